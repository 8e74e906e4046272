"""Programs that the tests of the gloo world run on its ranks: small, importable by name, mostly misbehaving."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from by_address import OFFSETS, shifted


def who_am_i(argument: Any) -> tuple[int, int, Any]:
    """Rank, world size, and what was handed in."""
    return dist.get_rank(), dist.get_world_size(), argument


def process_id(_: Any) -> int:
    """The rank's process."""
    return os.getpid()


def pass_round(argument: Any) -> list[float]:
    """Each rank's number, passed once round the ring and gathered on every rank as it came by."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([float(rank)])
    seen = []
    for _ in range(size - 1):
        theirs = torch.empty(1)
        sending = dist.P2POp(dist.isend, mine, (rank + 1) % size)
        receiving = dist.P2POp(dist.irecv, theirs, (rank - 1) % size)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        seen.append(theirs.item())
        mine = theirs
    return seen


def products(_: Any) -> str:
    """The bits of a few products of matrices, begun where allocators do not begin."""
    generator = torch.Generator().manual_seed(0)
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.float64):
        for size in (5, 17, 64):
            one, other = torch.randn(2, size, size, generator=generator, dtype=dtype)
            for offset in (0, *OFFSETS):
                digest.update((shifted(one, offset) @ shifted(other, offset).t()).numpy().tobytes())
    return digest.hexdigest()


def variable(name: str) -> str | None:
    """An environment variable of the rank."""
    return os.environ.get(name)


def collectives(_: Any) -> float:
    """Sum of all ranks' numbers, by a collective."""
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def misbehave(how: str) -> int:
    """Rank 1 does what `how` says; the others wait for it as a ring would."""
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer = torch.zeros(1)
    print(f"rank {rank} is about to {how}")
    if rank == 1:
        match how:
            case "raise":
                raise ValueError("no such\nthing")
            case "sys.exit":
                sys.exit(3)
            case "os._exit":
                os._exit(3)
            case "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "SIGABRT":
                os.abort()
            case "spin":
                while True:
                    pass
            case "sleep":
                time.sleep(3600)
            case "not send":
                return rank
            case "raise what cannot be printed":
                raise _Unprintable
    dist.recv(buffer, (rank - 1) % size)
    return rank


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def flood(_: Any) -> int:
    """Print far more than any pipe or memory should hold."""
    line = "x" * 1023 + "\n"
    for _ in range(20_000):
        sys.stdout.write(line)
    print("the end")
    if dist.get_rank() == 1:
        raise ValueError("after the flood")
    return dist.get_rank()


def destroy(_: Any) -> int:
    """End the process group that the world set up."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank


_KEPT: list[Any] = []


def leave_a_message(value: float) -> int:
    """Rank 0 sends what nobody receives."""
    if dist.get_rank() == 0:
        # A handle that is dropped would take its message back, and the pair of ranks with it.
        _KEPT.append(dist.isend(torch.tensor([value]), 1))
    return dist.get_rank()


def receive(value: float) -> float:
    """Rank 0 sends a value; rank 1 returns what it received."""
    buffer = torch.tensor([value])
    if dist.get_rank() == 0:
        dist.send(buffer, 1)
        return value
    buffer = torch.zeros(1)
    dist.recv(buffer, 0)
    return buffer.item()


def receive_from_anyone(_: Any) -> float:
    """Rank 0 returns what it received from whoever sent it."""
    if dist.get_rank() == 0:
        buffer = torch.zeros(1)
        dist.recv(buffer)
        return buffer.item()
    dist.send(torch.tensor([7.0]), 0)
    return 7.0


def extra_collective(_: Any) -> int:
    """Rank 0 starts a collective that the others never join."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1), async_op=True)
    return dist.get_rank()


def change_settings(_: Any) -> tuple[Any, ...]:
    """Process-wide settings as found; then all of them changed."""
    found = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.rand(()).item())
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    return found


def fork_and_return(_: Any) -> tuple[int, int]:
    """Fork twice: one child returns too, the other stays behind. The rank's process, and that child."""
    if os.fork() == 0:
        return -1, -1
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    return os.getpid(), child


def new_group(_: Any) -> int:
    """Make a group of all ranks and use it; leave it behind."""
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group())
    return int(total.item())


def die_later(_: Any) -> int:
    """Return, and end the process a moment later."""
    threading.Timer(0.05, os._exit, args=(5,)).start()
    return dist.get_rank()


def die_slowly(_: Any) -> None:
    """Rank 1 ends at once, but what it has started takes a second to end: a stopped tracker of shared memory."""
    from multiprocessing import resource_tracker

    dist.barrier()
    if dist.get_rank() == 1:
        resource_tracker.ensure_running()
        tracker: Any = resource_tracker._resource_tracker
        os.kill(tracker._pid, signal.SIGSTOP)
        os._exit(3)
    dist.barrier()


def unpicklable(_: Any) -> Any:
    """A result that no process can send."""
    return lambda: None


def has_functional_collectives(_: None) -> bool:
    """Whether this process has their module before anybody asks for it."""
    return "torch.distributed._functional_collectives" in sys.modules
