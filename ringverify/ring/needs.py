"""Which ranks need which blocks: all pairs at once, because every rank has to know the moves of all.

Bands, segments' outer bounds and documents' are compared for whole matrices of ranks. That is exact where a pattern is
nothing but a band, by the congruence that evenly spaced positions leave; elsewhere it rules most pairs out, and the
regions of the others say whether there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringref.problem import Problem
from ringverify.ring.regions import MOST_RUNS, attends, band
from ringverify.ring.runs import Run

Bools = NDArray[np.bool_]


def needs(problem: Problem, queries: Sequence[tuple[Run, ...]], keys: Sequence[tuple[Run, ...]]) -> Bools:
    """Whether a query of a rank attends a key of an owner, `(ranks, owners)`.

    Args:
        problem: what all ranks compute.
        queries: of every rank.
        keys: of every rank.
    """
    found = np.zeros((len(queries), len(keys)), dtype=np.bool_)
    steps = {run.step for held in (*queries, *keys) for run in held if run.size > 1}
    regular = len(steps) <= 1 and max((len(held) for held in (*queries, *keys)), default=0) <= MOST_RUNS
    only_a_band = regular and problem.documents is None and problem.dilation is None
    if regular:
        step = next(iter(steps), 1) if only_a_band else 1
        for query_runs in _padded(queries):
            for key_runs in _padded(keys):
                found |= _may_meet(problem, query_runs, key_runs, step)
    else:
        found[:] = True
    if not only_a_band:
        for rank, owner in np.argwhere(found):
            found[rank, owner] = attends(problem, queries[rank], keys[owner])
    return found


def _padded(held: Sequence[tuple[Run, ...]]) -> list[NDArray[np.int64]]:
    """The first runs of all ranks, then the second ones and so on, as `(ranks, 2)`: first and last position.

    Where a rank has no such run, first is after last.
    """
    most = max((len(runs) for runs in held), default=0)
    nothing = (0, -1)
    return [
        np.array([(runs[i].first, runs[i].last) if i < len(runs) else nothing for runs in held], dtype=np.int64)
        for i in range(most)
    ]


def _may_meet(problem: Problem, queries: NDArray[np.int64], keys: NDArray[np.int64], step: int) -> Bools:
    """Whether one run of each rank and one of each owner have a pair; exactly so if a band of that step is all."""
    first_query, last_query = queries[:, :1], queries[:, 1:]
    first_key, last_key = keys[None, :, 0], keys[None, :, 1]
    if problem.key_lengths is not None:
        limit = max(problem.key_lengths) - 1
        last_key = np.minimum(last_key, limit - (limit - first_key) % step)
    met: Bools = (first_query <= last_query) & (first_key <= last_key)
    least, greatest = band(problem)
    lowest, highest = first_key - last_query - problem.diagonal, last_key - first_query - problem.diagonal
    low = lowest if least is None else np.maximum(lowest, least)
    high = highest if greatest is None else np.minimum(highest, greatest)
    # The least difference from low on that is congruent to all differences of these positions.
    met &= low + (lowest - low) % step <= high
    if problem.dilation is not None:
        shared = [
            (first_query // segment <= last_key // segment) & (first_key // segment <= last_query // segment)
            for segment, _ in problem.dilation.branches
        ]
        met &= np.logical_or.reduce(shared)
    if problem.documents is not None:
        offsets = np.array(problem.documents)
        of_query = [np.searchsorted(offsets, x, side="right") for x in (first_query, last_query)]
        of_key = [np.searchsorted(offsets, x, side="right") for x in (first_key, last_key)]
        met &= (of_query[0] <= of_key[1]) & (of_key[0] <= of_query[1])
    return met
