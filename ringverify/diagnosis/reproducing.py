"""Predict what a ring with wrong steps returns on a case: all ranks run in this process, in float64.

No process group is needed. If every step of communication is right, ranks run one after the other and are given each
other's blocks, and what right steps have computed for one hypothesis is reused for the next. Otherwise ranks are
threads of which one runs at a time, until it waits for a message. A message that is not waited for does not arrive, so
that a missing wait has the effect that it has on a device.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch

from ringverify.cases.inputs import lay_out
from ringverify.diagnosis.scene import Array, Counts, Results, Scene
from ringverify.faults.place import Block, Here
from ringverify.faults.ring import BACKWARD, STEPS, Steps, Visit, mixed
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
"""Steps that decide which query attends which key."""

WIRE = frozenset({
    "owner", "right", "left", "peer", "group", "hops", "buffers", "post", "arrive", "move", "visit", "forward",
})  # fmt: skip
"""Steps that bring a KV block to another rank; a changed `visit` or `forward` may use other blocks."""

WIRE_BACK = WIRE | {"backward", "travel", "arrive_gradients"}
"""`WIRE`, and the steps that return dK and dV to the rank that owns the block."""

AFTER_ATTENDING = frozenset(
    {"order", "sink", "merge", "accumulate", "between", "normalise", "returned", "kept", *BACKWARD}
)
"""Steps that do not change the partial result of a block."""

AFTER_GRADIENTS = frozenset({"times_in_dq", "times_in_part", "add_dq", "add_part", "returned_gradients", "narrow"})
"""Steps that do not change the gradients of a block."""


class NoPrediction(Exception):
    """There is no prediction for a case: a rank fails, waits for ever, or does not agree with what was seen."""


class _Box:
    """Messages between the ranks of one run; only one rank runs at a time."""

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
        """Wait for a message and return it.

        Raises:
            NoPrediction: a rank has failed, or all ranks wait and no message is on its way.
        """
        self.waiting[rank] = key
        while key not in self.sent:
            lost = len(self.waiting) == self.running and not any(one in self.sent for one in self.waiting.values())
            if self.over or lost:
                raise NoPrediction
            self.turn.wait()
        del self.waiting[rank]
        return self.sent.pop(key)

    def post(self, here: Here, to: int, source: int, group: Any, leaving: Block, arriving: Block) -> Posted:
        """Post one hop, like `wire.post`."""
        for x in leaving:
            if x.numel():
                self.send(here, to, x)
        works: list[Any] = [_Sent() for x in leaving if x.numel()]
        for x in arriving:
            if x.numel():
                works.append(_Arrival(self, here.rank, self._next("received", source, here.rank), x))
        return Posted(works, arriving)

    def gather(self, here: Here, rows: Tensor) -> list[Tensor]:
        """Return a tensor of every rank, like `wire.gather_partials`."""
        for other in range(here.size):
            if other != here.rank:
                self.send(here, other, rows)
        return [
            rows if other == here.rank else self.take(here.rank, self._next("received", other, here.rank))
            for other in range(here.size)
        ]

    def add_up(self, here: Here, rows: Tensor) -> Tensor:
        """Return the sum over ranks, like `wire.add_up`."""
        return torch.stack(self.gather(here, rows)).sum(dim=0)

    @contextlib.contextmanager
    def rank(self) -> Iterator[None]:
        """Let one rank run, from its first step to its last, alone except while it waits."""
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
    """Handle of a send, which is complete at once."""

    def wait(self) -> None:
        """Return at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Arrival:
    """Handle of a receive: the message arrives when it is waited for.

    Attributes:
        box: holds the message.
        rank: the receiver.
        key: sender, receiver and number of the message.
        room: the tensor that receives it.
    """

    box: _Box
    rank: int
    key: Key
    room: Tensor

    def wait(self) -> None:
        """Wait for the message, and copy it to where it is received."""
        self.room.copy_(self.box.take(self.rank, self.key))


StepsOfRank = Callable[[int], Steps]


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """What one rank has after its forward.

    Attributes:
        here: the rank.
        saved: what the forward saved for its backward.
        results: out and lse, canonical layout.
    """

    here: Here
    saved: tuple[Tensor, ...]
    results: Results


def place_of(scene: Scene, rank: int, *, wide: torch.dtype = torch.float64, dtype: torch.dtype = torch.float64) -> Here:
    """Return a rank of a case, without a process group, with the dtypes of its sums and of its inputs."""

    def call() -> AttentionCall:
        queries, keys = (torch.from_numpy(held[rank].copy()) for held in scene.shards)
        return AttentionCall(
            group=cast(Any, None),
            rank=rank,
            world_size=scene.size,
            problem=scene.problem,
            sharding=scene.sharding,
            positions=queries,
            key_positions=keys,
            sinks=None if scene.inputs.sinks is None else torch.from_numpy(scene.inputs.sinks.copy()),
        )

    return Here(scene.once(("call", rank), call), dtype, wide, layout=scene.capabilities.tensor_layout)


def _given(scene: Scene, rank: int) -> dict[str, Tensor]:
    """Return a rank's inputs and cotangents in the memory layout of the case; they must not be written to."""
    swapped = scene.capabilities.tensor_layout == "bhsd"

    def lying(x: Array) -> Tensor:
        tensor, _ = lay_out(x.swapaxes(1, 2) if swapped else x, torch.float64, scene.case.memory, "cpu")
        return tensor.transpose(1, 2) if swapped else tensor

    def laid_out() -> dict[str, Tensor]:
        (queries, keys), x = (held[rank] for held in scene.shards), scene.inputs
        found = {"q": lying(x.q[:, queries]), "k": lying(x.k[:, keys]), "v": lying(x.v[:, keys])}
        found["dout"] = lying(x.dout[:, queries])
        found["dlse"], _ = lay_out(x.dlse[:, :, queries], torch.float64, scene.case.memory, "cpu")
        return found

    return scene.once(("given", rank), laid_out)


def _in_turn(scene: Scene, program: Callable[[int, _Box], T]) -> list[T]:
    """Run a program on every rank, each in a thread, one at a time; return its results in rank order.

    Raises:
        NoPrediction: it failed on a rank.
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


def _wired(scene: Scene, steps: Steps, **ways: Any) -> Steps:
    """Return steps with some replaced, unless the fault changes them; a right mask is taken from the case."""
    if not steps.changed.intersection(MASK):
        ways["pattern"] = lambda steps, here, hop, owner: scene.counts[here.rank, owner]
    return replace(steps, **{name: way for name, way in ways.items() if name not in steps.changed})


def _run(
    scene: Scene,
    every: list[Steps],
    program: Callable[[int, Steps], T],
    blocks: Callable[[], list[Block]],
    wire: frozenset[str] = WIRE,
) -> list[T]:
    """Run a program on every rank: one rank after the other if no step of `wire` is changed, else as threads.

    Raises:
        NoPrediction: it failed on a rank.
    """
    if scene.replicated or any(steps.changed & wire for steps in every):

        def in_turn(rank: int, box: _Box) -> T:
            ways = {"post": box.post, "gather": box.gather, "add_up": box.add_up}
            ways |= {"peer": lambda here, rank: rank, "group": lambda here: None}
            return program(rank, _wired(scene, every[rank], **ways))

        return _in_turn(scene, in_turn)
    try:
        with torch.no_grad():
            there = blocks()

            def visit(steps: Steps, here: Here, block: Block) -> Iterator[Visit]:
                owners = ((here.rank - hop) % here.size for hop in range(here.size))
                every = [(hop, owner, there[owner] if hop else block) for hop, owner in enumerate(owners)]
                return mixed(steps, here, every) if "hop_of" in steps.changed else iter(every)

            wired = functools.cache(functools.partial(_wired, scene, visit=visit))  # ranks mostly have the same steps
            found = {rank: program(rank, wired(every[rank])) for rank in scene.worst_first}
            return [found[rank] for rank in range(scene.size)]
    except NoPrediction:
        raise
    except Exception as error:
        raise NoPrediction from error


def _blocks(scene: Scene, every: list[Steps]) -> list[Block]:
    """Return the KV block that every rank sends."""

    def sent(rank: int, steps: Steps) -> Block:
        here, x = place_of(scene, rank), _given(scene, rank)
        return steps.outgoing(steps.given(here, "k", x["k"]), steps.given(here, "v", x["v"]))

    if any(steps.changed & {"given", "outgoing"} for steps in every):
        return [sent(rank, steps) for rank, steps in enumerate(every)]
    return scene.once("blocks", lambda: [sent(rank, STEPS) for rank in range(scene.size)])


Agrees = Callable[[int, Results], bool]
"""Whether a rank's results, or some of them, may be what was seen; if not, nothing further is computed."""


def forward(
    scene: Scene,
    steps_of: StepsOfRank,
    *,
    wide: torch.dtype = torch.float64,
    dtype: torch.dtype = torch.float64,
    agrees: Agrees = lambda rank, results: True,
) -> list[Forward]:
    """Run the forward of every rank.

    Args:
        scene: the case.
        steps_of: the steps of each rank.
        wide: the dtype in which sums are kept.
        dtype: the dtype to which results, and what a fault rounds, are rounded.
        agrees: whether the results of a rank may be what was seen.

    Raises:
        NoPrediction: the ring of these steps fails, or a rank does not agree.
    """
    attended: dict[tuple[int, int], Any] = scene.shared.setdefault("attended", {})

    def attend(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> Any:
        if (here.rank, hop) not in attended:
            attended[here.rank, hop] = STEPS.attend(steps, here, hop, owner, q, block)
        return attended[here.rank, hop]

    @functools.cache
    def attending(steps: Steps) -> Steps:
        return replace(steps, attend=attend)

    def program(rank: int, steps: Steps) -> Forward:
        here, x = place_of(scene, rank, wide=wide, dtype=dtype), _given(scene, rank)
        if wide == torch.float64 and every[rank].changed <= AFTER_ATTENDING:
            steps = attending(steps)
        whole = steps.forward(steps, here, x["q"], x["k"], x["v"])
        saved = steps.kept(here, (x["q"], x["k"], x["v"], whole.out, whole.lse))
        out, lse = steps.returned(here, whole)
        found = Forward(here, saved, {"out": _array(out), "lse": _array(lse)})
        if not agrees(rank, found.results):
            raise NoPrediction
        return found

    every = [steps_of(rank) for rank in range(scene.size)]
    return _run(scene, every, program, lambda: _blocks(scene, every))


def right(scene: Scene) -> list[Forward]:
    """Return the right forward of every rank."""
    return scene.once("right", lambda: forward(scene, lambda rank: STEPS))


def backward(
    scene: Scene,
    steps_of: StepsOfRank,
    forwards: list[Forward],
    *,
    agrees: Agrees = lambda rank, results: True,
) -> list[Results]:
    """Run the backward of every rank, from what its forward saved.

    Raises:
        NoPrediction: the ring of these steps fails, or a rank does not agree.
    """
    every = [steps_of(rank) for rank in range(scene.size)]
    known: dict[tuple[int, int], Any] | None = None
    if forwards is scene.shared.get("right") and all(steps.changed <= AFTER_GRADIENTS for steps in every):
        known = scene.shared.setdefault("gradients", {})

    def gradients(
        steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
    ) -> tuple[Tensor, Block]:
        assert known is not None
        if (here.rank, hop) not in known:
            known[here.rank, hop] = STEPS.gradients(steps, here, hop, owner, rows, block)
        found: tuple[Tensor, Block] = known[here.rank, hop]
        return found

    def program(rank: int, steps: Steps) -> tuple[Here, tuple[Tensor, ...]]:
        before, x = forwards[rank], _given(scene, rank)
        here = replace(before.here, notes=dict(before.here.notes))
        steps = steps if known is None else replace(steps, gradients=gradients)
        return here, steps.backward(steps, here, before.saved, x["dout"], x["dlse"])

    def sent() -> list[Block]:
        found = []
        for steps, one in zip(every, forwards, strict=True):
            k, v = (steps.given(one.here, name, x) for name, x in zip("kv", one.saved[1:3], strict=True))
            found.append(steps.outgoing(k, v))
        return found

    def checked(rank: int, dq: Tensor, dk: Tensor, dv: Tensor) -> Results:
        found: Results = {"dq": _array(dq), "dk": _array(dk), "dv": _array(dv)}
        if not agrees(rank, found):
            raise NoPrediction
        return found

    if scene.replicated or any(steps.changed & WIRE_BACK for steps in every):
        return _run(scene, every, lambda rank, steps: checked(rank, *program(rank, steps)[1]), sent, WIRE_BACK)

    def summed(every: list[Steps], *, checking: bool) -> list[tuple[Here, Tensor, Block]]:
        """Return each rank's dq, and the sums of dk and dv of its block."""
        parts: dict[tuple[int, int], Block] = {}

        def noted(rank: int, steps: Steps) -> tuple[Here, tuple[Tensor, ...]]:
            """Return the rank's dq, and note its part in the gradient of each block."""

            def travel(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
                parts[owner, hop] = part
                return part

            found = program(rank, replace(steps, travel=travel, returned_gradients=STEPS.returned_gradients))
            if checking and "returned_gradients" not in steps.changed and not agrees(rank, {"dq": _array(found[1][0])}):
                raise NoPrediction
            return found

        found = []
        for rank, (here, gradients_here) in enumerate(_run(scene, every, noted, sent, WIRE_BACK)):
            total = parts[rank, 0]
            for hop in range(1, scene.size):
                total = every[(rank + hop) % scene.size].add_part(hop, total, parts[rank, hop])
            found.append((here, gradients_here[0], total))
        return found

    if known is not None and all(steps.changed <= {"returned_gradients"} for steps in every):
        sums = scene.once("sums", lambda: summed([STEPS] * scene.size, checking=False))
    else:
        sums = summed(every, checking=True)
    found = []
    for rank, (here, dq, total) in enumerate(sums):
        returned = every[rank].returned_gradients(here, dq, *(x.to(here.dtype) for x in total))
        found.append(checked(rank, *returned))
    return found


def partials(scene: Scene, steps: Steps, rank: int) -> list[tuple[Array, Array]]:
    """Return what a rank gets of each block, by hop: out `(B, H, S, E)` and lse `(B, H, S)`.

    Raises:
        NoPrediction: the ring of these steps fails.
    """
    here = place_of(scene, rank)
    try:
        with torch.no_grad():
            q, blocks = STEPS.widen(here, _given(scene, rank)["q"]), _blocks(scene, [STEPS])
            found = []
            for hop in range(scene.size):
                owner = (rank - hop) % scene.size
                found.append(_wired(scene, steps).attend(_wired(scene, steps), here, hop, owner, q, blocks[owner]))
    except Exception as error:
        raise NoPrediction from error
    return [(_array(out), _array(lse)) for out, lse in found]


def parts(scene: Scene, steps: Steps) -> dict[tuple[int, int], Results]:
    """Return what each rank adds to dq, and to dk and dv of the block of each hop, after a right forward.

    Raises:
        NoPrediction: the ring of these steps fails.
    """
    found: dict[tuple[int, int], Results] = {}
    forwards = right(scene)

    def program(rank: int, steps: Steps) -> None:
        before, x = forwards[rank], _given(scene, rank)
        here = replace(before.here, notes=dict(before.here.notes))

        def add_dq(here: Here, hop: int, total: Tensor, part: Tensor) -> Tensor:
            found[rank, hop] = {"dq": _array(part.transpose(1, 2))}
            return total + part

        def travel(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
            found[rank, hop] |= {"dk": _array(part.k), "dv": _array(part.v)}
            return part

        steps.backward(replace(steps, add_dq=add_dq, travel=travel), here, before.saved, x["dout"], x["dlse"])

    _run(scene, [steps] * scene.size, program, lambda: _blocks(scene, [STEPS]), WIRE_BACK)
    return found


def scores(scene: Scene, steps_of: StepsOfRank) -> tuple[Counts, Array, float] | None:
    """Return multiplicities and scores after the softcap, both `(B, H, Nq, Nk)`, and the largest absolute scale.

    `None` if heads are taken for tokens: then no score belongs to a query and a key of the case.

    Raises:
        NoPrediction: the ring of these steps fails.
    """
    p, inner = scene.problem, scene.truth.intermediates
    m, s, scales = inner.m.copy(), np.zeros_like(inner.scores), [0.0]

    def program(rank: int, steps: Steps) -> bool:
        here, x = place_of(scene, rank), _given(scene, rank)
        q, k, v = (steps.given(here, name, x[name]) for name in ("q", "k", "v"))
        wide_q, fit = steps.widen(here, q), True
        for hop, owner, block in steps.visit(steps, here, steps.outgoing(k, v)):
            attends = steps.pattern(steps, here, hop, owner).numpy()
            scored = _array(steps.capped(steps, here, wide_q, steps.per_query_head(here, steps.widen(here, block.k))))
            place = np.ix_(np.arange(p.batch), np.arange(p.heads), scene.shards[0][rank], scene.shards[1][owner])
            scales.append(abs(steps.scale(here)))
            if attends.shape == scored.shape == m[place].shape:
                m[place], s[place] = attends, scored
            else:
                fit = False
        return fit

    every = [steps_of(rank) for rank in range(scene.size)]
    return (m, s, max(scales)) if all(_run(scene, every, program, lambda: _blocks(scene, every))) else None


def _array(x: Tensor) -> Array:
    found: Array = x.detach().to(torch.float64).numpy()
    return found
