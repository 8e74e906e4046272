"""Tiles whose bounds, or whose rest, are wrong: keys that a tile of queries leaves out, rows past the last tile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from ringverify.diagnosis.masks.positions import late
from ringverify.diagnosis.masks.skips import ENDS as BOTH
from ringverify.diagnosis.masks.skips import WHOLE, Ends, Skips, after_either, after_window, before_window
from ringverify.diagnosis.pairs import Ints, Mask, OneSide, Otherwise, Pairs
from ringverify.diagnosis.scene import Counts
from ringverify.diagnosis.undefined import Blocks
from ringverify.faults.merging import TILES

Bound = Callable[[Pairs, str], "Ints | None"]
"""The first or the last key that queries may attend by a constraint, `(B, H, Nq)` or less; `None` if it sets none."""


PIECE = 0
"""A tile that is a piece of a zigzag shard, and of other shards the whole."""

DOCUMENT = WHOLE - 1
"""A tile that is what a shard has of one document, and without documents the whole."""


NUMBERED = 0.6
"""What it costs, in parts, that the size of a tile is a number that was tried until it fitted."""


def ways_to_bound() -> Iterator[Otherwise]:
    """Yield keys of tiles of queries that are bounded by one query of the tile, as a mask otherwise made."""
    cuts = (WHOLE, PIECE, DOCUMENT, *TILES, *(-tile for tile in TILES))
    for tile, (by, ends) in product(cuts, ENDS.items()):  # of what is whole, nothing is said of tiles
        named = {WHOLE: "a shard of queries", PIECE: "a shard of queries, and each piece of a zigzag one,"}
        named[DOCUMENT] = "what a shard of queries has of a document"
        named |= {-tile: f"a tile of {tile} queries, cut from position 0 on," for tile in TILES}
        whose = f"{named.get(tile, f'a tile of {tile} queries of a shard')} attends no key"
        for text, end, past in (
            (f"after {by.format('end')} of its first query", "last", False),
            (f"before {by.format('beginning')} of its last query", "first", False),
            (f"at {by.format('end')} of its last query, which is taken for one past it", "last", True),
            (f"at {by.format('beginning')} of its first query, which is taken for one before it", "first", True),
        ):
            cost = 1 + 0.25 * past + NUMBERED * (tile not in (WHOLE, PIECE, DOCUMENT))
            yield Otherwise(f"{whose} {text}", functools.partial(_bounded, tile, ends, end, past), cost)


def ways_to_split() -> Iterator[Otherwise]:
    """Yield keys that are left over where a rank's are split into parts of equal length."""
    for parts in TILES:
        yield Otherwise(
            f"a rank's keys are split into {parts} parts of keys // {parts} each, and the rest is left out",
            functools.partial(_without_rest, parts),
            0.75,
        )
    for tile in (1, *TILES):
        yield Otherwise(
            f"a rank's keys past the mean share of all, in whole tiles of {tile}, are left out",
            functools.partial(_past_mean_share, tile),
            1,
        )


PADDED: dict[str, Callable[[Pairs], Mask]] = {
    "": lambda pairs: np.ones((1, 1, 1, 1), dtype=bool),
    ", but not in blocks of which a rank attends nothing": lambda pairs: Blocks(pairs).visited > 0,
    ", but not in a rank's own block under a causal mask": lambda pairs: _of_others(pairs),
    ", but not in a rank's own block under a causal mask, nor in those of which it attends nothing": lambda pairs: (
        _of_others(pairs) & (Blocks(pairs).visited > 0)
    ),
}
"""In which blocks padding counts, in words and as `(B, H, Nq, P)`."""


def _of_others(pairs: Pairs) -> Mask:
    """False of a rank's own block under a causal mask, and True of all others."""
    own: Mask = pairs.queries.rank == np.arange(pairs.size)
    return ~own | (not pairs.problem.causal or pairs.case.replicated)


Order = Callable[[OneSide], Ints]
"""The positions of all shards, in an order."""


def _by_rank(x: OneSide) -> Ints:
    return np.concatenate(x.shards)


OF_ALL: dict[str, Order | None] = {
    "": None,
    ", cut from all keys in the order of the ranks,": _by_rank,
    ", cut from all keys in the order of positions,": lambda x: np.arange(x.total),
}
"""Whether tiles are those of all keys, in which order, or of each shard."""


def ways_to_judge_tiles() -> Iterator[Otherwise]:
    """Yield masks that are left out, or keys that are, in tiles of queries and keys by what holds of a part of each."""
    for (rows, columns), (where, order) in product(product(TILES, TILES), OF_ALL.items()):
        tile = f"a tile of {rows} queries and {columns} keys{where}"
        for query, key in (("first", "last"), ("first", "first"), ("last", "last"), ("last", "first")):
            says = f"{tile} has no mask if its {query} query attends its {key} key"
            yield Otherwise(says, functools.partial(_by_corner, rows, columns, order, query, key), 1.25)
        for query, (short, whole) in product(BOTH, SHORT.items()) if rows == columns else ():
            says = f"{tile} has no mask if its {query} query attends all of its keys{short}"
            yield Otherwise(says, functools.partial(_by_row, rows, columns, order, query, whole), 1.25)
        says = f"{tile} is skipped, or has no mask, in all batch entries as it is in the first"
        yield Otherwise(says, functools.partial(_by_first_entry, rows, columns, order), 1)
    for (rows, columns), (where, order) in product(product((WHOLE, *TILES), TILES), OF_ALL.items()):
        tile = f"a tile of {rows} queries and {columns} keys{where}"
        if rows == WHOLE:
            tile = f"a tile of {columns} keys{where} is held against all queries of a rank, and"
        for text, skips in SKIPPED.items() if order is not _by_rank else ():
            for query, key in product(BOTH, BOTH):
                level = (query, key) == RIGHT[text]  # these tell rightly, but for a key that is level with the end
                if level and rows == WHOLE:
                    continue
                lies = f"{text.format(query)}, or level with its end" if level else text.format(query)
                says = f"{tile} is skipped if its {key} key lies {lies}"
                yield Otherwise(says, functools.partial(_skipped, rows, columns, order, skips(key, query, level)), 1.25)
    for size, (where, concerned) in product(TILES, WINDOWED.items()):
        says = f"{where}the window only skips tiles of {size} queries and {size} keys: what is left of them is whole"
        yield Otherwise(says, functools.partial(_windowed_by_tile, size, concerned), 1)


WINDOWED: dict[str, Callable[[Pairs], bool]] = {
    "": lambda pairs: True,
    "where there are documents, ": lambda pairs: pairs.problem.documents is not None,
    "where there is a causal mask, ": lambda pairs: pairs.problem.causal,
}
"""In which cases a window is laid by whole tiles, in words."""


def _windowed_by_tile(tile: int, concerned: Callable[[Pairs], bool], pairs: Pairs) -> Counts | None:
    """Return counts with the window laid by tiles: a pair is excluded if no pair of its tile may be in the window."""
    if pairs.problem.window is None or not concerned(pairs):
        return None
    plain, (left, right) = (pairs.queries.p, pairs.keys.p), pairs.problem.window
    i = {end: _corners(tile, None, end, pairs.queries)[:, None] + pairs.problem.diagonal for end in BOTH}
    j = {end: _corners(tile, None, end, pairs.keys)[None] for end in BOTH}
    inside = np.ones((pairs.problem.nq, pairs.problem.nk), dtype=bool)
    if left is not None:
        inside &= j["last"] >= i["first"] - left
    if right is not None:
        inside &= j["first"] <= i["last"] + right
    return pairs.counts(lambda name: None if name == "window" else plain) * inside


SHORT = {"": False, ", and it is whole": True}
"""Whether a tile of keys may be one that is cut short, in words."""


def _by_row(rows: int, columns: int, of_all: Order | None, query: str, whole: bool, pairs: Pairs) -> Counts | None:
    """Return counts without a mask in tiles of which one query attends all keys."""
    if not pairs.present() or pairs.problem.dilation is not None or not pairs.keys.total:
        return None
    order, number = _tiles_of(columns, of_all, pairs.keys)
    begins = np.flatnonzero(np.diff(number, prepend=-1))
    lengths = np.diff(begins, append=len(number))
    attended = np.minimum.reduceat(pairs.true[..., order] > 0, begins, axis=-1) & ((lengths == columns) | (not whole))
    of_key = np.empty_like(order)
    of_key[order] = number
    at = _corners(rows, None, query, pairs.queries)
    every: Mask = np.all(attended[:, :, at], axis=(0, 1))
    return np.where(every[:, of_key], 1, pairs.true)


def _tiles_of(size: int, of_all: Order | None, x: OneSide) -> tuple[Ints, Ints]:
    """Return an order of the rows of all shards, and the number of each one's tile there."""
    if of_all is not None:
        return of_all(x), np.arange(x.total) // size
    order, size = _by_rank(x), min(size, x.total + 1)
    rank, place = x.rank.ravel()[order], x.place.ravel()[order]
    return order, np.unique(rank * (x.total + 1) + place // size, return_inverse=True)[1]


def _corners(size: int, of_all: Order | None, end: str, x: OneSide) -> Ints:
    """Return by position the position of the first or last row of its tile."""
    order, number = _tiles_of(size, of_all, x)
    at = np.searchsorted(number, number, side="left" if end == "first" else "right") - (end == "last")
    found = np.empty_like(order)
    found[order] = order[at]
    return found


def _by_corner(rows: int, columns: int, of_all: Order | None, query: str, key: str, pairs: Pairs) -> Counts | None:
    if not pairs.present() or pairs.problem.dilation is not None:
        return None
    i, j = _corners(rows, None, query, pairs.queries), _corners(columns, of_all, key, pairs.keys)
    seen = np.all(pairs.true[:, :, i[:, None], j] > 0, axis=(0, 1))
    return np.where(seen, 1, pairs.true)


SKIPPED: dict[str, Callable[[str, str, bool], Skips]] = {
    "after its {} query, and there is a causal mask": lambda key, query, level: functools.partial(
        _after, key, query, level
    ),
    "before the window of its {} query": lambda key, query, level: functools.partial(before_window, key, query, level),
    "after the window of its {} query": lambda key, query, level: functools.partial(after_window, key, query, level),
    "after its {} query under a causal mask, and after the window of that otherwise": lambda key, query, level: (
        functools.partial(after_either, key, query, level)
    ),
}
"""Where a key of a tile lies that is skipped, with a place for which of its queries; the test, by the key and that."""


def _after(key: str, query: str, level: bool, pairs: Pairs, at: Ends) -> Mask | None:
    return after_either(key, query, level, pairs, at) if pairs.problem.causal else None


RIGHT = dict(zip(SKIPPED, (("last", "first"), ("first", "last"), *[("last", "first")] * 2), strict=True))
"""Which query and which key tell rightly, where a key that is level with the end is no key past it."""


def _skipped(rows: int, columns: int, of_all: Order | None, skips: Skips, pairs: Pairs) -> Counts | None:
    """Return counts without tiles of which one query and one key are taken to say that they hold nothing."""
    queries = {end: _corners(rows, None, end, pairs.queries)[:, None] + pairs.problem.diagonal for end in BOTH}
    skip = skips(pairs, Ends(queries, {end: _corners(columns, of_all, end, pairs.keys)[None] for end in BOTH}))
    return None if skip is None else np.where(skip, 0, pairs.true)


def _by_first_entry(rows: int, columns: int, of_all: Order | None, pairs: Pairs) -> Counts | None:
    if pairs.problem.key_lengths is None or pairs.problem.dilation is not None:
        return None
    first, sums = (pairs.true[0, 0] > 0).astype(np.int64), list[Counts]()
    for values in (first, np.ones_like(first)):
        for size, ordered, x, axis in ((rows, None, pairs.queries, 0), (columns, of_all, pairs.keys, 1)):
            order, number = _tiles_of(size, ordered, x)
            tile = np.empty_like(order)
            tile[order] = number
            total = np.zeros((number.max(initial=-1) + 1, values.shape[1 - axis]), dtype=np.int64)
            np.add.at(total, tile, values if axis == 0 else values.T)
            values = total[tile] if axis == 0 else total[tile].T
        sums.append(values)
    seen, whole = sums
    return np.where(seen == 0, 0, np.where(seen == whole, 1, pairs.true))


def ways_to_pad() -> Iterator[Otherwise]:
    """Yield keys of 0 that make whole tiles of a block, or shards of one length, and count."""
    for where, at in FILLED_AT.items():
        yield Otherwise(
            f"shards are padded to the longest, and the padding counts as keys of 0{where}",
            lambda pairs: pairs.true,
            0.75,
            functools.partial(_shard_padding, at),
        )
    for tile, (where, there) in product(TILES, PADDED.items()):
        yield Otherwise(
            f"blocks are padded to whole tiles of {tile} keys, and the padding counts as keys of 0{where}",
            lambda pairs: pairs.true,
            1,
            functools.partial(_tile_padding, tile, there),
        )
    for tile in TILES:
        yield Otherwise(
            f"all keys are padded to whole tiles of {tile}, and the padding counts as keys of 0 at the positions past "
            "the end",
            lambda pairs: pairs.true,
            1,
            functools.partial(_padding_past_the_end, tile),
        )
    for tile, (where, causal_too) in product(TILES, {"": True, ", where nothing is causal": False}.items()):
        yield Otherwise(
            f"all keys are padded to whole tiles of {tile}, and the padding counts as keys of 0{where}",
            lambda pairs: pairs.true,
            1,
            functools.partial(_padding_of_all, tile, causal_too),
        )


def _of_mask(pairs: Pairs, end: str) -> Ints:
    """Before all keys, or after all of them, for a query that attends none."""
    seen = pairs.true > 0
    some, total = seen.any(axis=-1), pairs.keys.total
    if end == "first":
        return np.where(some, seen.argmax(axis=-1), total)
    return np.where(some, total - 1 - seen[..., ::-1].argmax(axis=-1), -1)


def _of_causal(pairs: Pairs, end: str) -> Ints | None:
    if not pairs.problem.causal or end == "first":
        return None
    return pairs.queries.p[:, 0] + pairs.problem.diagonal


def _of_window(pairs: Pairs, end: str) -> Ints | None:
    left, right = pairs.problem.window or (None, None)
    by = right if end == "last" else None if left is None else -left
    return None if by is None else (pairs.queries.p[:, 0] + pairs.problem.diagonal + by)


def _of_documents(pairs: Pairs, end: str, *, in_some: bool = False) -> Ints | None:
    """Of a query before the first document, its end is where that begins, or the end of that: `in_some`."""
    if pairs.problem.documents is None:
        return None
    offsets = np.array(pairs.problem.documents)
    number = np.searchsorted(offsets, pairs.queries.p[:, 0], side="right") - 1
    number = np.maximum(number, 0) if end == "first" or in_some else number
    if end == "first":
        return offsets[number]
    found: Ints = offsets[np.minimum(number + 1, len(offsets) - 1)] - 1
    return found


ENDS: dict[str, Bound] = {
    "the {} of the keys": _of_mask,
    "the {} of the causal mask": _of_causal,
    "the {} of the window": _of_window,
    "the {} of the document": _of_documents,
    "the {} of the document, or of the first one,": functools.partial(_of_documents, in_some=True),
}
"""What bounds the keys of a tile, in words with a place for which end it is."""


def _of_tile(tile: int, pairs: Pairs, *, last: bool) -> Ints:
    """Return the position of the last, or the first, query of the tile of each query, `(Nq,)`.

    A tile of a negative number is cut from position 0 on, whatever the shards.
    """
    queries = pairs.queries
    if tile < 0:
        begins = queries.p[:, 0] // -tile * -tile
        return np.minimum(begins - tile, queries.total) - 1 if last else begins
    place, count, rank = (x[:, 0] for x in (queries.place, queries.count, queries.rank))
    if tile == DOCUMENT:
        position = queries.p[:, 0]
        of = rank * (queries.total + 2) + np.searchsorted(pairs.problem.documents or (), position, side="right")
        together = of[:, None] == of
        found: Ints = np.where(together, position, -1).max(axis=-1)
        return found if last else np.where(together, position, queries.total).min(axis=-1)
    if tile == PIECE:
        after = late(queries, pairs)[:, 0] & (pairs.case.sharding == "zigzag")
        early = count - np.bincount(rank, weights=after, minlength=pairs.size).astype(np.int64)[rank]
        begins, ends = np.where(after, early, 0), np.where(after, count, early)
    else:
        begins = place // tile * tile
        ends = np.minimum(begins + tile, count)
    return queries.at(rank, ends - 1 if last else begins)


def _bounded(tile: int, ends: Bound, end: str, past: bool, pairs: Pairs) -> Counts | None:
    """Return counts if a tile's keys end with its first query's last, or begin with its last query's first.

    With `past`, they end one key before the last query's last, or begin one after the first query's first.
    """
    nothing = not pairs.queries.total or not pairs.keys.total or not pairs.present()
    if nothing or (found := ends(pairs, end)) is None:
        return None
    bound = found[..., _of_tile(tile, pairs, last=past == (end == "last"))][..., None]
    outside: Mask = pairs.keys.p < bound + past if end == "first" else pairs.keys.p >= bound + (not past)
    return np.where(outside, 0, pairs.true)


def _without_rest(parts: int, pairs: Pairs) -> Counts:
    """Return counts without a rank's last keys; where it has fewer than parts, each of them is one."""
    each = np.maximum(1, pairs.keys.count // parts)
    return np.where(pairs.keys.place >= each * parts, 0, pairs.true)


def _always(at: tuple[Ints, Ints], name: str) -> tuple[Ints, Ints]:
    return at


def _at(place: Callable[[Pairs, int, int], int], pairs: Pairs) -> Counts:
    """Return which queries see padding of each shard that is taken to be at these positions, `(B, H, Nq, P)`."""
    longest, plain = max(map(len, pairs.keys.shards)), np.zeros_like(pairs.keys.p)
    found = np.zeros((*pairs.true.shape[:3], pairs.size), dtype=np.int64)
    for rank, held in enumerate(pairs.keys.shards):
        for number in range(len(held), longest if pairs.keys.total else 0):
            at = pairs.queries.p, plain + place(pairs, rank, number)
            found[..., rank] += np.asarray(pairs.counts(functools.partial(_always, at)))[..., 0]
    return found


FILLED_AT: dict[str, Callable[[Pairs], Counts]] = {
    "": lambda pairs: np.array([max(map(len, pairs.keys.shards)) - len(held) for held in pairs.keys.shards]),
    " at position -1": functools.partial(_at, lambda pairs, rank, number: -1),
    " at position 0": functools.partial(_at, lambda pairs, rank, number: 0),
    " at the positions past the end": functools.partial(_at, lambda pairs, rank, number: pairs.keys.total),
}
"""Where padding of short shards is taken to be, and how much of each shard's a query sees then, `(B, H, Nq, P)`."""


def _shard_padding(at: Callable[[Pairs], Counts], pairs: Pairs) -> Counts:
    """Return how many keys of 0 there are if shards are padded to the longest, `(B, H, Nq)`."""
    found: Counts = np.broadcast_to(at(pairs), (*pairs.true.shape[:3], pairs.size)).sum(axis=-1)
    return found


def _tile_padding(tile: int, there: Callable[[Pairs], Mask], pairs: Pairs) -> Counts:
    """Return how many keys of 0 there are if blocks are padded to whole tiles, `(B, H, Nq)`."""
    lacking = np.array([-len(held) % tile for held in pairs.keys.shards])
    found: Counts = np.broadcast_to(lacking * there(pairs), (*pairs.true.shape[:3], len(lacking))).sum(axis=-1)
    return found


def _padding_of_all(tile: int, causal_too: bool, pairs: Pairs) -> Counts:
    """Return how many keys of 0 there are if all keys together are padded to whole tiles, `(B, H, Nq)`."""
    lacking = -pairs.keys.total % tile if causal_too or not pairs.problem.causal else 0
    return np.full(pairs.true.shape[:3], lacking)


def _padding_past_the_end(tile: int, pairs: Pairs) -> Counts:
    """Return how many positions past the end each query sees that make whole tiles of all keys, `(B, H, Nq)`."""
    end, plain = pairs.keys.total, np.zeros_like(pairs.keys.p)
    found = np.zeros(pairs.true.shape[:3], dtype=np.int64)
    for position in range(end, end + (-end % tile)):
        at = pairs.queries.p, plain + position
        found += np.asarray(pairs.counts(functools.partial(_always, at)))[..., 0]
    return found


def _past_mean_share(tile: int, pairs: Pairs) -> Counts:
    """Return counts without the keys of a rank that are past ceil(Nk / ranks) in whole tiles."""
    share = -(-pairs.keys.total // pairs.size)
    return np.where(pairs.keys.place >= -(-share // tile) * tile, 0, pairs.true)
