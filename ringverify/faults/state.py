"""Faults of accumulation order and of state that outlives a call (J in the reports)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from ringverify.faults.fault import Faults
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS, Steps, returning, travel

FAULTS = Faults()


def _as_they_come(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    """Send each part of dk and dv straight to its owner, which adds parts in the order of their arrival."""
    if here.replicated or here.size == 1:
        return travel(steps, here, hop, owner, carried, part)
    if hop == 0:
        here.notes["own"] = part
        return part
    flat = torch.cat([x.reshape(-1) for x in part])
    if flat.numel():
        dist.send(flat, steps.peer(here, owner), group=here.group)
    if hop + 1 < here.size:
        return part
    total = torch.cat([x.reshape(-1) for x in here.notes["own"]])
    for _ in range(here.size - 1 if total.numel() else 0):
        arrived = torch.empty_like(total)
        dist.recv(arrived, group=here.group)
        total = total + arrived
    own = here.notes["own"]
    return Block(total[: own.k.numel()].view_as(own.k), total[own.k.numel() :].view_as(own.v))


J1 = FAULTS.add(
    "J1",
    "gradients added in the order of arrival",
    story="dk and dv are right up to rounding, and different bits on another schedule, though the same ones are "
    "claimed. Needs three ranks and the same case twice.",
    source="flash-attention#2510, #2549 (l)",
    kind="determinism",
    ring=replace(STEPS, travel=_as_they_come),
)

_SCALES: dict[tuple[int, ...], float] = {}


def _cached_scale(here: Here) -> float:
    key = (here.problem.heads, here.problem.head_dim)
    return _SCALES.setdefault(key, STEPS.scale(here))


J2a = FAULTS.add(
    "J2a",
    "compiled kernel cached by shape alone",
    story="The scale of the first call of a shape serves all later ones. Needs two scales in one process.",
    source="TransformerEngine 6e75715d9; flash-attention#2402 (l)",
    kind="state",
    ring=replace(STEPS, scale=_cached_scale),
)

_MASKS: dict[tuple[object, ...], torch.Tensor] = {}


def _cached_mask(steps: Steps, here: Here, hop: int, owner: int) -> torch.Tensor:
    """Cache the mask under a key that has nothing of the pattern but causality."""
    problem = here.problem
    shards = (here.call.sharding, here.rank, here.size, owner)
    key = (*shards, problem.batch, problem.heads, problem.nq, problem.nk, problem.causal)
    if key not in _MASKS:
        _MASKS[key] = STEPS.pattern(steps, here, hop, owner)
    return _MASKS[key]


J2b = FAULTS.add(
    "J2b",
    "mask cached under too coarse a key",
    story="Two patterns of one shape share an entry; the second gets the mask of the first. Needs both in a process.",
    source="TransformerEngine 6e75715d9; flash-attention#2402 (l)",
    kind="state",
    ring=replace(STEPS, pattern=_cached_mask),
)


def _scaled_in_place(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
    q.data.mul_(here.problem.scale_value)
    return STEPS.forward(replace(steps, scale=lambda here: 1.0), here, q, k, v)


O90 = FAULTS.add(
    "O90",
    "q scaled in place",
    story="The caller's queries are multiplied by the scale. Needs a look at the inputs afterwards.",
    kind="state",
    ring=replace(STEPS, forward=_scaled_in_place),
)
_ROOM: dict[tuple[object, ...], torch.Tensor] = {}


def _in_room(rooms: dict[tuple[object, ...], torch.Tensor], here: Here, x: torch.Tensor) -> torch.Tensor:
    """What is returned in a buffer that is kept, one a rank and shape."""
    return rooms.setdefault((here.rank, tuple(x.shape), x.dtype), torch.empty_like(x)).copy_(x).detach()


def _from_room(here: Here, saved: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Accumulate into a buffer that still holds the values of the previous call."""
    lse = saved[-1]
    room = _ROOM.setdefault((here.rank, tuple(lse.shape), lse.dtype), lse.clone())
    return (*saved[:-1], room)


O91 = FAULTS.add(
    "O91",
    "backward reads the lse of the call before",
    story="One buffer a shape, saved before it is written: the first call of a shape is right. Needs a shape twice.",
    kind="state",
    ring=replace(
        returning(lambda here, out, lse: (out, _in_room(_ROOM, here, lse))),
        kept=lambda here, saved: tuple(x.clone() for x in _from_room(here, saved)),
    ),
)

_SAVED: dict[int, tuple[torch.Tensor, ...]] = {}


def _on_the_module(here: Here, saved: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    _SAVED[here.rank] = saved
    return saved


def _from_the_module(
    steps: Steps, here: Here, saved: tuple[torch.Tensor, ...], dout: torch.Tensor, dlse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return STEPS.backward(steps, here, _SAVED[here.rank], dout, dlse)


O94 = FAULTS.add(
    "O94",
    "backward of whichever forward came last",
    story="What the backward needs is kept on the module instead of in the graph. Needs two forwards before the first "
    "backward, as two layers have.",
    kind="state",
    ring=replace(STEPS, kept=_on_the_module, backward=_from_the_module),
)


def _used_up(
    steps: Steps, here: Here, saved: tuple[torch.Tensor, ...], dout: torch.Tensor, dlse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    found = STEPS.backward(steps, here, saved, dout, dlse)
    saved[-2].data.zero_()  # out in the wide dtype, taken for scratch
    return found


O95 = FAULTS.add(
    "O95",
    "a second backward finds scratch memory",
    story="The backward overwrites what it was saved. Needs retain_graph and a second backward.",
    kind="state",
    ring=replace(STEPS, kept=lambda here, saved: (*saved[:-2], saved[-2].clone(), saved[-1]), backward=_used_up),
)
_OUT: dict[tuple[object, ...], torch.Tensor] = {}


O96 = FAULTS.add(
    "O96",
    "out is overwritten by the next call",
    story="One output buffer a shape: right until the same shape is asked for again. Needs an output that is looked at "
    "after a second call.",
    kind="state",
    ring=returning(lambda here, out, lse: (_in_room(_OUT, here, out), lse)),
)


def _doing(action: Callable[[Here], object]) -> Steps:
    """Right values, and something done before they are returned."""

    def returned(here: Here, whole: Partial) -> tuple[torch.Tensor, torch.Tensor]:
        action(here)
        return STEPS.returned(here, whole)

    return replace(STEPS, returned=returned)


O125 = FAULTS.add(
    "O125",
    "torch's default dtype left changed",
    story="float64 for a sum, and not put back: whatever makes tensors afterwards makes others. Values are right.",
    kind="state",
    ring=_doing(lambda here: torch.set_default_dtype(torch.float64)),
)


O126 = FAULTS.add(
    "O126",
    "a process group more with each call",
    story="Made for the call and never destroyed: connections and memory run out after hours. Values are right.",
    kind="state",
    ring=_doing(lambda here: dist.new_group(dist.get_process_group_ranks(here.group), use_local_synchronization=True)),
)


O127 = FAULTS.add(
    "O127",
    "the call's key positions taken for scratch",
    story="Negated in place once they are not needed any more: the next layer is given them. Values are right.",
    kind="state",
    ring=_doing(lambda here: here.call.key_positions.neg_()),
)


def _send_late(here: Here) -> None:
    to = STEPS.peer(here, STEPS.right(here))

    def send() -> None:
        time.sleep(0.01)
        with contextlib.suppress(Exception):
            dist.send(torch.zeros(1), to)

    if here.size > 1:
        threading.Thread(target=send, name="late message").start()


O128 = FAULTS.add(
    "O128",
    "a thread sends after the call has returned",
    story="Its message is taken for one of the next call's. Needs a look at threads that a call leaves behind.",
    kind="state",
    ring=_doing(_send_late),
)
