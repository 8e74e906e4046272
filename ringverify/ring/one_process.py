"""Attention of a rank's queries to its own keys: all there is on one rank, and where no query needs another's keys."""

from __future__ import annotations

import torch

from ringverify.ring.accumulate import PartialResult, Sum, join_sinks
from ringverify.ring.compute import Job, Rows, TileGradients
from ringverify.ring.gradients import Gradients
from ringverify.ring.plan.kv_slices import KVTensors


class OneProcess:
    """Nothing is sent."""

    def forward(self, job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> PartialResult:
        """As `Method` says."""
        tile = job.single_tile(q, k, v)
        if tile is not None:
            out_BHSE, lse = tile.kernel.forward(job.setting, tile.given)
            found = PartialResult(out_BHSE.transpose(1, 2), lse)
            out, lse = found if job.sinks is None else join_sinks(found, job.sinks)
            return PartialResult(out.to(q.dtype).contiguous(), lse)
        running = job.running(q)
        job.attend(running, q, job.own(k, v), job.plan.rank)
        return running.result(q.dtype, job.sinks)

    def backward(
        self, job: Job, rows: Rows, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Method` says."""
        tile = job.single_tile(rows.q, k, v, rows)
        if tile is not None:
            found = tile.kernel.backward(job.setting, tile.given, rows.at(tile.place))
            dq, dk, dv = (gradient.transpose(1, 2) for gradient in found)
            return dq, dk, dv
        total = job.dq_sum(rows)
        dk, dv = own_gradients(job, rows, k, v, total)
        return total.total, dk, dv


def own_gradients(job: Job, rows: Rows, k: torch.Tensor, v: torch.Tensor, dq: Sum) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to `dq (B, S, H, D)` what this rank's own keys contribute; returns what its queries add to dk and dv."""
    dtype = job.setting.accumulates
    dk, dv = k.new_empty(k.shape, dtype=dtype), v.new_empty(v.shape, dtype=dtype)
    gradients = Gradients(KVTensors.of_tensors(job.plan.whole(job.plan.rank), dk, dv), empty=True)
    TileGradients(job, rows, job.own(k, v), job.plan.rank, dq).add_to(gradients)
    return dk, dv
