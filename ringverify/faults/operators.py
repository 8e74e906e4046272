"""Generic mutants of the formulas (O): terms dropped, signs, comparisons off by one, indices off by a rank or a hop.

Arithmetic first; masks and indices are in `operators_of_index`, casts and waits in `operators_of_dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ringverify.faults import arithmetic
from ringverify.faults.arithmetic import Shift, weight
from ringverify.faults.fault import Faults
from ringverify.faults.place import Partial
from ringverify.faults.ring import STEPS, Steps

FAULTS = Faults()


def merging(
    *,
    first: float = 1.0,
    second: float = 1.0,
    lse: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.logaddexp,
    crossed: bool = False,
) -> Steps:
    """Merge with the terms multiplied, with another lse, or with the weights exchanged."""

    def merge(a: Partial, b: Partial) -> Partial:
        right = torch.logaddexp(a.lse, b.lse)
        shift = torch.where(right == -math.inf, 0.0, right)
        of_a, of_b = weight(a.lse, shift) * first, weight(b.lse, shift) * second
        if crossed:
            of_a, of_b = of_b, of_a
        return Partial(of_a * a.out + of_b * b.out, lse(a.lse, b.lse))

    return replace(STEPS, merge=merge)


O01 = FAULTS.add(
    "O01",
    "merge drops the earlier out",
    story="Only the new block's term.",
    ring=merging(first=0.0),
    cause="the merge drops what came before: its out is the new block's term alone",
)
O02 = FAULTS.add(
    "O02",
    "merge drops the new out",
    story="Only the term so far.",
    ring=merging(second=0.0),
    cause="the merge drops the new block's term of out",
)
O03 = FAULTS.add(
    "O03",
    "merge subtracts the new out",
    story="A sign.",
    ring=merging(second=-1.0),
    cause="the merge subtracts the new block's term of out",
)
O04 = FAULTS.add(
    "O04",
    "merge weights exchanged",
    story="Right for equal masses only.",
    ring=merging(crossed=True),
    cause="the weights of the merge are exchanged",
)
O05 = FAULTS.add(
    "O05",
    "merged lse is the larger one",
    story="The sum's logarithm is dropped: off by up to log 2 a merge.",
    ring=merging(lse=torch.maximum),
    cause="the merged lse is the larger of both",
)
O06 = FAULTS.add(
    "O06",
    "merged lse is the new one",
    story="The earlier is forgotten.",
    ring=merging(lse=lambda a, b: b),
    cause="the merged lse is the new block's",
)
O07 = FAULTS.add(
    "O07",
    "merged lse is the earlier one",
    story="It is never updated.",
    ring=merging(lse=lambda a, b: a),
    cause="the merged lse is the earlier one: it is never updated",
)


def shifted(shift: Shift) -> Steps:
    """Scores stabilised by another number than the largest that is attended."""
    return replace(STEPS, partial=lambda s, m, v: arithmetic.partial(s, m, v, shift))


def _partial(change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Partial], Partial]) -> Steps:
    return replace(STEPS, partial=lambda s, m, v: change(s, m, v, arithmetic.partial(s, m, v)))


O08 = FAULTS.add(
    "O08",
    "lse without the maximum",
    story="log Σ exp(s − max): the shift is not added back.",
    ring=_partial(
        lambda s, m, v, found: found._replace(
            lse=found.lse - s.masked_fill(m == 0, -math.inf).amax(dim=-1).nan_to_num(neginf=0.0)
        )
    ),
    cause="a block's lse lacks its maximum",
)
O09 = FAULTS.add(
    "O09",
    "a block's lse is its maximum",
    story="log Σ is dropped: right for one key.",
    ring=_partial(
        lambda s, m, v, found: found._replace(lse=s.masked_fill(m == 0, -math.inf).amax(dim=-1)),
    ),
    cause="a block's lse is its maximum: the logarithm of the sum is missing",
)


O10 = FAULTS.add(
    "O10",
    "stabiliser from masked keys too",
    story="The maximum is taken before the mask: a key that is not attended but scores 100 more makes the row vanish.",
    ring=shifted(lambda s, attended: s.amax(dim=-1, keepdim=True)),
    cause="the stabiliser is taken over masked keys too: the row vanishes",
    overflows=True,
)


def _along(axis: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Partial]:
    """Sum over another axis where the shape allows it."""

    def partial(s: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Partial:
        found = arithmetic.partial(s, m, v)
        if s.size(axis) != s.size(-1):
            return found
        turned = arithmetic.partial(s.transpose(axis, -1), m.transpose(axis, -1), v)
        return found._replace(lse=turned.lse)

    return partial


O11 = FAULTS.add(
    "O11",
    "softmax sums over queries",
    story="Another axis of the same length. Needs as many queries as keys in a block, so an error elsewhere.",
    ring=replace(STEPS, partial=_along(-2)),
    cause="lse sums over queries instead of keys",
)
O12 = FAULTS.add(
    "O12",
    "multiplicities taken as a mask",
    story="A pair that two branches let through counts once. Needs shared dilation whose branches overlap.",
    ring=replace(STEPS, partial=lambda s, m, v: arithmetic.partial(s, m.clamp(max=1), v)),
    cause="multiplicities counted once: a pair that several branches let through counts as one",
)
O13 = FAULTS.add(
    "O13",
    "multiplicities left out of the backward",
    story="As O12, in the probabilities of the backward only.",
    ring=replace(STEPS, probabilities=lambda s, m, lse: arithmetic.probabilities(s, m.clamp(max=1), lse)),
    cause="multiplicities counted once in the probabilities of the backward",
)
O14 = FAULTS.add(
    "O14",
    "scale counts one dimension too many",
    story="1 / sqrt(D + 1).",
    ring=replace(STEPS, scale=lambda here: float((here.problem.head_dim + 1) ** -0.5)),
    cause="scale is 1/sqrt(D + 1)",
    also=("backward", "forward"),
)
O15 = FAULTS.add(
    "O15",
    "scale applied twice",
    story="On q and again on the scores.",
    ring=replace(STEPS, scale=lambda here: here.problem.scale_value**2),
    cause="scale applied twice",
    also=("backward", "forward"),
)
O16 = FAULTS.add(
    "O16",
    "scale left out of dq",
    story="The derivative of the scores lacks its factor.",
    ring=replace(STEPS, dq=lambda ds, k, scale, attended: arithmetic.dq(ds, k, 1.0, attended)),
    cause="scale is missing from dq",
)
O17 = FAULTS.add(
    "O17",
    "scale twice in dk",
    story="q was scaled already, and the result is again.",
    ring=replace(STEPS, dk=lambda ds, q, scale, attended: arithmetic.dk(ds, q, scale * scale, attended)),
    cause="scale is applied twice in dk",
)
O18 = FAULTS.add(
    "O18",
    "sign of the scale lost",
    story="|scale|: needs a negative one.",
    ring=replace(STEPS, scale=lambda here: abs(here.problem.scale_value)),
    cause="sign of the scale lost",
    also=("backward", "forward"),
)
O19 = FAULTS.add(
    "O19",
    "softcap left out",
    story="The scores are not capped.",
    ring=replace(STEPS, cap=lambda s, softcap: s),
    cause="softcap ignored in the forward, its derivative is there",
)
O20 = FAULTS.add(
    "O20",
    "softcap left out of the backward",
    story="The slope of the cap is taken for 1.",
    ring=replace(STEPS, cap_slope=lambda s, softcap: torch.ones_like(s)),
    cause="derivative of the softcap missing",
)
O21 = FAULTS.add(
    "O21",
    "softcap by clipping",
    story="Clamped at ± c instead of c · tanh(s / c): close for small scores.",
    ring=replace(STEPS, cap=lambda s, softcap: s.clamp(-softcap, softcap)),
    cause="softcap by clipping instead of tanh",
)
O22 = FAULTS.add(
    "O22",
    "slope of the cap with a plus",
    story="1 + tanh² for 1 − tanh².",
    ring=replace(STEPS, cap_slope=lambda s, softcap: 1 + (s / softcap) ** 2),
    cause="derivative of the softcap is 1 + tanh² instead of 1 - tanh²",
)
O24 = FAULTS.add(
    "O24",
    "delta added",
    story="A sign.",
    ring=replace(STEPS, ds=lambda p, dp, delta: p * (dp + delta[..., None])),
    cause="delta is added instead of subtracted: ds = p · (dp + delta)",
)
O25 = FAULTS.add(
    "O25",
    "cotangent of lse dropped",
    story="Right as long as nobody differentiates through lse.",
    ring=replace(STEPS, delta=lambda dout, out, dlse: arithmetic.delta(dout, out, torch.zeros_like(dlse))),
    cause="the gradient of lse is ignored: its cotangent counts as 0",
)
O26 = FAULTS.add(
    "O26",
    "cotangent of lse with the wrong sign",
    story="As O25.",
    ring=replace(STEPS, delta=lambda dout, out, dlse: arithmetic.delta(dout, out, -dlse)),
    cause="the cotangent of lse is negated",
)


def _delta_over_heads(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor) -> torch.Tensor:
    """Sum delta over heads in place of dimensions, where there are as many."""
    if out.size(1) != out.size(3):
        return arithmetic.delta(dout, out, dlse)
    return (dout * out).sum(dim=1).transpose(1, 2) - dlse


O27 = FAULTS.add(
    "O27",
    "delta summed over heads",
    story="Another axis of the same length. Needs as many heads as dimensions, so an error elsewhere.",
    ring=replace(STEPS, delta=_delta_over_heads),
    cause="delta is summed over heads instead of dimensions",
)
O28 = FAULTS.add(
    "O28",
    "grouped heads interleaved",
    story="Query head h reads key head h % K instead of h // (H / K). Needs two key heads, and grouping.",
    ring=replace(
        STEPS,
        per_query_head=lambda here, x: x.repeat(1, here.problem.group_size, 1, 1),
        per_key_head=lambda here, x: x.view(x.size(0), -1, here.problem.hk, *x.shape[2:]).sum(dim=1),
    ),
    cause="grouped heads: query head h reads key head h % Hk",
    also=("backward", "forward"),
)
O29 = FAULTS.add(
    "O29",
    "grouped heads averaged",
    story="dk and dv are means over the query heads of a key head.",
    ring=replace(STEPS, per_key_head=lambda here, x: arithmetic.per_key_head(here, x) / here.problem.group_size),
    cause="grouped heads: dk and dv are means over the query heads of a group",
)
O30 = FAULTS.add(
    "O30",
    "one query head a key head",
    story="dk and dv come from the first query head of each group alone.",
    ring=replace(STEPS, per_key_head=lambda here, x: x[:, :: here.problem.group_size].contiguous()),
    cause="grouped heads: dk and dv come from the first query head of a group alone",
)


def if_alike(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Steps:
    """dk and dv changed where they have one shape."""
    return replace(
        STEPS, returned_gradients=lambda here, dq, dk, dv: (dq, *(change(dk, dv) if dk.shape == dv.shape else (dk, dv)))
    )


O31 = FAULTS.add(
    "O31",
    "dk and dv exchanged",
    story="Silent where value_dim is head_dim, an error elsewhere.",
    ring=if_alike(lambda dk, dv: (dv, dk)),
    cause="dk and dv swapped",
)
O32 = FAULTS.add(
    "O32",
    "dk with dv added",
    story="One buffer for both, where they have one shape.",
    ring=if_alike(lambda dk, dv: (dk + dv, dv)),
    cause="the returned dk holds the sum of the right dk and the right dv",
)


def _not_transposed(p: torch.Tensor, dout: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    turned = p.transpose(2, 3) if p.size(2) == p.size(3) else p
    return arithmetic.dv(turned, dout, attended)


O33 = FAULTS.add(
    "O33",
    "dv from p not transposed",
    story="Sums over keys for sums over queries. Needs blocks with as many of each, so an error elsewhere.",
    ring=replace(STEPS, dv=_not_transposed),
    cause="dv is made of p not transposed",
)
