"""What a mask excludes, kept out of ops that multiply it with a weight of 0, without asking the host.

`0 · NaN` is NaN, so that under a mask a key or a row that is not finite reaches those that do not attend it. On a CPU
the caller asks whether there is one, and leaves such tiles to the streaming kernel. On a CUDA device asking waits for
all work that is queued. There such keys and rows become 0 in every tile with a mask, and after the op what attends them
becomes NaN. So under a mask a row is NaN for every key that it attends and that is not finite, an infinite one of score
−inf included, which weighs nothing in a tile without a mask.

Shape letters: see `ringverify.ring.kernels.kernel`; G = H / K queries heads read one key head.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ringverify.ring.kernels.kernel import KernelTile, MergedRows


class Affected(NamedTuple):
    """Which rows of a tile attend a key or a value that is not finite, each `(B, H, S)` or a 1 there, or `None`."""

    key: torch.Tensor | None
    value: torch.Tensor | None


def without_strange_keys(tile: KernelTile) -> tuple[KernelTile, Affected]:
    """The tile with 0 for keys and values that are not finite, and which rows attend one; as it is without a mask."""
    q, k, v, mask = tile
    if mask is None:
        return tile, Affected(None, None)
    strange = ~_finite(k), ~_finite(v)
    k, v = (_filled(x, which, 0.0) for x, which in zip((k, v), strange, strict=True))
    by_head = (which.repeat_interleave(q.size(1) // k.size(1), dim=1) for which in strange)
    return KernelTile(q, k, v, mask), Affected(*(_attending(mask, which) for which in by_head))


def _attending(mask: torch.Tensor | str, strange_BHT: torch.Tensor) -> torch.Tensor:
    if isinstance(mask, torch.Tensor):
        return _meet("bhst,bht->bhs", mask, strange_BHT)
    place = torch.arange(strange_BHT.size(-1), device=strange_BHT.device)  # of keys and of rows: a square
    return place >= place.where(strange_BHT, place.numel()).amin(dim=-1, keepdim=True)


def without_strange_rows(
    tile: KernelTile, rows: MergedRows
) -> tuple[KernelTile, MergedRows, torch.Tensor | None, torch.Tensor | None]:
    """Rows that add nothing where they are not finite or attend nothing, and what they spoil; alike without a mask.

    Returns:
        The tile and its rows; which of these are not finite, `(B, H, S)`; and which keys those attend, `(B, K, T)`.
    """
    if tile.mask is None:
        return tile, rows, None, None
    dout, out, lse, dlse = rows
    nothing = lse == torch.inf
    finite = _finite(tile.q) & _finite(dout) & _finite(out) & ~lse.isnan()
    if dlse is not None:
        finite &= dlse.isfinite()
    strange_BHS = ~(finite | nothing)
    if tile.bias is not None:
        attended = _meet("bhst,bhs->bht", tile.bias, strange_BHS)
    else:
        place = torch.arange(lse.size(-1), device=lse.device)
        attended = place <= place.where(strange_BHS, -1).amax(dim=-1, keepdim=True)
    attended_BKT = attended.view(len(attended), tile.k.size(1), -1, attended.size(-1)).any(dim=2)
    gone = ~finite | nothing
    dout, out, q = (_filled(x, gone, 0.0) for x in (dout, out, tile.q))
    dlse = None if dlse is None else dlse.masked_fill(gone, 0.0)
    rows = MergedRows(dout, out, lse.masked_fill(gone, torch.inf), dlse)
    return tile._replace(q=q), rows, strange_BHS, attended_BKT


def spoilt(x: torch.Tensor, *which: torch.Tensor | None) -> torch.Tensor:
    """`x` with NaN in some rows; `x` has their axes, or one more."""
    some = [rows for rows in which if rows is not None]
    return _filled(x, functools.reduce(torch.logical_or, some), torch.nan) if some else x


def _filled(x: torch.Tensor, rows: torch.Tensor, value: float) -> torch.Tensor:
    """`x` with a value in some rows; `x` has their axes, or one more. A pass less than `masked_fill`, which copies."""
    return torch.where(rows if rows.dim() == x.dim() else rows[..., None], value, x)


def largest(x: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of the last axis, or NaN; one pass and no copy."""
    found: torch.Tensor = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1)
    return found


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Whether all of the last axis is finite."""
    return largest(x) < torch.inf


def _meet(equation: str, bias: torch.Tensor, strange: torch.Tensor) -> torch.Tensor:
    """Whether one of some rows or keys meets a strange one; nothing of size B H S T is made."""
    allowed = (bias > -torch.inf)[(None,) * (4 - bias.dim())]
    if allowed.size(2) == 1:  # one row for all
        allowed = allowed.expand(-1, -1, strange.size(-1) if equation.endswith("bht") else 1, -1)
    return torch.einsum(equation, allowed.float(), strange.float()) > 0
