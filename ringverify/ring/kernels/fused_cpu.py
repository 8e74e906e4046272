"""torch's fused attention on CPU: blocked, no score matrix, matrix products in the input dtype, sums in float32.

`aten::_scaled_dot_product_flash_attention_for_cpu` differs from the interface in eight ways, seven of them mended here:
1. A row whose keys all weigh 0 gets lse 0, not −inf; so does one of NaN, in a tile of fewer keys than a vector; and one
   with a score of +inf may get lse +inf: see `settled.py`. A row that a mask empties is NaN where its query is.
2. It wants head_dim and value_dim equal; the shorter is padded with zeros, which changes no score and no output.
3. It knows no cotangent of lse; further columns of dout and out bring it in.
4. Under causality it multiplies −inf with the scale, so that a negative one lets masked keys win and 0 gives NaN. Only
   positive scales are passed on; a sign, or the 0, goes into q.
5. In float16 its backward takes longer than in float32 and rounds more, and its forward as long: float16 is converted,
   tile by tile. bfloat16 is not, where hardware multiplies it several times as fast.
6. In bfloat16 its backward sums dk and dv over the query heads of a key head in bfloat16 (root mean square error 0.8 u
   for one head, 1.8 u for eight): each of them gets a call of its own, and their results are added in float32. It sums
   over its inner blocks like that too (of 256 queries from 768 on, of 64 from 192 on, else of 32), so that tiles here
   have three of those: with eight, dv was off by 4.6 u at 16,384 positions. Its forward has wide sums. Keys and values
   it packs itself, for the hardware's sake.
7. It reads keys once for every query head. Where few queries attend them, as in decoding, that is what takes time: the
   heads that share a key head are given to it as so many more queries.
8. In bfloat16 its exp has a relative error of up to 2^-14, and so lse an absolute one: that is what users are promised.
"""

from __future__ import annotations

import torch

from ringverify.ring.accumulate import widened_at_once
from ringverify.ring.kernels.columns import as_given, positive, to_width, with_lse_cotangent
from ringverify.ring.kernels.kernel import Extent, KernelTile, MergedRows, QKVGradients, Setting
from ringverify.ring.kernels.settled import settle_
from ringverify.ring.torch_private import cpu_backward, cpu_forward

FEW_ROWS = 32
"""The op takes that many queries at a time, and reads all keys for them."""


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
        """Half of a rank's rows; in bfloat16 three inner blocks, for the sake of its sums: see the module."""
        if setting.dtype == torch.bfloat16:
            return next((three for three in (768, 192) if rows >= three), 96)
        return max(64, -(-rows // 2))

    def at_once(self, setting: Setting, *, backward: bool) -> bool:
        """See `Kernel.at_once`: float16 is converted, and bfloat16 gradients have narrow sums."""
        return setting.dtype != torch.float16 and not (backward and setting.dtype == torch.bfloat16)

    def held(self, setting: Setting, tile: Extent) -> int:
        """See `Kernel.held`: results, also as wider sums, and what the op wants padded or converted."""
        d, e, width = setting.head_dim, setting.value_dim, max(setting.head_dim, setting.value_dim)
        half, flipped = setting.dtype == torch.float16, setting.scale <= 0
        size = 4 if half else setting.dtype.itemsize
        rows = tile.of_rows(width + (d < e) * width + (e < d) * 2 * width + half * (d + 2 * e) + 2 * flipped * d)
        keys = tile.of_keys(2 * width + (d != e) * width + half * (d + e))
        sums = tile.of_rows(4)
        if setting.dtype == torch.bfloat16:
            results = max(tile.of_rows(width), tile.of_keys(width))
            sums += widened_at_once(results, tile.batch * tile.heads * width)
            if tile.heads > tile.key_heads:
                sums += tile.of_keys(2 * width)
                rows += tile.of_rows(width) * tile.key_heads // tile.heads
        return (rows + keys) * size + sums * setting.accumulates.itemsize

    def forward(self, setting: Setting, tile: KernelTile) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        width = max(setting.head_dim, setting.value_dim)
        used = tile.each(torch.Tensor.float) if setting.dtype == torch.float16 else tile
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
        if setting.dtype == torch.float16:
            tile, rows = tile.each(torch.Tensor.float), rows.each(torch.Tensor.float)
        rows = with_lse_cotangent(rows)
        width = max(setting.head_dim, rows.out.size(-1))
        setting, tile, sign = positive(setting, tile)
        tile = tile.each(lambda x: to_width(x, width))
        rows = rows.each(lambda x: to_width(x, width))
        q, k, v, _ = tile
        dout, out, lse, _ = rows
        group = q.size(1) // k.size(1)
        causal, bias, scale = tile.causal, tile.bias, setting.scale
        if q.dtype != torch.bfloat16 or group == 1:
            found = cpu_backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
            return as_given(setting, found, sign)
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=setting.accumulates) for x in (k, v))
        for member in range(group):
            part = slice(member, None, group)
            one = bias[:, part] if bias is not None and bias.dim() == 4 and bias.size(1) > 1 else bias
            dq[:, part], dk_g, dv_g = cpu_backward(
                dout[:, part], q[:, part], k, v, out[:, part], lse[:, part], 0.0, causal, attn_mask=one, scale=scale
            )
            dk += dk_g
            dv += dv_g
            del dk_g, dv_g
        return as_given(setting, (dq, dk, dv), sign)


def _each_key_once(tile: KernelTile, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The op's results on a tile without a mask, with the query heads of a key head as queries of one head."""
    batch, heads, rows, _ = tile.q.shape
    folded = tile.q.reshape(batch, tile.k.size(1), heads // tile.k.size(1) * rows, -1)
    out, lse = cpu_forward(folded, tile.k, tile.v, 0.0, False, scale=scale)
    return out.reshape(batch, heads, rows, -1), lse.reshape(batch, heads, rows)
