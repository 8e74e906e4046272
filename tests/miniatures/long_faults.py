"""Faults of the backward that a long case shows in its own ways."""

from dataclasses import replace

import right
import torch

from ringverify.faults.ring import EVERYTHING, PLAIN, STEPS, ring_of
from ringverify.implementation import AttentionCall, Implementation
from ringverify.ring.declared import ring

TILE = (700, 716)
"""Positions whose rows are left out of the backward."""


def _detached(q, k, v, call: AttentionCall):
    """Out and lse of the rows of one tile give no gradients."""
    out, lse = PLAIN.function(q, k, v, call)
    tile = (call.positions >= TILE[0]) & (call.positions < TILE[1])
    return torch.where(tile[:, None, None], out.detach(), out), torch.where(tile, lse.detach(), lse)


tile_detached = Implementation(_detached, "a tile detached", EVERYTHING)
claimed = replace(right.attend.capabilities, memory="streaming")
gathered = Implementation(right.attend.function, "all keys gathered, and said to stream", claimed)
without_lse = Implementation(
    lambda q, k, v, call: ring.function(q, k, v, call)[0],
    "a ring that returns out alone",
    replace(ring.capabilities, lse=False, lse_gradient=False),
)
dq_twice = Implementation(
    ring_of(replace(STEPS, times_in_dq=lambda here, hop, owner: 2 if hop == 1 else 1)),
    "the part of dq of the second hop counted twice",
    EVERYTHING,
)
dk_scaled = Implementation(
    ring_of(replace(STEPS, times_in_part=lambda here, hop, owner: (1.01 if hop == 2 else 1, 1))),
    "the part of dk of the third hop is a hundredth too large",
    EVERYTHING,
)
part_lost = Implementation(
    ring_of(replace(STEPS, times_in_part=lambda here, hop, owner: (0, 0) if hop == 2 else (1, 1))),
    "the part of dk and dv of the third hop lost",
    EVERYTHING,
)
dq_beside = Implementation(
    ring_of(
        replace(
            STEPS,
            returned_gradients=lambda here, dq, dk, dv: (torch.where(dq == 0, 1e-3, dq), dk, dv),
        )
    ),
    "a dq that is never zero",
    EVERYTHING,
)


SPOT = 1099
"""The position of which one element is wrong."""


class _OneOff(torch.autograd.Function):
    """The same numbers, and a gradient of which the last element at a position is wrong."""

    @staticmethod
    def forward(ctx, x, at):
        ctx.save_for_backward(at)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        (at,) = ctx.saved_tensors
        gradient = gradient.clone()
        gradient[:, at, -1, -1] += 0.5
        return gradient, None


def _one_off(result):
    """A ring with one wrong element."""

    def attend(q, k, v, call: AttentionCall):
        given = {"dq": (q, call.positions), "dk": (k, call.key_positions), "dv": (v, call.key_positions)}
        x = [_OneOff.apply(one, at == SPOT) if name == result else one for name, (one, at) in given.items()]
        out, lse = PLAIN.function(*x, call)
        spot = call.positions == SPOT
        if result == "out":
            out = out.clone()
            out[:, spot, -1, -1] += 0.5
        if result == "lse":
            lse = lse.clone()
            lse[:, -1, spot] += 0.5
        return out, lse

    return Implementation(attend, f"one element of {result} is off", EVERYTHING)


out_off, lse_off, dq_off, dk_off, dv_off = map(_one_off, ("out", "lse", "dq", "dk", "dv"))


def _hoarding(q, k, v, call: AttentionCall):
    """All scores of 4,096 positions or more lie there for a while, and are not used."""
    scores = torch.ones(call.problem.nq * call.problem.nk if call.problem.nq >= 4096 else 0)
    out, lse = ring.function(q, k, v, call)
    return out + 0 * scores[:1].sum(), lse


hoards = Implementation(_hoarding, "all scores of a long case", ring.capabilities)
