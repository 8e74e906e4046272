"""Correct implementations that look wrong: other forms of softmax, other places of the scale, other dtypes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import NamedTuple

import torch

from ringverify.faults import arithmetic, wire
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import EVERYTHING, STEPS, Steps, attend, gradients
from ringverify.lab.variant import Variants

ROWS = Variants()
Tensor = torch.Tensor


class Sums(NamedTuple):
    """Partial result, not normalised: a shift `(B, H, S, 1)`, and sums of `exp(s − shift)`, plain and times values."""

    shift: Tensor
    total: Tensor
    acc: Tensor


def _finite(shift: Tensor) -> Tensor:
    return torch.where(shift == -math.inf, 0.0, shift)


def _sums(s: Tensor, m: Tensor, v: Tensor, at_least: Tensor | None = None) -> Sums:
    attended = m > 0
    s = s.masked_fill(~attended, -math.inf)
    shift = s.amax(dim=-1, keepdim=True)
    if at_least is not None:
        shift = torch.maximum(shift, at_least)
    w = m * torch.exp(s - _finite(shift))
    return Sums(shift, w.sum(dim=-1, keepdim=True), arithmetic.weighted_sum(w, v, attended))


def _merge_sums(a: Sums, b: Sums) -> Sums:
    shift = torch.maximum(a.shift, b.shift)
    of_a, of_b = (torch.exp(part.shift - _finite(shift)) for part in (a, b))
    return Sums(shift, a.total * of_a + b.total * of_b, a.acc * of_a + b.acc * of_b)


def _no_sums(here: Here, q: Tensor, dim: int) -> Sums:
    shape = q.shape[:3]
    return Sums(q.new_full((*shape, 1), -math.inf), q.new_zeros((*shape, 1)), q.new_zeros((*shape, dim)))


def _divided(whole: Sums) -> Partial:
    out = whole.acc / torch.where(whole.total == 0, 1.0, whole.total)
    return Partial(out, (_finite(whole.shift) + whole.total.log())[..., 0])


RUNNING = replace(
    STEPS,
    partial=_sums,
    merge=_merge_sums,
    nothing=_no_sums,
    normalise=_divided,
    together=lambda steps, here, whole: STEPS.together(STEPS, here, whole),
)
running_max = ROWS.add(
    "running_max", "A running maximum, a sum and an accumulator that is divided once, at the end.", RUNNING
)


def _known_lse(steps: Steps, here: Here, hop: int, running: Sums | None, new: Sums) -> Sums:
    whole = new if running is None else _merge_sums(running, new)
    here.notes["lse"] = _finite(whole.shift) + whole.total.log()
    return whole


def _at_least_lse(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> object:
    known = here.notes.get("lse") if hop else None
    return attend(replace(steps, partial=lambda s, m, v: _sums(s, m, v, known)), here, hop, owner, q, block)


lse_stabiliser = ROWS.add(
    "lse_stabiliser",
    "Scores are shifted by max(m, lse so far) instead of max(m, m so far): larger than need be, and as good "
    "(lucidrains/ring-attention-pytorch 373f75b).",
    replace(RUNNING, accumulate=_known_lse, attend=_at_least_lse),
)


def _two_sigmoids(a: Partial, b: Partial) -> Partial:
    gap = torch.where(a.lse == b.lse, 0.0, a.lse - b.lse)  # −inf − (−inf) is NaN
    top = torch.maximum(a.lse, b.lse)
    lse = top + torch.log1p(torch.exp(-gap.abs()))
    out = torch.sigmoid(gap)[..., None] * a.out + torch.sigmoid(-gap)[..., None] * b.out
    return Partial(out, torch.where(top == -math.inf, -math.inf, lse))


sigmoid_merge = ROWS.add(
    "sigmoid_merge",
    "Weights of the merge are sigmoids of the difference, guarded.",
    replace(STEPS, merge=_two_sigmoids),
)


def _subtracted(a: Partial, b: Partial) -> Partial:
    whole = _two_sigmoids(a, b)
    share = torch.sigmoid(torch.where(a.lse == b.lse, 0.0, b.lse - a.lse))[..., None]
    return whole._replace(out=a.out - share * (a.out - b.out))


def _plain_log(a: Partial, b: Partial) -> Partial:
    whole = _two_sigmoids(a, b)
    top = _finite(torch.maximum(a.lse, b.lse))
    return whole._replace(lse=top + torch.log(torch.exp(a.lse - top) + torch.exp(b.lse - top)))


plain_log = ROWS.add(
    "plain_log",
    "log(1 + x) for log1p(x): loses digits of a sum that is close to 1, where they do not matter (TE#1546).",
    replace(STEPS, merge=_plain_log),
)


subtracted_sigmoid = ROWS.add(
    "subtracted_sigmoid",
    "o − σ(bl − l) · (o − bo), the merge of zhuzilin/ring-flash-attention, guarded: where the weight of o is tiny it "
    "leaves a rounding error of u · |o|, more than the error that a sum of weighted terms has.",
    replace(STEPS, merge=_subtracted),
)


def _base2(s: Tensor, m: Tensor, v: Tensor) -> Partial:
    attended = m > 0
    s = (s / math.log(2)).masked_fill(~attended, -math.inf)
    top = _finite(s.amax(dim=-1, keepdim=True))
    w = m * torch.exp2(s - top)
    total = w.sum(dim=-1, keepdim=True)
    out = arithmetic.weighted_sum(w, v, attended) / torch.where(total == 0, 1.0, total)
    return Partial(out, ((top + total.log2()) * math.log(2)).squeeze(-1))


base_two = ROWS.add("base_two", "exp2 and log2 within a block, as kernels do.", replace(STEPS, partial=_base2))


def _repaired(s: Tensor, m: Tensor, v: Tensor) -> Partial:
    attended = m > 0
    s = torch.where(attended, s, torch.finfo(s.dtype).min)
    w = torch.where(attended, m, 1) * torch.exp(s - s.amax(dim=-1, keepdim=True))
    total = w.sum(dim=-1, keepdim=True)
    seen = attended.any(dim=-1, keepdim=True)
    out = arithmetic.weighted_sum(torch.where(attended, w / total, 0.0), v, attended)
    lse = s.amax(dim=-1, keepdim=True) + total.log()
    return Partial(torch.where(seen, out, 0.0), torch.where(seen, lse, -math.inf)[..., 0])


repaired_sentinel = ROWS.add(
    "repaired_sentinel",
    "The mask fills in the smallest finite number; rows of nothing else are repaired afterwards.",
    replace(STEPS, partial=_repaired),
)


def _scaled_first(steps: Steps, here: Here, q: Tensor, k: Tensor) -> Tensor:
    return STEPS.capped(replace(steps, scale=lambda here: 1.0), here, q * steps.scale(here), k)


scaled_queries = ROWS.add(
    "scaled_queries", "The scale is on q before it meets the keys.", replace(STEPS, capped=_scaled_first)
)


def _scaled_both(steps: Steps, here: Here, q: Tensor, k: Tensor) -> Tensor:
    scale = steps.scale(here)
    root = math.sqrt(abs(scale))
    return STEPS.capped(replace(steps, scale=lambda here: 1.0), here, q * root, k * math.copysign(root, scale))


scaled_both = ROWS.add("scaled_both", "Its root on q and on k.", replace(STEPS, capped=_scaled_both))
wide_sums = ROWS.add(
    "wide_sums",
    "Everything in float64, for every input dtype; lse comes back in float32.",
    replace(
        STEPS,
        wide=lambda dtype: torch.float64,
        returned=lambda here, whole: (
            arithmetic.narrow(here, whole.out),
            whole.lse.to(torch.promote_types(here.dtype, torch.float32)),
        ),
    ),
    dataclasses.replace(EVERYTHING, accumulates="float64"),
)
wide_lse = ROWS.add(
    "wide_lse",
    "Everything in float64, lse too as it is returned, though float32 sums are all that is claimed.",
    replace(STEPS, wide=lambda dtype: torch.float64),
)


def _rounded(here: Here, x: Tensor) -> Tensor:
    return x.to(here.dtype).to(here.wide)


def _rounded_attend(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> object:
    """Round weights relative to the block's maximum before they multiply the values; their sum is not rounded."""

    def partial(s: Tensor, m: Tensor, v: Tensor) -> Partial:
        sums = _sums(s, m, v)
        w = m * torch.exp(s.masked_fill(m == 0, -math.inf) - _finite(sums.shift))
        return _divided(sums._replace(acc=arithmetic.weighted_sum(_rounded(here, w), v, m > 0)))

    return attend(replace(steps, partial=partial), here, hop, owner, q, block)


def _rounded_gradients(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    rounding = replace(
        steps,
        ds=lambda p, dp, delta: _rounded(here, arithmetic.ds(p, dp, delta)),
        dv=lambda p, dout, attended: arithmetic.dv(_rounded(here, p), dout, attended),
    )
    return gradients(rounding, here, hop, owner, rows, block)


rounded_probabilities = ROWS.add(
    "rounded_probabilities",
    "P and ds are rounded to the input dtype before they are multiplied, as flash kernels do, and it is declared.",
    replace(STEPS, attend=_rounded_attend, gradients=_rounded_gradients),
    dataclasses.replace(EVERYTHING, probabilities="input"),
)
delta_of_rounded_out = ROWS.add(
    "delta_of_rounded_out",
    "The backward starts from out as it was returned, rounded.",
    replace(STEPS, kept=lambda here, saved: (*saved[:3], _rounded(here, saved[3]), saved[4])),
)
wide_wire = ROWS.add(
    "wide_wire",
    "Keys and values travel in float32: twice the bytes, the same numbers.",
    replace(
        STEPS,
        outgoing=lambda k, v: Block(*(x.to(torch.promote_types(x.dtype, torch.float32)) for x in wire.outgoing(k, v))),
    ),
)
