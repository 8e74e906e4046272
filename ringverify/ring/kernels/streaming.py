"""A tile in plain tensor operations: any device, dtype and head dimension, softcap, and inputs that are not finite.

What a mask excludes cannot matter here, NaN and infinity included. `0 · NaN` is NaN, so an excluded pair must not be a
product with weight 0: scores and ds are replaced, and sums go through `_sum_allowed` where a tile is not finite.

Shape letters: see `ringverify.ring.kernels.kernel`; G = H / K queries heads read one key head, P = B K pairs of batch
element and key head, X = G S queries of a pair.
"""

from __future__ import annotations

import math
from typing import overload

import torch

from ringverify.ring.kernels.kernel import Gradients, Setting, TileMask


class Streaming:
    """Scores of one tile at a time, in the accumulation dtype; see the module."""

    name = "streaming"
    blocked = False
    takes_bias = True
    packs = False

    def why_not(self, setting: Setting) -> str | None:
        """Never."""
        del setting
        return None

    def bucket(self, setting: Setting, rows: int) -> int:
        """A tile of this many rows and columns of scores fits a cache."""
        del setting, rows
        return 256

    def forward(
        self, setting: Setting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        q, k, v = (x.to(setting.accumulates) for x in (q, k, v))
        s_BHST, _ = _scores(setting, q, k)
        bias = _bias(mask, s_BHST)
        allowed = None
        if bias is not None:
            allowed = (bias > -math.inf).expand(s_BHST.shape)
            s_BHST = torch.where(allowed, s_BHST + bias, -math.inf)
        largest = s_BHST.amax(dim=-1, keepdim=True)
        if bias is not None:  # −inf − (−inf) is NaN
            largest = largest.masked_fill(largest == -math.inf, 0.0)
        w_BHST = s_BHST.sub_(largest).exp_()
        total = w_BHST.sum(dim=-1, keepdim=True)
        # At least 1, because the largest score contributes exp(0), or 0 where nothing is attended.
        w_BHST /= total.clamp(min=1)
        out = _sum_allowed(_by_pair(w_BHST, k), _pairs(v), _by_pair(allowed, k))
        lse = (largest + total.log()).squeeze(-1)
        return out.view(*q.shape[:3], v.size(-1)), lse

    def backward(
        self,
        setting: Setting,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        mask: TileMask,
    ) -> Gradients:
        """See `Kernel.backward`."""
        dout, q, k, v, out = (x.to(setting.accumulates) for x in (dout, q, k, v, out))
        s_BHST, tanh = _scores(setting, q, k)
        bias = _bias(mask, s_BHST)
        nothing = lse == math.inf
        delta = (dout * out).sum(dim=-1)
        if dlse is not None:
            delta = delta - dlse
        # The cotangent of an empty row may be anything, the derivative of an lse of −inf say: nothing depends on it.
        delta = delta.masked_fill(nothing, 0.0)
        dout = dout.masked_fill(nothing[..., None], 0.0)
        if bias is not None:
            s_BHST = s_BHST + bias
        p_BHST = s_BHST.sub_(lse[..., None]).exp_()
        allowed = None
        if bias is not None:
            allowed = (bias > -math.inf).expand(p_BHST.shape)
            p_BHST = torch.where(allowed, p_BHST, 0.0)
        dp_BHST = torch.bmm(_by_pair(dout, k), _pairs(v).transpose(1, 2)).view(p_BHST.shape)
        ds_BHST = dp_BHST.sub_(delta[..., None]).mul_(p_BHST)
        if tanh is not None:
            ds_BHST *= 1 - tanh**2
        if allowed is not None:
            ds_BHST = torch.where(allowed, ds_BHST, 0.0)
        ds, p, pairs_allowed = _by_pair(ds_BHST, k), _by_pair(p_BHST, k), _by_pair(allowed, k)
        transposed = None if pairs_allowed is None else pairs_allowed.transpose(1, 2)
        dq = _sum_allowed(ds, _pairs(k), pairs_allowed) * setting.scale
        dk = _sum_allowed(ds.transpose(1, 2), _by_pair(q, k), transposed) * setting.scale
        dv = _sum_allowed(p.transpose(1, 2), _by_pair(dout, k), transposed)
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _scores(setting: Setting, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores `(B, H, S, T)`, and the tanh of a softcap for its derivative."""
    scaled = _by_pair(q, k) * setting.scale
    s_BHST = torch.bmm(scaled, _pairs(k).transpose(1, 2)).view(*q.shape[:3], k.size(2))
    if setting.softcap is None:
        return s_BHST, None
    tanh = s_BHST.div_(setting.softcap).tanh_()
    return tanh * setting.softcap, tanh


def _bias(mask: TileMask, s_BHST: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(mask, str):
        return mask
    rows, keys = s_BHST.shape[-2:]
    return s_BHST.new_full((rows, keys), -math.inf).triu_(1)


def _pairs(x_BKTD: torch.Tensor) -> torch.Tensor:
    """(B, K, T, D) as (P, T, D)."""
    return x_BKTD.reshape(-1, *x_BKTD.shape[2:])


@overload
def _by_pair(x_BHSD: torch.Tensor, k_BKTD: torch.Tensor) -> torch.Tensor: ...
@overload
def _by_pair(x_BHSD: None, k_BKTD: torch.Tensor) -> None: ...
def _by_pair(x_BHSD: torch.Tensor | None, k_BKTD: torch.Tensor) -> torch.Tensor | None:
    """(B, H, S, last) as (P, X, last): together the queries that read one key head."""
    if x_BHSD is None:
        return None
    batch, _, _, last = x_BHSD.shape
    return x_BHSD.reshape(batch * k_BKTD.size(1), -1, last)


def _sum_allowed(w_PAC: torch.Tensor, x_PCD: torch.Tensor, allowed_PAC: torch.Tensor | None) -> torch.Tensor:
    """`Σ_c w·x` over the allowed c, where x may hold NaN and infinity, and w is 0 wherever it is not allowed.

    A sum that an allowed element of x makes infinite comes out as NaN, as it would from `inf · 0` or `inf − inf`.
    """
    if allowed_PAC is None or not (strange := ~torch.isfinite(x_PCD)).any():
        return torch.bmm(w_PAC, x_PCD)
    touched = torch.bmm(allowed_PAC.to(w_PAC.dtype), strange.to(w_PAC.dtype)) > 0
    return torch.bmm(w_PAC, x_PCD.masked_fill(strange, 0.0)).masked_fill_(touched, math.nan)
