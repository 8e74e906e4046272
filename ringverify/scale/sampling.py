"""Which rows are sampled: some for every purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringref.intervals import parts
from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import shards
from ringverify.implementation import Capabilities
from ringverify.scale.numbers import Positions

SAMPLED = 96
"""Rows that are sampled, about."""


def sampled_count(case: Case) -> int:
    """Return how many rows are sampled, about."""
    return max(SAMPLED, 16 * case.world_size)


def rows_to_sample(case: Case, capabilities: Capabilities, count: int) -> tuple[int, ...]:
    """Return positions of queries, some for every purpose.

    They are the ends of every rank's runs of positions, both sides of powers of two, where tiles may end, ends of
    documents (of many, some all along), others at random, and for each two ranks a query of one that attends a key of
    the other, if there is one.
    """
    n, rng = case.problem.nq, np.random.default_rng(case.seed)
    powers = 2 ** np.arange(max(n, 1).bit_length())
    chosen: list[Any] = [powers, powers - 1, rng.integers(0, max(n, 1), count // 2)]
    queries, keys = shards(case, capabilities)
    for own in queries:
        if len(own):
            ascending = np.sort(own)
            chosen += [ascending[[0, -1]], rng.choice(ascending, -(-count // (2 * case.world_size)))]
            breaks = np.flatnonzero(np.diff(ascending) > 1)
            if len(breaks) < case.world_size:  # a striped shard has breaks everywhere
                chosen += [ascending[breaks], ascending[breaks + 1]]
    edges = np.array(case.problem.documents or (), dtype=np.int64)
    edges = edges[np.linspace(0, len(edges) - 1, min(len(edges), count)).astype(np.int64)] if len(edges) else edges
    chosen += [edges - 1, edges]
    found = np.unique(np.concatenate(chosen).astype(np.int64))
    found = found[(found >= 0) & (found < n)]
    for attends in _attending(case.problem, keys):
        for own in queries:
            if not attends[found[np.isin(found, own)]].any() and len(candidates := own[attends[own]]):
                found = np.append(found, rng.choice(candidates))
    return tuple(np.unique(found).tolist())


def _attending(problem: Problem, keys: Sequence[Positions]) -> Iterator[NDArray[np.bool_]]:
    """Yield, for each rank's keys, which queries attend one of them in some head of some element."""
    cut = [part for b, h in np.ndindex(problem.batch, problem.heads) for part in parts(problem, b, h)]
    for of_owner in keys:
        owned = np.zeros(problem.nk, dtype=np.int64)
        owned[of_owner] = 1
        attends = np.zeros(problem.nq, dtype=bool)
        for part in cut:
            before = np.concatenate([[0], np.cumsum(owned[part.keys])])
            attends[part.queries] |= before[np.maximum(part.first, part.last)] > before[part.first]
        yield attends
