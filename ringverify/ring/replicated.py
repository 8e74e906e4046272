"""All queries on every rank, keys and values sharded: nothing visits, and partial results are combined instead.

Forward merges every rank's partial by log-sum-exps, backward sums dq; dk and dv are at home already. Both go round the
ring in the bandwidth-optimal way (Patarasuk & Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of
workstations*): each piece of the rows is combined on its way round, then the finished pieces go round once more, so
that all ranks end with the same bits. With `method="allgather"` partials are gathered instead and merged in rank order,
and dq is all-reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from ringverify.ring.accumulate import PartialResult, from_rows, merge_, merge_rows, to_rows
from ringverify.ring.compute import Job, Rows
from ringverify.ring.one_process import own_gradients
from ringverify.ring.transport import Transport


class ReplicatedQueries:
    """Partial results of all queries are combined: round the ring, or by gathering them.

    Args:
        collectives: whether by collectives.
    """

    def __init__(self, *, collectives: bool) -> None:
        self._collectives = collectives

    def forward(self, job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> PartialResult:
        """As `Method` says; the same bits on every rank."""
        running = job.running(q)
        job.attend(running, q, job.own(k, v), job.plan.rank)
        if running.partial.lse.numel():
            for own, combined in zip(running.partial, self._combined(job, running.partial), strict=True):
                own.copy_(combined)
        return running.result(q.dtype, job.sinks)

    def backward(
        self, job: Job, rows: Rows, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Method` says; dq is the same on every rank."""
        dq = job.dq_sum(rows)
        dk, dv = own_gradients(job, rows, k, v, dq)
        total = dq.total
        if total.numel() and self._collectives:
            dist.all_reduce(total, group=job.transport.group)
        elif total.numel():
            total.copy_(all_reduce(job.transport, total.flatten(0, 2), torch.add).view(total.shape))
        return total, dk, dv

    def _combined(self, job: Job, partial: PartialResult) -> PartialResult:
        """The partials of all ranks as one."""
        rows, shape = to_rows(partial), partial.lse.shape[:2]
        if not self._collectives:
            return from_rows(all_reduce(job.transport, rows, merge_rows), *shape)
        everyone = [torch.empty_like(rows) for _ in range(job.plan.world_size)]
        dist.all_gather(everyone, rows, group=job.transport.group)
        total, *others = (from_rows(one, *shape) for one in everyone)
        for other in others:
            merge_(total.out.transpose(1, 2), total.lse, other.out.transpose(1, 2), other.lse)
        return total


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
    if size == 2:  # all at once is as many bytes, and half as many hops
        mine, theirs = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
        transport.start([(mine, right)], [(theirs, left)])()
        return combine(mine, theirs) if rank == 0 else combine(theirs, mine)
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
