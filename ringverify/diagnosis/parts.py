"""Parts of all pairs: blocks by rank, owner and hop, rows and columns of blocks, heads and batch entries.

They are words in which `reading` says what it read, and `adding` what is added wrongly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from ringverify.diagnosis.masks.positions import keys_at, late, queries_at
from ringverify.diagnosis.pairs import INNER, SIDES, Ints, Mask, OneSide, Pairs
from ringverify.faults.merging import TILES


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
        yield f"past the first {tile} rows", functools.partial(_past, tile)
        for fewest, unless in ((0, ""), (tile, ", unless there are fewer")):
            whole = f"past the last whole tile of {tile}"
            yield whole + unless, functools.partial(_past_whole_tiles, tile, fewest)
            yield f"{whole} of all{unless}", functools.partial(_past_whole_tiles_of_all, tile, fewest)


def _past_whole_tiles(tile: int, fewest: int, pairs: Pairs, x: OneSide) -> Mask:
    found: Mask = (x.place >= x.count // tile * tile) & (x.count >= fewest)
    return found


def _past_whole_tiles_of_all(tile: int, fewest: int, pairs: Pairs, x: OneSide) -> Mask:
    found: Mask = (x.p >= x.total // tile * tile) & (x.total >= fewest)
    return found


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


def _on_its_way(pairs: Pairs) -> Mask:
    """Whether a block goes on, in a chain without an end that leads back, to as many ranks as some rank needs."""
    queries, keys = pairs.queries.shards, pairs.keys.shards
    if len(queries) != pairs.size:  # every rank has all queries
        return np.zeros((1, 1, 1, 1), dtype=bool)
    attends = np.array([[pairs.true[:, :, rows][..., held].any() for held in keys] for rows in queries])
    rank, owner = np.nonzero(attends)
    right, left = (away.max(initial=0) for away in (rank - owner, owner - rank))
    last, first = np.minimum(pairs.owner + right, pairs.size - 1), np.maximum(pairs.owner - left, 0)
    found: Mask = ((pairs.owner < pairs.rank) & (pairs.rank < last)) | (
        (first < pairs.rank) & (pairs.rank < pairs.owner)
    )
    return found


def _dropped_later(pairs: Pairs) -> Mask:
    """Whether a rank further on the way of a key's block attends the block, and not the key."""
    queries, keys = pairs.queries.shards, pairs.keys.shards
    found = np.zeros(pairs.true.shape[2:], dtype=bool)
    if len(queries) != pairs.size:  # every rank has all queries
        return found
    attends = np.array([pairs.true[:, :, rows].any(axis=(0, 1, 2)) for rows in queries])  # by rank and key
    for owner, held in enumerate(keys):
        dropped = np.zeros(len(held), dtype=bool)
        for hop in reversed(range(pairs.size)):
            rank = (owner + hop) % pairs.size
            found[np.ix_(queries[rank], held)] = dropped
            dropped = dropped | (attends[rank, held].any() & ~attends[rank, held])
    return found


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
        "everywhere but on a rank's own block under a causal mask": lambda pairs: (
            (pairs.hop > 0) | (not pairs.problem.causal)
        ),
        "everywhere but on blocks of later ranks under a causal mask": lambda pairs: (
            (pairs.owner <= pairs.rank) | (not pairs.problem.causal)
        ),
        "at hop 1": lambda pairs: pairs.hop == 1,
        "from hop 2 on": lambda pairs: pairs.hop >= 2,
        "at the last hop": lambda pairs: (pairs.hop == pairs.size - 1) & (pairs.hop > 0),
        "at hop ranks // 2": lambda pairs: (pairs.hop == pairs.size // 2) & (pairs.hop > 0),
        "on the block of rank + ranks // 2": lambda pairs: (
            (-pairs.hop % pairs.size == pairs.size // 2) & (pairs.hop > 0)
        ),
        "on the blocks furthest away, ranks // 2 hops in either direction": lambda pairs: (
            (np.minimum(pairs.hop, -pairs.hop % pairs.size) == pairs.size // 2) & (pairs.hop > 0)
        ),
        "past hop ranks // 2": lambda pairs: pairs.hop > pairs.size // 2,
        "on blocks that go on to a rank further away on that side of the owner": _on_its_way,
        "on keys that a rank further on the way of their block does not attend, though others of it": _dropped_later,
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
    for text, of in INNER.items():
        other = functools.partial(lambda of, pairs: pairs.owner // of(pairs.size) != pairs.rank // of(pairs.size), of)
        blocks[f"on blocks of other inner rings (of {text})"] = other
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
        yield PartOfPairs(f"for queries {where}", functools.partial(queries_at, place), "queries")
        yield PartOfPairs(f"for keys {where}", functools.partial(keys_at, place), "keys")
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
        "in heads of the last key head but one, of an odd number of them": lambda number: (
            (number == number.max() - 1) & (number.max() % 2 == 0)
        ),
        "in heads of a last key head that has no partner": lambda number: (
            (number == number.max()) & (number.max() % 2 == 0)
        ),
        "in heads of a last key head that has no partner, of three or more": lambda number: (
            (number == number.max()) & (number.max() % 2 == 0) & (number.max() > 0)
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
