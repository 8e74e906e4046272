"""Where runs of positions meet: for many runs and many pieces at once, in a few operations on arrays.

Documents, or the segments of a branch, cut all positions into pieces. Of each a run holds the entries from a first to a
last one; if the branch thins a piece, every `by`-th of them, where r / gcd(s, r) is `by` for rate r and step s.

Causality and windows are a band on the difference of two positions. For entries i and j of two runs of one step s that
begin at a and b,

    left <= (b + j·s) - (a + i·s + diagonal) <= right    iff    low <= j - i <= high,

where low and high belong to the two runs and to no piece. So in every piece the queries i0 to i1 attend, of the keys j0
to j1, those from max(j0, i0 + low) to min(j1, i1 + high). For striped shards the band is causality shifted by one where
the key's rank comes after the query's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringref.problem import Problem
from ringverify.ring.plan.heads import Branch, lanes
from ringverify.ring.plan.runs import RowRun

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Entries = tuple[Ints, Ints]
"""First and last entry of runs in pieces; none if they cross."""
UNBOUNDED = 1 << 40
"""A band's bound that never binds."""
NOWHERE = 1 << 60
"""First entry of what is empty, and its negative the last one: so far away that no bound reaches back."""
AT_ONCE = 1 << 18
"""Pairs of a run and a piece that are worked on together, which take a few megabytes."""
NEARBY = 1 << 16
"""Pairs of runs from which on they are looked for document by document: most pairs have no document in common."""


def band(problem: Problem) -> tuple[int | None, int | None]:
    """Bounds on `j - (i + Nk - Nq)`, both inclusive; `None` is unbounded, or bounds no pair: all see what the last may.

    So a single query at the end is kept from no key by causality.
    """
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0  # a window's right side is never negative, so causality is the narrower of the two
    low = None if left is None or left >= problem.nk - 1 else -left
    return low, None if right is None or right >= problem.nq - 1 else right


def constrained(problem: Problem) -> bool:
    """Whether anything may keep a query from a key, or have it count several times."""
    others = problem.key_lengths, problem.documents, problem.dilation
    return band(problem) != (None, None) or any(one is not None for one in others)


def settled(problem: Problem) -> int:
    """The position below which all queries attend all keys, or none of them does; 0 where that depends on more.

    The queries are those of all ranks, and a key is asked for by its position alone: in a cache, that of most keys.
    """
    low, high = band(problem)
    if problem.documents is not None or problem.dilation is not None:
        return 0
    if low is not None:
        return max(0, problem.diagonal + low)
    shortest = min(problem.key_lengths or (problem.nk,))
    return max(0, shortest if high is None else min(shortest, problem.diagonal + high + 1))


class Runs(NamedTuple):
    """Runs of one step as arrays, `(R,)` or broadcasting.

    Attributes:
        first: position of the first entry of each.
        size: entries of each.
        row: row of the first entry.
        rank: whose run it is.
        step: from one position to the next.
    """

    first: Ints
    size: Ints
    row: Ints
    rank: Ints
    step: int

    @property
    def last(self) -> Ints:
        """Position of the last entry of each."""
        return self.first + self.step * (self.size - 1)

    def at(self, index: Ints | Bools | slice | tuple[slice | None, ...]) -> Runs:
        """Some of these runs, or all with further axes."""
        first, size, row, rank = (x[index] for x in self[:4])
        return Runs(first, size, row, rank, self.step)


def gathered(held: Sequence[tuple[RowRun, ...]], step: int, limit: int | None = None) -> Runs:
    """The runs of some ranks, of which the positions below a limit count."""
    found = [(run.first, run.size, run.row, rank) for rank, of in enumerate(held) for run in of]
    first, size, row, rank = np.array(found, dtype=np.int64).reshape(-1, 4).T
    if limit is not None:
        size = np.clip(-((first - limit) // step), 0, size)
    return Runs(first, size, row, rank, step)


class Cutting(NamedTuple):
    """Pieces of all positions.

    Attributes:
        begin: first position of each piece, `(D,)`.
        end: the position after its last.
        residue: what its positions that count are congruent to, modulo `rate`.
        branch: number of the branch whose piece it is, in `branches_of`; ascending.
        rate: of the branches.
    """

    begin: Ints
    end: Ints
    residue: Ints
    branch: Ints
    rate: int = 1

    def at(self, index: Ints | Bools) -> Cutting:
        """Some of these pieces."""
        begin, end, residue, branch = (x[index] for x in self[:4])
        return Cutting(begin, end, residue, branch, self.rate)


@functools.lru_cache(maxsize=64)
def branches_of(problem: Problem) -> tuple[Branch | None, ...]:
    """Every branch that some head runs, once; without dilation `None`."""
    return tuple(dict.fromkeys(lane.branch for lane in lanes(problem)))


@functools.lru_cache(maxsize=2)
def cuttings(problem: Problem) -> tuple[Cutting, ...]:
    """What cuts the positions: documents, or the segments of all branches of one length and rate, or nothing."""
    if problem.dilation is None:
        everything = 0, max(problem.nq, problem.nk)
        edges = np.array(everything if problem.documents is None else problem.documents, dtype=np.int64)
        nothing = np.zeros(len(edges) - 1, dtype=np.int64)
        return (Cutting(edges[:-1], edges[1:], nothing, nothing),)
    alike: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, branch in enumerate(branches_of(problem)):
        assert branch is not None
        segment, rate, offset = branch
        alike.setdefault((segment, rate), []).append((number, offset))
    found = []
    for (segment, rate), of in alike.items():
        numbers, offsets = np.array(of, dtype=np.int64).T
        begin = np.arange(0, problem.nq, segment)
        residue = (begin + offsets[:, None]) % rate
        pieces = np.broadcast_to(begin, residue.shape).ravel()
        found.append(Cutting(pieces, pieces + segment, residue.ravel(), np.repeat(numbers, len(begin)), rate))
    return tuple(found)


def thinning(step: int, rate: int) -> int:
    """How many entries of a run of this step it takes to the next one that a branch of this rate covers."""
    return rate // math.gcd(step, rate)


def _entry(distance: Ints, step: int, rate: int) -> Ints:
    """The first entry whose distance from its run's first is congruent to a given one, if one is."""
    common, by = math.gcd(step, rate), thinning(step, rate)
    return distance // common * pow(step // common, -1, by) % by


def cut(runs: Runs, pieces: Cutting) -> Entries:
    """First and last entry that counts of runs `(..., 1)` in pieces `(..., D)`, `NOWHERE` if there is none."""
    first = np.maximum(-((runs.first - pieces.begin) // runs.step), 0)
    last = np.minimum(-((runs.first - pieces.end) // runs.step), runs.size) - 1
    if pieces.rate > 1:
        by, distance = thinning(runs.step, pieces.rate), pieces.residue - runs.first
        entry = _entry(distance, runs.step, pieces.rate)
        first += (entry - first) % by
        last -= (last - entry) % by
        last[distance % math.gcd(runs.step, pieces.rate) != 0] = -1
    empty = first > last
    first[empty], last[empty] = NOWHERE, -NOWHERE
    return first, last


def bounds(problem: Problem, queries: Runs, keys: Runs, rate: int) -> tuple[Ints, Ints]:
    """The band on entries, `low <= j - i <= high`, of runs that broadcast; `NOWHERE` as low if no pair lies in it."""
    left, right = band(problem)
    ahead = queries.first + problem.diagonal - keys.first
    low = np.full_like(ahead, -UNBOUNDED) if left is None else -((-left - ahead) // keys.step)
    high = np.full_like(ahead, UNBOUNDED) if right is None else (right + ahead) // keys.step
    if rate > 1:  # the entries that a branch covers in both differ by a class of numbers, in whatever piece
        by = thinning(keys.step, rate)
        apart = _entry(queries.first - keys.first, keys.step, rate)
        low += (apart - low) % by
        high -= (high - apart) % by
        low[(queries.first - keys.first) % math.gcd(keys.step, rate) != 0] = NOWHERE
    low[low > high] = NOWHERE  # a narrow window can fall between the positions of a striped shard
    return low, high


def attended(queries: Entries, keys: Entries, low: Ints, high: Ints) -> Entries:
    """The first and the last key that some queries attend in a piece; none if they cross. All broadcast."""
    return np.maximum(keys[0], queries[0] + low), np.minimum(keys[1], queries[1] + high)


class PieceOverlap(NamedTuple):
    """Some pieces of runs of keys, with all runs of queries: H of the ones and R of the others.

    Attributes:
        key_run: number of the run of keys, `(H,)`.
        pieces: those in which it has entries, `(H,)`.
        keys: first and last of these entries, `(H,)`.
        queries: first and last entry of each run of queries in the same pieces, `(R, H)`.
        low: of the band between the two runs, `(R, H)`.
        high: likewise.
    """

    key_run: Ints
    pieces: Cutting
    keys: Entries
    queries: Entries
    low: Ints
    high: Ints

    def attended(self) -> Entries:
        """The first and the last key that the queries attend, `(R, H)`; none if they cross."""
        return attended(self.queries, self.keys, self.low, self.high)


def piece_overlaps(problem: Problem, cutting: Cutting, queries: Runs, keys: Runs) -> Iterator[PieceOverlap]:
    """All pieces in which some runs of keys have entries, run by run, with runs of queries."""
    asking, asked = (runs.at((slice(None), None)) for runs in (queries, keys))
    low, high = bounds(problem, asking, keys, cutting.rate)
    for some in _parts(len(keys.first), len(cutting.begin)):
        first, last = cut(asked.at(some), cutting)
        held = np.nonzero(first <= last)
        for part in _parts(len(held[0]), len(queries.first)):
            run, piece = (index[part] for index in held)
            pieces, entries = cutting.at(piece), (first[run, piece], last[run, piece])
            run = run + some.start
            yield PieceOverlap(run, pieces, entries, cut(asking, pieces), low[:, run], high[:, run])


def nearby(problem: Problem, cutting: Cutting, queries: Runs, keys: Runs) -> Iterator[tuple[Cutting, Runs, Runs]]:
    """The pieces, and the runs that may have entries in them; where runs are many, a few documents at a time."""
    parts = min(len(queries.first) * len(keys.first) // NEARBY + 1, len(cutting.begin))
    if problem.documents is None or parts < 2:
        yield cutting, queries, keys
        return
    for some in np.array_split(np.arange(len(cutting.begin)), parts):
        pieces = cutting.at(some)
        reaching = [(of.first < pieces.end[-1]) & (of.last >= pieces.begin[0]) for of in (queries, keys)]
        yield pieces, queries.at(reaching[0]), keys.at(reaching[1])


def _parts(count: int, each: int) -> Iterator[slice]:
    """So many runs or pieces in parts that are worked on together, where each meets so many of the others."""
    together = AT_ONCE // max(each, 1) + 1
    return (slice(start, start + together) for start in range(0, count, together))
