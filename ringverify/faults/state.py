"""Faults of state that outlives a call, of memory, and of the order of sums (J in the reports, R1, R7, R14)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from ringverify.faults.communication import TRAVELLING
from ringverify.faults.fault import Faults
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS, Steps, attend, gradients, multiplicity, returning, travel

Tensor = torch.Tensor
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


FAULTS.add(
    "J1",
    "parts of dk and dv are added in the order of their arrival",
    replace(STEPS, travel=_as_they_come),
    kind="determinism",
)


_SCALES: dict[tuple[int, ...], float] = {}


def _cached_scale(here: Here) -> float:
    key = (here.problem.heads, here.problem.head_dim)
    return _SCALES.setdefault(key, STEPS.scale(here))


FAULTS.add(
    "J2a",
    "the scale is cached by shape: that of the first call serves all later ones",
    replace(STEPS, scale=_cached_scale),
    kind="state",
)


_MASKS: dict[tuple[object, ...], Tensor] = {}


def _cached_mask(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    """Cache the mask under a key that has nothing of the pattern but causality."""
    problem = here.problem
    shards = (here.call.sharding, here.rank, here.size, owner)
    key = (*shards, problem.batch, problem.heads, problem.nq, problem.nk, problem.causal)
    if key not in _MASKS:
        _MASKS[key] = STEPS.pattern(steps, here, hop, owner)
    return _MASKS[key]


FAULTS.add(
    "J2b",
    "the mask is cached by shape and causality: other patterns get that of the first call",
    replace(STEPS, pattern=_cached_mask),
    kind="state",
)


def _scaled_in_place(steps: Steps, here: Here, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    q.data.mul_(here.problem.scale_value)
    return STEPS.forward(replace(steps, scale=lambda here: 1.0), here, q, k, v)


FAULTS.add(
    "O90",
    "q is scaled in place: the caller's tensor is changed",
    replace(STEPS, forward=_scaled_in_place),
    kind="state",
)


_ROOM: dict[tuple[object, ...], Tensor] = {}


def _in_room(rooms: dict[tuple[object, ...], Tensor], here: Here, x: Tensor) -> Tensor:
    """What is returned in a buffer that is kept, one a rank and shape."""
    return rooms.setdefault((here.rank, tuple(x.shape), x.dtype), torch.empty_like(x)).copy_(x).detach()


def _from_room(here: Here, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Accumulate into a buffer that still holds the values of the previous call."""
    lse = saved[-1]
    room = _ROOM.setdefault((here.rank, tuple(lse.shape), lse.dtype), lse.clone())
    return (*saved[:-1], room)


FAULTS.add(
    "O91",
    "the backward reads the lse of the call before: there is one buffer a shape",
    replace(
        returning(lambda here, out, lse: (out, _in_room(_ROOM, here, lse))),
        kept=lambda here, saved: tuple(x.clone() for x in _from_room(here, saved)),
    ),
    kind="state",
)


_SAVED: dict[int, tuple[Tensor, ...]] = {}


def _on_the_module(here: Here, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    _SAVED[here.rank] = saved
    return saved


def _from_the_module(
    steps: Steps, here: Here, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor
) -> tuple[Tensor, ...]:
    return STEPS.backward(steps, here, _SAVED[here.rank], dout, dlse)


FAULTS.add(
    "O94",
    "the backward is that of whichever forward came last: what it needs is kept on the module",
    replace(STEPS, kept=_on_the_module, backward=_from_the_module),
    kind="state",
)


def _used_up(steps: Steps, here: Here, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
    found = STEPS.backward(steps, here, saved, dout, dlse)
    saved[-2].data.zero_()  # out in the wide dtype, taken for scratch
    return found


FAULTS.add(
    "O95",
    "the backward overwrites what was saved for it: a second one finds scratch memory",
    replace(STEPS, kept=lambda here, saved: (*saved[:-2], saved[-2].clone(), saved[-1]), backward=_used_up),
    kind="state",
)


_OUT: dict[tuple[object, ...], Tensor] = {}

FAULTS.add(
    "O96",
    "out is overwritten by the next call",
    returning(lambda here, out, lse: (_in_room(_OUT, here, out), lse)),
    kind="state",
)


def _into_the_inputs(k: Tensor, v: Tensor) -> Block:
    """Send the inputs themselves where they are contiguous, in place of a copy."""
    return Block(*(x.detach().contiguous() for x in (k, v)))


def _swapping(steps: Steps, here: Here, block: Block) -> Iterator[tuple[int, int, Block]]:
    """Receive into two buffers in turn, the first of which is the inputs: the second hop overwrites them."""
    spare: Block | None = None
    hops = 1 if here.replicated else here.size
    for hop in range(hops):
        posted = None
        if hop + 1 < hops:
            to, source = (steps.peer(here, rank) for rank in (steps.right(here), steps.left(here)))
            shapes = here.block_shapes(steps.owner(here, hop + 1))
            fits = spare is not None and all(x.shape == torch.Size(s) for x, s in zip(spare, shapes, strict=True))
            arriving = spare if fits and spare is not None else steps.buffers(here, block, steps.owner(here, hop + 1))
            posted = steps.post(here, to, source, steps.group(here), block, arriving)
        yield hop, steps.owner(here, hop), block
        if posted is not None:
            spare, block = block, steps.arrive(posted)


FAULTS.add(
    "F12a",
    "blocks are received into the caller's own k and v",
    replace(STEPS, outgoing=_into_the_inputs, visit=_swapping),
    kind="state",
)


def _uninitialised(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    dq, part = gradients(steps, here, hop, owner, rows, block)
    if not bool(multiplicity(steps, here, hop, owner).any()):
        part = Block(*(torch.empty_like(x) for x in part))
    return dq, part


FAULTS.add(
    "F9a",
    "the gradient of a block that no query attends is not written: it is whatever was in memory",
    replace(STEPS, gradients=_uninitialised),
    kind="state",
)


# -- right values, and something else done -----------------------------------------------------------------------------


def _doing(action: Callable[[Here], object]) -> Steps:
    """Right values, and something done before they are returned."""

    def returned(here: Here, whole: Partial) -> tuple[Tensor, Tensor]:
        action(here)
        return STEPS.returned(here, whole)

    return replace(STEPS, returned=returned)


FAULTS.add(
    "O125",
    "torch's default dtype is left changed",
    _doing(lambda here: torch.set_default_dtype(torch.float64)),
    kind="state",
)
FAULTS.add(
    "O126",
    "every call makes a process group and never destroys it",
    _doing(lambda here: dist.new_group(dist.get_process_group_ranks(here.group), use_local_synchronization=True)),
    kind="state",
)
FAULTS.add(
    "O127",
    "the call's key positions are negated in place",
    _doing(lambda here: here.call.key_positions.neg_()),
    kind="state",
)


def _send_late(here: Here) -> None:
    to = STEPS.peer(here, STEPS.right(here))

    def send() -> None:
        time.sleep(0.01)
        with contextlib.suppress(Exception):
            dist.send(torch.zeros(1), to)

    if here.size > 1:
        threading.Thread(target=send, name="late message").start()


FAULTS.add("O128", "a thread sends a message after the call has returned", _doing(_send_late), kind="state")


# -- memory ------------------------------------------------------------------------------------------------------------


def _full_size(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> object:
    """Allocate room for all rows of all ranks at every hop and keep it to the end."""
    problem = here.problem
    room = q.new_zeros((problem.batch, problem.heads, problem.nq, problem.dv + 1))
    here.notes.setdefault("rooms", []).append(room)
    return attend(steps, here, hop, owner, q, block)


FAULTS.add(
    "R1",
    "every hop allocates out and lse for the whole sequence, and keeps them",
    replace(STEPS, attend=_full_size),
    kind="memory",
    claims=TRAVELLING,
)


def _all_at_once(steps: Steps, here: Here, block: Block) -> Iterator[tuple[int, int, Block]]:
    yield from list(STEPS.visit(steps, here, block))


FAULTS.add(
    "R7",
    "every block that arrives is kept: a rank ends up with all keys",
    replace(STEPS, visit=_all_at_once),
    kind="memory",
    claims=TRAVELLING,
)


def _keeps_scores(steps: Steps, here: Here, q: Tensor, k: Tensor) -> Tensor:
    s = STEPS.capped(steps, here, q, k)
    here.notes.setdefault("scores", []).append(s.expand(4, *s.shape).contiguous())
    return s


FAULTS.add(
    "R14",
    "copies of every block's scores are kept until the backward ends",
    replace(STEPS, capped=_keeps_scores),
    kind="memory",
    claims=TRAVELLING,
)
