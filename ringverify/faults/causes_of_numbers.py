"""Causes without a mutant: faults of scores, merges and results that no report tells of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ringref.problem import Problem
from ringverify.faults import arithmetic
from ringverify.faults.accumulation import lse_of_blocks, taken
from ringverify.faults.arithmetic import permuted, weight
from ringverify.faults.fault import WHENS, Faults
from ringverify.faults.masking import lowest_fill
from ringverify.faults.operators import merging, shifted
from ringverify.faults.operators_of_index import MISCOUNTED
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import STEPS, Steps, returning, together, whole
from ringverify.faults.tiles import (
    TILES,
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


def _lse(change: Callable[[Tensor], Tensor]) -> Steps:
    return whole(lambda here, found: found._replace(lse=change(found.lse)))


def _nan_rows(here: Here, whole: Partial) -> Partial:
    return whole._replace(out=torch.where((whole.lse == -math.inf)[..., None], math.nan, whole.out))


def _nan_rows_and_lse(here: Here, whole: Partial) -> Partial:
    lse = torch.where(whole.lse == -math.inf, math.nan, whole.lse)
    return Partial(_nan_rows(here, whole).out, lse)


for says, steps in {
    "lse is 0 on rows without keys": _lse(taken(-math.inf, 0.0)),
    "lse is +inf on rows without keys": _lse(taken(-math.inf, math.inf)),
    "lse is -1e8 on rows without keys": _lse(taken(-math.inf, -1e8)),
    "lse is NaN on rows without keys": _lse(taken(-math.inf, math.nan)),
    "lse is not written: it is 0": _lse(torch.zeros_like),
    "lse has the wrong sign": _lse(lambda lse: -lse),
    "out is NaN on rows without keys": whole(_nan_rows),
    "out is 0": whole(lambda here, found: found._replace(out=torch.zeros_like(found.out))),
    "elements of out permuted: heads and tokens are exchanged by a reshape": returning(
        lambda here, out, lse: (permuted(out), lse)
    ),
}.items():
    FAULTS.cause(says, steps)
FAULTS.cause("out is NaN on rows without keys", whole(_nan_rows_and_lse), more=", and so is lse")

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


SENTINELS = (-1e9, -1e10, -1e30, torch.finfo(torch.float32).min)
"""What has been used for minus infinity, beside -1e8."""

FAULTS.cause(
    "log-sum-exps of blocks are rounded to the dtype of the inputs, and merged in it",
    replace(STEPS, forward=_narrow_lse),
)
for says, steps in {
    "natural log-sum-exps of blocks are merged as base-2 ones": replace(
        lse_of_blocks(lambda lse: lse * math.log(2)),
        normalise=lambda whole: Partial(whole.out, whole.lse / math.log(2)),
    ),
    "the lse of every block is 0: blocks are merged with equal weights, whatever they attend": lse_of_blocks(
        lambda lse: torch.where(lse == -math.inf, lse, 0.0)
    ),
}.items():
    FAULTS.cause(says, steps)
for says, more, steps in (
    (
        "base-2 log-sum-exps of blocks are merged as natural ones",
        ", and returned",
        lse_of_blocks(lambda lse: lse / math.log(2)),
    ),
    (
        "a block without visible keys has lse 0",
        ", unless it is skipped whole",
        lse_of_blocks(taken(-math.inf, 0.0), skipped=False),
    ),
    (
        "a block without visible keys has lse +inf",
        ", unless it is skipped whole",
        lse_of_blocks(taken(-math.inf, math.inf), skipped=False),
    ),
):
    FAULTS.cause(says, steps, more=more)
FAULTS.cause("an lse of exactly 0 is taken for one that was not computed", lse_of_blocks(taken(0.0, -math.inf)))
for value in SENTINELS:
    FAULTS.cause(
        "an lse of exactly 0 is taken for one that was not computed",
        lse_of_blocks(taken(0.0, value)),
        overflows=True,
    )
    FAULTS.cause(
        f"a block without visible keys has lse {value:.3g} instead of -inf",
        lse_of_blocks(taken(-math.inf, value)),
        overflows=True,
    )
FAULTS.cause(
    "a finite number stands for -inf: a row without keys becomes the average of all",
    replace(STEPS, partial=lowest_fill, skip=lambda here, hop, owner, m: not m.numel()),
    overflows=True,
)
FAULTS.cause(
    "scores are not stabilised: exp overflows",
    shifted(lambda s, attended: torch.zeros_like(s[..., :1])),
    overflows=True,
)

# -- blocks that are left out or counted twice -------------------------------------------------------------------------


for says, steps in MISCOUNTED.items():
    FAULTS.cause(says, steps, *WHENS)
FAULTS.cause(
    "replicated queries: the partial result of the last rank is left out",
    replace(STEPS, together=lambda steps, here, own: together(steps, here, own, slice(None, -1))),
)
