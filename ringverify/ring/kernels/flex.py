"""`flex_attention`, compiled, on CUDA devices: what fused ops do not know, which is softcap.

It gives no access to a backward that takes a merged out and lse. The chain rule does the same: merged out is
`Σ_b w_b out_b` with `w_b = exp(lse_b − lse)`, so that a tile's out has the cotangent `w_b · dout` and its lse
`w_b · (dout · (out_b − out) + dlse)`. The tile's forward is computed once more for it.

How it is compiled:
1. Softcap, scale and mask are literals of a function made for them. As values of a closure they would be graph inputs
   where shapes are dynamic: 0-dim tensors on CPU, which a kernel for CUDA loads from as if they were on the device.
2. Each such function has code of its own, because dynamo counts recompilations by code, and after eight runs it
   uncompiled, with all scores in memory. `fullgraph` makes that an error in place of a warning.
3. Head dimensions below 16, which its lowering refuses, are padded with zeros.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from ringverify.ring.kernels.columns import to_width
from ringverify.ring.kernels.kernel import Extent, KernelTile, MergedRows, QKVGradients, Setting
from ringverify.ring.kernels.on_cuda import OnCUDA

NARROWEST = 16
"""The smallest head dimension that flex takes on CUDA devices."""


class Flex(OnCUDA):
    """`torch.nn.attention.flex_attention`; see the module."""

    name = "flex_cuda"

    def _refuses(self, setting: Setting) -> str | None:
        """Up to 32 bits, where triton can compile it."""
        if setting.dtype == torch.float64:
            return "does not compute in float64"
        return None if importlib.util.find_spec("triton") else "needs triton to be compiled"

    def at_once(self, setting: Setting, *, backward: bool) -> bool:
        """See `Kernel.at_once`: where narrow inputs are not converted for a sum."""
        del backward
        return setting.dtype == setting.accumulates

    def held(self, setting: Setting, tile: Extent) -> int:
        """See `Kernel.held`: the tile's own out and its cotangent, also in the dtype of sums, and the gradients."""
        d, e = (max(width, NARROWEST) for width in (setting.head_dim, setting.value_dim))
        elements = tile.of_rows(d + 2 * e) + tile._replace(key_heads=tile.heads).of_keys(d + e) + tile.of_keys(d + e)
        sums = tile.of_rows(d + 4 * e + 4) + tile.of_keys(d + e)
        return elements * setting.dtype.itemsize + sums * setting.accumulates.itemsize

    def _forward(self, setting: Setting, tile: KernelTile) -> tuple[torch.Tensor, torch.Tensor]:
        grouped = tile.q.size(1) != tile.k.size(1)
        given = tile.each(lambda x: to_width(x, max(x.size(-1), NARROWEST)))
        out, aux = compiled(setting.softcap, setting.scale, tile.causal, grouped)(*given[:3])
        return out[..., : setting.value_dim], aux.lse

    def _backward(self, setting: Setting, tile: KernelTile, rows: MergedRows) -> QKVGradients:
        dout, out, lse, dlse = rows
        leaves = tile.each(lambda x: x.detach().requires_grad_())
        with torch.enable_grad():
            out_b, lse_b = self._forward(setting, leaves)
        weight = torch.exp(lse_b.detach() - lse)
        wide = dout.to(setting.accumulates)
        change = (wide * (out_b.detach().to(setting.accumulates) - out.to(setting.accumulates))).sum(dim=-1)
        if dlse is not None:
            change = change + dlse
        cotangents = (weight[..., None] * wide).to(out_b.dtype), (weight * change).to(lse_b.dtype)
        dq, dk, dv = torch.autograd.grad((out_b, lse_b), leaves[:3], cotangents)
        return dq, dk, dv


@functools.cache
def compiled(softcap: float | None, scale: float, causal: bool, grouped: bool) -> Callable[..., Any]:
    """`flex_attention` of q, k and v with these settings, compiled when first called; returns out and `AuxOutput`."""
    return torch.compile(written(softcap, scale, causal, grouped), dynamic=True, fullgraph=True)


def written(softcap: float | None, scale: float, causal: bool, grouped: bool) -> Callable[..., Any]:
    """The function that is compiled, in which the settings are literals; see the module."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    score = "s" if softcap is None else f"{float(softcap)!r} * torch.tanh(s / {float(softcap)!r})"
    if causal:
        score = f"torch.where(j <= i, {score}, -torch.inf)"
    text = (
        f"lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: {score}, scale={float(scale)!r}, "
        f"enable_gqa={grouped!r}, return_aux=AuxRequest(lse=True))"
    )
    known = {"torch": torch, "flex_attention": flex_attention, "AuxRequest": AuxRequest}
    function: Callable[..., Any] = eval(text, known)  # of numbers and booleans
    return function
