"""The collective variant: every rank gathers all keys and values, and gradients are scattered back in sums.

Forward is one all-gather, backward another and a reduce-scatter, its adjoint. Collectives want equal shapes and shards
differ in length by one or more, so that blocks are padded to the longest. Gathered keys are not kept for the backward:
they are n tokens, where a rank otherwise holds n / p.

With replicated queries partials are gathered and merged in rank order, dq is all-reduced, and nothing has to be done
for dk and dv.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from ringverify.ring.accumulate import Partial, from_rows, merge_, to_rows
from ringverify.ring.blocks import block_numel, largest_numel, pack_into, unpack
from ringverify.ring.compute import Job, Rows, add, all_finite


def forward(job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, partial: Partial) -> None:
    """Merge the attention of this rank's queries to the keys of all ranks into `partial`."""
    for owner, k_b, v_b in _gathered(job, k, v):
        job.attend(partial, q, k_b, v_b, owner)
    if not job.plan.replicated or job.plan.world_size == 1 or not partial.lse.numel():
        return
    own = to_rows(partial)
    everyone = [torch.empty_like(own) for _ in range(job.plan.world_size)]
    dist.all_gather(everyone, own, group=job.transport.group)
    for total, first in zip(partial, from_rows(everyone[0], q.size(0), q.size(2)), strict=True):
        total.copy_(first)
    for rows in everyone[1:]:
        other = from_rows(rows, q.size(0), q.size(2))
        merge_(partial.out.transpose(1, 2), partial.lse, other.out.transpose(1, 2), other.lse)


def backward(
    job: Job, rows: Rows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to `dq (B, S, H, D)` and return this rank's dk and dv, summed over all ranks; accumulation dtype."""
    plan, group = job.plan, job.transport.group
    finite = all_finite(q, rows.dout, rows.out)
    alone = plan.schedule.steps == 1
    owners = [plan.rank] if alone else list(range(plan.world_size))
    numel = block_numel(plan, plan.rank) if alone else largest_numel(plan)
    parts = dq.new_zeros(len(owners), numel)
    for index, (owner, k_b, v_b) in enumerate(_gathered(job, k, v)):
        dk, dv = unpack(plan, parts[index], owner)
        for part in job.differentiate(rows, q, k_b, v_b, owner, dq, finite):
            add(part[0], dk, dv, *part[1:])
    if plan.replicated and plan.world_size > 1 and dq.numel():
        dist.all_reduce(dq, group=group)
    if alone or not numel:
        return unpack(plan, parts[0], plan.rank)
    total = parts.new_empty(numel)
    dist.reduce_scatter(total, list(parts.unbind()), group=group)
    return unpack(plan, total, plan.rank)


def _gathered(job: Job, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Every rank's keys and values, by rank; with replicated queries this rank's own."""
    plan = job.plan
    numel = largest_numel(plan)
    if plan.schedule.steps == 1 or not numel:  # no rank needs the keys of another
        yield plan.rank, k, v
        return
    own = k.new_zeros(numel)
    pack_into(plan, own, k, v)
    everyone = [torch.empty_like(own) for _ in range(plan.world_size)]
    dist.all_gather(everyone, own, group=job.transport.group)
    for owner, flat in enumerate(everyone):
        yield owner, *unpack(plan, flat, owner)
