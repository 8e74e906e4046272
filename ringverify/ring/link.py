"""What a hop costs on the group at hand: measured with messages of several sizes, each rank to its right neighbour."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ringverify.ring.choosing import Link
from ringverify.ring.transport import Transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of the messages that are timed."""
REPEATS = 9


def hop_seconds(group: ProcessGroup | None, nbytes: int, *, device: str = "cpu", repeats: int = REPEATS) -> float:
    """Seconds of one hop of `nbytes` bytes, all ranks at once; the same on every rank, which all call this together.

    The fastest of several, because what else a machine does meanwhile is no property of the link; of the slowest rank.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    transport = Transport(group, rank, size, "p2p", torch.device(device))
    sent, received = (torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=device) for _ in range(2))
    taken = []
    for _ in range(repeats + 1):
        dist.barrier(group)
        began = time.perf_counter()
        transport.start([(sent, (rank + 1) % size)], [(received, (rank - 1) % size)])()
        if sent.is_cuda:
            torch.cuda.synchronize(sent.device)
        taken.append(time.perf_counter() - began)
    slowest = torch.tensor(min(taken[1:]), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest)


def measured_link(
    group: ProcessGroup | None = None, *, sizes: Sequence[int] = SIZES, device: str = "cpu", repeats: int = REPEATS
) -> Link:
    """Latency and bandwidth between neighbours, the same on every rank; all ranks of the group call this together.

    The latency is the time of the smallest message, the bandwidth what the largest one carries in the time beyond it.
    """
    times = {nbytes: hop_seconds(group, nbytes, device=device, repeats=repeats) for nbytes in sizes}
    small, large = min(times), max(times)
    beyond = times[large] - times[small]
    return Link(times[small], (large - small) / beyond if beyond > 0 else float("inf"))
