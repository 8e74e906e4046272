"""The gradient of a block, summed over the tiles of this rank.

Shape letters: B batch, T keys of a tile, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringverify.ring.accumulate import Sum, widened
from ringverify.ring.plan.kv_slices import KVTensors, Places
from ringverify.ring.plan.rectangles import Rectangle
from ringverify.ring.uploading import uploaded


class TileGradient(NamedTuple):
    """What one tile adds to the gradients of some rows of a region: `dk (B, K, T, D)` and `dv (B, K, T, E)`."""

    region: Rectangle
    keys: slice
    dk: torch.Tensor
    dv: torch.Tensor


class Gradients:
    """dk and dv of a block to which tiles are added.

    Args:
        block: memory for them, in the accumulation dtype, written to.
        empty: whether nothing has been added so far, and nothing written; until `complete`, no row is 0.
    """

    def __init__(self, block: KVTensors, *, empty: bool) -> None:
        self._block = block
        self._sums = {
            number: tuple(Sum(x.shape, x.dtype, x.device, into=x, written=0 if empty else x.size(1)) for x in pair)
            for number, pair in block.parts.items()
        }

    def begin(self, arrived: KVTensors) -> None:
        """Add, before anything else, gradients of rows that the block holds as well."""
        for number, pair in arrived.parts.items():
            places = self._block.locate(number, arrived.slice.parts[number].rows)
            for total, gradient in zip(self._sums[number], pair, strict=True):
                _add(total, slice(None), places, slice(None), gradient.transpose(1, 2))

    def add(self, part: TileGradient) -> None:
        """Add what a tile contributes."""
        places, heads = self._block.places(part.region, part.keys)
        for total, gradient in zip(self._sums[part.region.head_class], (part.dk, part.dv), strict=True):
            _add(total, slice(*part.region.batch), places, heads, gradient)

    def complete(self) -> None:
        """Make rows 0 to which nothing was added."""
        for pair in self._sums.values():
            for total in pair:
                total.complete()


def _add(total: Sum, batch: slice, places: Places, heads: slice, gradient: torch.Tensor) -> None:
    """Add `gradient (B, K, T, D)` to some rows."""
    if isinstance(places, slice):
        total.add(batch, places, heads, gradient)
        return
    target = total.total
    index = uploaded(torch.from_numpy(places), target.device)
    for piece, (wide,) in widened(target.dtype, gradient):
        target[batch, :, heads].index_add_(1, index[piece], wide.transpose(1, 2))
