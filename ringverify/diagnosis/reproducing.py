"""What the ring of steps returns on a case when some of its steps are wrong: all ranks in this process, in float64.

No process group is needed. Ranks are threads of which one runs at a time; a rank hands over where it waits for a
message. A message that is not waited for does not arrive, so that a fault of waiting gives what it gives on a device.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from ringverify.cases.inputs import lay_out
from ringverify.diagnosis.scene import Array, Counts, Results, Scene
from ringverify.faults.place import Block, Here
from ringverify.faults.ring import STEPS, Steps
from ringverify.faults.wire import Posted
from ringverify.implementation import AttentionCall

Tensor = torch.Tensor
Key = tuple[int, int, int]
"""Sender, receiver, and the number of the message between them."""
T = TypeVar("T")

MASK = (
    "queries", "keys", "causal", "window", "documents", "key_lengths", "branches", "covers", "segment", "dilation",
    "pattern",
)  # fmt: skip
"""Steps that say who attends whom."""

BACKWARD = (
    "delta", "probabilities", "dp", "ds", "cap_slope", "dq", "dk", "dv", "gradients", "add_dq", "add_part", "travel",
    "arrive_gradients", "returned_gradients", "sum_queries", "add_up", "backward", "per_key_head", "narrow",
    "times_in_dq", "times_in_part",
)  # fmt: skip
"""Steps that the forward does not take."""

FORWARD = tuple(field.name for field in dataclasses.fields(Steps) if field.name not in BACKWARD)
"""Steps that the forward takes."""


class NoPrediction(Exception):
    """The ring of these steps returns nothing on this case: a rank fails, or waits for ever."""


class _Box:
    """Messages between the ranks of one run, of which one runs at a time."""

    def __init__(self, size: int) -> None:
        self.turn = threading.Condition()
        self.sent: dict[Key, Tensor] = {}
        self.counts: collections.Counter[tuple[str, int, int]] = collections.Counter()
        self.waiting: dict[int, Key] = {}
        self.running = size
        self.over = False

    def _next(self, what: str, sender: int, receiver: int) -> Key:
        number = self.counts[what, sender, receiver]
        self.counts[what, sender, receiver] += 1
        return sender, receiver, number

    def send(self, here: Here, to: int, x: Tensor) -> None:
        """Leave a copy of a tensor for a rank."""
        self.sent[self._next("sent", here.rank, to)] = x.detach().clone()
        self.turn.notify_all()

    def take(self, rank: int, key: Key) -> Tensor:
        """Wait for a message."""
        self.waiting[rank] = key
        while key not in self.sent:
            lost = len(self.waiting) == self.running and not any(one in self.sent for one in self.waiting.values())
            if self.over or lost:
                raise NoPrediction
            self.turn.wait()
        del self.waiting[rank]
        return self.sent.pop(key)

    def post(self, here: Here, to: int, source: int, group: Any, leaving: Block, arriving: Block) -> Posted:
        """One hop, as `wire.post`."""
        for x in leaving:
            if x.numel():
                self.send(here, to, x)
        works: list[Any] = [_Sent() for x in leaving if x.numel()]
        for x in arriving:
            if x.numel():
                works.append(_Arrival(self, here.rank, self._next("received", source, here.rank), x))
        return Posted(works, arriving)

    def gather(self, here: Here, rows: Tensor) -> list[Tensor]:
        """A tensor of every rank, as `wire.gather_partials`."""
        for other in range(here.size):
            if other != here.rank:
                self.send(here, other, rows)
        return [
            rows if other == here.rank else self.take(here.rank, self._next("received", other, here.rank))
            for other in range(here.size)
        ]

    def add_up(self, here: Here, rows: Tensor) -> Tensor:
        """The sum over ranks, as `wire.add_up`."""
        return torch.stack(self.gather(here, rows)).sum(dim=0)

    @contextlib.contextmanager
    def rank(self) -> Iterator[None]:
        """The turn of one rank, from its first step to its last."""
        with self.turn:
            try:
                yield
            except BaseException:
                self.over = True
                raise
            finally:
                self.running -= 1
                self.turn.notify_all()


class _Sent:
    """The handle of a message that is on its way already."""

    def wait(self) -> None:
        """Return at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Arrival:
    """The handle of a message that is received: it is there once it was waited for.

    Attributes:
        box: where it is left.
        rank: who receives it.
        key: which it is.
        room: where to.
    """

    box: _Box
    rank: int
    key: Key
    room: Tensor

    def wait(self) -> None:
        """Receive it."""
        self.room.copy_(self.box.take(self.rank, self.key))


StepsOfRank = Callable[[int], Steps]


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """What one rank has after its forward.

    Attributes:
        here: the rank.
        saved: what its backward gets.
        results: out and lse, canonical layout.
    """

    here: Here
    saved: tuple[Tensor, ...]
    results: Results


def place_of(scene: Scene, rank: int, *, wide: torch.dtype = torch.float64) -> Here:
    """A rank of a case."""
    queries, keys = (torch.from_numpy(held[rank].copy()) for held in scene.shards)
    call = AttentionCall(
        group=cast(Any, None),
        rank=rank,
        world_size=scene.size,
        problem=scene.problem,
        sharding=scene.capabilities.sharding_named(scene.case.sharding),
        positions=queries,
        key_positions=keys,
    )
    return Here(call, torch.float64, wide, layout=scene.capabilities.tensor_layout)


def _given(scene: Scene, rank: int) -> dict[str, Tensor]:
    """A rank's inputs and cotangents as they lie in memory."""
    queries, keys = (held[rank] for held in scene.shards)
    swapped = scene.capabilities.tensor_layout == "bhsd"

    def lying(x: Array) -> Tensor:
        tensor, _ = lay_out(x.swapaxes(1, 2) if swapped else x, torch.float64, scene.case.memory, "cpu")
        return tensor.transpose(1, 2) if swapped else tensor

    x = scene.inputs
    found = {"q": lying(x.q[:, queries]), "k": lying(x.k[:, keys]), "v": lying(x.v[:, keys])}
    found["dout"] = lying(x.dout[:, queries])
    found["dlse"], _ = lay_out(x.dlse[:, :, queries], torch.float64, scene.case.memory, "cpu")
    return found


def _in_turn(scene: Scene, program: Callable[[int, _Box], T]) -> list[T]:
    """What a program returns on every rank.

    Raises:
        NoPrediction: it failed on one.
    """
    box = _Box(scene.size)
    found: dict[int, T] = {}

    def run(rank: int) -> None:
        with contextlib.suppress(Exception), torch.no_grad(), box.rank():
            found[rank] = program(rank, box)

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, scene.size)]
    for thread in ranks:
        thread.start()
    run(0)
    for thread in ranks:
        thread.join()
    if len(found) < scene.size:
        raise NoPrediction
    return [found[rank] for rank in range(scene.size)]


def _wired(scene: Scene, steps: Steps, box: _Box) -> Steps:
    """The steps with messages that are left in a box, and with the case's own pattern where it is the right one."""
    ways: dict[str, Any] = {
        "peer": lambda here, rank: rank,
        "post": box.post,
        "gather": box.gather,
        "add_up": box.add_up,
        "group": lambda here: None,
    }
    if all(getattr(steps, name) is getattr(STEPS, name) for name in MASK):
        ways["pattern"] = lambda steps, here, hop, owner: scene.counts[here.rank, owner]
    return replace(steps, **{name: way for name, way in ways.items() if getattr(steps, name) is getattr(STEPS, name)})


def forward(scene: Scene, steps_of: StepsOfRank, *, wide: torch.dtype = torch.float64) -> list[Forward]:
    """The forward of every rank.

    Args:
        scene: the case.
        steps_of: the steps of each rank.
        wide: the dtype in which sums are kept.

    Raises:
        NoPrediction: the ring of these steps fails.
    """

    def program(rank: int, box: _Box) -> Forward:
        here, steps, x = place_of(scene, rank, wide=wide), _wired(scene, steps_of(rank), box), _given(scene, rank)
        whole = steps.forward(steps, here, x["q"], x["k"], x["v"])
        saved = steps.kept(here, (x["q"], x["k"], x["v"], whole.out, whole.lse))
        out, lse = steps.returned(here, whole)
        return Forward(here, saved, {"out": _array(out), "lse": _array(lse)})

    return _in_turn(scene, program)


def backward(scene: Scene, steps_of: StepsOfRank, forwards: list[Forward]) -> list[Results]:
    """The backward of every rank, from what its forward has kept.

    Raises:
        NoPrediction: the ring of these steps fails.
    """

    def program(rank: int, box: _Box) -> Results:
        before, steps, x = forwards[rank], _wired(scene, steps_of(rank), box), _given(scene, rank)
        here = replace(before.here, notes=dict(before.here.notes))
        dq, dk, dv = steps.backward(steps, here, before.saved, x["dout"], x["dlse"])
        return {"dq": _array(dq), "dk": _array(dk), "dv": _array(dv)}

    return _in_turn(scene, program)


class Scored(NamedTuple):
    """What the forward makes of the pairs of one rank's queries and one block's keys.

    Attributes:
        place: where they are in a tensor `(B, H, Nq, Nk)`.
        m: multiplicities `(B, H, S, T)`.
        s: scores after the cap, of the same shape.
        scale: by its size.
    """

    place: tuple[Any, ...]
    m: Counts
    s: Array
    scale: float


def scores(scene: Scene, steps_of: StepsOfRank) -> list[Scored]:
    """Multiplicities and scores of every rank's queries and every block that it visits.

    Raises:
        NoPrediction: the ring of these steps fails.
    """
    p = scene.problem

    def program(rank: int, box: _Box) -> list[Scored]:
        here, steps, x = place_of(scene, rank), _wired(scene, steps_of(rank), box), _given(scene, rank)
        q, k, v = (steps.given(here, name, x[name]) for name in ("q", "k", "v"))
        wide_q, found = steps.widen(here, q), []
        for hop, owner, block in steps.visit(steps, here, steps.outgoing(k, v)):
            m = steps.pattern(steps, here, hop, owner)
            s = steps.capped(steps, here, wide_q, steps.per_query_head(here, steps.widen(here, block.k)))
            place = np.ix_(np.arange(p.batch), np.arange(p.heads), scene.shards[0][rank], scene.shards[1][owner])
            found.append(Scored(place, m.numpy(), _array(s), abs(steps.scale(here))))
        return found

    return [one for of_rank in _in_turn(scene, program) for one in of_rank]


def _array(x: Tensor) -> Array:
    found: Array = x.detach().to(torch.float64).numpy()
    return found
