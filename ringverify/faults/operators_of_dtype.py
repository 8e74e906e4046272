"""Generic mutants (O) of casts, of waits and of claims about messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ringverify.faults import arithmetic
from ringverify.faults.arithmetic import rounded
from ringverify.faults.communication import TRAVELLING
from ringverify.faults.fault import Faults
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS, Steps, gradients, returning, travel

FAULTS = Faults()


def _rounded_scores(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return rounded(here, STEPS.capped(steps, here, q, k))


O75 = FAULTS.add(
    "O75",
    "scores rounded to the input dtype",
    story="Before the softmax, as an einsum of half-precision tensors does.",
    kind="precision",
    ring=replace(STEPS, capped=_rounded_scores),
)


def _scaled_before_the_cast(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return STEPS.capped(replace(steps, scale=lambda here: 1.0), here, rounded(here, q * steps.scale(here)), k)


O76 = FAULTS.add(
    "O76",
    "q scaled in the input dtype",
    story="q · scale is rounded before it meets the keys. Exact where the scale is a power of 2.",
    kind="precision",
    ring=replace(STEPS, capped=_scaled_before_the_cast),
)


def _rounded_weights(steps: Steps, here: Here) -> Steps:
    """Round P to the input dtype before it is multiplied with V, forward and backward."""

    def partial(s: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Partial:
        found = arithmetic.partial(s, m, v)
        p = rounded(here, arithmetic.probabilities(s, m, found.lse))
        return found._replace(out=arithmetic.weighted_sum(p, v, m > 0))

    return replace(
        steps,
        partial=partial,
        dv=lambda p, dout, attended: arithmetic.dv(rounded(here, p), dout, attended),
    )


O77 = FAULTS.add(
    "O77",
    "probabilities rounded to the input dtype",
    story="As many kernels do and say; here it is not declared.",
    kind="precision",
    ring=replace(
        STEPS,
        attend=lambda steps, here, hop, owner, q, block: STEPS.attend(
            _rounded_weights(steps, here), here, hop, owner, q, block
        ),
    ),
)


O78 = FAULTS.add(
    "O78",
    "lse rounded to the input dtype",
    story="Returned in float32 with the digits of the input. Out and gradients are right.",
    kind="precision",
    ring=returning(lambda here, out, lse: (out, rounded(here, lse))),
)
O79 = FAULTS.add(
    "O79",
    "backward from an lse of the input dtype",
    story="What is saved is rounded; P is off by |lse| ulps of half precision.",
    kind="precision",
    ring=replace(STEPS, kept=lambda here, saved: (*saved[:-1], rounded(here, saved[-1]))),
)


def _rounded_ds(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[torch.Tensor, ...], block: Block
) -> tuple[torch.Tensor, Block]:
    rounding = replace(steps, ds=lambda p, dp, delta: rounded(here, arithmetic.ds(p, dp, delta)))
    return gradients(rounding, here, hop, owner, rows, block)


O80 = FAULTS.add(
    "O80",
    "ds rounded to the input dtype",
    story="The cotangent of the scores loses its digits before it meets queries and keys; not declared.",
    kind="precision",
    ring=replace(STEPS, gradients=_rounded_ds),
)
O81 = FAULTS.add(
    "O81",
    "float64 accumulated in float32",
    story="Everything wide is float32, for float64 inputs too.",
    ring=replace(
        STEPS,
        wide=lambda dtype: torch.float32,
        returned=lambda here, whole: (arithmetic.narrow(here, whole.out), _as_wide_as(here, whole.lse)),
    ),
)


def _as_wide_as(here: Here, lse: torch.Tensor) -> torch.Tensor:
    return lse.to(torch.promote_types(here.dtype, torch.float32))


O82 = FAULTS.add(
    "O82",
    "everything in the input dtype",
    story="No wider sums at all: scores, weights, merges and gradients in 8 or 11 bits.",
    kind="precision",
    ring=replace(
        STEPS,
        wide=lambda dtype: dtype,
        returned=lambda here, whole: (arithmetic.narrow(here, whole.out), _as_wide_as(here, whole.lse)),
    ),
)
O83 = FAULTS.add(
    "O83",
    "delta rounded to the input dtype",
    story="The row's mean cotangent is rounded to the input dtype before it is subtracted.",
    kind="precision",
    ring=replace(
        STEPS,
        gradients=lambda steps, here, hop, owner, rows, block: gradients(
            steps, here, hop, owner, (*rows[:2], rounded(here, rows[2]), rows[3]), block
        ),
    ),
)


def _one_more_hop(steps: Steps, here: Here, block: Block) -> Iterator[tuple[int, int, Block]]:
    """Send blocks one more hop, back to their owner, which does not need them."""
    for hop in range(here.size):
        posted = steps.move(steps, here, block, steps.owner(here, hop + 1)) if here.size > 1 else None
        yield hop, steps.owner(here, hop), block
        if posted is not None:
            block = steps.arrive(posted)


O84 = FAULTS.add(
    "O84",
    "one hop more than needed",
    story="Keys and values travel home again. Values are right; messages are more than the hops need.",
    kind="traffic",
    ring=replace(STEPS, visit=_one_more_hop),
    claims=TRAVELLING,
)


def to_the_owner(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    """Send each part of dk and dv straight to the owner of its block."""
    if here.size == 1:
        return part
    if hop == 0:
        here.notes["own"] = part
        return part
    posted = steps.post(
        here,
        steps.peer(here, owner),
        steps.peer(here, (here.rank + hop) % here.size),
        steps.group(here),
        part,
        steps.buffers(here, part, here.rank),
    )
    arrived = steps.arrive_gradients(posted)
    here.notes["own"] = Block(here.notes["own"].k + arrived.k, here.notes["own"].v + arrived.v)
    return Block(*here.notes["own"])


O85 = FAULTS.add(
    "O85",
    "gradients sent straight to the owner",
    story="Not by neighbours, as is claimed. Values are right.",
    kind="traffic",
    ring=replace(STEPS, travel=to_the_owner),
    claims=TRAVELLING,
)


def _never_received(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    home = travel(steps, here, hop, owner, carried, part)
    if here.size > 1 and hop == here.size - 1 and part.k.numel():
        to = steps.peer(here, steps.right(here))
        steps.post(here, to, to, steps.group(here), part, Block(*(x[:, :0] for x in part)))
    return home


O87 = FAULTS.add(
    "O87",
    "a message that nobody receives",
    story="One send too many after the last hop. Values are right; the next call may receive it, or wait for ever.",
    kind="progress",
    ring=replace(STEPS, travel=_never_received),
)
