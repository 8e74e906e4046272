"""All queries on every rank, keys and values sharded: nothing visits, and partial results are combined instead.

Forward merges every rank's partial by log-sum-exps, backward sums dq; dk and dv are at home already. Both go round the
ring in the bandwidth-optimal way (Patarasuk & Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of
workstations*): each piece of the rows is combined on its way round, then the finished pieces go round once more, so
that all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch

from ringverify.ring.accumulate import Running, Sum, from_rows, merge_rows, to_rows
from ringverify.ring.compute import Job, Rows
from ringverify.ring.gradients import Gradients
from ringverify.ring.plan.kv_slices import KVTensors
from ringverify.ring.transport import Transport


def forward(job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, running: Running) -> None:
    """Merge the attention of all queries to the keys of all ranks into a partial, the same bits on every rank."""
    plan = job.plan
    job.attend(running, q, KVTensors.of_tensors(plan.whole(plan.rank), k, v), plan.rank)
    if plan.world_size == 1:
        return
    partial = running.partial
    if not partial.lse.numel():
        return
    merged = from_rows(all_reduce(job.transport, to_rows(partial), merge_rows), q.size(0), q.size(2))
    for own, everyone in zip(partial, merged, strict=True):
        own.copy_(everyone)


def backward(job: Job, rows: Rows, k: torch.Tensor, v: torch.Tensor, dq: Sum) -> tuple[torch.Tensor, torch.Tensor]:
    """Make `dq (B, S, H, D)` the sum over all ranks' keys, and return dk and dv of this rank's; accumulation dtype."""
    whole = job.plan.whole(job.plan.rank)
    dk, dv = (torch.empty(x.shape, dtype=job.setting.accumulates, device=x.device) for x in (k, v))
    gradients = Gradients(KVTensors.of_tensors(whole, dk, dv), empty=True)
    for part in job.differentiate(rows, KVTensors.of_tensors(whole, k, v), job.plan.rank, dq):
        gradients.add(part)
    _ = gradients.block
    total = dq.total
    if job.plan.world_size > 1 and total.numel():
        total.copy_(all_reduce(job.transport, total.flatten(0, 2), torch.add).view(total.shape))
    return dk, dv


def all_reduce(
    transport: Transport, rows: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`rows` of all ranks combined elementwise by row, the same bits on every rank.

    Args:
        transport: between the ranks.
        rows: `(R, columns)`, of one shape on all ranks; not written to.
        combine: of the left neighbours' rows so far and this rank's.
    """
    rank, size = transport.rank, transport.world_size
    right, left = (rank + 1) % size, (rank - 1) % size
    share, larger = divmod(rows.size(0), size)
    ends = accumulate([share + (piece < larger) for piece in range(size)], initial=0)
    pieces = [rows[start:end].contiguous() for start, end in pairwise(ends)]
    for hop in range(size - 1):
        sent, received = (rank - hop) % size, (rank - hop - 1) % size
        arriving = torch.empty_like(pieces[received])
        transport.start([(pieces[sent], right)], [(arriving, left)])()
        pieces[received] = combine(arriving, pieces[received])
    for hop in range(size - 1):
        sent, received = (rank + 1 - hop) % size, (rank - hop) % size
        arriving = torch.empty_like(pieces[received])
        transport.start([(pieces[sent], right)], [(arriving, left)])()
        pieces[received] = arriving
    return torch.cat(pieces)
