"""Causes without a mutant: faults of masks, positions and dilation that no report tells of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ringref.problem import Problem
from ringref.sharding import ShardingName, key_positions, query_positions
from ringverify.faults import pattern
from ringverify.faults.fault import WHENS, Faults
from ringverify.faults.masking import COUNTED_ONCE, WINDOW_IGNORED, everything, fitted
from ringverify.faults.pattern import Branch
from ringverify.faults.place import Here
from ringverify.faults.ring import STEPS, Steps, multiplicity

FAULTS = Faults()
Tensor = torch.Tensor

# -- causality, window, documents, key lengths -------------------------------------------------------------------------


FAULTS.mask("causal mask missing", replace(STEPS, causal=everything))


def _by_block(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    whole = replace(steps, causal=lambda problem, i, j: torch.full_like(i - j, owner <= here.rank, dtype=torch.bool))
    return multiplicity(whole, here, hop, owner)


FAULTS.mask("causal mask decided by whole blocks", replace(STEPS, pattern=_by_block))


def _unasked(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    i, j = steps.queries(here)[:, None], steps.keys(here, hop, owner)[None, :]
    return multiplicity(steps, here, hop, owner) * pattern.causal(here.problem, i, j)


def _window(change: Callable[[int | None, int | None], tuple[int | None, int | None]]) -> Steps:
    def changed(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
        assert problem.window is not None
        return pattern.window(problem.replace(window=change(*problem.window)), i, j)

    return replace(STEPS, window=changed)


FAULTS.mask("window ignored", WINDOW_IGNORED)
FAULTS.mask("left side of the window ignored", _window(lambda left, right: (None, right)))
FAULTS.mask("right side of the window ignored", _window(lambda left, right: (left, None)))


def _local_window(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    def window(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
        local = (torch.arange(len(i), device=i.device)[:, None], torch.arange(j.size(1), device=j.device)[None, :])
        return pattern.window(problem, local[0] - problem.diagonal, local[1])

    return multiplicity(replace(steps, window=window), here, hop, owner)


FAULTS.mask("window uses local indices", replace(STEPS, pattern=_local_window))


def _by_ends(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
    ends = torch.tensor((problem.documents or ())[1:], device=i.device)
    return torch.bucketize(i, ends, right=True) == torch.bucketize(j, ends, right=True)


FAULTS.mask(
    "documents are taken to cover the sequence: what lies before the first belongs to it, and what lies after the "
    "last attends itself",
    replace(STEPS, documents=_by_ends),
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
    *WHENS,
)

# -- positions ---------------------------------------------------------------------------------------------------------


def _keys_of(rank: Callable[[Here, int, int], int]) -> Steps:
    """Mask keys as if they had the positions of another rank's keys."""
    return replace(
        STEPS,
        keys=lambda here, hop, owner: fitted(here.shards[rank(here, hop, owner) % here.size], here, owner),
    )


def _local_queries(here: Here) -> Tensor:
    return torch.arange(len(here.call.positions))


def _local_keys(here: Here, hop: int, owner: int) -> Tensor:
    return torch.arange(len(here.shards[owner]))


def _queries_of(by: int) -> Steps:
    """Mask queries as if they had the positions of a neighbour's queries."""

    def queries(here: Here) -> Tensor:
        own = here.call.positions
        if here.replicated:
            return own
        of = query_positions(here.call.sharding, here.problem.nq, here.size)[(here.rank + by) % here.size]
        return torch.as_tensor(of)[torch.arange(len(own)).clamp(max=len(of) - 1)] if len(of) else own

    return replace(STEPS, queries=queries)


POSITIONS: dict[str, Steps] = {
    "key positions are local to the block instead of global": replace(STEPS, keys=_local_keys),
    "query positions are local to the rank instead of global": replace(STEPS, queries=_local_queries),
    "positions are local to the shard instead of global": replace(STEPS, queries=_local_queries, keys=_local_keys),
    "every block is masked as this rank's own block": _keys_of(lambda here, hop, owner: here.rank),
    "every block is masked as that of the hop before": _keys_of(lambda here, hop, owner: owner + 1),
    "every block is masked as that of rank 0": _keys_of(lambda here, hop, owner: 0),
    "queries are placed as those of the rank to the right": _queries_of(1),
    "queries are placed as those of the rank to the left": _queries_of(-1),
}
for says, steps in POSITIONS.items():
    FAULTS.cause(says, steps, *WHENS)


def contiguous() -> Steps:
    """Return the positions that ranks would hold in contiguous shards of these sizes."""

    def queries(here: Here) -> Tensor:
        own = here.call.positions
        if here.replicated:
            return own
        shards = query_positions(here.call.sharding, here.problem.nq, here.size)
        return sum(len(shard) for shard in shards[: here.rank]) + torch.arange(len(own))

    def keys(here: Here, hop: int, owner: int) -> Tensor:
        return sum(len(shard) for shard in here.shards[:owner]) + torch.arange(len(here.shards[owner]))

    return replace(STEPS, queries=queries, keys=keys)


def another_sharding(name: ShardingName) -> Steps:
    """Mask as if positions were those of another sharding."""

    def cut(positions: Tensor, like: Tensor) -> Tensor:
        return positions[torch.arange(len(like)).clamp(max=len(positions) - 1)] if len(positions) else like

    def queries(here: Here) -> Tensor:
        own = here.call.positions
        if here.replicated:
            return own
        return cut(torch.as_tensor(query_positions(name, here.problem.nq, here.size)[here.rank]), own)

    def keys(here: Here, hop: int, owner: int) -> Tensor:
        return cut(torch.as_tensor(key_positions(name, here.problem.nk, here.size)[owner]), here.shards[owner])

    return replace(STEPS, queries=queries, keys=keys)


def declare_or_heed(sharding: str) -> str:
    """Say what to try where positions are those of another sharding than the declared one."""
    return f'Declare sharding="{sharding}" if that is how your ranks hold the sequence, or mask by call.positions'


FAULTS.cause("positions are those of contiguous shards", contiguous(), *WHENS, advice=declare_or_heed("contiguous"))

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


def _each(change: Callable[[Branch], Branch]) -> Steps:
    """Change every branch of every head."""
    return replace(
        STEPS, branches=lambda problem: [[change(branch) for branch in run] for run in pattern.branches(problem)]
    )


def _in_turn(problem: Problem) -> list[list[Branch]]:
    dilation = problem.dilation
    assert dilation is not None
    if dilation.heads != "split":
        return pattern.branches(problem)
    of = [head % len(dilation.branches) for head in range(problem.heads)]
    return [[(*dilation.branches[b], b % dilation.branches[b][1])] for b in of]


DILATIONS: dict[str, Steps] = {
    "dilation rate ignored": _each(lambda branch: (branch[0], 1, 0)),
    "dilation rate one too large": _each(lambda branch: (branch[0], branch[1] + 1, branch[2])),
    "segments one token too short": _each(lambda branch: (max(1, branch[0] - 1), *branch[1:])),
    "split heads: branches dealt out in turn, h % G": replace(STEPS, branches=_in_turn),
    "only the first branch is run": replace(
        STEPS, branches=lambda problem: [run[:1] for run in pattern.branches(problem)]
    ),
}
for says, steps in DILATIONS.items():
    FAULTS.cause(says, steps, *WHENS)
