"""torch's fused attention on CUDA devices: flash for 16-bit inputs, memory-efficient for the others and for biases.

Both ops take `(B, H, S, D)`, keep float32 sums and return a natural lse in float32. They differ from the interface:
1. Flash wants head dimensions that are equal and multiples of 8, up to 256; the shorter are padded with zeros. It takes
   no bias: a tile that needs one goes to the streaming kernel.
2. Memory-efficient wants as many key heads as query heads (keys are repeated and their gradients summed), returns lse
   padded to a multiple of 32 rows, and reads it with that padding in backward.
3. Neither knows a cotangent of lse; as on CPU, further columns of dout and out bring it in.
4. Memory-efficient's backward asks out for the stride of its heads, but not for that of its rows: in 16 bits it reads
   them as of a dense `(B, S, H, E)` (torch's kernel_backward.h, `o_strideM`). The other inputs may lie as they like.
5. Both backwards add to gradients in any order, unless torch's deterministic mode is on, which `_in_order` sees to.
6. A causal mask is aligned to the bottom right by one and to the top left by another version: causal tiles are square.
7. Of a row that weighs nothing and of one that is NaN flash says alike that lse is +inf (torch's softmax.h).
   Memory-efficient says of a row that a mask empties what its query makes of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from ringverify.ring.kernels.columns import positive, to_width, with_lse_cotangent
from ringverify.ring.kernels.kernel import Extent, Gradients, Setting, TileMask
from ringverify.ring.torch_private import (
    cuda_efficient_backward,
    cuda_efficient_forward,
    cuda_flash_backward,
    cuda_flash_forward,
)

AMPERE = (8, 0)
"""The compute capability from which on flash runs, and memory-efficient in bfloat16."""
LSE_ALIGNMENT = 32
"""Rows that the memory-efficient op pads lse to a multiple of."""


class FlashCUDA:
    """`aten::_scaled_dot_product_flash_attention`; see the module."""

    name = "flash_cuda"
    blocked = True
    takes_bias = False
    packs: tuple[torch.dtype, ...] = ()
    widest = 256

    def why_not(self, setting: Setting) -> str | None:
        """Anything but softcap, in 16 bits, on CUDA devices."""
        if setting.device != "cuda":
            return f"runs on cuda, not on {setting.device}"
        if setting.dtype not in (torch.bfloat16, torch.float16):
            return f"computes in 16 bits, not in {setting.dtype}"
        if (capability := _capability()) < AMPERE:
            return f"needs compute capability 8.0, and this device has {capability[0]}.{capability[1]}"
        if max(setting.head_dim, setting.value_dim + 3) > self.widest:
            return f"takes head dimensions up to {self.widest}, three columns for the cotangent of lse included"
        return "knows no softcap" if setting.softcap is not None else None

    def bucket(self, setting: Setting, rows: int) -> int:
        """Launching and merging cost little beside such tiles."""
        del setting
        return min(8192, max(256, -(-rows // 2)))

    def at_once(self, setting: Setting, *, backward: bool) -> bool:
        """See `Kernel.at_once`: sums are float32, those of dq in memory of their own."""
        del setting, backward
        return True

    def held(self, setting: Setting, tile: Extent) -> int:
        """See `Kernel.held`: results, also as wider sums, and what the op wants padded."""
        return _held(setting, tile, repeated=1)

    def forward(
        self, setting: Setting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        q, scale, _ = positive(q, setting.scale)
        width = _multiple_of_8(max(setting.head_dim, setting.value_dim))
        q, k, v = (to_width(x, width) for x in (q, k, v))
        out, lse, *_ = cuda_flash_forward(q, k, v, 0.0, mask is not None, False, scale=scale)
        strange = lse == torch.inf  # see 7. of the module
        lse = lse.masked_fill(strange, -torch.inf).masked_fill(strange & out[..., 0].isnan(), torch.nan)
        return out[..., : setting.value_dim], lse

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
        q, scale, sign = positive(q, setting.scale)
        dout, out = with_lse_cotangent(dout, out, dlse)
        width = _multiple_of_8(max(setting.head_dim, out.size(-1)))
        q, k, v, dout, out = (to_width(x, width) for x in (q, k, v, dout, out))
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        with _in_order(setting):
            dq, dk, dv = cuda_flash_backward(
                dout, q, k, v, out, lse.contiguous(), None, None, q.size(2), k.size(2), 0.0, mask is not None,
                no_dropout, no_dropout, scale=scale,
            )  # fmt: skip
        if sign != 1:
            dq = dq * sign
        return dq[..., : setting.head_dim], dk[..., : setting.head_dim], dv[..., : setting.value_dim]


class EfficientCUDA:
    """`aten::_scaled_dot_product_efficient_attention`; see the module."""

    name = "efficient_cuda"
    blocked = True
    takes_bias = True
    packs: tuple[torch.dtype, ...] = ()

    def why_not(self, setting: Setting) -> str | None:
        """Anything but softcap, up to 32 bits, on CUDA devices."""
        if setting.device != "cuda":
            return f"runs on cuda, not on {setting.device}"
        if setting.dtype == torch.float64:
            return "does not compute in float64"
        if setting.dtype == torch.bfloat16 and (capability := _capability()) < AMPERE:
            return f"needs compute capability 8.0 for bfloat16, and this device has {capability[0]}.{capability[1]}"
        return "knows no softcap" if setting.softcap is not None else None

    def bucket(self, setting: Setting, rows: int) -> int:
        """Launching and merging cost little beside such tiles; a bias of that size is still affordable."""
        del setting
        return min(4096, max(256, -(-rows // 2)))

    def at_once(self, setting: Setting, *, backward: bool) -> bool:
        """See `Kernel.at_once`: sums are float32, those of dq in memory of their own."""
        del setting, backward
        return True

    def held(self, setting: Setting, tile: Extent) -> int:
        """See `Kernel.held`: results, also as wider sums, and keys and values once for every query head."""
        return _held(setting, tile, repeated=3)

    def forward(
        self, setting: Setting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        q, scale, _ = positive(q, setting.scale)
        q, k, v = (to_width(x, _multiple_of_8(x.size(-1))) for x in (q, *_repeated(q, k, v)))
        bias = _aligned_bias(mask, q, k)
        out, lse, _, _ = cuda_efficient_forward(q, k, v, bias, True, 0.0, isinstance(mask, str), scale=scale)
        lse = lse[..., : q.size(2)]
        if isinstance(mask, torch.Tensor):
            emptied = (mask == -torch.inf).all(dim=-1)
            out, lse = out.masked_fill(emptied[..., None], 0.0), lse.masked_fill(emptied, -torch.inf)
        return out[..., : setting.value_dim], lse

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
        key_heads = k.size(1)
        q, scale, sign = positive(q, setting.scale)
        dout, out = with_lse_cotangent(dout, out, dlse)
        width = _multiple_of_8(out.size(-1))
        k, v = _repeated(q, k, v)
        q, k = (to_width(x, _multiple_of_8(x.size(-1))) for x in (q, k))
        v, dout, out = (to_width(x, width) for x in (v, dout, out))
        out = out.transpose(1, 2).contiguous().transpose(1, 2)  # see 4. of the module
        bias = _aligned_bias(mask, q, k)
        lse = pad(lse, (0, -lse.size(-1) % LSE_ALIGNMENT), value=torch.inf)
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        with _in_order(setting):
            dq, dk, dv, _ = cuda_efficient_backward(
                dout, q, k, v, bias, out, lse, no_dropout, no_dropout, 0.0, [True, True, True, False],
                isinstance(mask, str), scale=scale,
            )  # fmt: skip
        if q.size(1) > key_heads:
            dk, dv = (x.unflatten(1, (key_heads, -1)).sum(dim=2, dtype=setting.accumulates) for x in (dk, dv))
        if sign != 1:
            dq = dq * sign
        return dq[..., : setting.head_dim], dk[..., : setting.head_dim], dv[..., : setting.value_dim]


@contextlib.contextmanager
def _in_order(setting: Setting) -> Iterator[None]:
    """Torch's deterministic mode for the launch of an op, where the call has to be deterministic.

    It is a setting of the process: elsewhere it is the user's to choose, because it slows these backwards down. What
    is called here is `torch.use_deterministic_algorithms`, except that it does not import inductor, for seconds.
    """
    if not setting.deterministic:
        yield
        return
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def _capability() -> tuple[int, int]:
    """Of the current device; where there is none, nothing is going to be computed either."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else AMPERE


def _held(setting: Setting, tile: Extent, *, repeated: int) -> int:
    """Rows and keys padded to one width, dq, dk and dv of every query head, and both as sums."""
    width = _multiple_of_8(max(setting.head_dim, setting.value_dim))
    by_head = tile._replace(key_heads=tile.heads)
    elements = by_head.of_rows(5 * width) + by_head.of_keys((2 + repeated) * width)
    sums = by_head.of_rows(width + 4) + tile.of_keys(2 * width)
    return elements * setting.dtype.itemsize + sums * setting.accumulates.itemsize


def _multiple_of_8(width: int) -> int:
    return -(-width // 8) * 8


def _repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values once for every query head."""
    group = q.size(1) // k.size(1)
    return (k, v) if group == 1 else (k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def _aligned_bias(mask: TileMask, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """The bias in the dtype of q for all batch elements and heads, its rows 16 elements apart or a multiple of that."""
    if not isinstance(mask, torch.Tensor):
        return None
    rows, keys = mask.shape[-2:]
    aligned = pad(mask.to(q.dtype), (0, -keys % 16))[..., :keys]
    return aligned.expand(q.size(0), q.size(1), rows, k.size(2))
