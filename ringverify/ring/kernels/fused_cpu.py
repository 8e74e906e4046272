"""torch's fused attention on CPU: blocked, no score matrix, matrix products in the input dtype, sums in float32.

`aten::_scaled_dot_product_flash_attention_for_cpu` differs from the interface in eight ways, seven of them mended here:
1. A row whose keys all weigh 0 gets lse 0, not −inf; so does one of NaN, in a tile of fewer keys than a vector; and one
   with a score of +inf may get lse +inf: see `settled.py`. A row that a mask empties is NaN where its query is.
2. It wants head_dim and value_dim equal; the shorter is padded with zeros, which changes no score and no output.
3. It knows no cotangent of lse; further columns of dout and out bring it in.
4. Under causality it multiplies −inf with the scale, so that a negative one lets masked keys win and 0 gives NaN. Only
   positive scales are passed on; a sign, or the 0, goes into q.
5. In float16 its backward takes longer than in float32 and rounds more, and its forward as long: float16 is converted,
   tile by tile.
6. In bfloat16 its backward sums dk and dv in bfloat16: over the query heads of a key head, and over its inner blocks of
   queries (256 from 768 queries on, 64 from 192 on, else 32), of which a call of 2,048 queries has eight. Nothing but
   calls of 32 queries would keep to the sums in float32 that the ring declares, so its inputs are converted too, for
   backward alone. That is four times as fast without hardware for bfloat16, and about as fast with it. Its forward has
   wide sums, and keys and values it packs itself, for the hardware's sake.
7. It reads keys once for every query head. Where few queries attend them, as in decoding, that is what takes time: the
   heads that share a key head are given to it as so many more queries.
8. In bfloat16 its exp has a relative error of up to 2^-14, and so lse an absolute one: that is what users are promised.
"""

from __future__ import annotations

import torch

from ringverify.ring.kernels.columns import as_given, positive, to_width, with_lse_cotangent
from ringverify.ring.kernels.kernel import Extent, KernelTile, MergedRows, QKVGradients, Setting
from ringverify.ring.kernels.settled import settle_
from ringverify.ring.torch_private import cpu_backward, cpu_forward

FEW_ROWS = 32
"""The op takes that many queries at a time, and reads all keys for them."""
CONVERTED = (128, 512)
"""Least and most rows of a tile that is converted: calls cost little beside their work, and memory is small."""


class FusedCPU:
    """The fused CPU op; see the module."""

    name = "fused_cpu"
    blocked = True
    takes_bias = True
    keeps_out = False
    packs: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.float16)

    def why_not(self, setting: Setting) -> str | None:
        """Anything but softcap, on CPU."""
        if setting.device != "cpu":
            return f"runs on cpu, not on {setting.device}"
        return "knows no softcap" if setting.softcap is not None else None

    def bucket(self, setting: Setting, rows: int) -> int:
        """Half of a rank's rows; an eighth, within limits, of what is converted, which is alive in both dtypes."""
        if setting.dtype.itemsize == 2:
            least, most = CONVERTED
            return max(least, min(-(-rows // 8), most))
        return max(64, -(-rows // 2))

    def at_once(self, setting: Setting, *, backward: bool) -> bool:
        """See `Kernel.at_once`: float16 is converted, and bfloat16 for backward."""
        return not _converted(setting.dtype, backward=backward)

    def held(self, setting: Setting, tile: Extent) -> int:
        """See `Kernel.held`: results, lse, and what the op wants padded or converted; most of it in backward."""
        d, e, width = setting.head_dim, setting.value_dim, max(setting.head_dim, setting.value_dim)
        narrow, flipped = _converted(setting.dtype, backward=True), setting.scale <= 0
        size = 4 if narrow else setting.dtype.itemsize
        rows = tile.of_rows(width + (d < e) * width + (e < d) * 2 * width + narrow * (d + 2 * e) + 2 * flipped * d)
        keys = tile.of_keys(2 * width + (d != e) * width + narrow * (d + e))
        return (rows + keys) * size + tile.of_rows(4) * setting.accumulates.itemsize

    def forward(self, setting: Setting, tile: KernelTile) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        width = max(setting.head_dim, setting.value_dim)
        used = tile.each(torch.Tensor.float) if _converted(setting.dtype, backward=False) else tile
        scaled, used, _ = positive(setting, used)
        used = used.each(lambda x: to_width(x, width))
        if tile.mask is None and used.q.size(2) <= FEW_ROWS:
            out, lse = _each_key_once(used, scaled.scale)
        else:
            out, lse = cpu_forward(*used[:3], 0.0, used.causal, attn_mask=used.bias, scale=scaled.scale)
        out = out[..., : setting.value_dim]
        lse = lse.contiguous()  # its heads lie together, and merging would be several times as slow
        settle_(setting, tile, out, lse)
        return out, lse

    def backward(self, setting: Setting, tile: KernelTile, rows: MergedRows) -> QKVGradients:
        """See `Kernel.backward`."""
        if _converted(setting.dtype, backward=True):
            tile, rows = tile.each(torch.Tensor.float), rows.each(torch.Tensor.float)
        rows = with_lse_cotangent(rows)
        width = max(setting.head_dim, rows.out.size(-1))
        setting, tile, sign = positive(setting, tile)
        tile = tile.each(lambda x: to_width(x, width))
        rows = rows.each(lambda x: to_width(x, width))
        found = cpu_backward(
            *(rows.dout, *tile[:3], rows.out, rows.lse), 0.0, tile.causal, attn_mask=tile.bias, scale=setting.scale
        )
        return as_given(setting, found, sign)


def _converted(dtype: torch.dtype, *, backward: bool) -> bool:
    """Whether tiles are converted to float32; see the module."""
    return dtype == torch.float16 or (backward and dtype == torch.bfloat16)


def _each_key_once(tile: KernelTile, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The op's results on a tile without a mask, with the query heads of a key head as queries of one head."""
    batch, heads, rows, _ = tile.q.shape
    folded = tile.q.reshape(batch, tile.k.size(1), heads // tile.k.size(1) * rows, -1)
    out, lse = cpu_forward(folded, tile.k, tile.v, 0.0, False, scale=scale)
    return out.reshape(batch, heads, rows, -1), lse.reshape(batch, heads, rows)
