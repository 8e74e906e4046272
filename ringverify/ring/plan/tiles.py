"""A region cut into tiles: what one kernel call works on. Empty tiles do not exist.

Within a bucket of rows `[r0, r1)` the keys that every row attends are a full tile, without a mask. Under causality the
rest is a square on the diagonal, which every fused kernel masks by itself. At a window's left edge small squares with a
mask of their own lie along the edge, and beyond them all is full again; one mask does for all such squares. Where a
window is narrower than the bucket, a mask is built for that bucket alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ringverify.ring.plan.rectangles import Rectangle

Kind = Literal["full", "causal", "band", "positions"]
NARROWEST = 64
"""Rows of the narrowest bucket under a window; below that, calls cost more than the masked pairs they save."""
WIDEST_MASK = 256
"""Rows of the tallest tile whose mask is built; with more of them, calls cost less than the pairs masked in vain."""


class Tile(NamedTuple):
    """A piece of a region.

    Attributes:
        rows: `[start, stop)` within the region's queries.
        keys: `[start, stop)` within the region's keys.
        kind: full: every pair attends. causal: square, and row x attends keys 0 to x of the tile. band: a mask is
            built from `low` and `high`. positions: a mask is looked up.
        low: on `j - i`, indices within the tile; `None` is unbounded.
        high: likewise.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    kind: Kind
    low: int | None = None
    high: int | None = None

    @property
    def computed(self) -> int:
        """Pairs that a kernel works on, per head; a fused kernel spares itself about half of a causal square."""
        return (self.rows[1] - self.rows[0]) * (self.keys[1] - self.keys[0])


def tiles(region: Rectangle, row_bucket: int, key_bucket: int, mask_side: int = WIDEST_MASK) -> Iterator[Tile]:
    """The tiles of a region, rows first.

    Args:
        region: to be cut.
        row_bucket: most queries of a tile, at least 1.
        key_bucket: most keys of a tile, at least 1.
        mask_side: most queries of a tile of kind band, at least 1. It has fewer keys than twice as many.
    """
    rows, keys = region.queries.size, region.keys.size
    if region[6:] == (None, None, False) and rows <= row_bucket and keys <= key_bucket:
        yield Tile((0, rows), (0, keys), "full")
        return
    if region.low is not None:
        # Of a bucket of b rows, b² / 2 pairs at a window's left edge are computed in vain. Where that edge is all that
        # a block has of the window, it is as wide as the block.
        last = region.keys.size - 1 if region.high is None else region.high
        width = min(last - region.low + 1, region.keys.size)
        row_bucket = min(row_bucket, max(min(NARROWEST, mask_side), width // 4))
    if region.high is not None:
        row_bucket = min(row_bucket, key_bucket)  # a square on the diagonal is one tile
    if region.low is not None and row_bucket > mask_side:
        row_bucket -= row_bucket % mask_side  # so that all masked squares are alike
    for start in range(0, rows, row_bucket):
        for tile in _bucket(region, start, min(start + row_bucket, rows), mask_side):
            for key in range(*tile.keys, key_bucket):
                stop = min(key + key_bucket, tile.keys[1])
                moved = tile.keys[0] - key
                low, high = (None if side is None else side + moved for side in (tile.low, tile.high))
                yield tile._replace(keys=(key, stop), low=low, high=high)


def _bucket(region: Rectangle, start: int, stop: int, mask_side: int) -> Iterator[Tile]:
    """The tiles of rows `[start, stop)`, keys not yet cut."""
    total, low, high = region.keys.size, region.low, region.high
    rows = start, stop
    if region.by_position:
        yield Tile(rows, (0, total), "positions")
        return
    if low is None and high is None:
        yield Tile(rows, (0, total), "full")
        return
    everyone = 0 if low is None else _attended_by_all(low, stop, total)
    corner = total if high is None else min(start + high, total)
    if low is not None and 0 < everyone >= corner:  # narrower than the bucket
        first, last = max(0, start + low), total if high is None else min(total, stop + high)
        if first < last:
            yield _band(rows, (first, last), low, high)
        return
    if low is not None:
        yield from _left_edge(low, start, stop, total, mask_side)
    if everyone < corner:
        yield Tile(rows, (everyone, corner), "full")
    side = min(stop - start, total - corner)
    if side > 0:
        yield Tile((start, start + side), (corner, corner + side), "causal")
        if start + side < stop:
            yield Tile((start + side, stop), (corner, total), "full")


def _left_edge(low: int, start: int, stop: int, total: int, mask_side: int) -> Iterator[Tile]:
    """The triangle of keys that not all rows `[start, stop)` attend: masked squares along its edge, the rest full."""
    first, everyone = max(0, start + low), _attended_by_all(low, stop, total)
    if first >= everyone:
        return
    squares = -(-(stop - start) // mask_side)
    if squares == 1:
        yield _band((start, stop), (first, everyone), low, None)
        return
    middle = start + squares // 2 * mask_side
    yield from _left_edge(low, start, middle, total, mask_side)
    inner = _attended_by_all(low, middle, total)
    if inner < everyone:
        yield Tile((start, middle), (inner, everyone), "full")
    yield from _left_edge(low, middle, stop, total, mask_side)


def _attended_by_all(low: int, stop: int, total: int) -> int:
    """The first key from which on a window's left side bounds no row before `stop`."""
    return max(0, min(total, stop - 1 + low))


def _band(rows: tuple[int, int], keys: tuple[int, int], low: int | None, high: int | None) -> Tile:
    """A tile with its band, moved from indices within the region to indices within the tile."""
    shift = rows[0] - keys[0]
    return Tile(rows, keys, "band", *(None if side is None else side + shift for side in (low, high)))
