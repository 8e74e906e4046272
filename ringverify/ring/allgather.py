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

from ringverify.ring.accumulate import Running, Sum, from_rows, merge_, to_rows
from ringverify.ring.compute import Job, Rows
from ringverify.ring.gradients import Gradients
from ringverify.ring.plan.kv_slices import KVTensors
from ringverify.ring.plan.plan import Plan


def forward(job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, running: Running) -> None:
    """Merge the attention of this rank's queries to the keys of all ranks into a partial."""
    for owner, block in _gathered(job, k, v):
        job.attend(running, q, block, owner)
    if not job.plan.replicated or job.plan.world_size == 1:
        return
    partial = running.partial
    if not partial.lse.numel():
        return
    own = to_rows(partial)
    everyone = [torch.empty_like(own) for _ in range(job.plan.world_size)]
    dist.all_gather(everyone, own, group=job.transport.group)
    for total, first in zip(partial, from_rows(everyone[0], q.size(0), q.size(2)), strict=True):
        total.copy_(first)
    for rows in everyone[1:]:
        other = from_rows(rows, q.size(0), q.size(2))
        merge_(partial.out.transpose(1, 2), partial.lse, other.out.transpose(1, 2), other.lse)


def backward(job: Job, rows: Rows, k: torch.Tensor, v: torch.Tensor, dq: Sum) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to `dq (B, S, H, D)` and return this rank's dk and dv, summed over all ranks; accumulation dtype."""
    plan, group = job.plan, job.transport.group
    alone = plan.schedule.steps == 1
    parts = []
    for owner, block in _gathered(job, k, v):
        numel = plan.whole(owner).numel if alone else _longest(plan)
        flat = torch.zeros(numel, dtype=job.setting.accumulates, device=k.device)
        gradients = Gradients(KVTensors.of_flat(plan.whole(owner), flat), empty=False)
        for part in job.differentiate(rows, block, owner, dq):
            gradients.add(part)
        parts.append(flat)
    if plan.replicated and plan.world_size > 1 and dq.total.numel():
        dist.all_reduce(dq.total, group=group)
    if alone or not parts[0].numel():
        total = parts[0]
    else:
        total = parts[0].new_empty(parts[0].numel())
        dist.reduce_scatter(total, parts, group=group)
    dk, dv = (torch.empty(x.shape, dtype=job.setting.accumulates, device=x.device) for x in (k, v))
    KVTensors.of_flat(plan.whole(plan.rank), total).copy_to(KVTensors.of_tensors(plan.whole(plan.rank), dk, dv))
    return dk, dv


def _gathered(job: Job, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, KVTensors]]:
    """Every rank's keys and values, by rank; with replicated queries this rank's own."""
    plan = job.plan
    numel = _longest(plan)
    mine = KVTensors.of_tensors(plan.whole(plan.rank), k, v)
    if plan.schedule.steps == 1 or not numel:  # no rank needs the keys of another
        yield plan.rank, mine
        return
    own = k.new_zeros(numel)
    mine.copy_to(KVTensors.of_flat(plan.whole(plan.rank), own))
    everyone = [torch.empty_like(own) for _ in range(plan.world_size)]
    dist.all_gather(everyone, own, group=job.transport.group)
    for owner, flat in enumerate(everyone):
        yield owner, KVTensors.of_flat(plan.whole(owner), flat)


def _longest(plan: Plan) -> int:
    """Elements of the largest block."""
    return max(plan.whole(owner).numel for owner in range(plan.world_size))
