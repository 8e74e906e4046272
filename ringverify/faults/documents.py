"""Faults of shardings by documents: positions that are taken to be those of another sharding, or of rows as they lie.

Mutants declare `zigzag_documents` alone; on one rank there is none of these faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from ringref.problem import Problem
from ringref.sharding import covering, key_positions
from ringverify.faults import pattern
from ringverify.faults.fault import Faults
from ringverify.faults.place import Here
from ringverify.faults.positions import cut
from ringverify.faults.ring import EVERYTHING, STEPS, Positional, Steps, multiplicity

Tensor = torch.Tensor
Held = Callable[[Here, int], list[Tensor]]
"""Positions of each rank, of a sequence of so many."""
FAULTS = Faults()
BALANCED = replace(EVERYTHING, sharding="zigzag_documents")
"""What these mutants claim."""


def _add(id: str, says: str, steps: Steps) -> None:
    FAULTS.add(id, says, steps, claims=BALANCED)


# -- another sharding --------------------------------------------------------------------------------------------------


def _taken_for(held: Held) -> Steps:
    """Mask queries and keys as if each rank had the rows of another sharding."""
    return replace(
        STEPS,
        queries=lambda here: cut(held(here, here.problem.nq)[here.rank], here.call.positions),
        keys=lambda here, hop, owner: cut(held(here, here.problem.nk)[owner], here.shards[owner]),
    )


def _whole(here: Here, length: int) -> list[Tensor]:
    return [torch.from_numpy(one) for one in key_positions("zigzag", length, here.size)]


def _without_documents(here: Here, length: int) -> list[Tensor]:
    return [torch.from_numpy(one) for one in key_positions("zigzag_documents", length, here.size)]


def _left_over_at_the_end(here: Here, length: int) -> list[Tensor]:
    """Mirror every document, and the tokens that are dealt with it."""
    mirrored = torch.arange(length)
    for start, end in pairwise(covering(here.problem.documents, length)):
        mirrored[start:end] = torch.arange(start, end).flip(0)
    held = key_positions("zigzag_documents", length, here.size, here.problem.documents)
    return [mirrored[torch.from_numpy(one)].sort().values for one in held]


_add(
    "O180", "the pieces of a rank are taken for those of the whole sequence, not of every document", _taken_for(_whole)
)
_add("O181", "positions are made without documents, as if there were one", _taken_for(_without_documents))
_add(
    "O182",
    "the tokens of a document that the pieces leave over are taken for its last ones",
    _taken_for(_left_over_at_the_end),
)


# -- rows as they lie --------------------------------------------------------------------------------------------------


def _in_shard_order(here: Here, length: int) -> Tensor:
    """The row that each position has where the shards of all ranks lie one after another."""
    held = key_positions("zigzag_documents", length, here.size, here.problem.documents)
    return torch.cat([torch.from_numpy(one) for one in held]).argsort()


def _in_shard_order_within_documents(here: Here, length: int) -> Tensor:
    """The same of each document: put together again from the parts of the ranks, one after another."""
    ends = torch.tensor(covering(here.problem.documents, length)[1:])
    order = _in_shard_order(here, length).argsort()
    return order[torch.searchsorted(ends, order, right=True).argsort(stable=True)].argsort()


def _looked_up(step: str, constraint: Positional, row_of: Callable[[Here, int], Tensor]) -> Steps:
    """Apply one constraint to rows instead of positions; the others have positions."""

    def in_rows(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        queries, keys = row_of(here, here.problem.nq), row_of(here, here.problem.nk)

        def masked(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
            return constraint(problem, queries[i], keys[j])

        changed: dict[str, Any] = {step: masked}
        return multiplicity(replace(steps, **changed), here, hop, owner)

    return replace(STEPS, pattern=in_rows)


_add(
    "O183",
    "the causal mask compares rows as they lie on the ranks",
    _looked_up("causal", pattern.causal, _in_shard_order),
)
_add(
    "O184",
    "the window is measured between rows as they lie on the ranks",
    _looked_up("window", pattern.window, _in_shard_order),
)
_add(
    "O185",
    "the boundaries of documents are looked up for rows as they lie on the ranks",
    _looked_up("documents", pattern.documents, _in_shard_order),
)
_add(
    "O186",
    "documents are put together from the parts of the ranks, and their order is not restored before the causal mask",
    _looked_up("causal", pattern.causal, _in_shard_order_within_documents),
)
