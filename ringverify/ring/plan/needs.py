"""Who needs which keys: which ranks need which blocks, and how far every row of a block travels.

Every rank has to know the moves of all, so both are asked of all ranks. The plain form makes the rectangles of every
pair of ranks; for runs of one step, the intervals of keys that all runs of queries attend are found at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringref.problem import Problem
from ringverify.ring.plan.geometry import (
    AT_ONCE,
    Bools,
    Cutting,
    Ints,
    Runs,
    attended,
    bounds,
    branches_of,
    cut,
    cuttings,
    gathered,
    nearby,
    piece_overlaps,
    thinning,
)
from ringverify.ring.plan.heads import head_classes
from ringverify.ring.plan.regions import Regions, regions
from ringverify.ring.plan.runs import RowRun, step_of

Held = Sequence[tuple[RowRun, ...]]
"""Runs of queries or keys, by rank."""
Counts = NDArray[np.uint8] | NDArray[np.uint16]
"""Numbers below the world size, a byte each where that does."""


def needs(problem: Problem, queries: Held, keys: Held) -> Bools:
    """Whether a query of a rank attends a key of an owner, `(ranks, owners)`."""
    step = step_of(*queries, *keys, documents=problem.documents)
    if step is None:
        return needs_of([regions(problem, of, keys) for of in queries])
    found = np.zeros((len(queries), len(keys)), dtype=np.bool_)
    asking, held = gathered(queries, step), gathered(keys, step, _limit(problem))
    for cutting in cuttings(problem):
        for branch in np.unique(cutting.branch):
            for near in nearby(problem, cutting.at(cutting.branch == branch), asking, held):
                _find(found, problem, *near)
    return found


def needs_of(found: Sequence[Sequence[Regions]]) -> Bools:
    """The plain form of `needs`, from the regions of all ranks, `(ranks, owners)`."""
    return np.array([[any(len(part.table) for part in of.parts) for of in rank] for rank in found], dtype=np.bool_)


def _limit(problem: Problem) -> int | None:
    """The positions whose keys count in some batch element; `None` for all."""
    return None if problem.key_lengths is None else max(problem.key_lengths)


def _find(found: Bools, problem: Problem, pieces: Cutting, queries: Runs, keys: Runs) -> None:
    """Mark the ranks and owners that share a piece in which a query attends a key.

    The pieces that two runs may share are tried in order, twice as many each time: mostly, the first one does.
    """
    low, high = bounds(problem, queries.at((slice(None), None)), keys, pieces.rate)
    query, key = np.nonzero((low <= high) & (queries.size[:, None] > 0) & (keys.size > 0))
    start = np.searchsorted(pieces.end, np.maximum(queries.first[query], keys.first[key]), side="right")
    last = np.minimum(queries.last[query], keys.last[key])
    stop = np.searchsorted(pieces.begin, last, side="right")
    left, width = start < stop, 1
    while True:
        left &= ~found[queries.rank[query], keys.rank[key]]
        query, key, start, stop = (x[left] for x in (query, key, start, stop))
        if not query.size:
            return
        number = np.minimum(start[:, None] + np.arange(width), stop[:, None] - 1)
        some = pieces.at(number)
        of_queries, of_keys = (cut(runs.at(which[:, None]), some) for runs, which in ((queries, query), (keys, key)))
        first, last = attended(of_queries, of_keys, low[query, key, None], high[query, key, None])
        met = (first <= last).any(axis=1)
        found[queries.rank[query[met]], keys.rank[key[met]]] = True
        start += width
        left = start < stop
        width = max(min(2 * width, AT_ONCE // len(query)), 1)


class Hops(NamedTuple):
    """How far the rows of one block travel, `(classes of key heads, rows)`.

    Attributes:
        nearest: hops to the first rank after the owner that attends a row; 0 if none does.
        furthest: hops to the last rank, going round the ring.
    """

    nearest: Counts
    furthest: Counts


def hops(problem: Problem, queries: Held, keys: Held, owner: int) -> Hops:
    """How far the rows of an owner's keys travel; queries and keys are those of every rank."""
    step = step_of(*queries, *keys, documents=problem.documents)
    if step is None:
        return _rank_by_rank(problem, queries, keys, owner)
    world_size, rows = len(queries), sum(run.size for run in keys[owner])
    everyone, owned = gathered(queries, step), gathered([keys[owner]], step, _limit(problem))
    away = (everyone.rank - owner) % world_size
    others = everyone.at(np.argsort(away, kind="stable")[np.count_nonzero(away == 0) :])
    found = np.zeros((2, len(branches_of(problem)), rows), dtype=np.min_scalar_type(world_size))
    for cutting in cuttings(problem):
        by = thinning(step, cutting.rate)
        overlaps = (
            (asking, held, shared)
            for pieces, asking, held in nearby(problem, cutting, others, owned)
            for shared in piece_overlaps(problem, pieces, asking, held)
        )
        for asking, held, shared in overlaps:
            away = (asking.rank - owner) % world_size
            key_first, key_last = shared.keys
            size = (key_last - key_first) // by + 1
            place = np.cumsum(size) - size  # of a piece's first key among all these pieces' keys
            row = np.repeat(held.row[shared.key_run] + key_first - by * place, size) + by * np.arange(size.sum())
            index = np.repeat(shared.pieces.branch * rows, size) + row
            first, last = shared.attended()
            # The nearest rank is the one from which it is furthest to go the other way round.
            for into, weight, way in zip(found, (world_size - away, away), (-1, 1), strict=True):
                run, piece = np.nonzero(_unlike_the_next(first[::way], last[::way]))
                begin, end = ((of[::way][run, piece] - key_first[piece]) // by + place[piece] for of in (first, last))
                into.reshape(-1)[index] = largest(begin, end, weight[::way][run].astype(into.dtype), len(row))
    rest, furthest = (np.stack([of[list(branches)].max(axis=0) for branches in _classes(problem)]) for of in found)
    return Hops(np.where(rest > 0, world_size - rest, 0).astype(furthest.dtype), furthest)


def _classes(problem: Problem) -> list[list[int]]:
    """The branches of every class of heads, by their numbers."""
    number = {branch: number for number, branch in enumerate(branches_of(problem))}
    return [
        [number[branch] for branch, _ in one.lanes] for one in head_classes(problem.dilation, problem.heads, problem.hk)
    ]


def _unlike_the_next(first: Ints, last: Ints) -> Bools:
    """Which intervals `(R, D)` hold anything that the one after them does not: most runs attend what the next does."""
    found = first <= last
    found[:-1] &= (first[1:] > first[:-1]) | (last[:-1] > last[1:])
    return found


def largest(first: Ints, last: Ints, weight: Counts, length: int) -> Counts:
    """Of every place below `length` the largest weight of the intervals, both ends included, that hold it; else 0.

    An interval is two of a power of two, which overlap; from the longest on, these are halved down to single places.
    """
    found: Counts = np.zeros(length, weight.dtype)
    level = np.frexp(last - first + 1)[1] - 1
    for number in range(level.max(initial=0), -1, -1):
        size, of = 1 << number, level == number
        found[size:] = np.maximum(found[size:], found[:-size])
        np.maximum.at(found, first[of], weight[of])
        np.maximum.at(found, last[of] + 1 - size, weight[of])
    return found


def _rank_by_rank(problem: Problem, queries: Held, keys: Held, owner: int) -> Hops:
    """`hops` of runs of any steps, however many."""
    others = (queries[(owner + hop) % len(queries)] for hop in range(1, len(queries)))
    visited = [regions(problem, of, [keys[owner]])[0] for of in others]
    return hops_of(problem, visited, sum(run.size for run in keys[owner]))


def hops_of(problem: Problem, visited: Sequence[Regions], rows: int) -> Hops:
    """The plain form of `hops`: what every rank after the owner attends of its block, by hop; the block has `rows`."""
    world_size = len(visited) + 1
    dtype = np.min_scalar_type(world_size)
    shape = len(head_classes(problem.dilation, problem.heads, problem.hk)), rows
    found = Hops(np.zeros(shape, dtype), np.zeros(shape, dtype))
    attended_by = [(hop, list(of.key_rows())) for hop, of in enumerate(visited, start=1)]
    for into, order in zip(found, (reversed(attended_by), attended_by), strict=True):  # what is written last counts
        for hop, of in order:
            for head_class, places in of:
                into[head_class, places] = hop
    return found
