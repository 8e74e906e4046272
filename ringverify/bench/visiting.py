"""What a process does when it is its side's turn: a few equal calls, forward and backward, between barriers.

Processes are kept from turn to turn, and so are their inputs. Between turns they wait for a message, blocked, and take
no processor time from the side whose turn it is.

Shape letters: B batch, S this process's queries, T its keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ringref.sharding import key_positions, query_positions
from ringverify.bench import floor, gathered, plain
from ringverify.bench.phases import Phases, taken_apart
from ringverify.bench.sides import Side, sharding_of
from ringverify.bench.workload import Workload
from ringverify.implementation import AttentionCall, Implementation
from ringverify.targets import load

SPINNING = 0.02
"""Seconds after which threads of a parallel region have stopped spinning and are blocked."""
Interval = tuple[float, float]
"""Beginning and end in seconds of `time.monotonic()`, which the processes of one machine share."""


@dataclasses.dataclass(frozen=True)
class Visit:
    """One turn of a side.

    Attributes:
        side: the side whose turn it is.
        workload: what to compute.
        calls: how many calls.
        phases: also time the phases of each pass, which takes a little time itself.
    """

    side: Side
    workload: Workload
    calls: int
    phases: bool = False


class TimedCall(NamedTuple):
    """One call on one rank: when each pass was under way, and its phases if they were asked for."""

    forward: Interval
    backward: Interval
    phases: tuple[Phases, Phases] | None


class PreparedSide(Protocol):
    """A side with its inputs, ready to be timed."""

    def forward(self) -> Any:
        """Run the forward pass, and return what backward needs."""

    def backward(self, made: Any) -> None:
        """Run the backward pass."""


class Attending:
    """An implementation with this rank's shards of a workload.

    Args:
        implementation: what to call.
        sharding: name of a sharding that it declares.
        workload: what to compute.
        world_size: number of ranks.
        rank: this rank.
        group: the process group of all ranks.
        device: device of all tensors.
        make: functions that make q, k, v and the cotangent of out, each from its shape, dtype and device.
    """

    def __init__(
        self,
        implementation: Implementation,
        sharding: str,
        workload: Workload,
        world_size: int,
        rank: int,
        group: Any,
        device: str = "cpu",
        make: Sequence[Callable[..., torch.Tensor]] = (torch.randn,) * 4,
    ) -> None:
        problem, declared = workload.problem, implementation.capabilities
        named = declared.sharding_named(sharding)
        positions = torch.as_tensor(
            query_positions(named, problem.nq, world_size, problem.documents)[rank], device=device
        )
        key_pos = torch.as_tensor(key_positions(named, problem.nk, world_size, problem.documents)[rank], device=device)
        shapes = (
            (problem.batch, len(positions), problem.heads, problem.head_dim),
            (problem.batch, len(key_pos), problem.hk, problem.head_dim),
            (problem.batch, len(key_pos), problem.hk, problem.dv),
            (problem.batch, len(positions), problem.heads, problem.dv),
        )
        dtype = getattr(torch, problem.dtype)
        tensors = [one(*shape, dtype=dtype, device=device) for one, shape in zip(make, shapes, strict=True)]
        if declared.tensor_layout == "bhsd":
            tensors = [x.transpose(1, 2).contiguous() for x in tensors]
        self.leaves = tuple(x.requires_grad_() for x in tensors[:3])
        self.dout = tensors[3]
        sinks = torch.linspace(-2, 2, problem.heads, device=device, requires_grad=True) if problem.sinks else None
        self._trained = self.leaves if sinks is None else (*self.leaves, sinks)
        self._implementation = implementation
        self._call = AttentionCall(
            group=group,
            rank=rank,
            world_size=world_size,
            problem=problem,
            sharding=named,
            positions=positions,
            key_positions=key_pos,
            sinks=sinks,
        )

    def forward(self) -> torch.Tensor:
        """Return this rank's output."""
        q, k, v = self.leaves
        returned = self._implementation(q, k, v, self._call)
        out: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
        return out

    def backward(self, made: torch.Tensor) -> None:
        """Compute the gradients of this rank's q, k and v, and of sinks if there are any."""
        torch.autograd.grad(made, self._trained, self.dout)


_PREPARED: dict[Side, PreparedSide] = {}
_OF: list[Workload] = []
"""What the sides of this process prepared, and for which workload: only one at a time is kept, to save memory."""


def visit(turn: Visit) -> list[TimedCall]:
    """Run a side's turn on this rank, and return the times of its calls."""
    torch.set_num_threads(turn.side.threads(turn.workload))
    prepared = _prepared(turn.side, turn.workload)
    torch.zeros(1 << 17).add_(1)  # wakes the threads
    calls = []
    for _ in range(turn.calls):
        with taken_apart(wanted=turn.phases) as first:
            _together()
            began = time.monotonic()
            made = prepared.forward()
            forward = began, time.monotonic()
        with taken_apart(wanted=turn.phases) as second:
            _together()
            began = time.monotonic()
            prepared.backward(made)
            backward = began, time.monotonic()
        del made
        calls.append(TimedCall(forward, backward, (first, second) if turn.phases else None))
    if turn.side.threads(turn.workload) > 1:
        time.sleep(SPINNING)
    return calls


def _prepared(side: Side, workload: Workload) -> PreparedSide:
    if workload not in _OF:
        _PREPARED.clear()
        _OF[:] = [workload]
    if side not in _PREPARED:
        torch.manual_seed(dist.get_rank())
        _PREPARED[side] = _prepare(side, workload)
    return _PREPARED[side]


def _prepare(side: Side, workload: Workload) -> PreparedSide:
    if side.kind == "plain":
        return plain.Plain(workload) if workload.problem.dilation is None else gathered.Gathered(workload.problem)
    if side.kind in ("dense", "sinkless"):
        without = {"dilation": None} if side.kind == "dense" else {"sinks": False}
        workload = dataclasses.replace(workload, problem=workload.problem.replace(**without))
    implementation = load(side.target)
    attending = Attending(
        implementation,
        sharding_of(implementation.capabilities, workload),
        workload,
        dist.get_world_size(),
        dist.get_rank(),
        dist.group.WORLD,
    )
    return floor.Floor(attending) if side.kind == "floor" else attending


def _together() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()
