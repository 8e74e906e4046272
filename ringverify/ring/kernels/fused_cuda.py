"""torch's fused attention on CUDA devices: flash for 16-bit inputs, memory-efficient for the others and for biases.

Both ops take `(B, H, S, D)`, keep float32 sums and return a natural lse in float32. They differ from the interface:
1. Flash wants head dimensions that are equal and multiples of 8, up to 256; the shorter are padded with zeros. It takes
   no bias: a tile that needs one goes to the streaming kernel.
2. Memory-efficient wants as many key heads as query heads (keys are repeated and their gradients summed) and a bias of
   every row, returns lse padded to a multiple of 32 rows, and reads it with that padding in backward.
3. Neither knows a cotangent of lse; as on CPU, further columns of dout and out bring it in. Where they make rows wider
   than flash takes, memory-efficient computes the tile's backward: both read the same out and lse.
4. Memory-efficient's backward asks out for the stride of its heads, but not for that of its rows: in 16 bits it reads
   them as of a dense `(B, S, H, E)` (torch's kernel_backward.h, `o_strideM`). The other inputs may lie as they like.
5. Both read 16 bytes at a time. Of an address that is no multiple of 16, as in the middle of a KV block,
   memory-efficient complains (`CHECK_ALIGNED_PTR`), and flash reads another one. Of a stride that is none, that of an
   axis of length 1 too, memory-efficient says "no kernel found". Such a tensor is copied.
6. Both backwards add to gradients in any order, unless torch's deterministic mode is on, which `_in_order` sees to.
   Flash then has a sum of dq for every multiprocessor that a pair of batch element and head has to itself.
7. A causal mask is aligned to the bottom right by one and to the top left by another version: causal tiles are square.
8. Of a row that weighs nothing and of one that is NaN flash says alike that lse is +inf (torch's softmax.h); out is NaN
   in the second. Memory-efficient says (0, 0) of the first, and of a row that a mask empties what its query makes of
   it.
9. Flash works on blocks of 64 to 256 keys, the last ones first. Without a mask it says NaN of a row of which the first
   two have no score but −inf, whatever the others have: it rescales by `exp(−inf − (−inf))` (softmax.h,
   `softmax_rescale_o` without `Check_inf`). That loses the other keys: such a row stays NaN, loud and not wrong.
10. What a mask excludes is multiplied with 0, NaN included: see `excluded.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from ringverify.ring.kernels.columns import to_width, with_lse_cotangent
from ringverify.ring.kernels.excluded import largest
from ringverify.ring.kernels.kernel import Extent, KernelTile, MergedRows, QKVGradients, Setting
from ringverify.ring.kernels.on_cuda import OnCUDA
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
READ_BYTES = 16
"""Bytes that both ops read at a time."""
WIDEST_FLASH = 256
"""The largest head dimension that flash takes."""
ERRORS = 2
"""The mode of `torch.use_deterministic_algorithms(True)`."""
PROCESSORS = 132
"""Multiprocessors of a device that is not there: those of an H100."""


class EfficientCUDA(OnCUDA):
    """`aten::_scaled_dot_product_efficient_attention`; see the module."""

    name = "efficient_cuda"
    takes_bias = True
    longest = 4096  # a bias of that size is still affordable

    def _refuses(self, setting: Setting) -> str | None:
        """Anything but softcap, up to 32 bits."""
        if setting.dtype == torch.float64:
            return "does not compute in float64"
        if setting.dtype == torch.bfloat16 and (capability := _capability()) < AMPERE:
            return f"needs compute capability 8.0 for bfloat16, and this device has {capability[0]}.{capability[1]}"
        return "knows no softcap" if setting.softcap is not None else None

    def held(self, setting: Setting, tile: Extent) -> int:
        """See `Kernel.held`: results, also as wider sums, and keys and values once for every query head."""
        return _held(setting, tile, repeated=3)

    def _forward(self, setting: Setting, tile: KernelTile) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, _, _ = tile
        given = _repeated(tile).each(lambda x: _readable(x, x.size(-1)))
        out, lse, *_ = cuda_efficient_forward(
            *given[:3], _aligned_bias(tile), True, 0.0, tile.causal, scale=setting.scale
        )
        lse = lse[..., : q.size(2)]
        # (0, 0) is also said of a query of 0 and values of 0. Scores of −inf come of products that may overflow alone.
        most_k = largest(k).float().amax(dim=-1, keepdim=True).repeat_interleave(q.size(1) // k.size(1), dim=1)
        most = largest(q).float() * most_k * (q.size(-1) * setting.scale)
        emptied = ~(most < torch.finfo(torch.float32).max) & (lse == 0) & (out == 0).all(dim=-1)
        if tile.bias is not None:
            emptied = emptied | (tile.bias == -torch.inf).all(dim=-1)
        return out.masked_fill(emptied[..., None], 0.0), lse.masked_fill(emptied, -torch.inf)

    def _backward(self, setting: Setting, tile: KernelTile, rows: MergedRows) -> QKVGradients:
        dout, out, lse, _ = with_lse_cotangent(rows)
        key_heads, bias = tile.k.size(1), _aligned_bias(tile)
        q, k, v, _ = _repeated(tile)
        q, k = _readable(q, q.size(-1)), _readable(k, k.size(-1))
        v, dout, out = (_readable(x, out.size(-1)) for x in (v, dout, out))
        out = out.transpose(1, 2).contiguous().transpose(1, 2)  # see 4. of the module
        lse = pad(lse, (0, -lse.size(-1) % LSE_ALIGNMENT), value=torch.inf).contiguous()
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        with _in_order(setting):
            dq, dk, dv, _ = cuda_efficient_backward(
                dout, q, k, v, bias, out, lse, no_dropout, no_dropout, 0.0, [True, True, True, False],
                tile.causal, scale=setting.scale,
            )  # fmt: skip
        if q.size(1) > key_heads:
            dk, dv = (x.unflatten(1, (key_heads, -1)).sum(dim=2, dtype=setting.accumulates) for x in (dk, dv))
        return dq, dk, dv


EFFICIENT = EfficientCUDA()


class FlashCUDA(OnCUDA):
    """`aten::_scaled_dot_product_flash_attention`; see the module."""

    name = "flash_cuda"

    def _refuses(self, setting: Setting) -> str | None:
        """Anything but softcap, in 16 bits."""
        if setting.dtype not in (torch.bfloat16, torch.float16):
            return f"computes in 16 bits, not in {setting.dtype}"
        if (capability := _capability()) < AMPERE:
            return f"needs compute capability 8.0, and this device has {capability[0]}.{capability[1]}"
        if max(setting.head_dim, setting.value_dim) > WIDEST_FLASH:
            return f"takes head dimensions up to {WIDEST_FLASH}"
        return "knows no softcap" if setting.softcap is not None else None

    def held(self, setting: Setting, tile: Extent) -> int:
        """See `Kernel.held`: results, also as wider sums, what the op wants padded, and its sums of dq."""
        return _held(setting, tile, repeated=1) + _in_order_bytes(setting, tile)

    def _forward(self, setting: Setting, tile: KernelTile) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(tile.q.size(-1), tile.v.size(-1))
        given = tile.each(lambda x: _readable(x, width))
        out, lse, *_ = cuda_flash_forward(*given[:3], 0.0, tile.causal, False, scale=setting.scale)
        strange = lse == torch.inf  # see 8. of the module
        return out, lse.masked_fill(strange, -torch.inf).masked_fill(strange & out[..., 0].isnan(), torch.nan)

    def _backward(self, setting: Setting, tile: KernelTile, rows: MergedRows) -> QKVGradients:
        wider = with_lse_cotangent(rows)
        width = max(tile.q.size(-1), wider.out.size(-1))
        if width > WIDEST_FLASH:  # by the columns of dlse
            return EFFICIENT._backward(setting, tile, rows)
        q, k, v, _ = tile.each(lambda x: _readable(x, width))
        wider = wider.each(lambda x: _readable(x, width))
        dout, out, lse, _ = wider
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        with _in_order(setting):
            dq, dk, dv = cuda_flash_backward(
                dout, q, k, v, out, lse.contiguous(), None, None, q.size(2), k.size(2), 0.0, tile.causal,
                no_dropout, no_dropout, scale=setting.scale,
            )  # fmt: skip
        return dq, dk, dv


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


def _processors() -> int:
    """Multiprocessors of the current device."""
    if not torch.cuda.is_available():
        return PROCESSORS
    count: int = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return count


def _held(setting: Setting, tile: Extent, *, repeated: int) -> int:
    """Rows and keys padded to one width, keys that are finite, dq, dk and dv of every query head, and both as sums."""
    width = _multiple_of_8(max(setting.head_dim, setting.value_dim))
    by_head = tile._replace(key_heads=tile.heads)
    elements = by_head.of_rows(5 * width) + by_head.of_keys((2 + repeated) * width) + tile.of_keys(2 * width)
    sums = by_head.of_rows(width + 4) + tile.of_keys(2 * width)
    return elements * setting.dtype.itemsize + sums * setting.accumulates.itemsize


def _in_order_bytes(setting: Setting, tile: Extent) -> int:
    """The float32 sums of dq by which flash's deterministic backward adds up in order.

    As torch's flash_api.cpp makes them (`dq_accum` of `mha_bwd`): rows a multiple of 128, columns one of 32, or of 64
    above 128.
    """
    if not (setting.deterministic or torch.get_deterministic_debug_mode() == ERRORS):
        return 0
    width = max(setting.head_dim, setting.value_dim)
    step = 32 if width <= 128 else 64
    splits = -(-_processors() // (tile.batch * tile.heads))
    rows = tile._replace(rows=-(-tile.rows // 128) * 128)
    return splits * rows.of_rows(-(-width // step) * step) * torch.float32.itemsize


def _multiple_of_8(width: int) -> int:
    return -(-width // 8) * 8


def _readable(x: torch.Tensor, width: int) -> torch.Tensor:
    """`x` with zeros after its last axis up to a multiple of 8, at an address and in strides that both ops can read."""
    x = to_width(x, _multiple_of_8(width))
    steps = (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1]))
    return x.clone(memory_format=torch.contiguous_format) if any(step % READ_BYTES for step in steps) else x


def _repeated(tile: KernelTile) -> KernelTile:
    """The tile with keys and values once for every query head."""
    group = tile.q.size(1) // tile.k.size(1)
    if group == 1:
        return tile
    return tile._replace(k=tile.k.repeat_interleave(group, dim=1), v=tile.v.repeat_interleave(group, dim=1))


def _aligned_bias(tile: KernelTile) -> torch.Tensor | None:
    """The bias in the dtype of q for all batch elements, heads and rows; rows lie a multiple of 16 elements apart."""
    if tile.bias is None:
        return None
    shape = *tile.q.shape[:3], tile.k.size(2)
    return pad(tile.bias.to(tile.q.dtype), (0, -shape[-1] % 16))[..., : shape[-1]].expand(shape)
