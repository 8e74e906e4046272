"""`flex_attention`, compiled, on CUDA devices: what fused ops do not know, which is softcap.

It gives no access to a backward that takes a merged out and lse. The chain rule does the same: merged out is
`Σ_b w_b out_b` with `w_b = exp(lse_b − lse)`, so that a tile's out has the cotangent `w_b · dout` and its lse
`w_b · (dout · (out_b − out) + dlse)`. The tile's forward is computed once more for it.

How it is compiled:
1. Softcap, scale and mask are literals of a function made for them. As values of a closure they would be graph inputs
   where shapes are dynamic: 0-dim tensors on CPU, which a kernel for CUDA loads from as if they were on the device.
2. Each such function, and each kind of inputs for which dynamo compiles it once more, has code of its own, because
   dynamo counts recompilations by code, and after eight runs it uncompiled, with all scores in memory. `fullgraph`
   makes that an error in place of a warning. The code is said to be of this file: what has none, torch 2.11 calls
   from a function that all of them share.
3. Head dimensions below 16, which its lowering refuses, are padded with zeros.
4. Compiling takes seconds, for each such kind: a call of few pairs is left to the streaming kernel.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ringverify.ring.kernels.columns import to_width
from ringverify.ring.kernels.kernel import Extent, KernelTile, MergedRows, QKVGradients, Setting
from ringverify.ring.kernels.on_cuda import OnCUDA

NARROWEST = 16
"""The smallest head dimension that flex takes on CUDA devices."""
FEW_PAIRS = 512 * 512
"""Pairs of a query and a key on a rank up to which their scores are sooner computed than a kernel for them compiled."""


class Flex(OnCUDA):
    """`torch.nn.attention.flex_attention`; see the module."""

    name = "flex_cuda"

    def _refuses(self, setting: Setting) -> str | None:
        """Up to 32 bits, where triton can compile it and that is worth it."""
        if setting.dtype == torch.float64:
            return "does not compute in float64"
        if setting.pairs is not None and setting.pairs <= FEW_PAIRS:
            return "takes seconds to be compiled, and a rank has few pairs"
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
        q, k, v, _ = tile.each(lambda x: to_width(x, max(x.size(-1), NARROWEST)))
        out, aux = compiled(setting.softcap, setting.scale, tile.causal, kind_of(q, k, v))(q, k, v)
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


class CompiledKind(NamedTuple):
    """What dynamo compiles a function once more for, by its guards on inputs whose lengths are dynamic.

    Attributes:
        dtype: of the inputs.
        widths: D and E.
        heads: H and K.
        single: whether there is one batch element, one query, one key.
        differentiated: whether gradients are wanted.
    """

    dtype: torch.dtype
    widths: tuple[int, int]
    heads: tuple[int, int]
    single: tuple[bool, bool, bool]
    differentiated: bool


def kind_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> CompiledKind:
    """The kind of `q (B, H, S, D)`, `k (B, K, T, D)` and `v (B, K, T, E)`."""
    single = q.size(0) == 1, q.size(2) == 1, k.size(2) == 1
    return CompiledKind(q.dtype, (q.size(3), v.size(3)), (q.size(1), k.size(1)), single, q.requires_grad)


@functools.cache
def compiled(softcap: float | None, scale: float, causal: bool, kind: CompiledKind) -> Callable[..., Any]:
    """`flex_attention` with these settings, of inputs of a kind, compiled when first called; see `written`."""
    return torch.compile(written(softcap, scale, causal, kind), dynamic=True, fullgraph=True)


def written(softcap: float | None, scale: float, causal: bool, kind: CompiledKind) -> Callable[..., Any]:
    """A function of q, k and v that returns out and `AuxOutput`, in which the settings are literals; see the module."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    score = "s" if softcap is None else f"{float(softcap)!r} * torch.tanh(s / {float(softcap)!r})"
    if causal:
        score = f"torch.where(j <= i, {score}, -torch.inf)"
    heads, key_heads = kind.heads
    text = (
        f"lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: {score}, scale={float(scale)!r}, "
        f"enable_gqa={heads != key_heads!r}, return_aux=AuxRequest(lse=True))"
    )
    known = {"torch": torch, "flex_attention": flex_attention, "AuxRequest": AuxRequest}
    function: Callable[..., Any] = eval(compile(text, __file__, "eval"), known)  # of numbers and booleans
    return function
