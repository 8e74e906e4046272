"""Tiles whose bounds, or whose rest, are wrong: keys that a tile of queries leaves out, rows past the last tile."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from ringverify.diagnosis.pairs import TILES, Ints, Mask, OneSide, Otherwise, Pairs
from ringverify.diagnosis.scene import Counts


def ways_to_bound() -> Iterator[Otherwise]:
    """Yield keys of tiles of queries that are bounded by one query of the tile, as a mask otherwise made."""
    for tile in TILES:
        whose = f"a tile of {tile} queries of a shard attends no key"
        yield Otherwise(
            f"{whose} after the last one of its first query", functools.partial(_bounded, tile, "last", False), 1
        )
        yield Otherwise(
            f"{whose} before the first one of its last query", functools.partial(_bounded, tile, "first", False), 1
        )
        yield Otherwise(
            f"{whose} at the end of what its last query attends: the end is taken for one past it",
            functools.partial(_bounded, tile, "last", True),
            1.25,
        )


def ways_to_split() -> Iterator[Otherwise]:
    """Yield keys that are left over where a rank's are split into parts of equal length."""
    for parts in TILES:
        yield Otherwise(
            f"a rank's keys are split into {parts} parts of keys // {parts} each, and the rest is left out",
            functools.partial(_without_rest, parts),
            0.75,
        )


def _ends(pairs: Pairs, end: str) -> Ints:
    """Return the last, or the first, key that each query attends, `(B, H, Nq)`; before all, or after all, if none."""
    seen = pairs.true > 0
    some, total = seen.any(axis=-1), pairs.keys.total
    if end == "first":
        return np.where(some, seen.argmax(axis=-1), total)
    return np.where(some, total - 1 - seen[..., ::-1].argmax(axis=-1), -1)


def _of_tile(tile: int, queries: OneSide, *, last: bool) -> Ints:
    """Return the position of the last, or the first, query of the tile of each query, `(Nq,)`."""
    place, count = queries.place[:, 0], queries.count[:, 0]
    begins = place // tile * tile
    return queries.at(queries.rank[:, 0], np.minimum(begins + tile, count) - 1 if last else begins)


def _bounded(tile: int, end: str, past: bool, pairs: Pairs) -> Counts | None:
    """Return counts if a tile's keys end with its first query's last, or begin with its last query's first.

    With `past`, they end one key before the last query's last.
    """
    if not pairs.queries.total or not pairs.keys.total or not pairs.present():
        return None
    bound = _ends(pairs, end)[..., _of_tile(tile, pairs.queries, last=past or end == "first")][..., None]
    j = pairs.keys.p[None, None]
    outside: Mask = j < bound if end == "first" else j >= bound + (not past)
    return np.where(outside, 0, pairs.true)


def _without_rest(parts: int, pairs: Pairs) -> Counts:
    """Return counts without a rank's last keys; where it has fewer than parts, each of them is one."""
    each = np.maximum(1, pairs.keys.count // parts)
    return np.where(pairs.keys.place >= each * parts, 0, pairs.true)
