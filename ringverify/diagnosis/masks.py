"""Ways to make a mask, and parts of all pairs of queries and keys: the words in which `reading` says what it read.

A mask may be made at other positions than those of the queries and keys: of another rank, of another place in the
shard, shifted. Parts are blocks by rank, owner and hop, and rows and columns of blocks.

Shapes: `(Nq, 1)` of queries, `(1, Nk)` of keys, `(B, H, Nq, Nk)` of counts, and what broadcasts to it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ringref import pattern
from ringref.sharding import SHARDINGS, Positions, ShardingName, key_positions, pieces, query_positions
from ringverify.diagnosis.scene import Counts, Scene

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
_Rows = TypeVar("_Rows", Ints, Mask)
CONSTRAINTS = ("causal", "window", "documents", "key_lengths", "dilation")
TILES = range(2, 9)


@dataclasses.dataclass(frozen=True, eq=False)
class OneSide:
    """The queries or the keys of a case, each with its place.

    Attributes:
        p: positions, as a column of queries or a row of keys.
        rank: which rank holds each.
        place: the place of each in the shard.
        count: how many that rank holds.
        of: positions `(P, longest + 1)` by rank and place, continued past the end of a shard.
        shards: positions of every rank.
        total: number of positions.
    """

    p: Ints
    rank: Ints
    place: Ints
    count: Ints
    of: Ints
    shards: list[Positions]
    total: int

    def at(self, rank: Ints | int, place: Ints) -> Ints:
        """Return the positions at places of ranks, counted on past the end."""
        rank, place = np.broadcast_arrays(np.asarray(rank) % len(self.shards), place)
        found: Ints = self.of[rank, place]
        return found


def side(shards: list[Positions], total: int, *, keys: bool) -> OneSide:
    """Return one side of a case."""
    p = np.arange(total)
    rank, place, count = (np.zeros(total, dtype=np.int64) for _ in range(3))
    longest = max((len(held) for held in shards), default=0)
    of = np.zeros((len(shards), 2 * longest + 2), dtype=np.int64)
    for number, held in enumerate(shards):
        rank[held], place[held], count[held] = number, np.arange(len(held)), len(held)
        of[number, : len(held)] = held
        last = held[-1] if len(held) else total - 1
        of[number, len(held) :] = last + 1 + np.arange(of.shape[1] - len(held))
    p, rank, place, count = (x[None, :] if keys else x[:, None] for x in (p, rank, place, count))
    return OneSide(p, rank, place, count, of, shards, total)


class Pairs:
    """Every pair of a query and a key of a case."""

    def __init__(self, scene: Scene) -> None:
        self.problem, self.size, self.case = scene.problem, scene.size, scene.case
        queries, keys = scene.shards
        self.true: Counts = scene.truth.intermediates.m
        self.keys = side(keys, self.problem.nk, keys=True)
        if scene.replicated:  # every rank attends its own block with all queries
            queries = [np.arange(self.problem.nq)]
        self.queries = side(queries, self.problem.nq, keys=False)
        self.rank = self.keys.rank if scene.replicated else self.queries.rank
        self.owner = self.keys.rank
        self.hop = (self.rank - self.owner) % self.size
        self.ring = np.array(scene.case.ring_ranks)

    @functools.cached_property
    def padding(self) -> Mask:
        """Keys that no query may attend, `(B, 1, 1, Nk)`."""
        p, j = self.problem, np.arange(self.problem.nk)
        lengths = np.array(p.key_lengths or (p.nk,) * p.batch)
        first, last = (0, p.nk) if p.documents is None else (p.documents[0], p.documents[-1])
        found: Mask = (j < first) | (j >= last) | (j >= lengths[:, None])
        return found[:, None, None, :]

    def present(self) -> tuple[str, ...]:
        """Return the constraints that the case has."""
        return tuple(name for name in CONSTRAINTS if getattr(self.problem, name))

    def counts(self, of: Callable[[str], tuple[Ints, Ints] | None]) -> Counts:
        """Return counts with each constraint made at the positions that are given for it; `None` leaves it out."""
        p = self.problem
        m = np.ones((p.batch, p.heads, p.nq, p.nk), dtype=np.int64)
        for name in self.present():
            if (at := of(name)) is not None:
                m *= _constraint(self, name, *(np.broadcast_to(x, (p.nq, p.nk)) for x in at))
        return m


def pairs_of(scene: Scene) -> Pairs:
    """Return the pairs of a case, which are made once."""
    return scene.once("pairs", lambda: Pairs(scene))


def _constraint(pairs: Pairs, name: str, i: Ints, j: Ints) -> Counts | Mask:
    p = pairs.problem
    match name:
        case "causal":
            return pattern.causal(i, j, diagonal=p.diagonal)
        case "window":
            assert p.window is not None
            return pattern.window(i, j, left=p.window[0], right=p.window[1], diagonal=p.diagonal)
        case "documents":
            return pattern.same_document(i, j, offsets=np.array(p.documents))
        case "key_lengths":
            return pattern.within_key_length(j, key_lengths=np.array(p.key_lengths)[:, None, None, None])
        case _:
            assert p.dilation is not None
            return pattern.branches_through(i, j, dilation=p.dilation, heads=p.heads)


# -- masks made in another way -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Otherwise:
    """A mask made in another way.

    Attributes:
        text: how, as a clause.
        counts: how often keys are attended then; `None` if it is the same mask in this case.
        cost: how far-fetched it is: a rule of one part less may cost one more.
        zeros: how often keys and values of 0 are attended, `(B, H, Nq)`.
        lse: the lse of rows that attend nothing then.
    """

    text: str
    counts: Callable[[Pairs], Counts | None]
    cost: float = 0
    zeros: Callable[[Pairs], Counts] | None = None
    lse: float = -np.inf


NOT_COMPUTED = "nothing is computed: results are 0, lse too"

At = Callable[[Pairs, OneSide], Ints]
"""Positions that are taken instead of those of a side."""


def _halves(pairs: Pairs, x: OneSide) -> Ints:
    """Positions of zigzag pieces cut at half of the rows, in an order that tells empty pieces apart too."""
    if pairs.case.sharding != "zigzag":
        return x.p
    half = x.count // 2
    piece = np.where(x.place < half, x.rank, 2 * pairs.size - 1 - x.rank)
    return piece * x.total + np.where(x.place < half, x.place, x.place - half)


def _shifted(by: int) -> At:
    return lambda pairs, x: x.p + by


def _through_order(pairs: Pairs, x: OneSide) -> Ints:
    """Positions if rows are put in order by the permutation whose inverse does so, and back by the other."""
    order = np.concatenate(x.shards) if len(x.shards) == pairs.size else np.arange(x.total)
    back = np.argsort(order)
    return back[back[x.p]]


def _down(tile: int) -> At:
    return lambda pairs, x: x.p // tile * tile


def _whole_tiles(tile: int) -> At:
    return lambda pairs, x: x.at(x.rank, x.place // tile * tile)


def _tiled(tile: int) -> At:
    return lambda pairs, x: x.at(x.rank, x.place % tile)


def _sharded(name: ShardingName) -> At:
    def at(pairs: Pairs, x: OneSide) -> Ints:
        if len(x.shards) != pairs.size or pairs.case.sharding == name:  # every rank may have all queries
            return x.p
        of = (key_positions if x is pairs.keys else query_positions)(name, x.total, pairs.size)
        if any(len(a) != len(b) for a, b in zip(of, x.shards, strict=True)):
            return x.p
        return side(of, x.total, keys=x is pairs.keys).at(x.rank, x.place)

    return at


def _in_pieces(*, early: bool) -> At:
    """Positions of zigzag pieces of length // (2 ranks) rows each; the late ones are counted from the end."""

    def at(pairs: Pairs, x: OneSide) -> Ints:
        if pairs.case.sharding != "zigzag":
            return x.p
        each, after = x.total // (2 * pairs.size), late(x, pairs)
        lengths = np.array([len(piece) for piece in pieces(x.total, 2 * pairs.size)])
        behind = x.total - (x.rank + 1) * each + x.place - lengths[x.rank]
        return np.where(after, behind, x.rank * each + x.place if early else x.p)

    return at


def _whole_tiled(tile: int) -> At:
    return lambda pairs, x: x.at(x.rank, np.where(x.place < x.count // tile * tile, x.place % tile, x.place))


def _of_rank(change: Callable[[Pairs, Ints], Ints]) -> At:
    return lambda pairs, x: x.at(change(pairs, x.rank), x.place)


def _of_world(pairs: Pairs, x: OneSide) -> Ints:
    """Positions as if the rank in the world were the rank in the ring."""
    g: Ints = pairs.ring[x.rank]
    found = {"striped": x.place * pairs.size + g, "contiguous": g * x.count + x.place}
    return x.p if pairs.case.group == "world" else found.get(pairs.case.sharding, x.at(g, x.place))


POSITIONS: dict[str, At] = {
    "of the rank in the world instead of the rank in the group": _of_world,
    **{f"{abs(by)} too {'large' if by > 0 else 'small'}": _shifted(by) for by in (-1, 1, -2, 2)},
    "aligned with the first key instead of the last": lambda pairs, x: x.p - pairs.problem.diagonal,
    "counted from the beginning of the shard": lambda pairs, x: x.place,
    "counted from the rank times the rank's own number of rows": lambda pairs, x: x.rank * x.count + x.place,
    "counted from the rank times length // ranks": lambda pairs, x: x.rank * (x.total // pairs.size) + x.place,
    "counted from the rank times the longest shard": lambda pairs, x: x.rank * -(-x.total // pairs.size) + x.place,
    **{f"of {name} shards": _sharded(name) for name in SHARDINGS if name != "replicated_query"},
    "that come of the inverse of the permutation that puts rows in order": _through_order,
    "of zigzag pieces that are cut at half of the rows": _halves,
    "of zigzag pieces of length // (2 ranks) rows": _in_pieces(early=True),
    "of late zigzag pieces counted back in length // (2 ranks) rows": _in_pieces(early=False),
    "of the next rank": _of_rank(lambda pairs, rank: rank + 1),
    "of the rank before": _of_rank(lambda pairs, rank: rank - 1),
    "of the ranks in reverse": _of_rank(lambda pairs, rank: -1 - rank),
    "of rank 0": _of_rank(lambda pairs, rank: 0 * rank),
    "of the last rank": _of_rank(lambda pairs, rank: 0 * rank - 1),
    "of the shard's first row": lambda pairs, x: x.at(x.rank, 0 * x.place),
    "of the shard's last row": lambda pairs, x: x.at(x.rank, x.count - 1),
    "of the shard's rows in reverse": lambda pairs, x: x.at(x.rank, x.count - 1 - x.place),
    **{f"rounded down to multiples of {tile}": _down(tile) for tile in TILES},
    **{f"rounded down to whole tiles of {tile}": _whole_tiles(tile) for tile in TILES},
    **{f"of the first {tile} rows of a shard in every tile of {tile}": _tiled(tile) for tile in TILES},
    **{f"of the first {tile} rows of a shard in every whole tile of {tile}": _whole_tiled(tile) for tile in TILES},
}
"""Positions that are taken for those of queries or keys, to follow "at positions"."""

OWNERS: dict[str, Callable[[Pairs], Ints]] = {
    "rank + hop": lambda pairs: pairs.rank + pairs.hop,
    "rank − hop + 1": lambda pairs: pairs.owner + 1,
    "rank − hop − 1": lambda pairs: pairs.owner - 1,
    "its own rank": lambda pairs: pairs.rank + 0 * pairs.owner,
    "hop": lambda pairs: pairs.hop,
    "hop − rank": lambda pairs: pairs.hop - pairs.rank,
    "ranks − 1 − owner": lambda pairs: -1 - pairs.owner + 0 * pairs.rank,
    "rank in the world − hop": lambda pairs: pairs.ring[pairs.rank] - pairs.hop,
}
"""Ranks that are taken for the owner of a block."""

BLOCKS: dict[str, Callable[[Pairs, OneSide, OneSide], Mask]] = {
    "a later rank": lambda pairs, i, j: _by_sharding(pairs, i.p < 0, late(i, pairs), j.place < i.place),
    "an earlier rank": lambda pairs, i, j: _by_sharding(pairs, i.p >= 0, ~late(j, pairs), j.place <= i.place),
    "the rank itself": lambda pairs, i, j: j.place <= i.place,
}
"""Which pairs a causal mask lets through that is chosen by whose block it is, where it is taken for another rank's."""

HELD: dict[str, Callable[[Pairs], Ints]] = {
    "of a rank and of the block": lambda pairs: pairs.keys.count,
    "of a rank": lambda pairs: np.array([len(held) for held in pairs.keys.shards])[pairs.rank],
}
"""How many keys decide how cross lengths are aligned, beside the queries of the rank."""


def _by_own_length(pairs: Pairs) -> Ints:
    return pairs.owner * HELD["of a rank"](pairs) + pairs.keys.place


def _aligned(held: Callable[[Pairs], Ints], pairs: Pairs) -> Ints:
    return pairs.queries.p - pairs.problem.diagonal + held(pairs) - pairs.queries.count


NAMES = {
    "causal": ("causal mask", "the causal mask is made"),
    "window": ("window", "the window is laid"),
    "documents": ("documents", "documents are told apart"),
    "key_lengths": ("key_lengths", "key_lengths are compared"),
    "dilation": ("dilation", "the dilation is made"),
}
"""Constraints, and how they are applied, to follow and to be followed by other words."""


def _at(
    queries: Callable[[Pairs], Ints] | None, keys: Callable[[Pairs], Ints] | None, only: str | None
) -> Callable[[Pairs], Counts | None]:
    def counts(pairs: Pairs) -> Counts | None:
        if only not in (None, *pairs.present()) or not pairs.present():
            return None
        plain = pairs.queries.p, pairs.keys.p
        other = (plain[0] if queries is None else queries(pairs), plain[1] if keys is None else keys(pairs))
        return pairs.counts(lambda name: other if only in (None, name) else plain)

    return counts


def _by_sharding(pairs: Pairs, contiguous: Mask, zigzag: Mask, striped: Mask) -> Mask:
    return {"contiguous": contiguous, "zigzag": zigzag}.get(pairs.case.sharding, striped)


def _as_block(of: Callable[[Pairs, OneSide, OneSide], Mask], pairs: Pairs) -> Counts | None:
    """Return counts with the causal mask of other ranks' blocks; `None` if it is not chosen by whose block it is."""
    if not pairs.problem.causal or pairs.problem.diagonal or pairs.case.replicated:
        return None
    plain = pairs.queries.p, pairs.keys.p
    rest = pairs.counts(lambda name: None if name == "causal" else plain)
    return rest * of(pairs, pairs.queries, pairs.keys)


def _as_block_of_the_world(number: str, pairs: Pairs) -> Counts | None:
    """Return counts with the causal mask chosen by the rank in the world, where hops and owners are of the group."""
    own, here = pairs.hop == 0, pairs.ring[pairs.rank]
    earlier = pairs.hop <= here if number == "hop" else pairs.owner < here

    def of(pairs: Pairs, i: OneSide, j: OneSide) -> Mask:
        right = pairs.counts(lambda name: (i.p, j.p) if name == "causal" else None) > 0
        later = BLOCKS["a later rank"](pairs, i, j)
        return np.where(own, right, np.where(earlier, BLOCKS["an earlier rank"](pairs, i, j), later))

    return None if pairs.case.group == "world" else _as_block(of, pairs)


def _zero_is_none(ends: tuple[str, ...], pairs: Pairs) -> Counts | None:
    """Return counts if these sides of a window are not bounded where they are 0."""
    p, plain = pairs.problem, (pairs.queries.p, pairs.keys.p)
    if p.window is None:
        return None
    left, right = (None if side == 0 and end in ends else side for side, end in zip(p.window, SIDES, strict=True))
    i, j = (np.broadcast_to(x, (p.nq, p.nk)) for x in plain)
    rest = pairs.counts(lambda name: None if name == "window" else plain)
    return rest * pattern.window(i, j, left=left, right=right, diagonal=p.diagonal)


SIDES = ("left", "right")


def _wrapped(pairs: Pairs) -> Counts | None:
    """Return counts if the owner of a block that wrapped around the ring is a negative number, and so its positions."""
    plain = pairs.queries.p, pairs.keys.p
    other = (plain[0], np.where(pairs.owner > pairs.rank, plain[1] - pairs.keys.total, plain[1]))
    return pairs.counts(lambda name: other) if pairs.present() and pairs.case.sharding == "contiguous" else None


ENDS = ("first", "last")


class Ends:
    """The first and last rows of the rank and of the block of each pair, as keys and queries are aligned."""

    def __init__(self, pairs: Pairs) -> None:
        self.keys = {end: self._of(pairs.keys, end) for end in ENDS}
        aligned = pairs.problem.diagonal
        self.queries = {end: self._of(pairs.queries, end) + aligned for end in ENDS}

    @staticmethod
    def _of(x: OneSide, end: str) -> Ints:
        found = np.array([held[0 if end == "first" else -1] if len(held) else 0 for held in x.shards])
        return found[x.rank]


Skips = Callable[[Pairs, Ends], "Mask | None"]
"""Whether a block, or a tile of it, is skipped, by pairs; `None` where the mask is not there that would skip it."""


def _skipped(skips: Skips, spared: bool, pairs: Pairs) -> Counts | None:
    """Return counts without the pairs of blocks or tiles that are skipped; a rank's own block may be spared."""
    skip = skips(pairs, Ends(pairs))
    return None if skip is None else np.where(skip & ((pairs.hop > 0) | (not spared)), 0, pairs.true)


def _after(key: str, query: str, pairs: Pairs, at: Ends) -> Mask | None:
    return at.keys[key] > at.queries[query] if pairs.problem.causal else None


def _before_window(key: str, query: str, pairs: Pairs, at: Ends) -> Mask | None:
    left = (pairs.problem.window or (None,))[0]
    if left is None:
        return None
    found: Mask = at.keys[key] < at.queries[query] - left
    return found


def _of_another_document(key: str, query: str, pairs: Pairs, at: Ends) -> Mask | None:
    if pairs.problem.documents is None:
        return None
    offsets = np.array(pairs.problem.documents)
    found: Mask = _bounds(offsets, at.keys[key]) != _bounds(offsets, at.queries[query])
    return found


def _after_unaligned(pairs: Pairs, at: Ends) -> Mask | None:
    if not pairs.problem.causal or not pairs.problem.diagonal:
        return None
    found: Mask = at.keys["first"] > at.queries["last"] - pairs.problem.diagonal
    return found


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


def _level(pairs: Pairs, at: Ends) -> Mask | None:
    return at.keys["first"] >= at.queries["last"] if pairs.problem.causal else None


def _padded_at_its_end(pairs: Pairs, at: Ends) -> Mask | None:
    if pairs.problem.key_lengths is None:
        return None
    found: Mask = at.keys["last"] >= np.array(pairs.problem.key_lengths)[:, None, None, None]
    return found


def _tile_after(tile: int, query: str, of_shard: bool, pairs: Pairs, at: Ends) -> Mask | None:
    """Whether a tile begins at or after the last query, or after the first; tiles begin at 0, or with each shard."""
    keys = pairs.keys
    start = keys.at(keys.rank, keys.place // tile * tile) if of_shard else keys.p // tile * tile
    if not pairs.problem.causal:
        return None
    return start >= at.queries[query] if query == "last" else start > at.queries[query]


def _skips() -> Iterator[tuple[str, Skips]]:
    """Yield tests by which blocks or tiles are skipped that hold keys to attend, in words."""
    for key, query in product(ENDS, ENDS):
        if (key, query) != ("first", "last"):
            yield (
                f"a block is skipped under a causal mask if its {key} key comes after the rank's {query} query",
                functools.partial(_after, key, query),
            )
        if (key, query) != ("last", "first"):
            yield (
                f"a block is skipped if its {key} key lies before the window of the rank's {query} query",
                functools.partial(_before_window, key, query),
            )
        yield (
            f"a block is skipped unless its {key} key's document is that of the rank's {query} query",
            functools.partial(_of_another_document, key, query),
        )
    yield "a block is skipped under a causal mask if its first key is level with the rank's last query", _level
    yield "a block is skipped if its last key is padding", _padded_at_its_end
    yield "a block is skipped under a causal mask as if the first query and the first key were level", _after_unaligned
    for axis, one in enumerate(("batch entry", "head")):
        says = f"a block is skipped in all if it holds no key to attend in one {one}"
        yield says, functools.partial(_empty_for_one, axis)
    for tile in TILES:
        for of_shard in (False, True):
            whose = f"a tile of {tile} keys{' of a shard' if of_shard else ''} is skipped under a causal mask"
            level, later = (functools.partial(_tile_after, tile, query, of_shard) for query in ("last", "first"))
            yield f"{whose} if its first key is level with the rank's last query", level
            yield f"{whose} if it begins after the rank's first query", later


def _by_twos(size: int) -> list[set[int]]:
    have = [{number} for number in range(size)]
    while len(have) > 1:
        have = [a | b for a, b in zip(have[::2], have[1::2], strict=False)]
    return have


def _left_over(order: Callable[[Pairs], Ints], pairs: Pairs) -> Counts:
    """Return counts if partial results are merged two by two, in this order, and an odd one is dropped."""
    return np.where(np.isin(order(pairs), list(_by_twos(pairs.size)[0])), pairs.true, 0)


Partner = Callable[[int, int, int], int]
"""The rank from which a rank takes partial results, by rank, how far away that is, and ranks; outside of all, none."""


def _exchanged(partner: Partner, rounded_down: bool, pairs: Pairs) -> Counts:
    """Return counts if every rank adds what its partners have: those 1, 2, 4 … away, where there is such a rank."""
    size, step = pairs.size, 1
    have = np.eye(size, dtype=np.int64)
    while step < size and (not rounded_down or 2 * step <= size):
        other = np.array([partner(rank, step, size) for rank in range(size)])
        inside = (other >= 0) & (other < size)
        have, step = have + np.where(inside[:, None], have[other % size], 0), 2 * step
    return pairs.true * have[pairs.rank, pairs.owner]


PARTNERS: dict[str, Partner] = {
    "rank XOR 1, 2, 4, …": lambda rank, step, size: rank ^ step,
    "the ranks 1, 2, 4, … before": lambda rank, step, size: (rank - step) % size,
    "the ranks 1, 2, 4, … after": lambda rank, step, size: (rank + step) % size,
}
"""With whom a rank may exchange in rounds, which is right of a number of ranks that is a power of 2."""


def _merged() -> Iterator[Otherwise]:
    orders: dict[str, Callable[[Pairs], Ints]] = {
        "by rank": lambda pairs: pairs.owner + 0 * pairs.rank,
        "by hop": lambda pairs: pairs.hop,
    }
    for text, order in orders.items():
        says = f"partial results are merged two by two, {text}, and an odd one that is left over is dropped"
        yield Otherwise(says, functools.partial(_left_over, order), 0.5)
    for whom, partner in PARTNERS.items():
        for rounded_down in (False, True):
            which = "log2(ranks) rounds, rounded down" if rounded_down else "rounds"
            yield Otherwise(
                f"partial results are exchanged in {which}, with {whom}: right only for 2, 4, 8, … ranks",
                functools.partial(_exchanged, partner, rounded_down),
                0.75,
            )


def _without(only: str | None) -> Callable[[Pairs], Counts | None]:
    def counts(pairs: Pairs) -> Counts | None:
        plain = pairs.queries.p, pairs.keys.p
        return pairs.counts(lambda name: None if only in (None, name) else plain)

    return counts


def _made() -> Iterator[Otherwise]:
    yield Otherwise("keys that the mask allows are not attended", lambda pairs: np.zeros_like(pairs.true))
    for times, text in ((2, "twice"), (3, "three times")):
        yield Otherwise(f"keys count {text}", functools.partial(_counted, times))
    for only in CONSTRAINTS:
        yield Otherwise(f"{NAMES[only][0]} ignored", _without(only), 0.5)
    yield Otherwise("all keys are attended, whatever the mask", _without(None), 0.5)
    for text, of in BLOCKS.items():
        whose = f"the causal mask is made as if the block were that of {text}"
        yield Otherwise(whose, functools.partial(_as_block, of), 1)
    for ends in (SIDES, SIDES[:1], SIDES[1:]):
        says = f"a window that is 0 on the {' or on the '.join(ends)} is not bounded there"
        yield Otherwise(says, functools.partial(_zero_is_none, ends), 0.25)
    for ends in (SIDES, SIDES[:1], SIDES[1:]):
        which = "both ends of the window are" if len(ends) > 1 else f"the {ends[0]} end of the window is"
        yield Otherwise(
            f"{which} laid in rows of a striped shard, at the distance divided by the number of ranks and rounded down",
            functools.partial(_in_rows, ends),
            0.5,
        )
    for number in ("hop", "owner"):
        says = f"the causal mask of a block is chosen by its {number} and the rank in the world, not that in the group"
        yield Otherwise(says, functools.partial(_as_block_of_the_world, number), 0.5)
    yield Otherwise("keys of blocks that have wrapped around the ring are taken for keys before the first", _wrapped, 1)
    for spared, (text, skips) in product((False, True), _skips()):
        never = ", but never a rank's own" if spared else ""
        yield Otherwise(text + never, functools.partial(_skipped, skips, spared), 1 + 0.25 * spared)
    yield from _merged()
    yield Otherwise(NOT_COMPUTED, lambda pairs: np.zeros_like(pairs.true), 0.25, lse=0.0)
    for scope in (*CONSTRAINTS, None):
        what = "the mask is made" if scope is None else NAMES[scope][1]
        cost = 1 if scope else 1.25
        for text, owner in OWNERS.items():
            keys = functools.partial(_keys_of, owner)
            whose = f"{what} as if the block were that of rank ({text}) mod ranks"
            yield Otherwise(whose, functools.partial(_in_a_ring, _at(None, keys, scope)), cost)
        for text, at in POSITIONS.items():
            queries, keys = functools.partial(_queries_at, at), functools.partial(_keys_at, at)
            yield Otherwise(f"{what} with queries and keys at positions {text}", _at(queries, keys, scope), cost)
            yield Otherwise(f"{what} with queries at positions {text}", _at(queries, None, scope), cost)
            yield Otherwise(f"{what} with keys at positions {text}", _at(None, keys, scope), cost)
            if scope == "window":
                for end in ("left", "right"):
                    says = f"the {end} end of the window is laid with queries at positions {text}"
                    yield Otherwise(says, functools.partial(_one_end, end, at), cost)
        says = f"{what} with keys at positions counted from the owner times the number of keys of the rank in hand"
        yield Otherwise(says, functools.partial(_in_a_ring, _at(None, _by_own_length, scope)), cost)
        for text, held in HELD.items():
            says = f"{what} with cross lengths aligned by the numbers of queries and keys {text} instead of all"
            yield Otherwise(says, _at(functools.partial(_aligned, held), None, scope), cost)
        yield Otherwise(
            f"{what} within each shard, at positions counted from its beginning",
            functools.partial(_within, scope),
            2,
        )
    yield Otherwise(
        "the mask is made with the rank in the world instead of the rank in the group",
        _at(
            lambda pairs: _of_world(pairs, pairs.queries),
            lambda pairs: pairs.keys.at(pairs.ring[pairs.rank] - pairs.hop, pairs.keys.place),
            None,
        ),
        0.5,
    )
    yield Otherwise(
        "the first position of each document is taken for one of the document before", _document_before, 0.5
    )
    yield Otherwise(
        "the first position of each document is taken for one of the document before, of the first for one of none",
        functools.partial(_documents, _bounds_before),
        0.5,
    )
    yield Otherwise(
        "the first position of each document, and the one past the last, are taken for the document before",
        functools.partial(_documents, _bounds_past),
        0.5,
    )
    for says, numbers in (
        ("positions that are in no document attend each other", _together),
        ("positions before the first document attend each other, and so do those after the last", _apart),
        ("positions after the last document attend each other", _behind),
        ("positions before the first document attend each other", _in_front),
    ):
        yield Otherwise(says, functools.partial(_documents, numbers), 0.5)
    for name in ("contiguous", "striped"):
        yield Otherwise(
            f"segments of a dilation are told apart with keys at positions of {name} shards",
            functools.partial(_segments, _sharded(name)),
        )
    yield Otherwise(
        "shards are gathered with the padding that makes them equally long: zeros are attended as keys between them, "
        "and the last keys are cut off",
        lambda pairs: _gathered(pairs)[0],
        0.5,
        lambda pairs: _gathered(pairs)[1],
    )
    for tile in TILES:
        for own in (True, False):
            where = "" if own else ", but not in a rank's own block under a causal mask"
            yield Otherwise(
                f"blocks are padded to whole tiles of {tile} keys, and the padding counts as keys of 0{where}",
                lambda pairs: pairs.true,
                1,
                functools.partial(_tile_padding, tile, own),
            )
    others: dict[str, Callable[[int], Ints]] = {
        "first": lambda n: 0 * np.arange(n),
        "next": lambda n: (np.arange(n) + 1) % n,
        "previous": lambda n: (np.arange(n) - 1) % n,
        "opposite": lambda n: n - 1 - np.arange(n),
    }
    for text, other in {**others, "last": lambda n: 0 * np.arange(n) + n - 1}.items():
        whose = f"each batch entry is masked by the {text} batch entry's key length"
        yield Otherwise(whose, functools.partial(_of_another, 0, other), 0.5)
    for text, extreme in (("largest", np.argmax), ("smallest", np.argmin)):
        whose = f"each batch entry is masked by the {text} of all key lengths"
        yield Otherwise(whose, functools.partial(_of_extreme, extreme), 0.5)
    for text, other in others.items():
        yield Otherwise(f"each head has the {text} head's mask", functools.partial(_of_another, 1, other), 0.5)


def _counted(times: int, pairs: Pairs) -> Counts:
    return times * pairs.true


def _in_a_ring(counts: Callable[[Pairs], Counts | None], pairs: Pairs) -> Counts | None:
    """Return counts, but none where every rank attends its own block only, so that there are no hops."""
    return None if pairs.case.replicated else counts(pairs)


def _keys_of(owner: Callable[[Pairs], Ints], pairs: Pairs) -> Ints:
    return pairs.keys.at(owner(pairs), pairs.keys.place)


def _queries_at(at: Callable[[Pairs, OneSide], _Rows], pairs: Pairs) -> _Rows:
    return at(pairs, pairs.queries)


def _keys_at(at: Callable[[Pairs, OneSide], _Rows], pairs: Pairs) -> _Rows:
    return at(pairs, pairs.keys)


def _of_another(axis: int, other: Callable[[int], Ints], pairs: Pairs) -> Counts:
    """Return counts in which each batch entry (axis 0) or head (axis 1) has those of another."""
    found: Counts = np.take(pairs.true, other(pairs.true.shape[axis]), axis=axis)
    return found


def _of_extreme(extreme: Callable[[tuple[int, ...]], np.intp], pairs: Pairs) -> Counts | None:
    lengths = pairs.problem.key_lengths
    return None if lengths is None else _of_another(0, lambda n: np.full(n, extreme(lengths)), pairs)


def _within(scope: str | None, pairs: Pairs) -> Counts | None:
    """Return counts with a constraint made within each shard; of a branch, if its segments are no longer than it."""
    if scope not in (None, *pairs.present()) or not pairs.present():
        return None
    plain, own = (pairs.queries.p, pairs.keys.p), (pairs.queries.place, pairs.keys.place)
    inside = pairs.rank == pairs.owner
    if scope != "dilation":
        return np.where(inside, pairs.counts(lambda name: own if scope in (None, name) else plain), 0)
    dilation = pairs.problem.dilation
    assert dilation is not None
    rest = pairs.counts(lambda name: None if name == "dilation" else plain)
    total = np.zeros_like(rest)
    for number, (w, _) in enumerate(dilation.branches):
        short = w <= pairs.queries.count
        total += np.where(short, branch(pairs, number, *own) * inside, branch(pairs, number, *plain))
    return rest * total


def branch(pairs: Pairs, number: int, i: Ints, j: Ints) -> Counts:
    """Return whether one branch of a dilation lets pairs through, in the heads that run it."""
    p = pairs.problem
    assert p.dilation is not None
    i, j = (np.broadcast_to(x, (p.nq, p.nk)) for x in (i, j))
    if p.dilation.heads == "shared":
        one = dataclasses.replace(p.dilation, branches=(p.dilation.branches[number],))
        return pattern.branches_through(i, j, dilation=one, heads=p.heads)
    count = len(p.dilation.branches)
    runs = [pattern.branch_of_head(h, heads=p.heads, branches=count) == number for h in range(p.heads)]
    every = pattern.branches_through(i, j, dilation=p.dilation, heads=p.heads)
    return np.where(np.array(runs)[:, None, None], every, 0)


def _document_before(pairs: Pairs) -> Counts | None:
    """Return counts if a document's first position is taken for one of the document before."""
    p = pairs.problem
    if p.documents is None:
        return None
    ends = np.array(p.documents[1:])
    of_i, of_j = (np.searchsorted(ends, x.p, side="left") for x in (pairs.queries, pairs.keys))
    inside = (pairs.queries.p >= p.documents[0]) & (pairs.queries.p < p.documents[-1])
    rest = pairs.counts(lambda name: None if name == "documents" else (pairs.queries.p, pairs.keys.p))
    return np.where((of_i == of_j) & inside & ~pairs.padding, rest, 0)


def _in_rows(ends: tuple[str, ...], pairs: Pairs) -> Counts | None:
    """Return counts if ends of a window are laid in rows of striped shards, their distance divided by the ranks."""
    p = pairs.problem
    if p.window is None or pairs.case.sharding != "striped":
        return None
    plain, rows = ((x.p for x in (pairs.queries, pairs.keys)), (x.place for x in (pairs.queries, pairs.keys)))
    i, j, of_i, of_j = (np.broadcast_to(x, (p.nq, p.nk)) for x in (*plain, *rows))
    found = pairs.counts(lambda name: None if name == "window" else (pairs.queries.p, pairs.keys.p))
    for end, side in zip(SIDES, p.window, strict=True):
        of_rows = end in ends and side is not None
        sides = {one: None if one != end or side is None else side // pairs.size if of_rows else side for one in SIDES}
        at, diagonal = ((of_i, of_j), p.diagonal // pairs.size) if of_rows else ((i, j), p.diagonal)
        found = found * pattern.window(*at, left=sides["left"], right=sides["right"], diagonal=diagonal)
    return found


def _one_end(end: str, at: At, pairs: Pairs) -> Counts | None:
    """Return counts with one end of the window laid with queries at other positions."""
    p = pairs.problem
    if p.window is None or p.window[end == "right"] is None:
        return None
    plain, other, (left, right) = pairs.queries.p, at(pairs, pairs.queries), p.window
    j = np.broadcast_to(pairs.keys.p, (p.nq, p.nk))
    of_left, of_right = (np.broadcast_to(other if end == one else plain, (p.nq, p.nk)) for one in ("left", "right"))
    rest = pairs.counts(lambda name: None if name == "window" else (plain, pairs.keys.p))
    inside = pattern.window(of_left, j, left=left, right=None, diagonal=p.diagonal)
    return rest * inside * pattern.window(of_right, j, left=None, right=right, diagonal=p.diagonal)


Numbered = Callable[[Ints, Ints], Ints]
"""Numbers of documents of positions, by offsets; a negative number is none, and attends nothing."""


def _bounds(offsets: Ints, at: Ints) -> Ints:
    number = np.searchsorted(offsets, at, side="right") - 1
    return np.where(number < len(offsets) - 1, number, -1)


def _bounds_past(offsets: Ints, at: Ints) -> Ints:
    number = np.searchsorted(offsets, at, side="left") - 1
    return np.where(number < len(offsets) - 1, number, -1)


def _bounds_before(offsets: Ints, at: Ints) -> Ints:
    return np.where(at < offsets[-1], _bounds_past(offsets, at), -1)


def _together(offsets: Ints, at: Ints) -> Ints:
    number = np.searchsorted(offsets, at, side="right")
    return np.where(number < len(offsets), number, 0)


def _behind(offsets: Ints, at: Ints) -> Ints:
    return np.searchsorted(offsets, at, side="right") - 1


def _in_front(offsets: Ints, at: Ints) -> Ints:
    number = np.searchsorted(offsets, at, side="right")
    return np.where(number < len(offsets), number, -1)


def _apart(offsets: Ints, at: Ints) -> Ints:
    return np.searchsorted(offsets, at, side="right")


def _documents(numbered: Numbered, pairs: Pairs) -> Counts | None:
    """Return counts if documents of positions are numbered otherwise."""
    if pairs.problem.documents is None:
        return None
    offsets = np.array(pairs.problem.documents)
    of_i, of_j = (numbered(offsets, x.p) for x in (pairs.queries, pairs.keys))
    rest = pairs.counts(lambda name: None if name == "documents" else (pairs.queries.p, pairs.keys.p))
    return np.where((of_i == of_j) & (of_i >= 0), rest, 0)


def _segments(at: At, pairs: Pairs) -> Counts | None:
    """Return counts if the segment of a key, but not its place in it, is that of another position."""
    p = pairs.problem
    if p.dilation is None:
        return None
    plain = pairs.queries.p, pairs.keys.p
    rest, total = pairs.counts(lambda name: None if name == "dilation" else plain), np.zeros_like(pairs.true)
    keys = at(pairs, pairs.keys)
    for number, (w, _) in enumerate(p.dilation.branches):
        i = plain[0] % w  # in one segment, where only places in it decide
        through = branch(pairs, number, i, plain[1] % w)
        total += through * (plain[0] // w == keys // w)
    return rest * total


def _gathered(pairs: Pairs) -> tuple[Counts, Counts]:
    """Return counts of keys, and of zeros, if shards padded to the longest are joined and the first Nk rows taken."""
    keys, counts = pairs.keys, np.zeros_like(pairs.true)
    zeros = counts.sum(axis=-1)
    longest = max(map(len, keys.shards))
    for slot in range(keys.total):
        rank, place = divmod(slot, longest)
        if rank < len(keys.shards) and place < len(keys.shards[rank]):
            counts[..., keys.shards[rank][place]] += pairs.true[..., slot]
        else:
            zeros += pairs.true[..., slot]
    return counts, zeros


def _tile_padding(tile: int, own: bool, pairs: Pairs) -> Counts:
    """Return how many keys of 0 there are if blocks are padded to whole tiles, `(B, H, Nq)`."""
    lacking = np.array([-len(held) % tile for held in pairs.keys.shards])
    if pairs.case.replicated:
        found = np.full(pairs.queries.total, lacking.sum())
    else:
        spared = lacking[pairs.queries.rank[:, 0]] if pairs.problem.causal and not own else 0
        found = np.full(pairs.queries.total, lacking.sum()) - spared
    return np.broadcast_to(found, pairs.true.shape[:3])


MADE: tuple[Otherwise, ...] = tuple(_made())

# -- parts of all pairs ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PartOfPairs:
    """A part of all pairs.

    Attributes:
        text: which, to follow nothing.
        holds: whether a pair is in it.
        limits: what it chooses among, such as "queries": a rule has one part of each; `None` for cases, of several.
    """

    text: str
    holds: Callable[[Pairs], Mask]
    limits: str | None = None


def late(x: OneSide, pairs: Pairs) -> Mask:
    """Whether a row is in the later piece of a zigzag shard, or in the later half of another."""
    if pairs.case.sharding != "zigzag":
        return x.place >= x.count - x.count // 2
    early = np.array([len(piece) for piece in pieces(x.total, 2 * pairs.size)])
    return x.place >= early[x.rank]


def _places() -> Iterator[tuple[str, Callable[[Pairs, OneSide], Mask]]]:
    yield "in the late piece", lambda pairs, x: late(x, pairs)
    yield "in the early piece", lambda pairs, x: ~late(x, pairs)
    yield "in the first row of a shard", lambda pairs, x: x.place == 0
    yield "in the last row of a shard", lambda pairs, x: x.place == x.count - 1
    yield "not in the first row of a shard", lambda pairs, x: x.place > 0
    yield "not in the last row of a shard", lambda pairs, x: x.place < x.count - 1
    yield "in even rows of a shard", lambda pairs, x: x.place % 2 == 0
    yield "in odd rows of a shard", lambda pairs, x: x.place % 2 == 1
    yield "where the shard is a short one", lambda pairs, x: x.count < max(map(len, x.shards))
    yield "where the shard is a long one", lambda pairs, x: x.count > min(map(len, x.shards))
    yield "where the shard has an odd number of rows", lambda pairs, x: x.count % 2 == 1
    yield "where the shard has an even number of rows", lambda pairs, x: x.count % 2 == 0


def _tiles() -> Iterator[tuple[str, Callable[[Pairs, OneSide], Mask]]]:
    for tile in TILES:
        yield f"past the last whole tile of {tile}", functools.partial(_past_whole_tiles, tile)
        yield f"past the first {tile} rows", functools.partial(_past, tile)


def _past_whole_tiles(tile: int, pairs: Pairs, x: OneSide) -> Mask:
    return x.place >= x.count // tile * tile


def _past(tile: int, pairs: Pairs, x: OneSide) -> Mask:
    return x.place >= tile


def _left(pairs: Pairs) -> int:
    left = (pairs.problem.window or (None,))[0]
    return pairs.problem.nk if left is None else left


def _beyond(which: str, end: str, up: bool, pairs: Pairs) -> Mask:
    """Whether blocks lie further away on one side than an end of the window reaches, in whole shards."""
    side = (pairs.problem.window or (None, None))[end == "right"]
    if side is None:
        return np.zeros((1, 1, 1, 1), dtype=bool)
    away = pairs.owner - pairs.rank if which == "later" else pairs.rank - pairs.owner
    found: Mask = away > (-(-side // _shard(pairs)) if up else side // _shard(pairs))
    return found


def _beyond_either(up: bool, pairs: Pairs) -> Mask:
    return _beyond("later", "right", up, pairs) | _beyond("earlier", "left", up, pairs)


def _shard(pairs: Pairs) -> int:
    return max(1, *(len(held) for held in pairs.keys.shards))


def _document(pairs: Pairs, number: int) -> Mask:
    """Whether queries are in one of the documents that hold any position."""
    offsets = sorted(set(pairs.problem.documents or (0, pairs.problem.nq)))
    bounds = list(pairwise(offsets))
    start, end = bounds[number] if bounds else (0, 0)
    return (start <= pairs.queries.p) & (pairs.queries.p < end)


def _parts() -> Iterator[PartOfPairs]:
    blocks: dict[str, Callable[[Pairs], Mask]] = {
        "on blocks of other ranks": lambda pairs: pairs.hop > 0,
        "on a rank's own block": lambda pairs: pairs.hop == 0,
        "on blocks of later ranks": lambda pairs: pairs.owner > pairs.rank,
        "on blocks of earlier ranks": lambda pairs: pairs.owner < pairs.rank,
        "at hop 1": lambda pairs: pairs.hop == 1,
        "from hop 2 on": lambda pairs: pairs.hop >= 2,
        "at the last hop": lambda pairs: (pairs.hop == pairs.size - 1) & (pairs.hop > 0),
        "at hop ranks // 2": lambda pairs: (pairs.hop == pairs.size // 2) & (pairs.hop > 0),
        "on the block of rank + ranks // 2": lambda pairs: (
            (-pairs.hop % pairs.size == pairs.size // 2) & (pairs.hop > 0)
        ),
        "past hop ranks // 2": lambda pairs: pairs.hop > pairs.size // 2,
        "at odd hops": lambda pairs: pairs.hop % 2 == 1,
        "at even hops": lambda pairs: pairs.hop % 2 == 0,
        "on the block of the rank before": lambda pairs: pairs.owner == pairs.rank - 1,
        "on the block of the rank after": lambda pairs: pairs.owner == pairs.rank + 1,
        "on blocks not of a neighbour": lambda pairs: np.minimum(pairs.hop, -pairs.hop % pairs.size) > 1,
        "on blocks of ranks more than one apart": lambda pairs: abs(pairs.owner - pairs.rank) > 1,
        "on the block of the opposite rank, half way round an even number of ranks": lambda pairs: (
            2 * pairs.hop == pairs.size
        ),
        "on rank 0": lambda pairs: pairs.rank == 0,
        "on rank 1": lambda pairs: pairs.rank == 1,
        "on rank 2": lambda pairs: pairs.rank == 2,
        "on the last rank": lambda pairs: pairs.rank == pairs.size - 1,
        "from rank 1 on": lambda pairs: pairs.rank > 0,
        "not on the last rank": lambda pairs: pairs.rank < pairs.size - 1,
        "on odd ranks": lambda pairs: pairs.rank % 2 == 1,
        "on even ranks": lambda pairs: pairs.rank % 2 == 0,
        "on the block of rank 0": lambda pairs: pairs.owner == 0,
        "on the block of rank 1": lambda pairs: pairs.owner == 1,
        "on the block of rank 2": lambda pairs: pairs.owner == 2,
        "on the block of the last rank": lambda pairs: pairs.owner == pairs.size - 1,
        "on the block of rank 0 on other ranks": lambda pairs: (pairs.owner == 0) & (pairs.rank > 0),
        "on the block of the last rank on other ranks": lambda pairs: (
            (pairs.owner == pairs.size - 1) & (pairs.rank < pairs.size - 1)
        ),
        "not on the block of rank 0": lambda pairs: pairs.owner > 0,
        "not on the block of the last rank": lambda pairs: pairs.owner < pairs.size - 1,
        "on blocks of odd ranks": lambda pairs: pairs.owner % 2 == 1,
        "on blocks of even ranks": lambda pairs: pairs.owner % 2 == 0,
        "past hop left // shard, of the window's left end": lambda pairs: pairs.hop > _left(pairs) // _shard(pairs),
    }
    blocks |= {
        f"on blocks of {which} ranks that are more than {side} // shard{', rounded up,' if up else ''} away": (
            functools.partial(_beyond, which, side, up)
        )
        for which in ("later", "earlier")
        for side in SIDES
        for up in (False, True)
    }
    blocks |= {
        f"on blocks that are further away than the window reaches in whole shards{', rounded up' if up else ''}": (
            functools.partial(_beyond_either, up)
        )
        for up in (False, True)
    }
    for text, holds in blocks.items():
        yield PartOfPairs(text, holds, "blocks")
    alone: dict[str, Callable[[Pairs], bool]] = {
        "on an odd number of ranks": lambda pairs: pairs.size % 2 == 1,
        "on an even number of ranks": lambda pairs: pairs.size % 2 == 0,
        "on two ranks or more": lambda pairs: pairs.size > 1,
        "on three ranks or more": lambda pairs: pairs.size > 2,
        "under a causal mask": lambda pairs: pairs.problem.causal,
        "without a causal mask": lambda pairs: not pairs.problem.causal,
        "with a window": lambda pairs: pairs.problem.window is not None,
        "with documents": lambda pairs: pairs.problem.documents is not None,
        "with an odd number of heads": lambda pairs: pairs.problem.heads % 2 == 1,
        "with grouped heads": lambda pairs: pairs.problem.group_size > 1,
        "where shards differ in length": lambda pairs: len(set(map(len, pairs.keys.shards))) > 1,
    }
    for text, is_so in alone.items():
        yield PartOfPairs(text, functools.partial(_all_if, is_so))
    for where, place in (*_places(), *_tiles()):
        yield PartOfPairs(f"for queries {where}", functools.partial(_queries_at, place), "queries")
        yield PartOfPairs(f"for keys {where}", functools.partial(_keys_at, place), "keys")
    yield PartOfPairs("for queries of the first document", lambda pairs: _document(pairs, 0), "queries")
    yield PartOfPairs("for queries of the last document", lambda pairs: _document(pairs, -1), "queries")
    for axis, name in ((1, "head"), (0, "batch entry")):
        numbers: dict[str, Callable[[Ints], Mask]] = {
            f"in the first {name}": lambda number: number == 0,
            f"not in the first {name}": lambda number: number > 0,
            f"in the last {name}": lambda number: number == number.max(),
            f"in odd {name}s": lambda number: number % 2 == 1,
        }
        for text, chosen in numbers.items():
            yield PartOfPairs(text, functools.partial(_numbered, axis, chosen), name)
    for text, chosen in {
        "in heads of the first key head": lambda number: number == 0,
        "not in heads of the first key head": lambda number: number > 0,
        "in heads of the last key head": lambda number: number == number.max(),
        "in heads of odd key heads": lambda number: number % 2 == 1,
        "in heads of a last key head that has no partner": lambda number: (
            (number == number.max()) & (number.max() % 2 == 0)
        ),
    }.items():
        yield PartOfPairs(text, functools.partial(_of_key_head, chosen), "head")


def _of_key_head(chosen: Callable[[Ints], Mask], pairs: Pairs) -> Mask:
    numbers = np.arange(pairs.problem.heads) // pairs.problem.group_size
    return chosen(numbers).reshape(1, -1, 1, 1)


def _all_if(is_so: Callable[[Pairs], bool], pairs: Pairs) -> Mask:
    return np.full((1, 1, 1, 1), is_so(pairs))


def _numbered(axis: int, chosen: Callable[[Ints], Mask], pairs: Pairs) -> Mask:
    """Whether a pair's batch entry (axis 0) or head (axis 1) is chosen by its number."""
    return chosen(np.arange(pairs.true.shape[axis]).reshape([-1 if a == axis else 1 for a in range(4)]))


EVERYWHERE = PartOfPairs("", lambda pairs: np.ones((1, 1, 1, 1), dtype=bool))

PARTS: tuple[PartOfPairs, ...] = tuple(_parts())
