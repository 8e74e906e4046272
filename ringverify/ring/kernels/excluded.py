"""What a mask excludes, kept out of ops that multiply it with a weight of 0, without asking the host.

`0 · NaN` is NaN, so that under a mask a key or a row that is not finite reaches those that do not attend it. On a CPU
the caller asks whether there is one, and leaves such tiles to the streaming kernel. On a CUDA device asking waits for
all work that is queued. There such keys and rows become 0 in every tile with a mask, and after the op what attends them
becomes NaN. So under a mask a row is NaN for every key that it attends and that is not finite, an infinite one of score
−inf included, which weighs nothing in a tile without a mask.

Shape letters: see `ringverify.ring.kernels.kernel`; G = H / K queries heads read one key head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringverify.ring.kernels.kernel import TileMask


class TileRows(NamedTuple):
    """What a backward pass reads of some rows; see `Kernel.backward`."""

    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None


class Affected(NamedTuple):
    """Which rows of a tile attend a key or a value that is not finite, each `(B, H, S)` or a 1 there, or `None`."""

    key: torch.Tensor | None
    value: torch.Tensor | None


def without_strange_keys(
    mask: TileMask, heads: int, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Affected]:
    """k and v with 0 for those that are not finite, and which rows attend one; as they are without a mask.

    Args:
        mask: of the tile.
        heads: H.
        k: `(B, K, T, D)`.
        v: `(B, K, T, E)`.
    """
    if mask is None:
        return k, v, Affected(None, None)
    strange = ~_finite(k), ~_finite(v)
    k, v = (x.masked_fill(which[..., None], 0.0) for x, which in zip((k, v), strange, strict=True))
    return k, v, Affected(*(_attending(mask, which.repeat_interleave(heads // k.size(1), dim=1)) for which in strange))


def _attending(mask: torch.Tensor | str, strange_BHT: torch.Tensor) -> torch.Tensor:
    if isinstance(mask, torch.Tensor):
        return _meet("bhst,bht->bhs", mask, strange_BHT)
    place = torch.arange(strange_BHT.size(-1), device=strange_BHT.device)  # of keys and of rows: a square
    return place >= place.where(strange_BHT, place.numel()).amin(dim=-1, keepdim=True)


def without_strange_rows(
    mask: TileMask, key_heads: int, rows: TileRows
) -> tuple[TileRows, torch.Tensor | None, torch.Tensor | None]:
    """TileRows that add nothing where they are not finite or attend nothing, and what they spoil.

    Args:
        mask: of the tile.
        key_heads: K.
        rows: of the tile.

    Returns:
        The rows, as they are without a mask; which of them are not finite, `(B, H, S)`; and which keys those attend,
        `(B, K, T)`.
    """
    if mask is None:
        return rows, None, None
    nothing = rows.lse == torch.inf
    finite = _finite(rows.q) & _finite(rows.dout) & _finite(rows.out) & ~rows.lse.isnan()
    if rows.dlse is not None:
        finite &= rows.dlse.isfinite()
    strange_BHS = ~(finite | nothing)
    if isinstance(mask, str):
        place = torch.arange(rows.q.size(2), device=rows.q.device)
        last_BH1 = place.where(strange_BHS, -1).amax(dim=-1, keepdim=True)
        attended = place <= last_BH1
    else:
        attended = _meet("bhst,bhs->bht", mask, strange_BHS)
    gone = ~finite | nothing
    dout, q, out = (x.masked_fill(gone[..., None], 0.0) for x in (rows.dout, rows.q, rows.out))
    lse = rows.lse.masked_fill(gone, torch.inf)
    dlse = None if rows.dlse is None else rows.dlse.masked_fill(gone, 0.0)
    attended_BKT = attended.view(len(attended), key_heads, -1, attended.size(-1)).any(dim=2)
    return TileRows(dout, q, out, lse, dlse), strange_BHS, attended_BKT


def spoilt(x: torch.Tensor, *which: torch.Tensor | None) -> torch.Tensor:
    """`x` with NaN in some rows; `x` has their axes, or one more."""
    for rows in which:
        if rows is not None:
            x = x.masked_fill(rows if rows.dim() == x.dim() else rows[..., None], torch.nan)
    return x


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Whether all of the last axis is finite; one pass and no copy."""
    largest: torch.Tensor = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1)
    return largest < torch.inf


def _meet(equation: str, bias: torch.Tensor, strange: torch.Tensor) -> torch.Tensor:
    """Whether one of some rows or keys meets a strange one; nothing of size B H S T is made."""
    allowed = (bias > -torch.inf)[(None,) * (4 - bias.dim())]
    if allowed.size(2) == 1:  # one row for all
        allowed = allowed.expand(-1, -1, strange.size(-1) if equation.endswith("bht") else 1, -1)
    return torch.einsum(equation, allowed.float(), strange.float()) > 0
