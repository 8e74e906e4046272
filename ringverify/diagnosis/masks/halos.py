"""Halos: a rank fetches the blocks of ranks before and after it that its queries attend: too few, or out of place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from ringverify.diagnosis.masks.documents import bounds
from ringverify.diagnosis.pairs import SIDES, Ints, Mask, Otherwise, Pairs
from ringverify.diagnosis.scene import Counts

Reach = Callable[[Pairs, int, int], int]
"""How many blocks are fetched from one side, by the window's extent there and the rank."""


def ways_to_fetch_halos() -> Iterator[Otherwise]:
    """Yield masks without the keys of blocks that are not fetched, or with those of fetched ones out of place."""
    for side, which, nearest, farthest in (("left", "before", "last", "first"), ("right", "after", "first", "last")):
        yield Otherwise(
            f"a rank attends only as many blocks {which} its own as {nearest} queries need, not {farthest} ones",
            functools.partial(_too_few, functools.partial(_by_nearest_query, side), side),
            0.5,
        )
        yield Otherwise(
            f"a rank attends only as many blocks {which} its own as the neediest rank needs of a window that is a key "
            "shorter",
            functools.partial(_too_few, functools.partial(_by_shorter_window, side), side),
            1.2,
        )
    for text, reach in REACHES.items():
        for side, which in (("left", "before"), ("right", "after")):
            yield Otherwise(
                f"a rank attends only as many blocks {which} its own as {text}",
                functools.partial(_too_few, reach, side),
                0.75,
            )
    for text, reach in HOPS.items():
        yield Otherwise(
            f"a ring in both directions ends after as many hops to each side as {text}, unless they meet",
            functools.partial(_in_both_directions, reach),
            1.25,
        )
    for beside, which in enumerate(("before", "after")):
        yield Otherwise(
            f"of the ranks {which} it, a rank attends the next one's keys alone, however far the window reaches",
            functools.partial(_of_neighbours, beside),
            0.75,
        )
    for of_first, says in {
        True: "the keys that a rank fetches end with the document of its first query, not of its last",
        False: "the keys that a rank fetches begin with the document of its last query, not of its first",
    }.items():
        yield Otherwise(says, functools.partial(_of_one_document, of_first), 0.75)
    for side, which in (("left", "before"), ("right", "after")):
        yield Otherwise(
            f"the blocks that a rank fetches from those {which} it are joined in reverse order, and taken to ascend",
            functools.partial(_reversed, side),
            0.75,
        )
    yield Otherwise(
        "the first key that a rank has fetched is taken for the first in the window of its first query, though whole "
        "blocks were fetched",
        _from_the_window,
        0.75,
    )
    yield Otherwise(
        "what queries of a rank may attend is cut from the first key in the window of the first of them on, and masked "
        "as if it began where the sequence, or their document, does",
        _cut_by_the_window,
        0.75,
    )
    yield Otherwise(
        "the left end of the window moves on from the first key that is cut out for queries of a rank, as if none were "
        "missing there before the sequence, or their document, begins",
        _from_the_first_cut_out,
        0.75,
    )
    yield Otherwise(
        "the keys that a rank has fetched are held against key_lengths as if the first of them were the rank's own: "
        "those that are padding then count as keys of 0",
        _without_cleared,
        0.75,
        _as_zeros,
    )
    yield Otherwise(
        "key_lengths are compared with the number of a key among those that its rank has fetched, from the first in "
        "the window or the document of the rank's first query on, instead of its position",
        _numbered_from_the_first,
        0.75,
    )


def _extent(pairs: Pairs, side: str) -> int | None:
    """Return how far a query's keys lie from it on one side at most; `None` if that is not bounded."""
    left, right = pairs.problem.window or (None, None)
    return left if side == "left" else 0 if pairs.problem.causal else right


def _divided(up: bool, unit: Callable[[Pairs, int], int]) -> Reach:
    """Return the extent in so many units, rounded."""

    def reach(pairs: Pairs, extent: int, rank: int) -> int:
        each = max(1, unit(pairs, rank))
        return -(-extent // each) if up else extent // each

    return reach


def _blocks_of(pairs: Pairs, rank: int, extent: int, side: str, end: int) -> int:
    """Return how many blocks away the farthest key lies that the first (0) or last (-1) query of a rank attends."""
    held = pairs.keys.shards[rank]
    if not len(held):
        return 0
    last = pairs.keys.total - 1
    position = min(max(0, held[end] - extent if side == "left" else held[end] + extent), last)
    return abs(int(pairs.keys.rank[0, position]) - rank)


def _by_nearest_query(side: str, pairs: Pairs, extent: int, rank: int) -> int:
    """Return how many blocks the query of any shard needs that needs the fewest in it."""
    end = -1 if side == "left" else 0
    return max(_blocks_of(pairs, other, extent, side, end) for other in range(pairs.size))


def _by_shorter_window(side: str, pairs: Pairs, extent: int, rank: int) -> int:
    """Return how many blocks some rank needs by a window that is a key shorter on one side."""
    end, shorter = (0 if side == "left" else -1), max(0, extent - 1)
    return max(_blocks_of(pairs, other, shorter, side, end) for other in range(pairs.size))


REACHES: dict[str, Reach] = {
    "the shortest shard goes into the window, rounded down": _divided(False, lambda p, rank: _lengths(p).min()),
    "its own shard goes into the window, rounded down": _divided(False, lambda p, rank: _lengths(p)[rank]),
    "its own shard goes into the window, rounded up": _divided(True, lambda p, rank: _lengths(p)[rank]),
}
"""How many blocks may be fetched, in words; as many as the longest shard goes into the window are parts of a mask."""

HOPS = REACHES | {
    "the longest shard goes into the window, rounded up": _divided(True, lambda p, rank: _lengths(p).max())
}
"""After how many hops a ring in both directions may end on each side, in words."""


def _lengths(pairs: Pairs) -> Ints:
    return np.array([len(held) for held in pairs.keys.shards])


def _whole(pairs: Pairs) -> bool:
    """Whether shards are pieces of the sequence, in order, and queries and keys are the same positions."""
    p = pairs.problem
    return pairs.case.sharding == "contiguous" and not p.diagonal and pairs.size > 1 and p.dilation is None


def _too_few(reach: Reach, side: str, pairs: Pairs) -> Counts | None:
    extent = _extent(pairs, side) if _whole(pairs) else None
    if extent is None or (side == "right" and pairs.problem.causal):
        return None
    most = np.array([reach(pairs, extent, rank) for rank in range(pairs.size)])[pairs.queries.rank]
    away = pairs.rank - pairs.owner if side == "left" else pairs.owner - pairs.rank
    return np.where(away > most, 0, pairs.true)


def _in_both_directions(reach: Reach, pairs: Pairs) -> Counts | None:
    """Return counts without blocks that come neither from the left nor from the right in so many hops."""
    if not _whole(pairs) or pairs.problem.window is None:
        return None
    before, after = (
        np.array([pairs.size if far is None else reach(pairs, far, rank) for rank in range(pairs.size)])[
            pairs.queries.rank
        ]
        for far in (_extent(pairs, side) for side in SIDES)
    )
    there = (pairs.hop <= before) | (-pairs.hop % pairs.size <= after) | (before + after >= pairs.size - 1)
    return np.where(there, pairs.true, 0)


def _of_neighbours(side: int, pairs: Pairs) -> Counts | None:
    """Return counts without the keys of ranks that are farther away on a side (0, 1) on which a window is bounded."""
    if pairs.case.sharding != "contiguous" or (pairs.problem.window or (None, None))[side] is None:
        return None
    return np.where((pairs.owner - pairs.rank if side else pairs.rank - pairs.owner) > 1, 0, pairs.true)


def _of_one_document(of_first: bool, pairs: Pairs) -> Counts | None:
    """Return counts without keys after the document of a rank's first query, or before that of its last one."""
    p, x = pairs.problem, pairs.queries
    if p.documents is None or pairs.case.sharding != "contiguous":
        return None
    offsets, place = np.array(p.documents), np.zeros_like(x.place) if of_first else x.count - 1
    number = np.searchsorted(offsets, x.at(x.rank, place) + p.diagonal, side="right")
    bound = offsets[np.clip(number if of_first else number - 1, 0, len(offsets) - 1)]
    return np.where(pairs.keys.p >= bound if of_first else pairs.keys.p < bound, 0, pairs.true)


def _fetched(pairs: Pairs, side: str) -> int:
    """Return how many blocks every rank fetches from one side, so that each has all that its queries attend."""
    extent = _extent(pairs, side)
    end = 0 if side == "left" else -1
    whole = pairs.keys.total if extent is None else extent
    return max(_blocks_of(pairs, rank, whole, side, end) for rank in range(pairs.size))


def _reversed(side: str, pairs: Pairs) -> Counts | None:
    """Return counts if the blocks of one side are joined from the nearest on, to the left, or from the farthest on."""
    if not _whole(pairs) or pairs.size < 3:
        return None
    most, j = _fetched(pairs, side), np.broadcast_to(pairs.keys.p, (pairs.problem.nq, pairs.problem.nk)).copy()
    lengths, starts = _lengths(pairs), np.concatenate([[0], np.cumsum(_lengths(pairs))])
    for rank, queries in enumerate(pairs.queries.shards):
        there = [rank + away if side == "right" else rank - away for away in range(1, most + 1)]
        there = [owner for owner in there if 0 <= owner < pairs.size]
        joined = there if side == "left" else there[::-1]
        at = starts[min(there, default=0)]
        for owner in joined:
            keys = pairs.keys.shards[owner]
            if len(queries) and len(keys):
                j[np.ix_(queries, keys)] = at + np.arange(len(keys))
            at += lengths[owner]
    return pairs.counts(lambda name: (pairs.queries.p, j))


def _first_fetched(pairs: Pairs) -> Ints:
    """Return by query the position of the first key that its rank has fetched, `(Nq, 1)`."""
    most, starts = _fetched(pairs, "left"), np.concatenate([[0], np.cumsum(_lengths(pairs))])
    found: Ints = starts[np.maximum(0, pairs.queries.rank - most)]
    return found


def _own_first(pairs: Pairs) -> Ints:
    starts: Ints = np.concatenate([[0], np.cumsum(_lengths(pairs))])[pairs.queries.rank]
    return starts


def _from_the_window(pairs: Pairs) -> Counts | None:
    extent = _extent(pairs, "left") if _whole(pairs) else None
    if extent is None:
        return None
    begins = np.maximum(0, _own_first(pairs) - extent)
    return pairs.counts(lambda name: (pairs.queries.p, pairs.keys.p - _first_fetched(pairs) + begins))


def _runs(pairs: Pairs) -> Iterator[tuple[Ints, int, int]]:
    """Yield the queries of a shard, or of a zigzag piece, that lie in one document, and its ends in the sequence."""
    p = pairs.problem
    offsets = np.array(p.documents or (0, p.nk))
    for held in pairs.of_pieces().queries.shards:
        number = bounds(offsets, held) if p.documents else np.zeros_like(held)
        for document in np.unique(number[number >= 0]):
            yield held[number == document], int(offsets[document]), int(offsets[document + 1])


def _is_cut_out(pairs: Pairs) -> bool:
    """Whether a window is bounded on the left, and queries of a rank are runs."""
    runs = pairs.case.sharding in ("contiguous", "zigzag") and pairs.problem.dilation is None
    return runs and _extent(pairs, "left") is not None


def _cut_out(pairs: Pairs) -> Iterator[tuple[Ints, int, int, int]]:
    """Yield runs of queries, the first key of their document, and the ends of what they may attend; windows alone."""
    left, right = (pairs.problem.nk if (far := _extent(pairs, side)) is None else far for side in SIDES)
    for rows, begins, ends in _runs(pairs):
        first, last = (int(rows[end]) + pairs.problem.diagonal for end in (0, -1))
        yield rows, begins, max(begins, first - left), min(ends, last + right + 1)


def _cut_by_the_window(pairs: Pairs) -> Counts | None:
    """Return counts if keys of a run of queries are numbered from the first that is cut out for it."""
    j = np.broadcast_to(pairs.keys.p, (pairs.problem.nq, pairs.problem.nk)).copy()
    there = np.zeros(j.shape, dtype=bool)
    for rows, begins, first, last in _cut_out(pairs):
        there[rows] = (pairs.keys.p >= first) & (pairs.keys.p < last)
        j[rows] -= first - begins
    at = {"documents": (pairs.queries.p, pairs.keys.p)}
    return pairs.counts(lambda name: at.get(name, (pairs.queries.p, j))) * there if _is_cut_out(pairs) else None


def _from_the_first_cut_out(pairs: Pairs) -> Counts | None:
    """Return counts if a window moves on from the first key that is cut out for a run of queries."""
    if not _is_cut_out(pairs):
        return None
    begins = np.zeros_like(pairs.queries.p)
    for rows, _, first, _ in _cut_out(pairs):
        begins[rows] = first + np.arange(len(rows))[:, None]
    return np.where(pairs.keys.p < begins, 0, pairs.true)


def _numbered_from_the_first(pairs: Pairs) -> Counts | None:
    p, rank = pairs.problem, pairs.queries.rank
    if p.key_lengths is None or (p.window is None and p.documents is None):
        return None
    edges = np.array([held[0] if len(held) else 0 for held in pairs.queries.shards])
    begins, left = np.zeros_like(edges), _extent(pairs, "left")
    if left is not None:
        begins = np.maximum(begins, edges + p.diagonal - left)
    if p.documents is not None:
        offsets = np.array(p.documents)
        number = np.searchsorted(offsets, edges, side="right") - 1
        begins = np.maximum(begins, offsets[np.clip(number, 0, len(offsets) - 1)])
    plain = pairs.queries.p, pairs.keys.p
    return pairs.counts(lambda name: (plain[0], plain[1] - begins[rank]) if name == "key_lengths" else plain)


def _cleared(pairs: Pairs) -> Mask | None:
    """Return which keys are taken for padding."""
    if pairs.problem.key_lengths is None or not _whole(pairs):
        return None
    lengths = np.array(pairs.problem.key_lengths)[:, None, None, None]
    found: Mask = pairs.keys.p - _first_fetched(pairs) + _own_first(pairs) >= lengths
    return found


def _without_cleared(pairs: Pairs) -> Counts | None:
    cleared = _cleared(pairs)
    return None if cleared is None else np.where(cleared, 0, pairs.true)


def _as_zeros(pairs: Pairs) -> Counts:
    """Return how many keys each query attends that are taken for padding, `(B, H, Nq)`."""
    cleared = _cleared(pairs)
    found: Counts = np.where(False if cleared is None else cleared, pairs.true, 0).sum(axis=-1)
    return found
