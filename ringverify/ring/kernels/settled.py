"""Rows for which the fused CPU op returns an lse of 0, +inf or NaN, and what they are worth by the rule of `kernel.py`.

Shape letters: see `ringverify.ring.kernels.kernel`.
"""

from __future__ import annotations

import torch

from ringverify.ring.kernels.kernel import KernelTile, Setting
from ringverify.ring.kernels.streaming import STREAMING

PIECE = 1 << 18
"""Scores that are formed at a time."""


def settle_(setting: Setting, tile: KernelTile, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Mend in place what the op says of rows that are empty or NaN.

    A row that the mask empties has lse 0, or NaN of its query. Where the largest score is +inf, among the first keys of
    the last block, lse is +inf, and in bfloat16 out is finite: such a row is NaN. Of other rows, out 0 and lse 0 are
    said in three cases, and which of them it is, the streaming kernel says:

    1. All scores are −inf.
    2. All scores are −inf or NaN, and the NaN are among the last keys, fewer than a vector has elements: the op's
       largest score of these is `std::max(−inf, NaN)`, which is −inf.
    3. lse is 0 and all values that count are 0.

    To see that there are no such rows takes two passes over lse.

    Args:
        setting: of the call.
        tile: as the kernel was given it.
        out: `(B, H, S, E)`, written to.
        lse: `(B, H, S)`, written to.
    """
    finite = float(lse.amax()) < torch.inf  # NaN is larger than all numbers, and less than none
    if finite and not _has_zeros(lse):
        return
    if tile.bias is not None:
        emptied = (tile.bias == -torch.inf).all(dim=-1)
        lse.masked_fill_(emptied, -torch.inf)
        if not finite:
            out.masked_fill_(emptied[..., None], 0.0)
    if not finite:
        infinite = lse == torch.inf
        lse.masked_fill_(infinite, torch.nan)
        out.masked_fill_(infinite[..., None], torch.nan)
    if not _has_zeros(lse):
        return
    doubtful = (lse == 0) & ~(out != 0).any(dim=-1)
    which = doubtful.any(dim=1).any(dim=0).nonzero().squeeze(1)
    at_a_time = max(1, PIECE // (lse.size(0) * lse.size(1) * tile.k.size(2)))
    for start in range(0, len(which), at_a_time):
        rows = which[start : start + at_a_time]
        out_s, lse_s = STREAMING.forward(setting, _of_rows(tile, rows, setting.accumulates))
        anew = doubtful[:, :, rows]
        out[:, :, rows] = torch.where(anew[..., None], out_s.to(out.dtype), out[:, :, rows])
        lse[:, :, rows] = torch.where(anew, lse_s, lse[:, :, rows])


def _has_zeros(x: torch.Tensor) -> bool:
    return int(torch.count_nonzero(x)) < x.numel()


def _of_rows(tile: KernelTile, rows: torch.Tensor, dtype: torch.dtype) -> KernelTile:
    """Some rows of a tile, whose mask is a bias if it has one."""
    mask = tile.bias
    if tile.causal:
        later = torch.arange(tile.k.size(2), device=rows.device) > rows[:, None]
        mask = torch.zeros(later.shape, dtype=dtype, device=rows.device).masked_fill_(later, -torch.inf)
    elif mask is not None and mask.size(-2) > 1:
        mask = mask[..., rows, :]
    return tile._replace(q=tile.q[:, :, rows], mask=mask)
