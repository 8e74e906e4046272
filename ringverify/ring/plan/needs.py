"""Which ranks need which blocks: all pairs at once, because every rank has to know the moves of all.

A band is compared for whole matrices of runs, exactly, and where nothing else constrains a pattern that is all. Of the
pairs that are left, the documents or segments that both have positions in are asked one after the other until one says
yes. Nearly always the first one does; and of segments that are alike one is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from ringref.problem import Problem
from ringverify.ring.plan.many import Bools, Ints, Many, many, met
from ringverify.ring.plan.regions import attends, branches, step_of
from ringverify.ring.plan.runs import RowRun


def needs(problem: Problem, queries: Sequence[tuple[RowRun, ...]], keys: Sequence[tuple[RowRun, ...]]) -> Bools:
    """Whether a query of a rank attends a key of an owner, `(ranks, owners)`.

    Args:
        problem: what all ranks compute.
        queries: of every rank.
        keys: of every rank.
    """
    found = np.zeros((len(queries), len(keys)), dtype=np.bool_)
    step = step_of(*queries, *keys)
    if step is None:
        for rank, owner in np.ndindex(found.shape):
            found[rank, owner] = attends(problem, queries[rank], keys[owner])
        return found
    ranks, asking = many(queries, step)
    owners, asked = many(keys, step)
    if problem.key_lengths is not None:
        asked = asked.within(0, max(problem.key_lengths))
    first, last = met(problem, asking.at((slice(None), None)), asked.at((None, slice(None))))
    row, column = np.nonzero(first <= last)
    if problem.documents is None and problem.dilation is None:
        found[ranks[row], owners[column]] = True
    for cutting in _cuttings(problem, step):
        unknown = ~found[ranks[row], owners[column]]
        row, column = row[unknown], column[unknown]
        first, last = cutting.shared(asking.at(row), asked.at(column))
        some = first <= last
        pairs = row[some], column[some], first[some], last[some]
        for rate, offset in cutting.places:
            yes = _meet_within(problem, cutting, rate, offset, asking.at(pairs[0]), asked.at(pairs[1]), *pairs[2:])
            found[ranks[pairs[0][yes]], owners[pairs[1][yes]]] = True
            pairs = pairs[0][~yes], pairs[1][~yes], pairs[2][~yes], pairs[3][~yes]
    return found


class _Cutting(NamedTuple):
    """Numbered pieces of all positions.

    Attributes:
        pieces: how many.
        number: of the piece of a position; outside `range(pieces)` if it is in none.
        edge: where a piece begins; its end is where the next one does.
        places: `(rate, offset)` of what is attended: places in a piece that are congruent to the offset.
        period: after so many pieces that lie within two runs, the next ones are as the first ones.
    """

    pieces: int
    number: Callable[[Ints], Ints]
    edge: Callable[[Ints], Ints]
    places: tuple[tuple[int, int], ...]
    period: int

    def shared(self, queries: Many, keys: Many) -> tuple[Ints, Ints]:
        """The first and the last piece that may have positions of both; none if they cross."""
        first = np.maximum(self.number(np.maximum(queries.first, keys.first)), 0)
        return first, np.minimum(self.number(np.minimum(queries.last, keys.last)), self.pieces - 1)


def _cuttings(problem: Problem, step: int) -> Iterator[_Cutting]:
    """The documents, or the segments of every length."""
    if problem.documents is not None:
        edges, count = np.array(problem.documents, dtype=np.int64), len(problem.documents) - 1
        yield _Cutting(
            count,
            lambda places: np.searchsorted(edges, places, side="right").astype(np.int64) - 1,
            lambda piece: edges[piece],
            ((1, 0),),
            count,
        )
    if problem.dilation is not None:
        places: dict[int, dict[tuple[int, int], None]] = {}
        for (segment, rate, offset), _ in branches(problem.dilation, problem.heads):
            places.setdefault(segment, {})[rate, offset] = None
        for segment, of in places.items():
            yield _segments(segment, problem.nq, tuple(of), step)


def _segments(segment: int, length: int, places: tuple[tuple[int, int], ...], step: int) -> _Cutting:
    period = step // math.gcd(step, segment)
    count = -(-length // segment)
    return _Cutting(count, lambda position: position // segment, lambda piece: piece * segment, places, period)


def _meet_within(
    problem: Problem, cutting: _Cutting, rate: int, offset: int, queries: Many, keys: Many, first: Ints, last: Ints
) -> Bools:
    """Whether the queries of each pair of runs attend a key of theirs in some piece from a first to a last one."""
    found = np.zeros(first.shape, dtype=np.bool_)
    alike = (queries.first - keys.first) % math.gcd(int(queries.step), rate) == 0
    asked = np.flatnonzero(alike)
    for further in chain(range(cutting.period + 1), [None]):
        if not asked.size:
            break
        piece = last[asked] if further is None else first[asked] + further
        low, high = cutting.edge(piece), cutting.edge(piece + 1)
        rows, columns = (of.at(asked).within(low, high).thinned(np.array(rate), low + offset) for of in (queries, keys))
        begin, end = met(problem, rows, columns)
        found[asked] = begin <= end
        asked = asked[(begin > end) & (piece < last[asked])]
    return found
