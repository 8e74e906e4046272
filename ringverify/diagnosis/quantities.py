"""Quantities of a pair of a query and a key that code on a rank has at hand, and comparisons of two of them.

Positions, rows of a shard, ends of documents, windows and segments, lengths, ranks and heads are the words in which
`inferring` says what pairs have in common.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from ringref.sharding import pieces
from ringverify.diagnosis.masks.documents import bounds
from ringverify.diagnosis.pairs import Ints, Mask, OneSide, Pairs
from ringverify.faults.merging import TILES

Value = Ints | int
Place = Callable[[Pairs], Value]

FAR = 1 << 20
"""Where a window ends that has no end."""


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number of a pair of a query and a key, or of their case.

    Attributes:
        text: what it is.
        of: the number, broadcast to `(B, H, Nq, Nk)`.
        cost: how far-fetched it is.
    """

    text: str
    of: Place
    cost: float = 1.0


@dataclasses.dataclass(frozen=True)
class Relation:
    """`a ≥ b + more`, or another relation."""

    a: Quantity
    relation: str
    b: Quantity
    more: int

    @property
    def cost(self) -> float:
        """How far-fetched it is."""
        return self.a.cost + self.b.cost + 0.6 * (self.more != 0) + (0.5 if self.relation in "=≠" else 0.0)

    def holds(self, pairs: Pairs) -> Mask:
        """Where it does, broadcast to `(B, H, Nq, Nk)`."""
        return related(difference(self.a, self.b, pairs), self.relation, self.more)

    @property
    def text(self) -> str:
        """As a clause."""
        more = f" {'+' if self.more > 0 else '−'} {abs(self.more)}" if self.more else ""
        return f"{self.a.text} {self.relation} {self.b.text}{more}"


def difference(a: Quantity, b: Quantity, pairs: Pairs) -> Ints:
    """Return how much the one is more than the other."""
    found: Ints = np.subtract(a.of(pairs), b.of(pairs))
    return found


RELATIONS = {"≥": np.greater_equal, "<": np.less, "=": np.equal, "≠": np.not_equal}


def related(by: Ints, relation: str, more: int) -> Mask:
    """Return where differences are in a relation to a number."""
    found: Mask = RELATIONS[relation](by, more)
    return found


def _numbers(count: int, cost: float, more: float) -> Iterator[Quantity]:
    """The first whole numbers."""
    for n in range(count):
        yield Quantity(str(n), functools.partial(_number, n), cost + more * n)


def _number(n: int, _: Pairs) -> int:
    return n


def _ends(x: OneSide, last: bool) -> Ints:
    """The first or the last position of the shard of each."""
    edges = np.array([(held[-1] if last else held[0]) if len(held) else 0 for held in x.shards])
    return edges[x.rank]


def _offsets(pairs: Pairs) -> Ints:
    """Where documents begin and end; without documents, all is one."""
    return np.array(pairs.problem.documents or (0, max(pairs.problem.nq, pairs.problem.nk)))


def _within(offsets: Ints, position: Value) -> Ints:
    """The position, or the first or last one of all documents where it is outside."""
    return np.clip(position, offsets[0], max(offsets[0], offsets[-1] - 1))


def _document(pairs: Pairs, x: OneSide, end: bool) -> Ints:
    """Where the document of each begins or ends; of what is in none, where it is itself."""
    offsets = _offsets(pairs)
    number = bounds(offsets, x.p)
    return np.where(number >= 0, offsets[number + end], x.p)


def _document_of(at: Place, end: bool, pairs: Pairs) -> Ints:
    """Where the document of a position begins or ends; of one outside all, the first or the last one's."""
    offsets = _offsets(pairs)
    number = np.maximum(bounds(offsets, _within(offsets, at(pairs))), 0)
    found: Ints = offsets[np.minimum(number + end, len(offsets) - 1)]
    return found


def _segment(pairs: Pairs, x: OneSide, end: bool) -> Ints:
    """Where the segment of each begins or ends."""
    length = pairs.segment[0]
    return np.minimum((x.p // length + end) * length, x.total)


def _in_both(pairs: Pairs, x: OneSide, last: bool) -> Ints:
    """The first or the last position that the shard and the document of each have in common."""
    return (
        np.minimum(_ends(x, True), _document(pairs, x, True) - 1)
        if last
        else np.maximum(_ends(x, False), _document(pairs, x, False))
    )


def _length(pairs: Pairs) -> Ints:
    p = pairs.problem
    return np.array(p.key_lengths or (p.nk,) * p.batch)[:, None, None, None]


def _window(pairs: Pairs, right: bool) -> int:
    side = (pairs.problem.window or (None, None))[right]
    return FAR if side is None else side


def _rank_of(pairs: Pairs, position: Value) -> Ints:
    ranks = pairs.keys.rank[0]
    return ranks[np.clip(position, 0, len(ranks) - 1)] if len(ranks) else np.zeros(1, dtype=np.int64)


def _valid(pairs: Pairs) -> Ints:
    """How many of the keys of a key's shard lie below the key length."""
    counts = [(np.asarray(held)[None, :] < _length(pairs)[:, 0, 0]).sum(axis=1) for held in pairs.keys.shards]
    return np.stack(counts, axis=1)[:, pairs.owner[0]][:, None, None, :]


def _rows(pairs: Pairs) -> int:
    """The rows of the longest shard of keys, at least 1."""
    return max(1, int(pairs.keys.count.max(initial=1)))


def _since(pairs: Pairs, of: Callable[[Pairs, OneSide, bool], Ints]) -> Ints:
    """How many ranks a key's is after that of the start of its document or segment."""
    return pairs.owner - _rank_of(pairs, of(pairs, pairs.keys, False))


def _length_of_document(pairs: Pairs) -> Ints:
    return _document(pairs, pairs.queries, True) - _document(pairs, pairs.queries, False)


def _own_keys(pairs: Pairs) -> Ints:
    return np.array([len(held) for held in pairs.keys.shards])[pairs.rank]


def _aligned(pairs: Pairs) -> Ints:
    return pairs.queries.p + pairs.problem.diagonal


def _heads(pairs: Pairs) -> Ints:
    return np.arange(pairs.problem.heads)[None, :, None, None]


def _offset_from_the_last_on(pairs: Pairs) -> Ints:
    """The first offset of documents that does not lie before the last query of the query's shard that is in one."""
    offsets = _offsets(pairs)
    found: Ints = offsets[np.searchsorted(offsets, _within(offsets, _ends(pairs.queries, True)), side="left")]
    return found


LAST_AND_FIRST: dict[str, Place] = {
    "the first query of the query's shard": lambda pairs: _ends(pairs.queries, False),
    "the last query of the query's shard": lambda pairs: _ends(pairs.queries, True),
}
"""Queries whose documents bound what a rank fetches."""

IN_SHARDS = (
    Quantity("the key's position", lambda pairs: pairs.keys.p, 0.5),
    Quantity("the query's position", _aligned, 0.5),
    Quantity("the first position of the query's shard", lambda p: _ends(p.queries, False) + p.problem.diagonal),
    Quantity("the last position of the query's shard", lambda p: _ends(p.queries, True) + p.problem.diagonal),
    Quantity("the first position of the key's shard", lambda pairs: _ends(pairs.keys, False)),
    Quantity("the last position of the key's shard", lambda pairs: _ends(pairs.keys, True)),
    Quantity("the start of the query's segment", lambda pairs: _segment(pairs, pairs.queries, False), 1.2),
    Quantity("the end of the query's segment", lambda pairs: _segment(pairs, pairs.queries, True), 1.2),
    Quantity("the start of the key's segment", lambda pairs: _segment(pairs, pairs.keys, False), 1.2),
    Quantity("the end of the key's segment", lambda pairs: _segment(pairs, pairs.keys, True), 1.2),
    Quantity("the start of the query's document", lambda pairs: _document(pairs, pairs.queries, False)),
    Quantity("the end of the query's document", lambda pairs: _document(pairs, pairs.queries, True)),
    Quantity("the start of the key's document", lambda pairs: _document(pairs, pairs.keys, False)),
    Quantity("the end of the key's document", lambda pairs: _document(pairs, pairs.keys, True)),
    Quantity("the key length", _length),
    Quantity("the number of keys", lambda pairs: pairs.problem.nk),
    Quantity("the longest key length of the batch", lambda pairs: int(_length(pairs).max()), 1.2),
    Quantity("the key length of the first batch entry", lambda pairs: _length(pairs)[:1], 1.2),
    Quantity("ranks · ⌊key length / ranks⌋", lambda pairs: _length(pairs) // pairs.size * pairs.size, 1.5),
    Quantity("ranks · ⌊keys / ranks⌋", lambda pairs: pairs.problem.nk // pairs.size * pairs.size, 1.5),
    Quantity("the first query of the query's shard, counted from 0", lambda p: _ends(p.queries, False), 1.6),
    Quantity("the last query of the query's shard, counted from 0", lambda p: _ends(p.queries, True), 1.6),
)

WINDOW_ENDS = (
    Quantity("the left end of the query's window", lambda pairs: _aligned(pairs) - _window(pairs, False)),
    Quantity("the right end of the query's window", lambda pairs: _aligned(pairs) + _window(pairs, True)),
    Quantity(
        "the left end of the window of the shard's first query",
        lambda p: _ends(p.queries, False) + p.problem.diagonal - _window(p, False),
        1.5,
    ),
    Quantity(
        "the right end of the window of the shard's last query",
        lambda p: _ends(p.queries, True) + p.problem.diagonal + _window(p, True),
        1.5,
    ),
    Quantity(
        "the left end of the window of the shard's first query, counted from 0",
        lambda p: _ends(p.queries, False) - _window(p, False),
        1.6,
    ),
    Quantity(
        "the right end of the window of the shard's last query, counted from 0",
        lambda p: _ends(p.queries, True) + _window(p, True),
        1.6,
    ),
)

DOCUMENT_ENDS = (
    *(
        Quantity(f"the {which} of the document of {text}", functools.partial(_document_of, at, which == "end"), 1.5)
        for text, at in LAST_AND_FIRST.items()
        for which in ("start", "end")
    ),
    Quantity("the first offset that is not before the last query of the query's shard", _offset_from_the_last_on, 1.6),
)

POSITIONS = (*IN_SHARDS, *WINDOW_ENDS, *DOCUMENT_ENDS)

ROWS = (
    Quantity("the key's row in its shard", lambda pairs: pairs.keys.place, 0.5),
    Quantity("the query's row in its shard", lambda pairs: pairs.queries.place, 0.5),
    Quantity("the rows of the key's shard", lambda pairs: pairs.keys.count),
    Quantity("the rows of the query's shard", lambda pairs: pairs.queries.count),
    Quantity("the rows of the longest shard", lambda pairs: max(map(len, pairs.keys.shards))),
    Quantity("the rows of the shortest shard", lambda pairs: min(map(len, pairs.keys.shards))),
    Quantity("the valid rows of the key's shard", _valid),
    Quantity("⌊keys / ranks⌋", lambda pairs: pairs.problem.nk // pairs.size),
    Quantity("⌈keys / ranks⌉", lambda pairs: -(-pairs.problem.nk // pairs.size)),
    Quantity("⌊key length / ranks⌋", lambda pairs: _length(pairs) // pairs.size, 1.2),
    Quantity("⌈key length / ranks⌉", lambda pairs: -(-_length(pairs) // pairs.size), 1.2),
    Quantity("the window's left", lambda pairs: _window(pairs, False)),
    Quantity("the window's right", lambda pairs: _window(pairs, True)),
    Quantity("query − key", lambda pairs: _aligned(pairs) - pairs.keys.p, 1.1),
    Quantity("key − query", lambda pairs: pairs.keys.p - _aligned(pairs), 1.1),
    Quantity("key − query, both counted from 0", lambda pairs: pairs.keys.p - pairs.queries.p, 1.0),
    Quantity("query − key, both counted from 0", lambda pairs: pairs.queries.p - pairs.keys.p, 1.0),
    Quantity("the key's place in its document", lambda p: p.keys.p - _document(p, p.keys, False), 0.8),
    Quantity("the query's place in its document", lambda p: p.queries.p - _document(p, p.queries, False), 0.8),
    Quantity("the length of the query's document", lambda pairs: _length_of_document(pairs)),
    Quantity("the query's row − the key's row", lambda p: p.queries.place - p.keys.place, 0.8),
    Quantity("the key's row − the query's row", lambda p: p.keys.place - p.queries.place, 0.8),
    Quantity("ranks · (the query's row − the key's row)", lambda p: p.size * (p.queries.place - p.keys.place), 1.2),
    Quantity("ranks · (the key's row − the query's row)", lambda p: p.size * (p.keys.place - p.queries.place), 1.2),
    Quantity("the rows of the key's shard − those of the query's", lambda p: p.keys.count - p.queries.count, 1.2),
    Quantity("keys − queries of the query's rank", lambda p: _own_keys(p) - p.queries.count, 1.2),
    Quantity("the keys of the query's rank", lambda p: _own_keys(p), 1.0),
    Quantity("the place in its segment of the key", lambda p: p.keys.p % p.segment[0], 0.8),
    Quantity("the place in its segment of the query", lambda p: p.queries.p % p.segment[0], 0.8),
    Quantity("the length of a segment", lambda pairs: pairs.segment[0]),
    Quantity("the dilation rate", lambda pairs: pairs.segment[1]),
    Quantity("keys mod ranks", lambda pairs: pairs.problem.nk % pairs.size, 1.2),
    Quantity("queries mod ranks", lambda pairs: pairs.problem.nq % pairs.size, 1.2),
    Quantity("half of the rows of the key's shard, rounded down", lambda pairs: pairs.keys.count // 2, 1.2),
    Quantity("half of the rows of the key's shard, rounded up", lambda pairs: -(-pairs.keys.count // 2), 1.2),
    Quantity("half of the rows of the query's shard, rounded down", lambda pairs: pairs.queries.count // 2, 1.2),
    Quantity("half of the rows of the query's shard, rounded up", lambda pairs: -(-pairs.queries.count // 2), 1.2),
    *_numbers(4, 0.5, 0.4),
)  # fmt: skip

OF_BOTH = (
    Quantity(
        "the first query of the shard in the document", lambda p: _in_both(p, p.queries, False) + p.problem.diagonal
    ),
    Quantity(
        "the last query of the shard in the document", lambda p: _in_both(p, p.queries, True) + p.problem.diagonal
    ),
    Quantity("the first key of the shard in its document", lambda p: _in_both(p, p.keys, False)),
    Quantity("the last key of the shard in its document", lambda p: _in_both(p, p.keys, True)),
)


def _piece(pairs: Pairs, x: OneSide, last: bool) -> Ints:
    """The first or the last position of the zigzag piece of each."""
    cuts = np.cumsum([0, *map(len, pieces(x.total, 2 * pairs.size))])
    found: Ints = cuts[np.searchsorted(cuts, x.p, side="right") - (not last)] - last
    return found


def _early_end(pairs: Pairs, x: OneSide) -> Ints:
    """Where the early zigzag piece of the shard of each ends."""
    cuts = np.cumsum([0, *map(len, pieces(x.total, 2 * pairs.size))])
    found: Ints = cuts[x.rank + 1]
    return found


IN_PIECES = (
    Quantity("the first position of the query's piece", lambda p: _piece(p, p.queries, False) + p.problem.diagonal),
    Quantity("the last position of the query's piece", lambda p: _piece(p, p.queries, True) + p.problem.diagonal),
    Quantity("the first position of the key's piece", lambda pairs: _piece(pairs, pairs.keys, False)),
    Quantity("the last position of the key's piece", lambda pairs: _piece(pairs, pairs.keys, True)),
    Quantity("the end of the early piece of the query's shard", lambda pairs: _early_end(pairs, pairs.queries)),
    Quantity("the end of the early piece of the key's shard", lambda pairs: _early_end(pairs, pairs.keys)),
)
"""Ends of zigzag pieces."""

EDGES = (*(one for one in IN_SHARDS[2:] if "segment" not in one.text and "⌊" not in one.text), *OF_BOTH)
"""Ends of shards, documents and lengths: how far apart two of them are may bound rows."""

RANKS = (
    Quantity("the query's rank", lambda pairs: pairs.rank, 0.5),
    Quantity("the key's rank", lambda pairs: pairs.owner, 0.5),
    Quantity("the hop", lambda pairs: pairs.hop, 0.5),
    Quantity("the hop to the left", lambda pairs: -pairs.hop % pairs.size, 0.9),
    Quantity("shards from that of the start of its segment to the key's", lambda pairs: _since(pairs, _segment)),
    Quantity("shards from that of the start of its document to the key's", lambda pairs: _since(pairs, _document)),
    Quantity("⌊length of a segment / rows of a shard⌋, at least 1", lambda p: max(1, p.segment[0] // _rows(p)), 1.5),
    Quantity("⌈length of a segment / rows of a shard⌉", lambda p: -(-p.segment[0] // _rows(p)), 1.5),
    Quantity("the number of ranks", lambda pairs: pairs.size),
    Quantity("half of the ranks", lambda pairs: pairs.size // 2, 1.2),
    Quantity("the largest power of two up to the number of ranks", lambda p: 1 << (p.size.bit_length() - 1), 1.5),
    Quantity("the rank of the start of the key's segment", lambda p: _rank_of(p, _segment(p, p.keys, False))),
    Quantity("the rank of the end of the key's segment", lambda p: _rank_of(p, _segment(p, p.keys, True) - 1)),
    Quantity("the rank of the start of the query's segment", lambda p: _rank_of(p, _segment(p, p.queries, False))),
    Quantity("the rank of the end of the query's segment", lambda p: _rank_of(p, _segment(p, p.queries, True) - 1)),
    Quantity("the rank of the start of the query's document", lambda p: _rank_of(p, _document(p, p.queries, False))),
    Quantity("the rank of the end of the query's document", lambda p: _rank_of(p, _document(p, p.queries, True) - 1)),
    Quantity("the rank of the start of the key's document", lambda p: _rank_of(p, _document(p, p.keys, False))),
    Quantity("the rank of the end of the key's document", lambda p: _rank_of(p, _document(p, p.keys, True) - 1)),
    Quantity("the rank of the last valid key", lambda pairs: _rank_of(pairs, _length(pairs) - 1)),
    Quantity(
        "the rank of the left end of the query's window",
        lambda p: _rank_of(p, _aligned(p) - _window(p, False)),
        1.2,
    ),
    Quantity(
        "the rank of the right end of the query's window",
        lambda p: _rank_of(p, _aligned(p) + _window(p, True)),
        1.2,
    ),
    Quantity("⌊the window's left / rows of a shard⌋", lambda p: _window(p, False) // _rows(p), 1.5),
    Quantity("⌊the window's right / rows of a shard⌋", lambda p: _window(p, True) // _rows(p), 1.5),
    *_numbers(4, 0.5, 0.3),
)  # fmt: skip

HEADS = (
    Quantity("the head", _heads, 0.5),
    Quantity("the key head", lambda pairs: _heads(pairs) // pairs.problem.group_size, 0.5),
    Quantity("the head's number in its group", lambda pairs: _heads(pairs) % pairs.problem.group_size, 0.8),
    Quantity("the number of heads", lambda pairs: pairs.problem.heads),
    Quantity("the number of key heads", lambda pairs: pairs.problem.hk),
    Quantity("heads of a group", lambda pairs: pairs.problem.group_size),
    Quantity("the batch entry", lambda pairs: np.arange(pairs.problem.batch)[:, None, None, None], 0.5),
    Quantity("the number of batch entries", lambda pairs: pairs.problem.batch),
    *_numbers(3, 0.5, 0.3),
)


BOUNDED = (
    "the key's row in its shard",
    "the query's row in its shard",
    "query − key",
    "key − query",
    "the key's place in its document",
    "the query's place in its document",
)


def _tiles(size: int) -> tuple[Quantity, ...]:
    of = f"the tile of {size} rows of"
    return (
        Quantity(f"{of} the key", lambda pairs: pairs.keys.place // size, 1.0),
        Quantity(f"{of} the query", lambda pairs: pairs.queries.place // size, 1.0),
        Quantity(f"{of} the last key", lambda pairs: (pairs.keys.count - 1) // size, 1.2),
        Quantity(f"{of} the last query", lambda pairs: (pairs.queries.count - 1) // size, 1.2),
        *_numbers(2, 0.6, 0.3),
    )  # fmt: skip


def _modulo(x: Quantity, size: int) -> Quantity:
    return Quantity(f"{x.text} mod {size}", lambda pairs: np.asarray(x.of(pairs)) % size, x.cost + 0.6)


def _apart(x: Quantity, y: Quantity) -> Quantity:
    return Quantity(f"{x.text} − {y.text}", functools.partial(difference, x, y), x.cost + y.cost)


APART = tuple(_apart(x, y) for x, y in itertools.permutations(EDGES, 2))


def _compared() -> Iterator[tuple[Quantity, Quantity]]:
    """The quantities that are compared with one another."""
    kinds = [(*POSITIONS, *OF_BOTH), ROWS, RANKS, HEADS, *map(_tiles, TILES)]
    for kind in kinds:
        for a, b in itertools.combinations(kind, 2):
            if not a.text.isdigit():
                yield a, b
    bounded = [one for one in ROWS if one.text in BOUNDED]
    yield from itertools.product(bounded, APART)
    zero = ROWS[-4]
    for x in (*POSITIONS[:2], *ROWS[:4], *RANKS[:4], *HEADS[:3]):
        yield _modulo(x, 2), zero
    for x, size in itertools.product((*POSITIONS[:2], *ROWS[:2]), TILES):
        yield _modulo(x, size), zero


COMPARED = tuple(_compared())

COMPARED_IN_PIECES = (
    *COMPARED,
    *itertools.product(IN_PIECES, (*POSITIONS, *OF_BOTH)),
    *itertools.combinations(IN_PIECES, 2),
)
"""The same where shards are zigzag."""
