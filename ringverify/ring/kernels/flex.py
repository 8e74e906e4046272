"""`flex_attention`, compiled, on CUDA devices: what fused ops do not know, which is softcap.

It gives no access to a backward that takes a merged out and lse. The chain rule does the same: merged out is
`Σ_b w_b out_b` with `w_b = exp(lse_b − lse)`, so that a tile's out has the cotangent `w_b · dout` and its lse
`w_b · (dout · (out_b − out) + dlse)`. The tile's forward is computed once more for it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from ringverify.ring.kernels.kernel import Extent, Gradients, Setting, TileMask


class Flex:
    """`torch.nn.attention.flex_attention`; see the module."""

    name = "flex_cuda"
    blocked = True
    takes_bias = False
    packs: tuple[torch.dtype, ...] = ()

    def why_not(self, setting: Setting) -> str | None:
        """Softcap, up to 32 bits, on CUDA devices, where triton can compile it."""
        if setting.device != "cuda":
            return f"is compiled for cuda, not for {setting.device}, where it has no backward"
        if setting.dtype == torch.float64:
            return "does not compute in float64"
        return None if importlib.util.find_spec("triton") else "needs triton to be compiled"

    def bucket(self, setting: Setting, rows: int) -> int:
        """Launching and merging cost little beside such tiles."""
        del setting
        return min(8192, max(256, -(-rows // 2)))

    def at_once(self, setting: Setting, *, backward: bool) -> bool:
        """See `Kernel.at_once`: where narrow inputs are not converted for a sum."""
        del backward
        return setting.dtype == setting.accumulates

    def held(self, setting: Setting, tile: Extent) -> int:
        """See `Kernel.held`: the tile's own out and its cotangent, also in the dtype of sums, and the gradients."""
        d, e = setting.head_dim, setting.value_dim
        elements = tile.of_rows(d + 2 * e) + tile._replace(key_heads=tile.heads).of_keys(d + e)
        sums = tile.of_rows(d + 4 * e + 4) + tile.of_keys(d + e)
        return elements * setting.dtype.itemsize + sums * setting.accumulates.itemsize

    def forward(
        self, setting: Setting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        out, lse = attend(compiled(), setting, q, k, v, mask)
        return out, lse

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
        leaves = q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
        with torch.enable_grad():
            out_b, lse_b = attend(compiled(), setting, *leaves, mask)
        weight = torch.exp(lse_b.detach() - lse)
        wide = dout.to(setting.accumulates)
        change = (wide * (out_b.detach().to(setting.accumulates) - out.to(setting.accumulates))).sum(dim=-1)
        if dlse is not None:
            change = change + dlse
        cotangents = (weight[..., None] * wide).to(out_b.dtype), (weight * change).to(lse_b.dtype)
        dq, dk, dv = torch.autograd.grad((out_b, lse_b), leaves, cotangents)
        return dq, dk, dv


def attend(
    flex: Callable[..., Any], setting: Setting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call of `flex_attention`, compiled or not."""
    cap = setting.softcap

    def score(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        return s if mask is None else torch.where(j <= i, s, -torch.inf)

    out, lse = flex(q, k, v, score_mod=score, scale=setting.scale, enable_gqa=q.size(1) != k.size(1), return_lse=True)
    return out, lse


@functools.cache
def compiled() -> Callable[..., Any]:
    """`flex_attention`, compiled when first called."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
