"""A region cut into tiles: what one kernel call works on. Empty tiles do not exist.

Within a bucket of rows `[r0, r1)` the keys that every row attends are a full tile, without a mask. Under causality the
rest is a square on the diagonal, which every fused kernel masks by itself; at a window's edges, and where a window is
narrower than the bucket, a mask is built for that tile alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ringverify.ring.regions import Region

Kind = Literal["full", "causal", "band", "positions"]
NARROWEST = 64
"""Rows of the narrowest bucket under a window; below that, calls cost more than the masked pairs they save."""


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


def tiles(region: Region, row_bucket: int, key_bucket: int) -> Iterator[Tile]:
    """The tiles of a region, rows first; no side is longer than its bucket, which is at least 1."""
    rows = region.queries.size
    if region.low is not None:
        # Of a bucket of b rows, b² / 2 pairs at a window's left edge are computed in vain. Where that edge is all that
        # a block has of the window, it is as wide as the block.
        last = region.keys.size - 1 if region.high is None else region.high
        width = min(last - region.low + 1, region.keys.size)
        row_bucket = min(row_bucket, max(NARROWEST, width // 4))
    if region.high is not None:
        row_bucket = min(row_bucket, key_bucket)  # a square on the diagonal is one tile
    for start in range(0, rows, row_bucket):
        for tile in _bucket(region, start, min(start + row_bucket, rows)):
            for key in range(*tile.keys, key_bucket):
                stop = min(key + key_bucket, tile.keys[1])
                moved = tile.keys[0] - key
                low, high = (None if side is None else side + moved for side in (tile.low, tile.high))
                yield tile._replace(keys=(key, stop), low=low, high=high)


def _bucket(region: Region, start: int, stop: int) -> Iterator[Tile]:
    """The tiles of rows `[start, stop)`, keys not yet cut."""
    total, low, high = region.keys.size, region.low, region.high
    rows = start, stop
    if region.by_position:
        yield Tile(rows, (0, total), "positions")
        return
    if low is None and high is None:
        yield Tile(rows, (0, total), "full")
        return
    first = 0 if low is None else max(0, start + low)
    everyone = 0 if low is None else max(0, min(total, stop - 1 + low))  # from here on a window's left side is no bound
    corner = total if high is None else min(start + high, total)
    if low is not None and everyone >= corner:  # narrower than the bucket
        last = total if high is None else min(total, stop + high)
        if first < last:
            yield _band(rows, (first, last), low, high)
        return
    if first < everyone:
        yield _band(rows, (first, everyone), low, None)
    if everyone < corner:
        yield Tile(rows, (everyone, corner), "full")
    side = min(stop - start, total - corner)
    if side > 0:
        yield Tile((start, start + side), (corner, corner + side), "causal")
        if start + side < stop:
            yield Tile((start + side, stop), (corner, total), "full")


def _band(rows: tuple[int, int], keys: tuple[int, int], low: int | None, high: int | None) -> Tile:
    """A tile with its band, moved from indices within the region to indices within the tile."""
    shift = rows[0] - keys[0]
    return Tile(rows, keys, "band", *(None if side is None else side + shift for side in (low, high)))
