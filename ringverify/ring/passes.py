"""The ring: keys and values travel from rank to rank, queries stay.

Forward: a rank merges its queries' attention to each block that comes by, its own first, while the next one is on its
way. A block that no query here needs is passed on and not computed, and stops at the last rank that needs it.

Backward: the blocks travel once more, and the gradient of a block follows one message behind, in the accumulation
dtype, each rank adding its part. Two ends would leave a rank waiting, the first block's arrival and its own gradient's
homecoming; the tiles of its own block are kept for them, the first for the beginning and the others for the end.
In the same way the first tile of every other block is computed before the gradient that it is added to has to be
there. So every sum has a fixed order, and the same inputs give the same bits on any schedule.

Two buffers hold blocks, whatever the world size: what arrives in one step is sent on in the next while the other one
receives. This rank's own keys and values are packed into the second, which is free until the second hop.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch

from ringverify.ring.accumulate import Partial
from ringverify.ring.blocks import block_numel, largest_numel, pack_into, unpack
from ringverify.ring.compute import Job, Rows, add, all_finite
from ringverify.ring.regions import Region
from ringverify.ring.tiles import Tile
from ringverify.ring.transport import Wait

Block = tuple[torch.Tensor, torch.Tensor]
"""Keys `(B, T, K, D)` and values `(B, T, K, E)` of one rank."""
Part = tuple[tuple[Region, Tile], torch.Tensor, torch.Tensor]
"""Where a tile lies, and its dk and dv."""
HELD = 1
"""Tiles whose gradients are kept until there is something to add them to."""


def forward(job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, partial: Partial) -> None:
    """Merge the attention of this rank's queries to the keys of all ranks into `partial`."""
    for owner, (k_b, v_b), computes in rotate(job, k, v):
        if computes:
            job.attend(partial, q, k_b, v_b, owner)


def backward(
    job: Job, rows: Rows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to `dq (B, S, H, D)` and return this rank's dk and dv, summed over all ranks; accumulation dtype."""
    plan, moves = job.plan, job.plan.schedule
    finite = all_finite(q, rows.dout, rows.out)
    travelling = _Travelling(job, k.device)
    own = job.differentiate(rows, q, k, v, plan.rank, dq, finite)
    first = list(islice(own, HELD)) if moves.computes[0] and moves.steps > 1 else []
    last = 0
    tiles: Iterator[Part] = iter(())
    for step, (owner, (k_b, v_b), computes) in enumerate(rotate(job, k, v)):
        if step == 0:
            continue
        tiles = job.differentiate(rows, q, k_b, v_b, owner, dq, finite) if computes else iter(())
        travelling.join(owner, list(islice(tiles, HELD)), tiles, computes)
        travelling.leave(step)
        last = step
    del k_b, v_b, tiles  # nothing visits any more: the buffers are free for the gradient that comes home
    for boundary in range(last + 1, len(moves.gradients)):  # gradients on their way home pass by
        travelling.join(plan.rank, [], iter(()), computes=False)
        travelling.leave(boundary)
    travelling.join(plan.rank, [*first, *islice(own, HELD)], own, computes=True)
    return unpack(plan, travelling.held[plan.rank], plan.rank)


def rotate(job: Job, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, Block, bool]]:
    """Every block that this rank is sent, its own first, the next one on its way while the caller works on one.

    Yields:
        (owner, its block, whether a query here needs it); the block is valid until the next one is asked for.
    """
    plan, moves = job.plan, job.plan.schedule
    buffers: dict[int, torch.Tensor] = {}

    def buffer(step: int, numel: int) -> torch.Tensor:
        # Made when first used: a world of two needs one to send and one to receive, a rank that only receives just one.
        if step % 2 not in buffers:
            buffers[step % 2] = k.new_empty(largest_numel(plan))
        return buffers[step % 2][:numel]

    block: Block = k, v
    if moves.steps > 1 and moves.passes_on(0):
        own = buffer(0, block_numel(plan, plan.rank))
        pack_into(plan, own, k, v)
    for step in range(moves.steps):
        owner, following = moves.owner(step), moves.owner(step + 1)
        sends, receives = [], []
        if moves.passes_on(step):
            sends.append((buffer(step, block_numel(plan, owner)), (plan.rank + 1) % plan.world_size))
        if step + 1 < moves.steps and moves.receives(step):
            receives.append((buffer(step + 1, block_numel(plan, following)), (plan.rank - 1) % plan.world_size))
        wait = job.transport.start(sends, receives)
        yield owner, block, moves.computes[step]
        wait()
        if receives:
            block = unpack(plan, receives[0][0], following)


class _Travelling:
    """The gradients of blocks that are at this rank, and those on their way to it.

    Attributes:
        held: by owner, flat, in the accumulation dtype.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self.held: dict[int, torch.Tensor] = {}
        self._job, self._device = job, device
        self._wait: Wait | None = None
        self._leaving: list[int] = []
        self._arriving: dict[int, torch.Tensor] = {}

    def join(self, owner: int, first: list[Part], others: Iterator[Part], computes: bool) -> None:
        """Let what is on its way arrive, then add tiles to the gradient of one block, `first` having been computed."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        for gone in self._leaving:
            del self.held[gone]
        self.held |= self._arriving
        self._leaving, self._arriving = [], {}
        if not computes:
            return
        if owner not in self.held:
            numel = block_numel(self._job.plan, owner)
            self.held[owner] = torch.zeros(numel, dtype=self._job.setting.accumulates, device=self._device)
        dk, dv = unpack(self._job.plan, self.held[owner], owner)
        for part in first:
            add(part[0], dk, dv, *part[1:])
        first.clear()
        for part in others:
            add(part[0], dk, dv, *part[1:])

    def leave(self, boundary: int) -> None:
        """Start sending and receiving what is due after a step."""
        plan = self._job.plan
        if boundary >= len(plan.schedule.gradients):
            return
        moves = plan.schedule.gradients[boundary]
        self._leaving = [owner for owner, _ in moves.sends]
        self._arriving = {
            owner: torch.empty(block_numel(plan, owner), dtype=self._job.setting.accumulates, device=self._device)
            for owner, _ in moves.receives
        }
        self._wait = self._job.transport.start(
            [(self.held[owner], to) for owner, to in moves.sends],
            [(self._arriving[owner], source) for owner, source in moves.receives],
        )
