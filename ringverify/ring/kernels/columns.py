"""What fused ops do not know, brought in by other columns: unequal head dimensions, signs, the cotangent of lse.

Shape letters: see `ringverify.ring.kernels.kernel`.
"""

from __future__ import annotations

import torch

from ringverify.ring.kernels.kernel import KernelTile, MergedRows, QKVGradients, Setting


def to_width(x: torch.Tensor, width: int) -> torch.Tensor:
    """`x` with zeros after its last axis up to `width`, and that axis contiguous, as fused ops want it.

    Zeros after q and k change no score, zeros after v only add columns of 0 to out.
    """
    if x.size(-1) < width:  # `pad` may choose channels last, where the stride of a single head is 1
        wide = x.new_zeros((*x.shape[:-1], width))
        wide[..., : x.size(-1)] = x
        return wide
    return x if x.stride(-1) == 1 or x.size(-1) == 1 else x.contiguous()


def with_lse_cotangent(rows: MergedRows) -> MergedRows:
    """dout and out with columns after which `Σ_e dout·out` is smaller by dlse; as they are without a dlse.

    Backward needs `Σ_e dout·out − dlse` where fused ops form `Σ_e dout·out`: with one more column, 0 in v, w in dout
    and −dlse / w in out, that sum is what is wanted and dout·v is unchanged. w is 1; in float16, whose largest number
    is 65504, it is the power of two up to 2^15 that leaves −dlse / w below 1, so that a dlse below 2^31 is held.
    """
    dout, out, _, dlse = rows
    if dlse is None:
        return rows
    column = -dlse[..., None]
    weight = torch.ones_like(column)
    if out.dtype == torch.float16:
        weight = torch.ldexp(weight, torch.frexp(column).exponent.clamp(0, 15))
    columns = in_columns(column / weight, out.dtype)
    weights = weight.to(out.dtype).expand(columns.shape)
    return rows._replace(dout=torch.cat([dout, weights], dim=-1), out=torch.cat([out, columns], dim=-1))


def in_columns(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Columns that add up to the column x: one in its own dtype, three in a narrower one, each the others' rest."""
    columns: list[torch.Tensor] = []
    for _ in range(1 if x.dtype == dtype else 3):
        columns.append(x.to(dtype))
        x = x - columns[-1].to(x.dtype)
    return torch.cat(columns, dim=-1)


def positive(setting: Setting, tile: KernelTile) -> tuple[Setting, KernelTile, int]:
    """The same scores with a positive scale, and the sign, or 0, that was moved into q."""
    if setting.scale > 0:
        return setting, tile, 1
    sign = -1 if setting.scale < 0 else 0
    return setting._replace(scale=abs(setting.scale) or 1.0), tile._replace(q=tile.q * sign), sign


def as_given(setting: Setting, gradients: QKVGradients, sign: int) -> QKVGradients:
    """QKVGradients of what `to_width` and `positive` were given, by those of what they returned."""
    dq, dk, dv = gradients
    if sign != 1:
        dq = dq * sign
    return dq[..., : setting.head_dim], dk[..., : setting.head_dim], dv[..., : setting.value_dim]
