"""The ring: KV blocks travel from rank to rank, queries stay.

Forward: a rank merges its queries' attention to each KV block that comes by, its own first, while the next one is on
its way. A block that no query here needs is sent on and not computed, and stops at the last rank that needs it.

Backward: the KV blocks travel once more, and the gradient of each, its dKV, follows one message behind, in the
accumulation dtype; each rank adds its part, and the last one sends it home. See `_Backward` for the steps.

Only what is needed travels: a KV slice of a block holds the rows that ranks ahead still need, its dKV slice those that
ranks behind have added to. For dense problems that is the whole block, all the way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ringverify.ring.accumulate import PartialResult
from ringverify.ring.compute import Job, Rows, TileGradients
from ringverify.ring.gradients import Gradients, TileGradient
from ringverify.ring.plan.kv_slices import KVSlice, KVTensors
from ringverify.ring.returning import Returns


class KVRing:
    """Every KV block visits the ranks that need it, hop by hop."""

    def forward(self, job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> PartialResult:
        """As `Method` says."""
        running = job.running(q)
        for owner, block, computes in rotate(job, k, v):
            if computes:
                job.attend(running, q, block, owner)
        return running.result(q.dtype, job.sinks)

    def backward(
        self, job: Job, rows: Rows, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Method` says."""
        return _Backward(job, rows, k, v).run()


def rotate(job: Job, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, KVTensors, bool]]:
    """Every KV block that this rank is sent, its own first, the next one on its way while the caller works on one.

    Two buffers hold blocks whatever the world size: what arrives in one is sent on while the other receives. The first
    hop sends a copy of the own block, in the order of a message; where that is all of it, kernels read the copy too.

    Yields:
        (owner, what arrived of its block, whether a query here needs it); valid until the next one is asked for.
    """
    plan, moves = job.plan, job.plan.schedule
    right, left = (plan.rank + 1) % plan.world_size, (plan.rank - 1) % plan.world_size
    buffers = _Buffers(job, k)
    block = KVTensors.of_tensors(plan.whole(plan.rank), k, v)
    if not moves.passes_on(0) and moves.computes[0]:
        block = job.own(k, v)
    for step in range(moves.steps):
        sent = received = None
        if moves.passes_on(step):
            kv_slice = plan.kv_slice(moves.owner(step), step)
            if step == 0:
                sent = block.copy_to(buffers.block(0, kv_slice))
                block = sent if kv_slice == block.slice else block
            elif kv_slice == block.slice:
                sent = block
            else:
                sent = block.copy_to(KVTensors.of_flat(kv_slice, k.new_empty(kv_slice.numel)))
        if moves.receives(step):
            received = buffers.block(step + 1, plan.kv_slice(moves.owner(step + 1), step))
        wait = job.transport.start(
            [] if sent is None else [(sent.message, right)], [] if received is None else [(received.message, left)]
        )
        yield moves.owner(step), block, moves.computes[step]
        wait()
        block = received or block


class _Buffers:
    """Two buffers for KV blocks in turn, each made when it is first used: a rank that only receives needs just one."""

    def __init__(self, job: Job, like: torch.Tensor) -> None:
        plan, moves = job.plan, job.plan.schedule
        arriving = [plan.kv_numel(moves.owner(step + 1), step) for step in range(moves.steps) if moves.receives(step)]
        leaving = [plan.kv_numel(plan.rank, 0)] if moves.passes_on(0) else []
        self._longest = max(arriving + leaving, default=0)
        self._like = like
        self._buffers: dict[int, torch.Tensor] = {}

    def block(self, step: int, kv_slice: KVSlice) -> KVTensors:
        """Room for what is here at a step."""
        if step % 2 not in self._buffers:
            self._buffers[step % 2] = self._like.new_empty(self._longest)
        return KVTensors.of_flat(kv_slice, self._buffers[step % 2])


class _Backward:
    """The backward pass of one rank: four states, in this order.

    1. begin: its own block. The first tile's gradient is computed and kept, while the first KV block is on its way.
    2. visit, for each KV block that comes by: its first tile is computed while its dKV is on its way; the dKV arrives;
       all tiles are added to it, the first one first; it is sent on.
    3. relay, at each boundary after the last KV block's: dKVs that pass by on their way home arrive and are sent on.
    4. end: its own block again. The next tile is computed while its own dKV is on its way; that arrives; all tiles of
       its own are added to it, the two that were kept first.

    A rank would idle twice, until the first KV block arrives and until its own dKV is back: tiles of its own block fill
    both gaps. Every sum has a fixed order, so that the same inputs give the same bits on any schedule. What a state has
    allocated is free when its function returns.
    """

    def __init__(self, job: Job, rows: Rows, k: torch.Tensor, v: torch.Tensor) -> None:
        self._job, self._rows, self._k, self._v = job, rows, k, v
        self._plan, self._moves = job.plan, job.plan.schedule
        self._dq = job.dq_sum(rows)
        self._returns = _DKVReturns(job, k.device)
        self._packs = False
        self._kept: list[TileGradient] = []

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv of this rank, in the accumulation dtype."""
        self._begin_and_visit()
        for boundary in range(self._moves.steps, len(self._moves.gradients)):  # relay
            self._returns.exchange(boundary)
        dk, dv = self._end()
        return self._dq.total, dk, dv

    def _begin_and_visit(self) -> None:
        """The states in which KV blocks travel."""
        for step, (owner, block, computes) in enumerate(rotate(self._job, self._k, self._v)):
            if step == 0:
                self._begin(block)
                continue
            if computes:
                self._visit(step, owner, block)
            self._returns.exchange(step)

    def _begin(self, own: KVTensors) -> None:
        self._packs = own.flat is not None
        tiles = self._tiles(own, self._plan.rank)
        tiles.compute_one()
        self._kept = tiles.computed

    def _visit(self, step: int, owner: int, block: KVTensors) -> None:
        tiles = self._tiles(block, owner)
        tiles.compute_one()
        self._returns.arrive()
        tiles.add_to(self._returns.gradients(owner, self._plan.dkv_slice(owner, step)))

    def _end(self) -> tuple[torch.Tensor, torch.Tensor]:
        # From k and v again: other blocks have been in the buffer from which the first tile was computed.
        own = KVTensors.of_tensors(self._plan.whole(self._plan.rank), self._k, self._v)
        tiles = self._tiles(own.packed() if self._packs else own, self._plan.rank, self._kept)
        tiles.compute_one()
        self._returns.arrive()
        gradients, dk, dv = self._returns.home(self._k, self._v)
        tiles.add_to(gradients)
        return dk, dv

    def _tiles(self, block: KVTensors, owner: int, computed: list[TileGradient] | None = None) -> TileGradients:
        return TileGradients(self._job, self._rows, block, owner, self._dq, computed)


class _DKVReturns:
    """dKVs of the blocks at this rank, and those on their way to it or from it."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._plan, self._dtype, self._device = job.plan, job.setting.accumulates, device

        def room(owner: int, boundary: int) -> KVTensors:
            return self._room(job.plan.dkv_slice(owner, boundary))

        self._returns = Returns(job.transport, job.plan.schedule.gradients, room, lambda block: block.message)
        self.exchange, self.arrive = self._returns.exchange, self._returns.arrive

    def gradients(self, owner: int, kv_slice: KVSlice) -> Gradients:
        """The dKV of a block, to add to, which holds the rows of `kv_slice` from now on."""
        arrived = self._returns.here.get(owner)
        if arrived is not None and arrived.slice == kv_slice:
            return Gradients(arrived, empty=False)
        self._returns.here[owner] = self._room(kv_slice)
        return _beginning_with(arrived, self._returns.here[owner])

    def home(self, k: torch.Tensor, v: torch.Tensor) -> tuple[Gradients, torch.Tensor, torch.Tensor]:
        """What has come home of this rank's own dKV, to add to, and the dk and dv that it is then."""
        arrived, whole = self._returns.here.pop(self._plan.rank, None), self._plan.whole(self._plan.rank)
        if arrived is not None and arrived.slice == whole and len(whole.parts) == 1:
            return Gradients(arrived, empty=False), *arrived.parts[0]
        dk, dv = (torch.empty(x.shape, dtype=self._dtype, device=self._device) for x in (k, v))
        return _beginning_with(arrived, KVTensors.of_tensors(whole, dk, dv)), dk, dv

    def _room(self, kv_slice: KVSlice) -> KVTensors:
        return KVTensors.of_flat(kv_slice, torch.empty(kv_slice.numel, dtype=self._dtype, device=self._device))


def _beginning_with(so_far: KVTensors | None, block: KVTensors) -> Gradients:
    """Gradients in memory that holds nothing yet, beginning with those of some of its rows."""
    gradients = Gradients(block, empty=True)
    if so_far is not None:
        gradients.begin(so_far)
    return gradients
