"""The ring the other way about: queries travel from rank to rank, KV blocks stay. Also called pass Q.

Where queries are few beside the keys, as in a chunk of a prompt that meets a cache, they and their partial results are
fewer bytes than the KV blocks. A query block stops at the last rank with a key for it. Its partial result, out and
log-sum-exp in the accumulation dtype, follows it one message behind as a dKV follows a KV block in the backward pass:
each rank merges its part into it, in the order of the ring, and the last one sends it home. Backward is that of the
ring whose KV blocks travel, which needs nothing but inputs and results.

Shape letters: B batch, S queries of one rank, H query heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ringverify.ring.accumulate import PartialResult, from_rows, merge_, merge_rows, to_rows
from ringverify.ring.compute import Job
from ringverify.ring.passes import KVRing
from ringverify.ring.returning import Returns


class QueryRing(KVRing):
    """Forward, every query block visits the ranks that have keys for it, hop by hop."""

    def forward(self, job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> PartialResult:
        """As `Method` says."""
        plan, moves = job.plan, job.plan.visits
        own, running = job.own(k, v), job.running(q)

        def room(owner: int, boundary: int) -> torch.Tensor:
            del boundary
            shape = q.size(0) * plan.queries_of(owner) * q.size(2), job.setting.value_dim + 1
            return torch.empty(shape, dtype=job.setting.accumulates, device=q.device)

        partials = Returns(job.transport, moves.gradients, room, lambda rows: rows)
        for step, (owner, visiting, computes) in enumerate(_visitors(job, q)):
            if computes and owner == plan.rank:
                job.attend(running, visiting, own, plan.rank)
            elif computes:
                part = job.running(visiting)
                job.attend(part, visiting, own, plan.rank, asking=owner)
                rows = to_rows(part.partial)
                partials.arrive()
                before = partials.here.get(owner)
                partials.here[owner] = rows if before is None else merge_rows(before, rows)
            partials.exchange(step)
        for boundary in range(moves.steps, len(moves.gradients)):
            partials.exchange(boundary)
        partials.arrive()
        if (home := partials.here.get(plan.rank)) is not None:
            out, lse = from_rows(home, q.size(0), q.size(2))
            mine = running.partial
            merge_(mine.out.transpose(1, 2), mine.lse, out.transpose(1, 2), lse)
        return running.result(q.dtype, job.sinks)


def _visitors(job: Job, q: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, bool]]:
    """Every query block that this rank is sent, its own first, the next one on its way while the caller works on one.

    Args:
        job: the call on this rank.
        q: this rank's queries `(B, S, H, D)`, contiguous.

    Yields:
        (owner, its queries, whether they attend a key here); valid until the next one is asked for.
    """
    plan, moves = job.plan, job.plan.visits
    right, left = (plan.rank + 1) % plan.world_size, (plan.rank - 1) % plan.world_size
    block = q
    for step in range(moves.steps):
        sends, receives = [], []
        if moves.passes_on(step):
            sends.append((block, right))
        arriving = block
        if moves.receives(step):
            arriving = q.new_empty(q.size(0), plan.queries_of(moves.owner(step + 1)), *q.shape[2:])
            receives.append((arriving, left))
        wait = job.transport.start(sends, receives)
        yield moves.owner(step), block, moves.computes[step]
        wait()
        block = arriving
