"""The collective variant: every rank gathers all keys and values, and gradients are scattered back in sums.

Forward is one all-gather, backward another and a reduce-scatter, its adjoint. Collectives want equal shapes and shards
differ in length by one or more, so that blocks are padded to the longest. Gathered keys are not kept for the backward:
they are n tokens, where a rank otherwise holds n / p.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from ringverify.ring.accumulate import PartialResult
from ringverify.ring.compute import Job, Rows, TileGradients
from ringverify.ring.gradients import Gradients
from ringverify.ring.plan.kv_slices import KVTensors
from ringverify.ring.plan.plan import Plan


class AllGather:
    """Every KV block is gathered on every rank."""

    def forward(self, job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> PartialResult:
        """As `Method` says."""
        running = job.running(q)
        for owner, block in _gathered(job, k, v):
            job.attend(running, q, block, owner)
        return running.result(q.dtype, job.sinks)

    def backward(
        self, job: Job, rows: Rows, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Method` says."""
        plan, dtype = job.plan, job.setting.accumulates
        dq = job.dq_sum(rows)
        parts = []
        for owner, block in _gathered(job, k, v):
            flat = torch.zeros(_longest(plan), dtype=dtype, device=k.device)
            gradients = Gradients(KVTensors.of_flat(plan.whole(owner), flat), empty=False)
            TileGradients(job, rows, block, owner, dq).add_to(gradients)
            parts.append(flat)
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, parts, group=job.transport.group)
        dk, dv = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (k, v))
        own = plan.whole(plan.rank)
        KVTensors.of_flat(own, total).copy_to(KVTensors.of_tensors(own, dk, dv))
        return dq.total, dk, dv


def _gathered(job: Job, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, KVTensors]]:
    """Every rank's keys and values, by rank."""
    plan = job.plan
    own = k.new_zeros(_longest(plan))
    whole = plan.whole(plan.rank)
    KVTensors.of_tensors(whole, k, v).copy_to(KVTensors.of_flat(whole, own))
    everyone = [torch.empty_like(own) for _ in range(plan.world_size)]
    dist.all_gather(everyone, own, group=job.transport.group)
    for owner, flat in enumerate(everyone):
        yield owner, KVTensors.of_flat(plan.whole(owner), flat)


def _longest(plan: Plan) -> int:
    """Elements of the largest block."""
    return max(plan.whole(owner).numel for owner in range(plan.world_size))
