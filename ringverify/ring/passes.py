"""The ring: keys and values travel from rank to rank, queries stay.

Forward: a rank merges its queries' attention to each block that comes by, its own first, while the next one is on its
way. A block that no query here needs is passed on and not computed, and stops at the last rank that needs it.

Backward: the blocks travel once more, and the gradient of a block follows one message behind, in the accumulation
dtype, each rank adding its part. Two ends would leave a rank waiting, the first block's arrival and its own gradient's
homecoming; the tiles of its own block are kept for them, the first for the beginning and the others for the end.
In the same way the first tile of every other block is computed before the gradient that it is added to has to be
there. So every sum has a fixed order, and the same inputs give the same bits on any schedule.

Only what is needed travels: a KV slice of a block holds the rows that ranks ahead still need, its gradient those that
ranks behind have added to. For dense problems that is the whole block, all the way, and two buffers hold blocks
whatever the world size: what arrives in one step is sent on in the next while the other one receives. This rank's own
keys and values, where a kernel wants them packed, lie in the second, which is free until the second hop.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch

from ringverify.ring.accumulate import Running, Sum
from ringverify.ring.compute import Job, Rows
from ringverify.ring.gradients import Gradients, TileGradient
from ringverify.ring.plan.kv_slices import KVSlice, KVTensors
from ringverify.ring.transport import Message, Wait

HELD = 1
"""Tiles whose gradients are kept until there is something to add them to."""


def forward(job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, running: Running) -> None:
    """Merge the attention of this rank's queries to the keys of all ranks into a partial."""
    for owner, block, computes in rotate(job, k, v):
        if computes:
            job.attend(running, q, block, owner)


def backward(job: Job, rows: Rows, k: torch.Tensor, v: torch.Tensor, dq: Sum) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to `dq (B, S, H, D)` and return this rank's dk and dv, summed over all ranks; accumulation dtype."""
    plan, moves = job.plan, job.plan.schedule
    travelling = _Travelling(job, k.device)
    first: list[TileGradient] = []
    own: Iterator[TileGradient] = iter(())
    last = 0
    for step, (owner, block, computes) in enumerate(rotate(job, k, v)):
        tiles = job.differentiate(rows, block, owner, dq) if computes else iter(())
        if step == 0:
            first, own = list(islice(tiles, HELD)) if moves.steps > 1 else [], tiles
            del block, tiles
            continue
        held = list(islice(tiles, HELD))
        travelling.join()
        if computes:
            travelling.add(owner, plan.dkv_slice(owner, step), held, tiles)
        del block, tiles, held  # what they hold on to is free for what comes next
        travelling.leave(step)
        last = step
    for boundary in range(last + 1, len(moves.gradients)):  # gradients on their way home pass by
        travelling.join()
        travelling.leave(boundary)
    if moves.steps > 2 and moves.computes[0]:  # other blocks have been where these tiles' keys were
        del own
        whole = KVTensors.of_tensors(plan.whole(plan.rank), k, v)
        own = job.differentiate(rows, _packed(whole) if job.packs else whole, plan.rank, dq, after=len(first))
    first += islice(own, HELD)
    travelling.join()
    return travelling.home(k, v, first, own)


def rotate(job: Job, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, KVTensors, bool]]:
    """Every block that this rank is sent, its own first, the next one on its way while the caller works on one.

    Yields:
        (owner, what arrived of its block, whether a query here needs it); valid until the next one is asked for.
    """
    plan, moves = job.plan, job.plan.schedule
    right, left = (plan.rank + 1) % plan.world_size, (plan.rank - 1) % plan.world_size
    arrives = [step + 1 < moves.steps and moves.receives(step) for step in range(moves.steps)]
    sizes = [plan.kv_numel(moves.owner(step + 1), step) for step in range(moves.steps) if arrives[step]]
    longest = max(sizes, default=0)
    if moves.passes_on(0):
        longest = max(longest, plan.kv_numel(plan.rank, 0))
    buffers: dict[int, torch.Tensor] = {}

    def block_in_buffer(step: int, kv_slice: KVSlice) -> KVTensors:
        # Made when first used: a world of two needs one to send and one to receive, a rank that only receives just one.
        if step % 2 not in buffers:
            buffers[step % 2] = k.new_empty(longest)
        return KVTensors.of_flat(kv_slice, buffers[step % 2])

    block = KVTensors.of_tensors(plan.whole(plan.rank), k, v)
    for step in range(moves.steps):
        sends: list[Message] = []
        receives: list[Message] = []
        if moves.passes_on(step):
            kv_slice = plan.kv_slice(moves.owner(step), step)
            sent = block
            if step == 0:
                sent = block_in_buffer(0, kv_slice)
            elif kv_slice != block.slice:
                sent = KVTensors.of_flat(kv_slice, k.new_empty(kv_slice.numel))
            if sent is not block:
                block.copy_to(sent)
            if step == 0 and kv_slice == block.slice:
                block = sent
            sends.append((_flat(sent), right))
        elif step == 0 and moves.computes[0] and job.packs:
            block = _packed(block)
        received = None
        if arrives[step]:
            received = block_in_buffer(step + 1, plan.kv_slice(moves.owner(step + 1), step))
            receives.append((_flat(received), left))
        wait = job.transport.start(sends, receives)
        yield moves.owner(step), block, moves.computes[step]
        wait()
        if received is not None:
            block = received


def _packed(block: KVTensors) -> KVTensors:
    """A copy as it would travel: the rows of a head lie together, and kernels take less time."""
    some = next(iter(block.parts.values()))[0] if block.parts else None
    if some is None:
        return block
    packed = KVTensors.of_flat(block.slice, some.new_empty(block.slice.numel))
    block.copy_to(packed)
    return packed


def _flat(block: KVTensors) -> torch.Tensor:
    assert block.flat is not None
    return block.flat


def _add(gradients: Gradients, first: list[TileGradient], others: Iterator[TileGradient]) -> KVTensors:
    """Add tiles to a gradient, which is returned; each is let go before the next one is computed."""
    while first:
        gradients.add(first.pop(0))
    for part in others:
        gradients.add(part)
        del part
    return gradients.block


def _beginning(block: KVTensors, so_far: KVTensors | None) -> Gradients:
    """Gradients in memory that holds nothing yet, beginning with those of some of its rows."""
    gradients = Gradients(block, empty=True)
    if so_far is not None:
        gradients.begin(so_far)
    return gradients


class _Travelling:
    """The gradients of blocks that are at this rank, and those on their way to it."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._plan, self._transport = job.plan, job.transport
        self._dtype, self._device = job.setting.accumulates, device
        self._held: dict[int, KVTensors] = {}
        self._leaving: list[int] = []
        self._arriving: dict[int, KVTensors] = {}
        self._wait: Wait | None = None

    def join(self) -> None:
        """Let what is on its way arrive."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        for gone in self._leaving:
            del self._held[gone]
        self._held |= self._arriving
        self._leaving, self._arriving = [], {}

    def add(self, owner: int, kv_slice: KVSlice, first: list[TileGradient], others: Iterator[TileGradient]) -> None:
        """Add tiles to the gradient of a block, which holds the rows of `kv_slice` from now on."""
        block = self._held.get(owner)
        if block is not None and block.slice == kv_slice:
            gradients = Gradients(block, empty=False)
        else:
            self._held[owner] = wider = self._block(kv_slice)
            gradients = _beginning(wider, block)
        del block
        _add(gradients, first, others)

    def leave(self, boundary: int) -> None:
        """Start sending and receiving what is due after a step."""
        if boundary >= len(self._plan.schedule.gradients):
            return
        moves = self._plan.schedule.gradients[boundary]
        self._leaving = [owner for owner, _ in moves.sends]
        for owner, _ in moves.receives:
            self._arriving[owner] = self._block(self._plan.dkv_slice(owner, boundary))
        self._wait = self._transport.start(
            [(_flat(self._held[owner]), to) for owner, to in moves.sends],
            [(_flat(self._arriving[owner]), source) for owner, source in moves.receives],
        )

    def home(
        self, k: torch.Tensor, v: torch.Tensor, first: list[TileGradient], others: Iterator[TileGradient]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of this rank's own keys: what has come home, and its own tiles."""
        arrived = self._held.pop(self._plan.rank, None)
        whole = self._plan.whole(self._plan.rank)
        if arrived is not None and arrived.slice == whole and len(whole.parts) == 1:
            return _add(Gradients(arrived, empty=False), first, others).parts[0]
        dk, dv = (torch.empty(x.shape, dtype=self._dtype, device=self._device) for x in (k, v))
        gradients = _beginning(KVTensors.of_tensors(whole, dk, dv), arrived)
        del arrived
        _add(gradients, first, others)
        return dk, dv

    def _block(self, kv_slice: KVSlice) -> KVTensors:
        return KVTensors.of_flat(kv_slice, torch.empty(kv_slice.numel, dtype=self._dtype, device=self._device))
