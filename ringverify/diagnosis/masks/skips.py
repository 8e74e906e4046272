"""Blocks, and tiles of them, that are skipped though they hold keys to attend: by which test."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from ringref.sharding import pieces
from ringverify.diagnosis.grids import HALVES, USUAL
from ringverify.diagnosis.masks.documents import apart, bounds
from ringverify.diagnosis.pairs import Ints, Mask, OneSide, Pairs
from ringverify.diagnosis.scene import Counts
from ringverify.diagnosis.undefined import Blocks
from ringverify.faults.merging import TILES

ENDS = ("first", "last")

WHOLE = 1 << 30
"""A tile that no shard is longer than."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ends:
    """The first and last query and key of the blocks, or tiles, in which pairs lie, as keys and queries are aligned.

    Attributes:
        queries: "first" and "last", by query.
        keys: likewise, by key.
    """

    queries: dict[str, Ints]
    keys: dict[str, Ints]

    @classmethod
    def of_blocks(cls, pairs: Pairs) -> Ends:
        """Return those of the rank and of the block of each pair."""
        if pairs.halved:
            return cls._of_halves(pairs)

        def of(x: OneSide, end: str) -> Ints:
            found = np.array([held[0 if end == "first" else -1] if len(held) else 0 for held in x.shards])
            return found[x.rank]

        queries = {end: of(pairs.queries, end) + pairs.problem.diagonal for end in ENDS}
        return cls(queries, {end: of(pairs.keys, end) for end in ENDS})

    @classmethod
    def _of_halves(cls, pairs: Pairs) -> Ends:
        sides = np.zeros((2, len(ENDS), pairs.size, pairs.size), dtype=np.int64)
        for rank, owner in product(range(pairs.size), repeat=2):
            for of_side, held in zip(sides, pairs.block(rank, owner), strict=True):
                of_side[:, rank, owner] = held[[0, -1]] if len(held) else 0
        queries, keys = sides[..., pairs.rank, pairs.owner]
        return cls(dict(zip(ENDS, queries, strict=True)), dict(zip(ENDS, keys, strict=True)))


Skips = Callable[[Pairs, Ends], "Mask | None"]
"""Whether a block, or a tile of it, is skipped, by pairs; `None` where the mask is not there that would skip it."""


HALVED = ", blocks being those that a zigzag ring computes, half of each under a causal mask"

WHOSE: dict[str, Callable[[Pairs], Pairs]] = {
    "": lambda pairs: pairs,
    ", blocks being those of the two pieces of each zigzag shard": Pairs.of_pieces,
    HALVED: Pairs.of_halves,
    **{grid.whose: functools.partial(Pairs.of_teams, grid=grid) for grid in (*USUAL, HALVES)},
}
"""Whose blocks are skipped, as the end of a sentence, and the pairs as those see them."""


def skipped(skips: Skips, spared: bool, whose: Callable[[Pairs], Pairs], pairs: Pairs) -> Counts | None:
    """Return counts without the pairs of blocks, or tiles of them, that are skipped.

    Args:
        skips: whether a block is skipped.
        spared: whether a rank's own is not.
        whose: the pairs as those see them whose blocks they are.
        pairs: the pairs.
    """
    pairs = whose(pairs)
    skip = skips(pairs, Ends.of_blocks(pairs))
    return None if skip is None else np.where(skip & ((pairs.hop > 0) | (not spared)), 0, pairs.true)


def _meet(pairs: Pairs, queries: Ints, keys: Ints) -> bool:
    """Return whether some of the documents of queries, from first to last, are among those of keys."""
    offsets = np.array(pairs.problem.documents or (0, pairs.problem.nk))
    mine, theirs = apart(offsets, queries), apart(offsets, keys)
    return bool(len(mine) and len(theirs) and mine[0] <= theirs[-1] and theirs[0] <= mine[-1])


COMPUTED: dict[str, Callable[[Pairs, Ints, Ints], bool]] = {
    "": lambda pairs, queries, keys: True,
    " of which it attends some": lambda pairs, queries, keys: bool(pairs.true[..., queries[:, None], keys].any()),
    " that documents do not keep apart": _meet,
}
"""Blocks that are computed, in words; the others are skipped."""


def masked_by_shape(
    way: int, computed: Callable[[Pairs, Ints, Ints], bool], whose: Callable[[Pairs], Pairs], pairs: Pairs
) -> Counts | None:
    """Return counts if a rank keeps masks by the numbers of queries and keys: a block has that of the first such one.

    Args:
        way: 1 in a ring that sends to the right, −1 to the left.
        computed: whether a block of queries and keys is computed.
        whose: the pairs as those see them whose blocks they are.
        pairs: the pairs.
    """
    if pairs.case.replicated:
        return None
    pairs = whose(pairs)
    found = pairs.true.copy()
    for rank in range(pairs.size):
        kept: dict[tuple[int, int], Counts] = {}
        for hop in range(pairs.size):
            rows, columns = pairs.block(rank, (rank - way * hop) % pairs.size)
            if computed(pairs, rows, columns):
                here = pairs.true[..., rows[:, None], columns]
                found[..., rows[:, None], columns] = kept.setdefault((len(rows), len(columns)), here)
    return found


LONGEST = "as if every rank held as many {} as the one that holds most"

COUNTED: tuple[tuple[str, str, Callable[[Pairs], Ints | int]], ...] = (
    ("queries", "as if the rank held as many queries as the block holds keys", lambda pairs: pairs.keys.count),
    ("keys", "as if the block held as many keys as the rank holds queries", lambda pairs: pairs.queries.count),
    ("queries", LONGEST.format("queries"), lambda pairs: max(map(len, pairs.queries.shards), default=0)),
    ("keys", LONGEST.format("keys"), lambda pairs: max(map(len, pairs.keys.shards), default=0)),
    ("queries", "as if every rank held an equal share of the queries, rounded down",
     lambda pairs: pairs.problem.nq // pairs.size),
    ("keys", "as if every rank held an equal share of the keys, rounded down",
     lambda pairs: pairs.problem.nk // pairs.size),
)  # fmt: skip
"""Of which side the last one may be miscounted from the first, in words, and how many there are taken to be."""


def _counted(test: Skips, side: str, count: Callable[[Pairs], Ints | int], pairs: Pairs, at: Ends) -> Mask | None:
    """Return what a test says if the last query, or key, is counted from the first by another number of them."""
    ends: dict[str, Ints] = getattr(at, side)
    apart = pairs.size if pairs.case.sharding == "striped" else 1
    last = ends["first"] + (count(pairs) - 1) * apart
    return test(pairs, dataclasses.replace(at, **{side: {**ends, "last": last}}))


def after(key: str, query: str, pairs: Pairs, at: Ends) -> Mask | None:
    """Return whether a key comes after a query, if there is a causal mask."""
    return at.keys[key] > at.queries[query] if pairs.problem.causal else None


def before_window(key: str, query: str, level: bool, pairs: Pairs, at: Ends) -> Mask | None:
    """Return whether a key lies before the window of a query, or begins it if `level`, if that has a left side."""
    left = (pairs.problem.window or (None,))[0]
    if left is None:
        return None
    found: Mask = at.keys[key] < at.queries[query] - left + level
    return found


def after_window(key: str, query: str, level: bool, pairs: Pairs, at: Ends) -> Mask | None:
    """Return whether a key lies after the window of a query, or at its end if `level`, if that has a right side."""
    right = (pairs.problem.window or (None, None))[1]
    if right is None:
        return None
    found: Mask = at.keys[key] > at.queries[query] + right - level
    return found


def _outside_exchanged_window(pairs: Pairs, at: Ends) -> Mask | None:
    """Return whether a block lies outside a window whose sides are exchanged; a causal mask bounds its right one."""
    right, left = pairs.problem.window or (None, None)
    skip = np.zeros((1, 1), dtype=bool)
    if left is not None:
        skip = skip | (at.keys["last"] < at.queries["first"] - left)
    if right is not None and not pairs.problem.causal:
        skip = skip | (at.keys["first"] > at.queries["last"] + right)
    return skip if left != right else None


def after_either(key: str, query: str, level: bool, pairs: Pairs, at: Ends) -> Mask | None:
    """Return whether a key comes after a query, or is level with it, by a causal mask; by a window otherwise."""
    if not pairs.problem.causal:
        return after_window(key, query, level, pairs, at)
    found: Mask = at.keys[key] > at.queries[query] - level
    return found


def _of_another_document(key: str, query: str, pairs: Pairs, at: Ends) -> Mask | None:
    if pairs.problem.documents is None:
        return None
    offsets = np.array(pairs.problem.documents)
    found: Mask = bounds(offsets, at.keys[key]) != bounds(offsets, at.queries[query])
    return found


def _of_document_beyond(
    key: str, query: str, later: bool, pairs: Pairs, at: Ends, *, level: bool = False
) -> Mask | None:
    """Whether a key's document comes before a query's, or after it; what lies in none is before or after all.

    If `level`, it may be the same too.
    """
    if pairs.problem.documents is None:
        return None
    offsets = np.array(pairs.problem.documents)
    of_key, of_query = apart(offsets, at.keys[key]), apart(offsets, at.queries[query])
    found: Mask = (of_key == of_query) & level | (of_key > of_query if later else of_key < of_query)
    return found


def _after_unaligned(pairs: Pairs, at: Ends) -> Mask | None:
    if not pairs.problem.causal or not pairs.problem.diagonal:
        return None
    found: Mask = at.keys["first"] > at.queries["last"] - pairs.problem.diagonal
    return found


def _of_a_later_rank(pairs: Pairs, at: Ends) -> Mask | None:
    return pairs.owner > pairs.rank if pairs.problem.causal else None


def _empty_for_one(axis: int, pairs: Pairs, at: Ends) -> Mask | None:
    """Whether a block holds no key to attend for some batch entry (axis 0) or head (axis 1)."""
    if pairs.true.shape[axis] < 2 or pairs.case.replicated:
        return None
    found = np.zeros(pairs.true.shape[2:], dtype=bool)
    for queries in pairs.queries.shards:
        for keys in pairs.keys.shards:
            there = pairs.true[:, :, queries][..., keys].any(axis=tuple({0, 1, 2, 3} - {axis}))
            found[np.ix_(queries, keys)] = not there.all()
    return found[None, None]


def _hidden_at(end: str, tile: int, of_all: bool, pairs: Pairs, at: Ends) -> Mask | None:
    """Whether no query, of the rank or of all, attends the first, or the last, key of a tile of a shard."""
    keys = pairs.keys
    begins = keys.place // tile * tile
    key = keys.at(keys.rank, begins if end == "first" else np.minimum(begins + tile, keys.count) - 1)
    hidden = np.zeros(pairs.true.shape[2:], dtype=bool)
    for held in [np.arange(pairs.problem.nq)] if of_all else pairs.queries.shards:
        attended: Mask = np.any(pairs.true[:, :, held], axis=(0, 1, 2))
        hidden[held] = ~attended[key]
    return hidden[None, None]


def _tile_before_window(tile: int, pairs: Pairs, at: Ends) -> Mask | None:
    """Whether the last key of a tile of a shard lies before the window of the rank's first query.

    That is right where positions ascend in a shard, as they need not in pages.
    """
    left, keys = (pairs.problem.window or (None,))[0], pairs.keys
    if left is None:
        return None
    last = np.minimum(keys.place // tile * tile + tile, keys.count) - 1
    found: Mask = keys.at(keys.rank, last) < at.queries["first"] - left
    return found


def _hidden_in_first(tile: int, pairs: Pairs, at: Ends) -> Mask | None:
    """Whether no query of the rank attends a key of a tile of a shard in the first batch entry."""
    keys = pairs.keys
    hidden = np.zeros(pairs.true.shape[2:], dtype=bool)
    for queries in pairs.queries.shards:
        attended: Mask = np.any(pairs.true[0][:, queries], axis=(0, 1))
        for held in keys.shards:
            for begin in range(0, len(held), tile):
                here = held[begin : begin + tile]
                hidden[np.ix_(queries, here)] = not attended[here].any()
    return hidden[None, None] if pairs.problem.batch > 1 else None


def _after_an_empty_tile(tile: int, pairs: Pairs, at: Ends) -> Mask | None:
    """Whether a tile of a shard comes after one of which no query of the rank attends anything."""
    skip = np.zeros(pairs.true.shape[2:], dtype=bool)
    for queries in pairs.queries.shards:
        attended: Mask = np.any(pairs.true[:, :, queries], axis=(0, 1, 2))
        for held in pairs.keys.shards:
            tiles = [held[begin : begin + tile] for begin in range(0, len(held), tile)]
            used = [bool(attended[here].any()) for here in tiles]
            if False in used:
                skip[np.ix_(queries, np.concatenate(tiles[used.index(False) :]))] = True
    return skip[None, None]


def _after_an_empty_hop(way: int, pairs: Pairs, at: Ends) -> Mask | None:
    """Whether a block comes after one of which the rank attends nothing, in a ring that sends to the right (1) or left.

    A ring that sends to the left (−1) brings the next rank's block first.
    """
    if pairs.case.replicated:
        return None
    visited = Blocks(pairs).visited[0, 0] > 0
    empty = ~np.take_along_axis(visited, (pairs.queries.rank - way * np.arange(pairs.size)) % pairs.size, axis=1)
    past = np.cumsum(empty, axis=1) > empty
    hops = np.broadcast_to(way * pairs.hop % pairs.size, pairs.true.shape[2:])
    found: Mask = np.take_along_axis(past, hops, axis=1)
    return found[None, None]


def _after_a_hop_of_none(pairs: Pairs, at: Ends) -> Mask | None:
    """Whether a block comes at a later hop than the first at which no rank attends anything."""
    if pairs.case.replicated:
        return None
    hops = np.broadcast_to(pairs.hop, pairs.true.shape[2:])
    used = [bool(pairs.true[:, :, hops == hop].any()) for hop in range(pairs.size)]
    found: Mask = np.asarray(hops > (used.index(False, 1) if False in used[1:] else pairs.size))
    return found[None, None]


def _past_the_farthest_before(pairs: Pairs, at: Ends) -> Mask | None:
    """Whether a block comes at a later hop than any that a rank attends of those of ranks before its own."""
    if pairs.case.replicated:
        return None
    hops = np.broadcast_to(pairs.hop, pairs.true.shape[2:])
    needed = np.any(pairs.true, axis=(0, 1)) & (pairs.owner < pairs.rank)
    found: Mask = hops > hops.max(where=needed, initial=0)
    return found[None, None]


def _past_the_longer_side(pairs: Pairs, at: Ends) -> Mask | None:
    """Whether a block comes at a later hop than the longer side of a window reaches in whole shards, rounded up.

    Shards of zigzag pieces are two of the longest. That is right of those that lie before a rank, one after the other.
    """
    left, right = pairs.problem.window or (None, None)
    right = 0 if pairs.problem.causal else right
    if left is None or right is None or pairs.case.replicated:
        return None
    zigzag = pairs.case.sharding == "zigzag"
    cut = pieces(pairs.keys.total, 2 * pairs.size) if zigzag else pairs.keys.shards
    longest = max(1, *map(len, cut)) * (1 + zigzag)
    return pairs.hop > -(-max(left, right) // longest)


def _level(pairs: Pairs, at: Ends) -> Mask | None:
    return at.keys["first"] >= at.queries["last"] if pairs.problem.causal else None


def _past_the_shortest(pairs: Pairs, at: Ends) -> Mask | None:
    """Whether the first key is padding in some batch entry."""
    lengths = pairs.problem.key_lengths
    return None if lengths is None else np.asarray(at.keys["first"] >= min(lengths))


def _padded_at_its_end(pairs: Pairs, at: Ends) -> Mask | None:
    if pairs.problem.key_lengths is None:
        return None
    found: Mask = at.keys["last"] >= np.array(pairs.problem.key_lengths)[:, None, None, None]
    return found


def _tile_after(tile: int, query: str, of_shard: bool, pairs: Pairs, at: Ends) -> Mask | None:
    """Whether a tile begins at or after the last query, or after the first; tiles begin at 0, or with each shard."""
    if not pairs.problem.causal:
        return None
    start = _starts(tile, of_shard, pairs)
    return start >= at.queries[query] if query == "last" else start > at.queries[query]


def _tile_after_unaligned(tile: int, of_shard: bool, pairs: Pairs, at: Ends) -> Mask | None:
    """Whether a tile begins after the last query, counted without what lies before the first one."""
    if not pairs.problem.causal or not pairs.problem.diagonal:
        return None
    found: Mask = _starts(tile, of_shard, pairs) > at.queries["last"] - pairs.problem.diagonal
    return found


def _starts(tile: int, of_shard: bool, pairs: Pairs) -> Ints:
    """Positions at which the tiles of keys begin that are cut from position 0 on, or from the start of each shard."""
    keys = pairs.keys
    return keys.at(keys.rank, keys.place // tile * tile) if of_shard else keys.p // tile * tile


def unmasked(tile: int, of_shard: bool, of_tile: bool, pairs: Pairs) -> Counts | None:
    """Return counts without the causal mask of tiles that begin before the first query, of the rank or of its tile."""
    if not pairs.problem.causal:
        return None
    queries = pairs.queries
    first = queries.at(queries.rank, queries.place // tile * tile * of_tile) + pairs.problem.diagonal
    plain = queries.p, pairs.keys.p
    bare = pairs.counts(lambda name: None if name == "causal" else plain)
    return np.where(_starts(tile, of_shard, pairs) < first, bare, pairs.true)


BOUNDS = {"causal": "causal mask", "window": "window"}
"""Constraints that a block may be within as a whole, in words."""


def whole(names: tuple[str, ...], key: str, query: str, pairs: Pairs) -> Counts | None:
    """Return counts without some constraints in blocks of which one pair of ends is within them."""
    if not set(names) & set(pairs.present()):
        return None
    ends = Ends.of_blocks(pairs)
    i, j = ends.queries[query] - pairs.problem.diagonal, ends.keys[key]
    plain = pairs.queries.p, pairs.keys.p
    let_through = pairs.counts(lambda name: (i, j) if name in names else None) > 0
    bare = pairs.counts(lambda name: None if name in names else plain)
    return np.where(let_through, bare, pairs.true)


def ways_to_leave_unmasked() -> Iterator[tuple[str, Callable[[Pairs], Counts | None]]]:
    """Yield tests by which blocks or tiles are taken for those that a mask lets through whole, in words."""
    for names, (key, query) in product((("causal",), ("window",), ("causal", "window")), product(ENDS, ENDS)):
        if (names, key, query) != (("causal",), "last", "first"):
            bounds = " and no ".join(BOUNDS[name] for name in names)
            says = f"a block has no {bounds} if its {key} key is within that of the rank's {query} query"
            yield says, functools.partial(whole, names, key, query)
    for tile, of_shard, of_tile in product(TILES, (False, True), (False, True)):
        whose = f"of a tile of {tile} queries" if of_tile else "of the rank"
        yield (
            f"a tile of {tile} keys{' of a shard' if of_shard else ''} that begins before the first query {whose} has "
            "no causal mask",
            functools.partial(unmasked, tile, of_shard, of_tile),
        )


def _miscounted() -> Iterator[tuple[str, Skips]]:
    """Yield tests that are right but for a miscounted end, in words."""
    right: tuple[tuple[str, str, Skips], ...] = (
        ("queries", "under a causal mask if its first key comes after the rank's last query",
         functools.partial(after, "first", "last")),
        ("queries", "if its first key lies after the window of the rank's last query",
         functools.partial(after_window, "first", "last", False)),
        ("keys", "if its last key lies before the window of the rank's first query",
         functools.partial(before_window, "last", "first", False)),
    )  # fmt: skip
    for (side, says, test), (other, miscounted, count) in product(right, COUNTED):
        if side == other:
            yield f"a block is skipped {says}, {miscounted}", functools.partial(_counted, test, side, count)


def ways_to_skip() -> Iterator[tuple[str, Skips]]:
    """Yield tests by which blocks or tiles are skipped that hold keys to attend, in words."""
    for key, query in product(ENDS, ENDS):
        if (key, query) != ("first", "last"):
            yield (
                f"a block is skipped under a causal mask if its {key} key comes after the rank's {query} query",
                functools.partial(after, key, query),
            )
        if (key, query) != ("last", "first"):
            yield (
                f"a block is skipped if its {key} key lies before the window of the rank's {query} query",
                functools.partial(before_window, key, query, False),
            )
        if (key, query) != ("first", "last"):
            yield (
                f"a block is skipped if its {key} key lies after the window of the rank's {query} query",
                functools.partial(after_window, key, query, False),
            )
        if (key, query) != ("first", "last"):
            yield (
                f"a block is skipped if its {key} key comes after the rank's {query} query under a causal mask, and "
                "after the window of that otherwise",
                functools.partial(after_either, key, query, False),
            )
        yield (
            f"a block is skipped unless its {key} key's document is that of the rank's {query} query",
            functools.partial(_of_another_document, key, query),
        )
        for order, beyond, right in (("an earlier", False, ("last", "first")), ("a later", True, ("first", "last"))):
            if (key, query) != right:
                yield (
                    f"a block is skipped if its {key} key lies in {order} document than the rank's {query} query",
                    functools.partial(_of_document_beyond, key, query, beyond),
                )
            else:
                says = f"a block is skipped if its {key} key lies in the document of the rank's {query} query, or in"
                yield f"{says} {order} one", functools.partial(_of_document_beyond, key, query, beyond, level=True)
    yield (
        "a block is skipped if its last key is the first in the window of the rank's first query",
        functools.partial(before_window, "last", "first", True),
    )
    yield (
        "a block is skipped if its first key is the last in the window of the rank's last query",
        functools.partial(after_window, "first", "last", True),
    )
    yield "a block is skipped under a causal mask if its first key is level with the rank's last query", _level
    yield (
        "a block is skipped if its first key is the last that the rank's last query may attend, by a causal mask or by "
        "the window otherwise",
        functools.partial(after_either, "first", "last", True),
    )
    yield from _miscounted()
    yield "a block is skipped if it lies outside the window with its sides exchanged", _outside_exchanged_window
    yield "a block is skipped if its last key is padding", _padded_at_its_end
    for way, ring in ((1, ""), (-1, ", in a ring that sends to the left")):
        says = f"a block is skipped if it comes after one of which the rank attends nothing, hop by hop{ring}"
        yield says, functools.partial(_after_an_empty_hop, way)
    yield "a block is skipped if it comes after the first hop on which no rank attends anything", _after_a_hop_of_none
    yield (
        "a block is skipped if it comes after the last hop on which a rank attends one of an earlier rank: those that "
        "have wrapped around the ring are not counted",
        _past_the_farthest_before,
    )
    yield (
        "a block is skipped if it comes at a later hop than the longer side of the window reaches in whole shards, "
        "rounded up",
        _past_the_longer_side,
    )
    yield "a block is skipped under a causal mask as if the first query and the first key were level", _after_unaligned
    yield "blocks of later ranks are skipped under a causal mask, whatever their positions", _of_a_later_rank
    yield (
        "a block is skipped in all batch entries if in the first no query of the rank attends it",
        functools.partial(_hidden_in_first, WHOLE),
    )
    for axis, one in enumerate(("batch entry", "head")):
        says = f"a block is skipped in all if it holds no key to attend in one {one}"
        yield says, functools.partial(_empty_for_one, axis)
    yield (
        "a block is skipped in all batch entries if its first key is past the shortest of key_lengths",
        _past_the_shortest,
    )
    for tile in TILES:
        whose = f"a tile of {tile} keys of a shard is skipped"
        says = f"{whose} if its last one lies before the window of the rank's first query"
        yield says, functools.partial(_tile_before_window, tile)
        yield (
            f"{whose} if it comes after one of which the rank attends nothing",
            functools.partial(_after_an_empty_tile, tile),
        )
        says = f"{whose} in all batch entries if in the first no query of the rank attends it"
        yield says, functools.partial(_hidden_in_first, tile)
        for end, (whose, of_all) in product(ENDS, {" of the rank": False, "": True}.items()):
            says = f"a tile of {tile} keys of a shard is skipped if no query{whose} attends its {end} key"
            yield says, functools.partial(_hidden_at, end, tile, of_all)
        for of_shard in (False, True):
            whose = f"a tile of {tile} keys{' of a shard' if of_shard else ''} is skipped under a causal mask"
            level, later = (functools.partial(_tile_after, tile, query, of_shard) for query in ("last", "first"))
            yield f"{whose} if its first key is level with the rank's last query", level
            yield f"{whose} if it begins after the rank's first query", later
            unaligned = functools.partial(_tile_after_unaligned, tile, of_shard)
            yield f"{whose} if it begins after the rank's last query, as if their first ones were level", unaligned
