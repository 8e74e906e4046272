"""The rows that need a CUDA device: our ring on one device against torch's flash attention.

Ranks that share a device are simulated: threads that take turns at communication, while the device works through what
they queue. So the time of all ranks together is the device's time for the whole work, with all that a ring adds to it.
It is compared with the same work in one call.

Shape letters: B batch, N positions, H heads, D head_dim.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringverify.bench.plain import Plain
from ringverify.bench.sides import Side
from ringverify.bench.timing import Seconds, interleaved, rows
from ringverify.bench.visiting import Attending
from ringverify.bench.workload import PatternName, Shape, Workload, workload
from ringverify.errors import Inconclusive
from ringverify.ring.attention import ring_attention
from ringverify.ring.calls import Engine
from ringverify.ring.declared import attended
from ringverify.targets import load
from ringverify.worlds.simulated import SimulatedWorld

LENGTH = 32768
SHAPE = Shape(batch=1, heads=32, head_dim=128, dtype="bfloat16")
RANKS = 4
RUN_SECONDS = 300.0
PLAIN, ALONE, RING = (
    Side("flash", "plain", ""),
    Side("world of 1", "alone", "ring"),
    Side(f"{RANKS} ranks on one device", "ranks", "ring"),
)
NO_DEVICE = "no CUDA device here"


def report(
    rounds: int, step: Callable[[], None], *, device: str = "cuda", length: int = LENGTH, shape: Shape = SHAPE
) -> dict[str, Any]:
    """Return the comparisons without and with a causal mask; without a device, the reason why there are none.

    Args:
        rounds: how many are measured.
        step: called when a side has had its turn.
        device: where to run; anything but cuda is for tests.
        length: positions.
        shape: heads and dtype.

    Raises:
        Inconclusive: a simulated rank failed.
    """
    if device == "cuda" and not torch.cuda.is_available():
        return {"device": None, "reason": NO_DEVICE, "speed": []}
    patterns: tuple[PatternName, ...] = ("dense", "causal")
    name = torch.cuda.get_device_name(0) if device == "cuda" else device
    entries = [_compared(workload(one, length, RANKS, shape), rounds, step, device) for one in patterns]
    return {"device": name, "reason": None, "speed": entries}


def _compared(work: Workload, rounds: int, step: Callable[[], None], device: str) -> dict[str, Any]:
    plain = Plain(work, device)
    leaves = [plain.q, plain.k, plain.v]

    def flash() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # and no other: an error where it cannot take these inputs
            return plain.forward()

    def ring() -> torch.Tensor:
        out = ring_attention(*leaves, causal=work.problem.causal)
        assert isinstance(out, torch.Tensor)
        return out

    def take(side: Side, calls: int) -> list[Seconds]:
        if side == RING:
            return _simulated(work, calls, device)
        return [_timed(flash if side == PLAIN else ring, leaves, plain.dout, device) for _ in range(calls)]

    found = interleaved((PLAIN, ALONE, RING), take, rounds, step)
    p = work.problem
    return {"pattern": work.pattern, "title": work.title, "length": p.nq, "rows": rows(found, PLAIN.name, {})}


def _timed(attend: Callable[[], torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor, device: str) -> Seconds:
    """Time one forward and backward call, each from an idle device to an idle device."""
    _idle(device)
    began = time.perf_counter()
    out = attend()
    _idle(device)
    between = time.perf_counter()
    torch.autograd.grad(out, leaves, dout)
    _idle(device)
    return Seconds(between - began, time.perf_counter() - between)


@dataclasses.dataclass(frozen=True)
class _Turn:
    work: Workload
    calls: int
    device: str


def _simulated(work: Workload, calls: int, device: str) -> list[Seconds]:
    turn = _Turn(work, calls, device)
    run = SimulatedWorld().run(on_rank, turn, world_size=work.world_size, seed=0, deadline=RUN_SECONDS)
    if run.failure is not None:
        raise Inconclusive(f"{work.world_size} ranks on one device, {work.title}: {run.failure.message}")
    found = []
    for ranks in zip(*run.results, strict=True):
        # The first rank past a barrier finds the device done with everyone's work, and may be ahead of the others.
        start, middle, end = (min(moments) for moments in zip(*ranks, strict=True))
        found.append(Seconds(middle - start, end - middle))
    return found


def on_rank(turn: _Turn) -> list[tuple[float, float, float]]:
    """Return when each call began on this rank, and when all ranks were known to have ended forward and backward."""
    attending = Attending(
        # As users call it: what `check` declares adds up in order on every device, which flash is not asked for here.
        dataclasses.replace(load("ring"), function=functools.partial(attended, engine=Engine("ring"))),
        turn.work.sharding,
        turn.work,
        dist.get_world_size(),
        dist.get_rank(),
        dist.group.WORLD,
        turn.device,
    )
    attending.backward(attending.forward())  # a first call allocates
    found = []
    for _ in range(turn.calls):
        dist.barrier()
        _idle(turn.device)
        began = time.perf_counter()
        out = attending.forward()
        dist.barrier()
        _idle(turn.device)
        between = time.perf_counter()
        attending.backward(out)
        dist.barrier()
        _idle(turn.device)
        found.append((began, between, time.perf_counter()))
    return found


def _idle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
