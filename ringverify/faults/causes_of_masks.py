"""Causes without a mutant: faults of masks, positions and dilation that no report tells of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ringref.problem import Problem
from ringref.sharding import ShardingName, key_positions, query_positions
from ringverify.faults import pattern
from ringverify.faults.dilation import RATE_IGNORED
from ringverify.faults.fault import WHENS, Faults
from ringverify.faults.masking import (
    COUNTED_ONCE,
    WINDOW_IGNORED,
    by_block,
    cut,
    everything,
    keys_of,
    local_window,
    window_of,
)
from ringverify.faults.operators_of_index import branched, dealt, documents_by
from ringverify.faults.place import Here
from ringverify.faults.ring import STEPS, Steps, multiplicity

FAULTS = Faults()
Tensor = torch.Tensor

# -- causality, window, documents, key lengths -------------------------------------------------------------------------


FAULTS.mask("causal mask missing", replace(STEPS, causal=everything))


FAULTS.mask("causal mask decided by whole blocks", by_block(lambda owner, rank: owner <= rank))


def _unasked(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    i, j = steps.queries(here)[:, None], steps.keys(here, hop, owner)[None, :]
    return multiplicity(steps, here, hop, owner) * pattern.causal(here.problem, i, j)


FAULTS.mask("window ignored", WINDOW_IGNORED)
FAULTS.mask("left side of the window ignored", window_of(lambda left, right: (None, right)))
FAULTS.mask("right side of the window ignored", window_of(lambda left, right: (left, None)))


FAULTS.mask("window uses local indices", local_window(moved=False))


FAULTS.mask(
    "documents are taken to cover the sequence: what lies before the first belongs to it, and what lies after the "
    "last attends itself",
    documents_by(1),
)
FAULTS.mask(
    "key_lengths ignored",
    replace(STEPS, key_lengths=lambda problem, j: torch.ones_like(pattern.key_lengths(problem, j))),
)
FAULTS.mask(
    "key_lengths of another batch element used",
    replace(STEPS, key_lengths=lambda problem, j: pattern.key_lengths(problem, j).roll(1, dims=0)),
)


def _local_lengths(problem: Problem, j: Tensor) -> Tensor:
    return pattern.key_lengths(problem, torch.arange(j.size(1), device=j.device)[None, :])


FAULTS.mask("key_lengths compared with local indices", replace(STEPS, key_lengths=_local_lengths))


def _without(key: Callable[[Here, int], int]) -> Steps:
    """Leave one key out, where more than one is attended."""

    def left_out(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        m = multiplicity(steps, here, hop, owner)
        return m * (here.shards[owner] != key(here, owner)) if here.problem.nk > 1 else m

    return replace(STEPS, pattern=left_out)


for says, key in {
    "the last key is never attended": lambda here, owner: here.problem.nk - 1,
    "the first key is never attended": lambda here, owner: 0,
    "the last key of every block is never attended": lambda here, owner: max(here.shards[owner].tolist(), default=0),
    "the first key of every block is never attended": lambda here, owner: min(here.shards[owner].tolist(), default=0),
}.items():
    FAULTS.cause(says, _without(key), *WHENS)
FAULTS.cause(
    "multiplicities counted once: a pair that several branches let through counts as one",
    COUNTED_ONCE,
)

# -- positions ---------------------------------------------------------------------------------------------------------


def _local_queries(here: Here) -> Tensor:
    return torch.arange(len(here.call.positions))


def _local_keys(here: Here, hop: int, owner: int) -> Tensor:
    return torch.arange(len(here.shards[owner]))


def _placed(queries: Callable[[Here], Tensor], keys: Callable[[Here, int], Tensor] | None = None) -> Steps:
    """Mask queries that are sharded as if they had these positions, and keys by owner."""
    steps = replace(STEPS, queries=lambda here: here.call.positions if here.replicated else queries(here))
    return steps if keys is None else replace(steps, keys=lambda here, hop, owner: keys(here, owner))


def _queries_of(by: int) -> Steps:
    """Mask queries as if they had the positions of a neighbour's queries."""

    def queries(here: Here) -> Tensor:
        of = query_positions(here.call.sharding, here.problem.nq, here.size)[(here.rank + by) % here.size]
        return cut(torch.as_tensor(of), here.call.positions)

    return _placed(queries)


POSITIONS: dict[str, Steps] = {
    "key positions are local to the block instead of global": replace(STEPS, keys=_local_keys),
    "query positions are local to the rank instead of global": replace(STEPS, queries=_local_queries),
    "positions are local to the shard instead of global": replace(STEPS, queries=_local_queries, keys=_local_keys),
    "every block is masked as this rank's own block": keys_of(lambda here, hop, owner: here.rank),
    "every block is masked as that of the hop before": keys_of(lambda here, hop, owner: owner + 1),
    "every block is masked as that of rank 0": keys_of(lambda here, hop, owner: 0),
    "queries are placed as those of the rank to the right": _queries_of(1),
    "queries are placed as those of the rank to the left": _queries_of(-1),
}
for says, steps in POSITIONS.items():
    FAULTS.cause(says, steps, *WHENS)


def _in_order(shards: Sequence[Any], rank: int) -> Tensor:
    return sum(len(shard) for shard in shards[:rank]) + torch.arange(len(shards[rank]))


CONTIGUOUS = _placed(
    lambda here: _in_order(query_positions(here.call.sharding, here.problem.nq, here.size), here.rank),
    lambda here, owner: _in_order(here.shards, owner),
)
"""Positions as they would be in contiguous shards of these sizes."""


def another_sharding(name: ShardingName) -> Steps:
    """Mask as if positions were those of another sharding."""

    def queries(here: Here) -> Tensor:
        return cut(torch.as_tensor(query_positions(name, here.problem.nq, here.size)[here.rank]), here.call.positions)

    def keys(here: Here, owner: int) -> Tensor:
        return cut(torch.as_tensor(key_positions(name, here.problem.nk, here.size)[owner]), here.shards[owner])

    return _placed(queries, keys)


def declare_or_heed(sharding: str) -> str:
    """Say what to try where positions are those of another sharding than the declared one."""
    return f'Declare sharding="{sharding}" if that is how your ranks hold the sequence, or mask by call.positions'


FAULTS.cause("positions are those of contiguous shards", CONTIGUOUS, *WHENS, advice=declare_or_heed("contiguous"))

MISUNDERSTOOD = Faults()
"""Right code whose adapter or declaration is wrong: tried before everything else."""

MISUNDERSTOOD.mask(
    "a causal mask is applied though the problem is not causal",
    replace(STEPS, pattern=_unasked),
    advice='Mask only where call.causal is true, or declare causal="always"',
)
for name in ("zigzag", "striped"):
    MISUNDERSTOOD.cause(
        f"positions are those of {name} shards", another_sharding(name), *WHENS, advice=declare_or_heed(name)
    )

# -- dilation ----------------------------------------------------------------------------------------------------------


DILATIONS: dict[str, Steps] = {
    "dilation rate ignored": RATE_IGNORED,
    "dilation rate one too large": branched(lambda problem, head, branch: (branch[0], branch[1] + 1, branch[2])),
    "segments one token too short": branched(lambda problem, head, branch: (max(1, branch[0] - 1), *branch[1:])),
    "split heads: branches dealt out in turn, h % G": dealt(lambda head, heads, count: head % count),
    "only the first branch is run": replace(
        STEPS, branches=lambda problem: [run[:1] for run in pattern.branches(problem)]
    ),
}
for says, steps in DILATIONS.items():
    FAULTS.cause(says, steps, *WHENS)
