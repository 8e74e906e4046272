"""A tile in plain tensor operations: any device, dtype and head dimension, softcap, and inputs that are not finite.

What a mask excludes cannot matter here, NaN and infinity included. `0 · NaN` is NaN, so an excluded pair must not be a
product with weight 0: scores and ds are replaced, and sums go through `_sum_allowed` where a tile is not finite.

Shape letters: see `ringverify.ring.kernels.kernel`; G = H / K queries heads read one key head, P = B K pairs of batch
element and key head, X = G S queries of a pair.
"""

from __future__ import annotations

import math

import torch

from ringverify.ring.kernels.kernel import Extent, KernelTile, MergedRows, QKVGradients, Setting


class Streaming:
    """Scores of one tile at a time, in the accumulation dtype; see the module."""

    name = "streaming"
    blocked = False
    takes_bias = True
    keeps_out = True
    packs: tuple[torch.dtype, ...] = ()

    def why_not(self, setting: Setting) -> str | None:
        """Never."""
        del setting
        return None

    def bucket(self, setting: Setting, rows: int) -> int:
        """A tile of this many rows and columns of scores fits a cache."""
        del setting, rows
        return 256

    def at_once(self, setting: Setting, *, backward: bool) -> bool:
        """See `Kernel.at_once`: never, since it forms all scores of a tile."""
        del setting, backward
        return False

    def held(self, setting: Setting, tile: Extent) -> int:
        """See `Kernel.held`: two matrices of scores, three with a softcap, and what goes into products.

        Elsewhere than on CPU one more says what is allowed.
        """
        matrices = 2 + (setting.softcap is not None) + (setting.device != "cpu")
        scores = tile.batch * tile.heads * tile.rows * tile.keys * matrices
        causal = 2 * tile.rows * tile.keys
        converted = setting.dtype != setting.accumulates
        d, e = setting.head_dim, setting.value_dim
        rows = tile.of_rows(3 * d + 3 * e + converted * (d + 2 * e) + 4)
        keys = tile.of_keys(2 * d + 2 * e + converted * (d + e))
        return (scores + causal + rows + keys) * setting.accumulates.itemsize

    def forward(self, setting: Setting, tile: KernelTile) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        tile = tile.each(lambda x: x.to(setting.accumulates))
        q, k, v, _ = tile
        s_BHST, _ = _scores(setting, q, k, derivative=False)
        bias = _bias(tile, s_BHST)
        excluded = None if bias is None else bias == -math.inf
        if bias is not None and excluded is not None:
            s_BHST.add_(bias).masked_fill_(excluded, -math.inf)
        largest = s_BHST.amax(dim=-1, keepdim=True)
        largest.masked_fill_(largest == -math.inf, 0.0)  # −inf − (−inf) is NaN
        w_BHST = s_BHST.sub_(largest).exp_()
        total = w_BHST.sum(dim=-1, keepdim=True)
        # At least 1, because the largest score contributes exp(0), or 0 where nothing is attended.
        w_BHST /= total.clamp(min=1)
        out = _sum_allowed(_by_pair(w_BHST, k), _pairs(v), _allowed(excluded, w_BHST))
        lse = (largest + total.log()).squeeze(-1)
        return out.view(*q.shape[:3], v.size(-1)), lse

    def backward(self, setting: Setting, tile: KernelTile, rows: MergedRows) -> QKVGradients:
        """See `Kernel.backward`."""
        tile = tile.each(lambda x: x.to(setting.accumulates))
        q, k, v, _ = tile
        dout, out, lse, dlse = rows.each(lambda x: x.to(setting.accumulates))
        s_BHST, tanh = _scores(setting, q, k, derivative=True)
        bias = _bias(tile, s_BHST)
        nothing = lse == math.inf
        delta = (dout * out).sum(dim=-1)
        if dlse is not None:
            delta = delta - dlse
        # The cotangent of an empty row may be anything, the derivative of an lse of −inf say: nothing depends on it.
        delta = delta.masked_fill(nothing, 0.0)
        dout = dout.masked_fill(nothing[..., None], 0.0)
        if bias is not None:
            s_BHST.add_(bias)
        p_BHST = s_BHST.sub_(lse[..., None]).exp_()
        excluded = None if bias is None else bias == -math.inf
        if excluded is not None:
            p_BHST.masked_fill_(excluded, 0.0)
        dp_BHST = torch.bmm(_by_pair(dout, k), _pairs(v).transpose(1, 2)).view(p_BHST.shape)
        ds_BHST = dp_BHST.sub_(delta[..., None]).mul_(p_BHST)
        if tanh is not None:
            ds_BHST *= tanh.square_().neg_().add_(1)
        if excluded is not None:
            ds_BHST.masked_fill_(excluded, 0.0)
        ds, p = _by_pair(ds_BHST, k), _by_pair(p_BHST, k)
        allowed = _allowed(excluded, p_BHST)
        dq = _sum_allowed(ds, _pairs(k), allowed).mul_(setting.scale)
        dk = _sum_allowed(ds.transpose(1, 2), _by_pair(q, k), allowed, transposed=True).mul_(setting.scale)
        dv = _sum_allowed(p.transpose(1, 2), _by_pair(dout, k), allowed, transposed=True)
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


STREAMING = Streaming()


def _scores(
    setting: Setting, q: torch.Tensor, k: torch.Tensor, *, derivative: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores `(B, H, S, T)`, new memory, and the tanh of a softcap if its derivative is wanted."""
    scaled = _by_pair(q, k) * setting.scale
    s_BHST = torch.bmm(scaled, _pairs(k).transpose(1, 2)).view(*q.shape[:3], k.size(2))
    if setting.softcap is None:
        return s_BHST, None
    tanh = s_BHST.div_(setting.softcap).tanh_()
    return (tanh * setting.softcap, tanh) if derivative else (tanh.mul_(setting.softcap), None)


def _bias(tile: KernelTile, s_BHST: torch.Tensor) -> torch.Tensor | None:
    return s_BHST.new_full(s_BHST.shape[-2:], -math.inf).triu_(1) if tile.causal else tile.bias


def _pairs(x_BKTD: torch.Tensor) -> torch.Tensor:
    """(B, K, T, D) as (P, T, D)."""
    return x_BKTD.reshape(-1, *x_BKTD.shape[2:])


def _by_pair(x_BHSD: torch.Tensor, k_BKTD: torch.Tensor) -> torch.Tensor:
    """(B, H, S, last) as (P, X, last): together the queries that read one key head."""
    batch, _, _, last = x_BHSD.shape
    return x_BHSD.reshape(batch * k_BKTD.size(1), -1, last)


def _allowed(excluded: torch.Tensor | None, s_BHST: torch.Tensor) -> torch.Tensor | None:
    """What is not excluded, in the shape of the scores but not in their memory."""
    return None if excluded is None else (~excluded).expand(s_BHST.shape)


def _sum_allowed(
    w_PAC: torch.Tensor, x_PCD: torch.Tensor, allowed_BHST: torch.Tensor | None, *, transposed: bool = False
) -> torch.Tensor:
    """`Σ_c w·x` over the allowed c, where x may hold NaN and infinity, and w is 0 wherever it is not allowed.

    What is allowed is by query and key, and is transposed where c is a query.
    A sum that an allowed element of x makes infinite comes out as NaN, as it would from `inf · 0` or `inf − inf`.
    Whether there is such an element is asked on CPU alone: another device would be waited for.
    """
    if allowed_BHST is None:
        return torch.bmm(w_PAC, x_PCD)
    strange = ~torch.isfinite(x_PCD)
    if strange.is_cpu and not strange.any():
        return torch.bmm(w_PAC, x_PCD)
    allowed_PAC = allowed_BHST.reshape(len(w_PAC), -1, allowed_BHST.size(-1))
    if transposed:
        allowed_PAC = allowed_PAC.transpose(1, 2)
    touched = torch.bmm(allowed_PAC.to(w_PAC.dtype), strange.to(w_PAC.dtype)) > 0
    return torch.bmm(w_PAC, x_PCD.masked_fill(strange, 0.0)).masked_fill_(touched, math.nan)
