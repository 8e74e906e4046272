"""The collective variant: every rank gathers all keys and values, and gradients are scattered back in sums.

Forward is one all-gather, backward another and a reduce-scatter, its adjoint. Collectives want equal shapes and shards
differ in length by one or more, so that blocks are padded to the longest; padding is cut off before it meets anything.
Gathered keys are not kept for the backward: they are n tokens, where a rank otherwise holds n / p.

With replicated queries each rank attends its own block; partials are gathered and merged in rank order, dq is
all-reduced, and nothing has to be done for dk and dv.

Shape letters: see `ringverify.ring.block`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ringverify.ring.block import Cotangents, Queries
from ringverify.ring.merge import Partial, empty, from_rows, merge, to_rows
from ringverify.ring.passes import add_gradients, attend_block
from ringverify.ring.plan import Plan


def forward(plan: Plan, queries: Queries, block: torch.Tensor) -> Partial:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        plan: who holds what.
        queries: this rank's queries.
        block: this rank's packed keys and values; left as it is.
    """
    blocks = {plan.rank: block} if plan.replicated else _gather(plan, block)
    parts = [attend_block(plan, queries, blocks[owner], owner) for owner in sorted(blocks)]
    q = queries.q_BHSD
    partial = _merged([part for part in parts if part is not None])
    if partial is None:
        partial = empty(q.shape[:3], plan.problem.dv, q.dtype, q.device)
    if not plan.replicated or plan.world_size == 1 or not q.numel():
        return partial
    rows = to_rows(partial)
    everyone = [torch.empty_like(rows) for _ in range(plan.world_size)]
    dist.all_gather(everyone, rows, group=plan.group)
    merged = _merged([from_rows(theirs.view(*q.shape[:3], -1)) for theirs in everyone])
    assert merged is not None
    return merged


def backward(plan: Plan, queries: Queries, rows: Cotangents, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients in the accumulation dtype: dq over scale, and the packed gradient of `block`.

    Arguments are those of `forward`, and `rows` from `ringverify.ring.block.cotangents`.
    """
    dq = torch.zeros_like(queries.q_BHSD)
    if plan.replicated:
        dq, home = add_gradients(plan, queries, rows, block, plan.rank, dq)
        if plan.world_size > 1 and dq.numel():
            dist.all_reduce(dq, group=plan.group)
        return dq, home
    blocks = _gather(plan, block)
    parts = []
    for owner, gathered in blocks.items():
        dq, part = add_gradients(plan, queries, rows, gathered, owner, dq)
        parts.append(part)
    return dq, _reduce_scatter(plan, parts)


def _merged(partials: list[Partial]) -> Partial | None:
    """All partials as one, in this order; `None` if there are none."""
    merged: Partial | None = None
    for partial in partials:
        merged = partial if merged is None else merge(merged, partial)
    return merged


def _gather(plan: Plan, block: torch.Tensor) -> dict[int, torch.Tensor]:
    """Every rank's packed keys and values."""
    numels = [plan.block_numel(owner) for owner in range(plan.world_size)]
    if plan.world_size == 1 or not max(numels):
        return dict.fromkeys(range(plan.world_size), block)
    everyone = [block.new_empty(max(numels)) for _ in numels]
    dist.all_gather(everyone, _padded(block, max(numels)), group=plan.group)
    return {owner: gathered[:numel] for owner, (gathered, numel) in enumerate(zip(everyone, numels, strict=True))}


def _reduce_scatter(plan: Plan, parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum over ranks of their gradients of this rank's block."""
    own = parts[plan.rank]
    longest = max(part.numel() for part in parts)
    if plan.world_size == 1 or not longest:
        return own
    total = own.new_empty(longest)
    dist.reduce_scatter(total, [_padded(part, longest) for part in parts], group=plan.group)
    return total[: own.numel()]


def _padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    """`flat`, contiguous, with zeros after it up to `numel` elements."""
    return torch.nn.functional.pad(flat, (0, numel - flat.numel()))
