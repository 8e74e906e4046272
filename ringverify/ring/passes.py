"""The ring: keys and values travel from rank to rank, queries stay.

Forward, W - 1 hops: a rank merges its queries' attention to each block that comes by. Backward: the blocks travel once
more, and the gradient of a block follows one message behind it, in the accumulation dtype, each rank adding its part:
it starts on the rank after the block's owner and arrives home after W - 1 hops, where the owner's own part is added.
The sum is thus formed in the order owner + 1, owner + 2, …, owner, on any schedule.

Which messages are sent depends on the plan alone: a block that no query here attends is not computed, but passed on
all the same, and so is its gradient.

With replicated queries nothing has to travel but results: each rank attends its own block, and partials, later dq, are
combined round the ring.

Shape letters: see `ringverify.ring.block`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ringverify.ring.block import Cotangents, Queries, all_finite, attend, gradients
from ringverify.ring.mask import Mask, block_mask
from ringverify.ring.merge import Partial, empty, from_rows, merge, merge_rows, to_rows
from ringverify.ring.neighbours import Neighbours, all_reduce, rotate, wait
from ringverify.ring.plan import Plan, pack


def forward(plan: Plan, queries: Queries, block: torch.Tensor) -> Partial:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        plan: who holds what.
        queries: this rank's queries.
        block: this rank's packed keys and values; left as it is.
    """
    neighbours = Neighbours.of(plan)
    partial: Partial | None = None
    if plan.replicated:
        partial = attend_block(plan, queries, block, plan.rank)
    else:
        for owner, visiting in rotate(neighbours, block, _numels(plan)):
            part = attend_block(plan, queries, visiting, owner)
            if part is not None:
                partial = part if partial is None else merge(partial, part)
    if partial is None:
        q = queries.q_BHSD
        partial = empty(q.shape[:3], plan.problem.dv, q.dtype, q.device)
    if plan.replicated and plan.world_size > 1:
        merged = from_rows(all_reduce(neighbours, to_rows(partial), merge_rows))
        partial = Partial(*(new.view(old.shape) for new, old in zip(merged, partial, strict=True)))
    return partial


def backward(plan: Plan, queries: Queries, rows: Cotangents, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients in the accumulation dtype: dq over scale, flat, and the packed gradient of `block`.

    Arguments are those of `forward`, and `rows` from `ringverify.ring.block.cotangents`.
    """
    neighbours = Neighbours.of(plan)
    q = queries.q_BHSD
    dq = torch.zeros_like(q)
    if plan.replicated:
        dq, home = add_gradients(plan, queries, rows, block, plan.rank, dq)
        if plan.world_size > 1:
            dq = all_reduce(neighbours, dq.flatten(0, 2), torch.add)
        return dq, home

    numels = _numels(plan)
    home = block.new_empty(0)
    arrived: torch.Tensor | None = None
    works: list[dist.Work] = []
    for owner, visiting in rotate(neighbours, block, numels):
        dq, part = add_gradients(plan, queries, rows, visiting, owner, dq)
        if owner == plan.rank:
            home = part
            continue
        wait(works)
        if arrived is not None:  # the first rank after the owner has nothing to add to
            part += arrived
        # The left neighbour is working on the block that comes here next, or after the last, on this rank's own.
        sent, arrived = part, part.new_empty(numels[(owner - 1) % plan.world_size])
        works = neighbours.post(sent, arrived)
    wait(works)
    if arrived is not None:
        home += arrived
    return dq, home


def attend_block(plan: Plan, queries: Queries, block: torch.Tensor, owner: int) -> Partial | None:
    """The partial over one rank's packed block, or `None` if no query here attends it."""
    mask = block_mask(plan.problem, plan.queries, plan.keys[owner], plan.accumulates)
    if mask is None:
        return None
    k_PTD, v_PTE = plan.unpack(block.to(plan.accumulates), owner)
    return attend(queries, k_PTD, v_PTE, mask, finite=_finite(mask, block))


def add_gradients(
    plan: Plan, queries: Queries, rows: Cotangents, block: torch.Tensor, owner: int, dq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dq with one block's part added, and the packed gradient of that block from this rank's queries, a new tensor."""
    mask = block_mask(plan.problem, plan.queries, plan.keys[owner], plan.accumulates)
    if mask is None:
        return dq, block.new_zeros(block.shape, dtype=plan.accumulates)
    k_PTD, v_PTE = plan.unpack(block.to(plan.accumulates), owner)
    dq_PXD, dk_PTD, dv_PTE = gradients(queries, rows, k_PTD, v_PTE, mask, finite=_finite(mask, block))
    return dq.add_(dq_PXD.view(dq.shape)), pack(dk_PTD, dv_PTE)


def _numels(plan: Plan) -> list[int]:
    return [plan.block_numel(owner) for owner in range(plan.world_size)]


def _finite(mask: Mask, block: torch.Tensor) -> bool:
    # Without a mask every pair counts, and NaN and infinity may take their course.
    return mask.allowed_BHST is None or all_finite(block)
