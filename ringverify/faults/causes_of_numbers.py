"""Causes without a mutant: faults of scores, merges and results that no report tells of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ringref.problem import Problem
from ringverify.faults import arithmetic
from ringverify.faults.arithmetic import weight
from ringverify.faults.fault import WHENS, Faults
from ringverify.faults.operators import merging
from ringverify.faults.operators_of_index import BLOCKS, merged
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import STEPS, Steps, Times, multiplicity, together
from ringverify.faults.tiles import (
    TILES,
    always,
    chunked,
    first_dimensions,
    forgetting,
    last_tile,
    masked,
    own_and_masked,
)

FAULTS = Faults()
Tensor = torch.Tensor

# -- what is returned --------------------------------------------------------------------------------------------------


def _returned(change: Callable[[Here, Partial], Partial]) -> Steps:
    return replace(STEPS, returned=lambda here, whole: STEPS.returned(here, change(here, whole)))


def _lse(change: Callable[[Tensor], Tensor]) -> Steps:
    return _returned(lambda here, whole: whole._replace(lse=change(whole.lse)))


def _empty(value: float) -> Steps:
    return _lse(lambda lse: torch.where(lse == -math.inf, value, lse))


def _nan_rows(here: Here, whole: Partial) -> Partial:
    return whole._replace(out=torch.where((whole.lse == -math.inf)[..., None], math.nan, whole.out))


def _nan_rows_and_lse(here: Here, whole: Partial) -> Partial:
    lse = torch.where(whole.lse == -math.inf, math.nan, whole.lse)
    return Partial(_nan_rows(here, whole).out, lse)


def _out_permuted(here: Here, whole: Partial) -> tuple[Tensor, Tensor]:
    out, lse = STEPS.returned(here, whole)
    return out.transpose(1, 2).reshape(out.shape), lse


for says, steps in {
    "lse is 0 on rows without keys": _empty(0.0),
    "lse is +inf on rows without keys": _empty(math.inf),
    "lse is -1e8 on rows without keys": _empty(-1e8),
    "lse is NaN on rows without keys": _empty(math.nan),
    "lse is not written: it is 0": _lse(torch.zeros_like),
    "lse has the wrong sign": _lse(lambda lse: -lse),
    "out is NaN on rows without keys": _returned(_nan_rows),
    "out is 0": _returned(lambda here, whole: whole._replace(out=torch.zeros_like(whole.out))),
    "elements of out permuted: heads and tokens are exchanged by a reshape": replace(STEPS, returned=_out_permuted),
}.items():
    FAULTS.cause(says, steps)
FAULTS.cause("out is NaN on rows without keys", _returned(_nan_rows_and_lse), more=", and so is lse")

# -- scores ------------------------------------------------------------------------------------------------------------


def _scale(of: Callable[[Problem], float]) -> Steps:
    return replace(STEPS, scale=lambda here: float(of(here.problem)))


def _default(of: Callable[[Problem], float]) -> Steps:
    """Use another default scale, where the problem names none."""
    return _scale(lambda p: of(p) if p.scale is None else p.scale)


SCALES: dict[str, Steps] = {
    "scale not applied": _scale(lambda p: 1.0),
    "scale is 1/sqrt(Dv)": _scale(lambda p: p.dv**-0.5),
    "scale is that of D rounded up to a multiple of 16": _default(lambda p: (-(-p.head_dim // 16) * 16) ** -0.5),
    "scale is that of D rounded up to a power of 2": _default(lambda p: 2.0 ** (-math.ceil(math.log2(p.head_dim)) / 2)),
    "scale is 1/D": _default(lambda p: 1 / p.head_dim),
    "scale is sqrt(D)": _default(lambda p: p.head_dim**0.5),
    "scale is 1/sqrt(D - 1)": _default(lambda p: max(1, p.head_dim - 1) ** -0.5),
    "scale is 1/sqrt(H · D), that of all heads together": _default(lambda p: (p.heads * p.head_dim) ** -0.5),
    "scale lacks the factor log2(e)": _scale(lambda p: p.scale_value * math.log(2)),
    "scale has a factor log2(e) too many": _scale(lambda p: p.scale_value / math.log(2)),
}
for says, steps in SCALES.items():
    FAULTS.cause(says, steps, *WHENS)
FAULTS.cause("scale is 1/8, that of D = 64", _scale(lambda p: 0.125), *WHENS, more=", whatever was asked for")
FAULTS.cause(
    "scale is 1/sqrt(D + 1)",
    _default(lambda p: (p.head_dim + 1) ** -0.5),
    *WHENS,
    more=" where the default is wanted",
)

FAULTS.cause("softcap ignored", replace(STEPS, cap=lambda s, c: s, cap_slope=lambda s, c: torch.ones_like(s)), *WHENS)
FAULTS.cause(
    "softcap by clipping instead of tanh",
    replace(STEPS, cap=lambda s, c: s.clamp(-c, c), cap_slope=lambda s, c: (s.abs() < c).to(s.dtype)),
)
FAULTS.cause(
    "softcap is tanh(s / c), without its factor c",
    replace(STEPS, cap=lambda s, c: torch.tanh(s / c), cap_slope=lambda s, c: (1 - s**2) / c),
    *WHENS,
)


def _head_0(here: Here, x: Tensor) -> Tensor:
    return x[:, :1].expand(-1, here.problem.heads, -1, -1)


def _sum_in_head_0(here: Here, x: Tensor) -> Tensor:
    found = x.new_zeros((x.size(0), here.problem.hk, *x.shape[2:]))
    found[:, 0] = x.sum(dim=1)
    return found


def _sum_by_turns(here: Here, x: Tensor) -> Tensor:
    return x.view(x.size(0), -1, here.problem.hk, *x.shape[2:]).sum(dim=1)


def _last_of_group(here: Here, x: Tensor) -> Tensor:
    return x[:, here.problem.group_size - 1 :: here.problem.group_size]


FAULTS.cause(
    "grouped heads: every query head reads key head 0",
    replace(STEPS, per_query_head=_head_0, per_key_head=_sum_in_head_0),
    *WHENS,
)
FAULTS.cause(
    "grouped heads: dk and dv come from the last query head of a group alone",
    replace(STEPS, per_key_head=_last_of_group),
)
FAULTS.cause(
    "dk and dv of a key head are summed over h % Hk instead of its group", replace(STEPS, per_key_head=_sum_by_turns)
)

# -- kernels -----------------------------------------------------------------------------------------------------------


for limit in TILES[1:]:
    FAULTS.cause(f"dimensions past the first {limit} are left out of the scores", first_dimensions(limit), *WHENS)
for tile in TILES:
    says = f"a block of more than {tile} keys is attended in tiles of {tile}, and only its last tile counts"
    FAULTS.cause(says, forgetting(tile, always))
    FAULTS.cause(says, last_tile(tile), *WHENS)
for tile in TILES:
    FAULTS.cause(
        f"own block in tiles of {tile} keys: every tile that is masked in part forgets the tiles before it",
        forgetting(tile, own_and_masked),
    )
    FAULTS.cause(
        f"tiles of {tile} keys: every tile that is masked in part forgets the tiles before it",
        forgetting(tile, masked),
    )
for count in TILES[:4]:
    FAULTS.cause(f"the mask is cut in {count} chunks, the keys in tiles of {count}", chunked(count), *WHENS)

# -- merges ------------------------------------------------------------------------------------------------------------


def _mean_of_blocks(steps: Steps, here: Here, hop: int, running: Any, new: Any) -> Any:
    """Add up the outs of all blocks, to be divided at the end by the number of blocks."""
    if running is None:
        here.notes["blocks"] = 1
        return new
    here.notes["blocks"] += 1
    return Partial(running.out + new.out, torch.logaddexp(running.lse, new.lse))


def _averaged(steps: Steps, here: Here, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    def divided(whole: Partial) -> Partial:
        return whole._replace(out=whole.out / here.notes["blocks"])

    return STEPS.forward(replace(steps, accumulate=_mean_of_blocks, normalise=divided), here, q, k, v)


def _weights_from(lse: Callable[[Tensor, Tensor], Tensor]) -> Steps:
    """Merge with another lse, from which the weights of both partials are computed too."""

    def merge(a: Partial, b: Partial) -> Partial:
        found = lse(a.lse, b.lse)
        shift = torch.where(found == -math.inf, 0.0, found)
        return Partial(weight(a.lse, shift) * a.out + weight(b.lse, shift) * b.out, found)

    return replace(STEPS, merge=merge)


def _unguarded_out(a: Partial, b: Partial) -> Partial:
    whole = arithmetic.merge(a, b)
    return whole._replace(out=torch.where((whole.lse == -math.inf)[..., None], math.nan, whole.out))


def _halved(a: Partial, b: Partial) -> Partial:
    return Partial((a.out + b.out) / 2, torch.logaddexp(a.lse, b.lse))


for says, steps in {
    "out is the plain average over blocks": replace(STEPS, forward=_averaged),
    "each merge is the plain average of both parts": replace(STEPS, merge=_halved),
    "the merged lse is the mean of both": merging(lse=lambda a, b: (a + b) / 2),
    "the merged lse is the sum of both": merging(lse=lambda a, b: a + b),
    "the merge of two empty parts is NaN: -inf - (-inf)": replace(STEPS, merge=_unguarded_out),
}.items():
    FAULTS.cause(says, steps)
FAULTS.cause(
    "the merged lse is the larger of both", _weights_from(torch.maximum), more=", and the weights come from it"
)
FAULTS.cause(
    "the merge overflows: log(1 + exp(difference)) is infinite or no number",
    _weights_from(lambda a, b: a + torch.log1p(torch.exp(b - a))),
    overflows=True,
)

# -- log-sum-exps of blocks --------------------------------------------------------------------------------------------


def _lse_of_block(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Steps:
    """Change the lse of each block; `change` gets scores, multiplicities and the right lse."""

    def partial(s: Tensor, m: Tensor, v: Tensor) -> Partial:
        found = arithmetic.partial(s, m, v)
        return found._replace(lse=change(s, m, found.lse))

    return replace(STEPS, partial=partial)


def _value(where: float, value: float) -> Steps:
    """Replace one value of a block's lse by another, also where the block is skipped."""

    def spoilt(found: Any) -> Partial:
        return Partial(found.out, torch.where(found.lse == where, value, found.lse))

    return replace(
        STEPS,
        partial=lambda s, m, v: spoilt(arithmetic.partial(s, m, v)),
        nothing=lambda here, q, dim: spoilt(STEPS.nothing(here, q, dim)),
    )


def _narrow_lse(steps: Steps, here: Here, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Round each block's lse as `lse.to(q.dtype)` does, and merge in that dtype with sigmoids."""
    dtype = getattr(torch, here.problem.dtype)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(here.wide)

    def partial(s: Tensor, m: Tensor, v: Tensor) -> Partial:
        found = arithmetic.partial(s, m, v)
        return found._replace(lse=rounded(found.lse))

    def merge(a: Partial, b: Partial) -> Partial:
        share = rounded(torch.sigmoid(rounded(b.lse - a.lse)))
        out = a.out - share[..., None] * (a.out - b.out)
        lse = rounded(a.lse - rounded(torch.log(torch.sigmoid(rounded(a.lse - b.lse)))))
        none = b.lse == -math.inf
        first = (a.lse == -math.inf) & ~none
        out = torch.where(none[..., None], a.out, torch.where(first[..., None], b.out, out))
        return Partial(out, torch.where(none, a.lse, torch.where(first, b.lse, lse)))

    return STEPS.forward(replace(steps, partial=partial, merge=merge), here, q, k, v)


def _average_of_all(s: Tensor, m: Tensor, v: Tensor) -> Partial:
    if bool((m > 0).any()) or not s.numel():
        return _filled(s, m, v)
    mean = v.mean(dim=2, keepdim=True).expand(*s.shape[:3], v.size(3))
    return Partial(mean, s.new_full(s.shape[:3], torch.finfo(torch.float32).min))


def _filled(s: Tensor, m: Tensor, v: Tensor) -> Partial:
    s = torch.where(m > 0, s, torch.finfo(torch.float32).min)
    top = s.amax(dim=-1, keepdim=True)
    w = torch.where(m > 0, m, 1) * torch.exp(s - top)
    total = w.sum(dim=-1, keepdim=True)
    return Partial(w @ v / total, (top + total.log()).squeeze(-1))


def _unstabilised(s: Tensor, m: Tensor, v: Tensor) -> Partial:
    w = torch.where(m > 0, m * torch.exp(s), 0.0)
    total = w.sum(dim=-1, keepdim=True)
    out = arithmetic.weighted_sum(w, v, m > 0) / torch.where(total == 0, 1.0, total)
    return Partial(out, total.log().squeeze(-1))


SENTINELS = (-1e9, -1e10, -1e30, torch.finfo(torch.float32).min)
"""What has been used for minus infinity, beside -1e8."""

FAULTS.cause(
    "log-sum-exps of blocks are rounded to the dtype of the inputs, and merged in it",
    replace(STEPS, forward=_narrow_lse),
)
for says, steps in {
    "natural log-sum-exps of blocks are merged as base-2 ones": replace(
        _lse_of_block(lambda s, m, lse: lse * math.log(2)),
        normalise=lambda whole: Partial(whole.out, whole.lse / math.log(2)),
    ),
    "the lse of every block is 0: blocks are merged with equal weights, whatever they attend": _lse_of_block(
        lambda s, m, lse: torch.where(lse == -math.inf, lse, 0.0)
    ),
}.items():
    FAULTS.cause(says, steps)
for says, more, lse_of_block in (
    (
        "base-2 log-sum-exps of blocks are merged as natural ones",
        ", and returned",
        lambda s, m, lse: lse / math.log(2),
    ),
    (
        "a block without visible keys has lse 0",
        ", unless it is skipped whole",
        lambda s, m, lse: torch.where(lse == -math.inf, 0.0, lse),
    ),
    (
        "a block without visible keys has lse +inf",
        ", unless it is skipped whole",
        lambda s, m, lse: torch.where(lse == -math.inf, math.inf, lse),
    ),
):
    FAULTS.cause(says, _lse_of_block(lse_of_block), more=more)
FAULTS.cause("an lse of exactly 0 is taken for one that was not computed", _value(0.0, -math.inf))
for value in SENTINELS:
    FAULTS.cause("an lse of exactly 0 is taken for one that was not computed", _value(0.0, value), overflows=True)
    FAULTS.cause(
        f"a block without visible keys has lse {value:.3g} instead of -inf", _value(-math.inf, value), overflows=True
    )
FAULTS.cause(
    "a finite number stands for -inf: a row without keys becomes the average of all",
    replace(STEPS, partial=_average_of_all, skip=lambda here, hop, owner, m: not m.numel()),
    overflows=True,
)
FAULTS.cause("scores are not stabilised: exp overflows", replace(STEPS, partial=_unstabilised), overflows=True)

# -- blocks that are left out or counted twice -------------------------------------------------------------------------


def in_pattern(times: Times) -> Steps:
    """Multiply the multiplicities of blocks, in forward and backward alike."""
    return replace(
        STEPS,
        pattern=lambda steps, here, hop, owner: multiplicity(steps, here, hop, owner) * times(here, hop, owner),
    )


for says, times in BLOCKS.items():
    FAULTS.cause(says, in_pattern(times), *WHENS)
    FAULTS.cause(says, merged(says))
FAULTS.cause(
    "replicated queries: the partial result of the last rank is left out",
    replace(STEPS, together=lambda steps, here, own: together(steps, here, own, slice(None, -1))),
)
