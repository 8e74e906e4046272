"""All queries on every rank, keys and values sharded: nothing visits, and partial results are combined instead.

Forward merges every rank's partial by log-sum-exps, backward sums dq; dk and dv are at home already. Both go round the
ring in the bandwidth-optimal way (Patarasuk & Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of
workstations*): each piece of the rows is combined on its way round, then the finished pieces go round once more, so
that all ranks end with the same bits. With `method="allgather"` partials are gathered instead and merged in rank order,
and dq is all-reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from ringverify.ring.accumulate import PartialResult, from_rows, merge_, merge_rows, to_rows
from ringverify.ring.compute import Job, Rows
from ringverify.ring.one_process import own_gradients
from ringverify.ring.transport import Message, Transport, Wait


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
        shape = q.shape[:3].numel(), job.setting.value_dim + 1
        reduce = None if self._collectives else AllReduce(job.transport, shape, job.setting.accumulates)
        job.attend(running, q, job.own(k, v), job.plan.rank)
        if running.partial.lse.numel():
            for own, combined in zip(running.partial, _combined(job, running.partial, reduce), strict=True):
                own.copy_(combined)
        return running.result(q.dtype, job.sinks)

    def backward(
        self, job: Job, rows: Rows, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Method` says; dq is the same on every rank."""
        dq = job.dq_sum(rows)
        shape = rows.q.shape[:3].numel(), rows.q.size(3)
        reduce = None if self._collectives else AllReduce(job.transport, shape, job.setting.accumulates)
        dk, dv = own_gradients(job, rows, k, v, dq)
        total = dq.total
        if not total.numel():
            return total, dk, dv
        if reduce is None:
            dist.all_reduce(total, group=job.transport.group)
        else:
            total.copy_(reduce(total.flatten(0, 2), torch.add).view(total.shape))
        return total, dk, dv


def _combined(job: Job, partial: PartialResult, reduce: AllReduce | None) -> PartialResult:
    """The partials of all ranks as one."""
    rows, shape = to_rows(partial), partial.lse.shape[:2]
    if reduce is not None:
        return from_rows(reduce(rows, merge_rows), *shape)
    everyone = [torch.empty_like(rows) for _ in range(job.plan.world_size)]
    dist.all_gather(everyone, rows, group=job.transport.group)
    total, *others = (from_rows(one, *shape) for one in everyone)
    for other in others:
        merge_(total.out.transpose(1, 2), total.lse, other.out.transpose(1, 2), other.lse)
    return total


class AllReduce:
    """Rows of all ranks combined elementwise, the same bits on every rank.

    Made before the rows are computed, so that what is received first is posted by then; called once.

    Of two ranks one combines for both: as few bytes as an exchange of all rows, and one combination less.

    Args:
        transport: between the ranks.
        shape: `(R, columns)` of the rows, the same on all ranks.
        dtype: of theirs.
    """

    def __init__(self, transport: Transport, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._transport, self._rank, self._size = transport, transport.rank, transport.world_size
        self._shape, self._dtype = shape, dtype
        self._right, self._left = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        share, larger = divmod(shape[0], self._size)
        self._ends = list(accumulate((share + (piece < larger) for piece in range(self._size)), initial=0))
        self._first = None if (self._size, self._rank) == (2, 1) else self._expected(0)

    def __call__(
        self, rows: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Combine them.

        Args:
            rows: this rank's `(R, columns)`; not written to.
            combine: of the left neighbours' rows so far and this rank's.
        """
        if self._first is None:
            self._transport.start([(rows.contiguous(), self._left)], [])()
            combined, send = self._expected(0)
            send([])()
            return combined
        if self._size == 2:
            theirs, send = self._first
            send([])()
            combined = combine(rows, theirs)
            self._transport.start([(combined, self._right)], [])()
            return combined
        pieces = [rows[start:end].contiguous() for start, end in pairwise(self._ends)]
        expected, last = [self._first], 2 * self._size - 3
        for hop in range(last + 1):
            if hop < last:
                expected.append(self._expected(hop + 1))
            arriving, send = expected.pop(0)
            sent, received = (self._rank - hop) % self._size, (self._rank - hop - 1) % self._size
            send([(pieces[sent], self._right)])()
            pieces[received] = combine(arriving, pieces[received]) if hop < self._size - 1 else arriving
        return torch.cat(pieces)

    def _expected(self, hop: int) -> tuple[torch.Tensor, Callable[[Sequence[Message]], Wait]]:
        """What arrives at a hop, and what starts it; the next hop's is posted before a hop is waited for."""
        received = (self._rank - hop - 1) % self._size
        count = self._shape[0] if self._size == 2 else self._ends[received + 1] - self._ends[received]
        arriving = torch.empty(count, self._shape[1], dtype=self._dtype, device=self._transport.device)
        return arriving, self._transport.expect([(arriving, self._left)])
