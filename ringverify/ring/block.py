"""Attention of this rank's queries to one block of keys, and its gradients.

    s = scale · q·k        softcap c: s ← c · tanh(s / c)
    w = m · exp(s − max),  sum = Σ_j w,  acc = Σ_j w · v

    p  = w / sum, with max and sum over all keys, so merged over all blocks
    dv = Σ_i p · dout      dp = dout·v      ds = p · (dp − delta + dlse) · (1 − tanh²)
    dq = scale · Σ_j ds·k  dk = scale · Σ_i ds·q

The backward is FlashAttention-2's (Dao 2023, arXiv:2307.08691, algorithm 2) with the cotangent of lse added. It
differs in that weights are divided by the merged sum instead of shifted by the merged lse, because lse is rounded and
the rounding error of exp(s − lse) grows with |lse|; the division is done once a row, on dout and delta.

What the mask excludes cannot matter, NaN and infinity included. `0 · NaN` is NaN, so an excluded pair must not be a
product with weight 0: scores and ds are replaced, and sums over rows that are not all finite go through `_sum_allowed`.

Shape letters: B batch, S queries, T keys, H query heads, K key heads, P = B K pairs, X = (H / K) S queries that read
one key head, D head_dim, E value_dim. Query head h reads key head h // (H / K), so (B, H, S, D) viewed as (P, X, D)
puts the queries of a key head together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float

from ringverify.ring.mask import Mask
from ringverify.ring.merge import Partial, shift


class Queries(NamedTuple):
    """This rank's queries in the accumulation dtype.

    Attributes:
        q_BHSD: queries times scale, contiguous.
        softcap: c of `c · tanh(s / c)`, or `None`.
        groups: number of key heads.
    """

    q_BHSD: torch.Tensor
    softcap: float | None
    groups: int


class Cotangents(NamedTuple):
    """What the backward of every block needs of a row, from the merged forward; 0 in empty rows.

    Attributes:
        shift_BHS1: the merged maximum; 0 in empty rows.
        dout_BHSE: cotangent of out over the merged sum.
        delta_BHS1: `(Σ_e dout · out − dlse)` over the merged sum.
        finite: whether q and all of these are finite.
    """

    shift_BHS1: torch.Tensor
    dout_BHSE: torch.Tensor
    delta_BHS1: torch.Tensor
    finite: bool


def all_finite(*tensors: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def cotangents(
    queries: Queries,
    merged: tuple[Float[torch.Tensor, "B H S 1"], Float[torch.Tensor, "B H S 1"]],
    out_BHSE: Float[torch.Tensor, "B H S E"],
    dout_BHSE: Float[torch.Tensor, "B H S E"],
    dlse_BHS: Float[torch.Tensor, "B H S"],
) -> Cotangents:
    """Prepare the backward of the blocks; all in the accumulation dtype.

    Args:
        queries: this rank's queries.
        merged: max and sum over all keys, `(B, H, S, 1)` each.
        out_BHSE: the output, not rounded to the input dtype.
        dout_BHSE: cotangent of out.
        dlse_BHS: cotangent of lse.
    """
    largest, total = merged
    dout_BHSE = dout_BHSE.contiguous()  # a sum over it must not depend on how the caller laid it out
    delta = (dout_BHSE * out_BHSE).sum(dim=-1, keepdim=True) - dlse_BHS[..., None]
    none = total == 0
    # The cotangent of an empty row may be anything, the derivative of an lse of −inf say; nothing depends on that row.
    dout = torch.where(none, 0.0, dout_BHSE / total)
    delta = torch.where(none, 0.0, delta / total).contiguous()
    return Cotangents(shift(largest), dout, delta, all_finite(queries.q_BHSD, dout, delta))


def attend(
    queries: Queries,
    k_PTD: Float[torch.Tensor, "P T D"],
    v_PTE: Float[torch.Tensor, "P T E"],
    mask: Mask,
    *,
    finite: bool,
) -> Partial:
    """The partial of all queries over one block; neither may be empty.

    Args:
        queries: this rank's queries.
        k_PTD: keys of the block, accumulation dtype.
        v_PTE: values of the block, accumulation dtype.
        mask: the block's pattern.
        finite: whether the block is free of NaN and infinity.
    """
    s_BHST, _ = _scores(queries, k_PTD)
    allowed, times = mask
    if allowed is not None:
        s_BHST = torch.where(allowed, s_BHST, -math.inf)
    largest = s_BHST.amax(dim=-1, keepdim=True)
    # Without a mask the maximum is a score and needs no guard against −inf.
    w_BHST = s_BHST.sub_(largest if allowed is None else shift(largest)).exp_()
    if times is not None:
        w_BHST *= times
    w_PXT = _by_pair(w_BHST, queries.groups)
    acc_PXE = torch.bmm(w_PXT, v_PTE) if finite else _sum_allowed(w_PXT, v_PTE, _pairs_allowed(allowed, s_BHST, w_PXT))
    shape = s_BHST.shape
    return Partial(largest, w_BHST.sum(dim=-1, keepdim=True), acc_PXE.view(*shape[:3], v_PTE.size(2)))


def gradients(
    queries: Queries,
    rows: Cotangents,
    k_PTD: Float[torch.Tensor, "P T D"],
    v_PTE: Float[torch.Tensor, "P T E"],
    mask: Mask,
    *,
    finite: bool,
) -> tuple[Float[torch.Tensor, "P X D"], Float[torch.Tensor, "P T D"], Float[torch.Tensor, "P T E"]]:
    """What one block contributes: dq over scale `(P, X, D)`, dk `(P, T, D)` and dv `(P, T, E)`.

    Arguments are those of `attend`, and `rows` from `cotangents`.
    """
    s_BHST, tanh = _scores(queries, k_PTD)
    allowed, times = mask
    p_BHST = s_BHST.sub_(rows.shift_BHS1).exp_()  # times the merged sum; an excluded pair may overflow here
    if times is not None:
        p_BHST *= times
    if allowed is not None:
        p_BHST = torch.where(allowed, p_BHST, 0.0)
    groups = queries.groups
    q_PXD, dout_PXE = _by_pair(queries.q_BHSD, groups), _by_pair(rows.dout_BHSE, groups)
    p_PXT = _by_pair(p_BHST, groups)
    dp_PXT = torch.bmm(dout_PXE, v_PTE.transpose(1, 2))
    ds_PXT = dp_PXT.sub_(_by_pair(rows.delta_BHS1, groups)).mul_(p_PXT)
    if tanh is not None:
        ds_PXT *= 1 - _by_pair(tanh, groups) ** 2
    if allowed is None or (finite and rows.finite):
        return (
            torch.bmm(ds_PXT, k_PTD),
            torch.bmm(ds_PXT.transpose(1, 2), q_PXD),
            torch.bmm(p_PXT.transpose(1, 2), dout_PXE),
        )
    allowed_PXT = _pairs_allowed(allowed, p_BHST, p_PXT)
    assert allowed_PXT is not None
    ds_PXT = torch.where(allowed_PXT, ds_PXT, 0.0)
    allowed_PTX = allowed_PXT.transpose(1, 2)
    return (
        _sum_allowed(ds_PXT, k_PTD, allowed_PXT),
        _sum_allowed(ds_PXT.transpose(1, 2), q_PXD, allowed_PTX),
        _sum_allowed(p_PXT.transpose(1, 2), dout_PXE, allowed_PTX),
    )


def _scores(queries: Queries, k_PTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores `(B, H, S, T)`, and the tanh of a softcap for its derivative."""
    q_BHSD, softcap, groups = queries
    s_BHST = torch.bmm(_by_pair(q_BHSD, groups), k_PTD.transpose(1, 2)).view(*q_BHSD.shape[:3], k_PTD.size(1))
    if softcap is None:
        return s_BHST, None
    tanh = s_BHST.div_(softcap).tanh_()
    return tanh * softcap, tanh


def _by_pair(x_BHSD: torch.Tensor, groups: int) -> torch.Tensor:
    """(B, H, S, ...) viewed as (P, X, ...): together the queries that read one key head."""
    b, h, s, last = x_BHSD.shape
    return x_BHSD.view(b * groups, h // groups * s, last)


def _pairs_allowed(
    allowed: torch.Tensor | None, like_BHST: torch.Tensor, like_PXT: torch.Tensor
) -> torch.Tensor | None:
    """Who attends whom, laid out as `like_PXT`."""
    return None if allowed is None else allowed.expand(like_BHST.shape).reshape(like_PXT.shape)


def _sum_allowed(w_PAC: torch.Tensor, x_PCD: torch.Tensor, allowed_PAC: torch.Tensor | None) -> torch.Tensor:
    """`Σ_c w·x` over the allowed c, where x may hold NaN and infinity, and w is 0 wherever it is not allowed.

    A sum that an allowed element of x makes infinite comes out as NaN, as it would from `inf · 0` or `inf − inf`.
    """
    if allowed_PAC is None:
        return torch.bmm(w_PAC, x_PCD)
    strange = ~torch.isfinite(x_PCD)
    touched = torch.bmm(allowed_PAC.to(w_PAC.dtype), strange.to(w_PAC.dtype)) > 0
    return torch.bmm(w_PAC, x_PCD.masked_fill(strange, 0.0)).masked_fill_(touched, math.nan)
