"""Which rank holds which positions. No divisibility is ever required; a rank may hold nothing."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args, overload

import numpy as np
from numpy.typing import NDArray

ShardingName = Literal["contiguous", "zigzag", "striped", "replicated_query", "zigzag_documents"]
SHARDING_NAMES: tuple[ShardingName, ...] = get_args(ShardingName)
SHARDINGS: tuple[ShardingName, ...] = ("contiguous", "zigzag", "striped", "replicated_query")
"""Shardings by length alone. The remaining name, `zigzag_documents`, depends on documents too, as a `Balancer` does."""

Positions = NDArray[np.int64]
ShardingFunction = Callable[[int, int], Sequence[Any]]
"""A user's own sharding: `(seq_len, world_size) -> list of position tensors`, one per rank."""
BalancingFunction = Callable[[tuple[int, ...], int], Sequence[Any]]
"""A user's own sharding by documents: `(documents, world_size) -> list of position tensors`, one per rank."""
RestoringFunction = Callable[[tuple[int, ...], int], Any]
"""`(documents, world_size) -> rows`: in which row of the shards, one rank's after another's, each position lies."""


@dataclasses.dataclass(frozen=True)
class Balancer:
    """A user's own sharding that depends on documents; `balancer` makes one.

    Attributes:
        function: is given cumulative document lengths that begin at 0 and end at the number of positions; positions
            before the first document and after the last count as documents of their own. Without documents: `(0, N)`.
        inverse: restores the order: is given the same, and returns N rows, so that the shards of all ranks, one after
            another, indexed by them, are the positions in order. `None` if there is none of its own.
    """

    function: BalancingFunction
    inverse: RestoringFunction | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"balancer({self.function!r}): expected a function (documents, world_size) -> positions")
        if self.inverse is not None and not callable(self.inverse):
            raise TypeError(f"inverse={self.inverse!r}: expected a function (documents, world_size) -> rows")
        object.__setattr__(self, "__qualname__", getattr(self.function, "__qualname__", repr(self.function)))

    def __call__(self, documents: tuple[int, ...], world_size: int) -> Sequence[Any]:
        """Return what the function returns: the positions of each rank."""
        return self.function(documents, world_size)


@overload
def balancer(function: BalancingFunction, *, inverse: RestoringFunction | None = None) -> Balancer: ...
@overload
def balancer(*, inverse: RestoringFunction) -> Callable[[BalancingFunction], Balancer]: ...
def balancer(
    function: BalancingFunction | None = None, *, inverse: RestoringFunction | None = None
) -> Balancer | Callable[[BalancingFunction], Balancer]:
    """Declare a function `(documents, world_size) -> list of positions, one a rank` as a sharding; also a decorator.

    Args:
        function: the function; without it, what is returned is the decorator.
        inverse: what restores the order, if there is such a function; see `Balancer`.

    Raises:
        TypeError: one of them cannot be called.
    """
    if function is None and inverse is not None:
        return lambda decorated: Balancer(decorated, inverse)
    return Balancer(function, inverse)  # type: ignore[arg-type]  # None is refused there


QueryShardingName = Literal["replicated", "contiguous", "zigzag", "striped"]
KeyShardingName = Literal["contiguous", "zigzag", "striped"]
QUERY_SHARDINGS: tuple[QueryShardingName, ...] = get_args(QueryShardingName)
KEY_SHARDINGS: tuple[KeyShardingName, ...] = get_args(KeyShardingName)


@dataclasses.dataclass(frozen=True)
class PageTable:
    """A sharding by pages, as caches of keys and values have it: page `p` is positions `p * page_size` and following.

    Attributes:
        page_size: positions of a page, at least 1. The last page of a sequence may be short.
        pages: of each rank the pages that it holds, in the order of its rows. Pages that begin at or after the end of a
            sequence hold nothing yet.

    Raises:
        ValueError: a value is out of range, or a page is held twice.
    """

    page_size: int
    pages: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        size = self.page_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"page_size={size!r}: expected an integer of at least 1")
        try:
            object.__setattr__(self, "pages", tuple(tuple(map(operator.index, held)) for held in self.pages))
        except TypeError:
            raise ValueError(f"pages={self.pages!r}: expected the numbers of the pages of each rank") from None
        holder: dict[int, int] = {}
        for rank, held in enumerate(self.pages):
            for page in held:
                if page < 0:
                    raise ValueError(f"page {page} of rank {rank}: expected page numbers from 0")
                if page in holder:
                    raise ValueError(f"page {page} is held twice, by ranks {holder[page]} and {rank}: expected once")
                holder[page] = rank

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Computed once: a decoder's call looks its plan up several times by a table of thousands of pages."""
        return hash((self.page_size, self.pages))

    def positions(self, length: int, world_size: int) -> list[Positions]:
        """The positions below `length` of each rank, in the order of its rows.

        Raises:
            ValueError: the table is of another number of ranks, or lacks a page.
        """
        if len(self.pages) != world_size:
            raise ValueError(f"a page table of {len(self.pages)} ranks on a world of {world_size}: expected one a rank")
        held = {page for pages in self.pages for page in pages}
        for page in range(-(-length // self.page_size)):
            if page not in held:
                first, last = page * self.page_size, min((page + 1) * self.page_size, length) - 1
                raise ValueError(f"page {page} (positions {first} to {last}) is held by no rank: expected by one")
        within = np.arange(min(self.page_size, length), dtype=np.int64)
        begins = [[page * self.page_size for page in pages if page * self.page_size < length] for pages in self.pages]
        rows = [(np.asarray(begin, dtype=np.int64)[:, None] + within).ravel() for begin in begins]
        return [positions[positions < length] for positions in rows]


@dataclasses.dataclass(frozen=True)
class QueryKeySharding:
    """A sharding of queries and another one of keys: while decoding, a few queries meet a cache that lies sharded.

    Attributes:
        queries: "replicated" (every rank holds all queries), "contiguous", "zigzag" or "striped".
        keys: "contiguous", "zigzag", "striped" or a `PageTable`.

    Raises:
        ValueError: one of them is unknown.
    """

    queries: QueryShardingName
    keys: KeyShardingName | PageTable

    def __post_init__(self) -> None:
        if self.queries not in QUERY_SHARDINGS:
            raise ValueError(f"queries={self.queries!r}: expected one of {', '.join(QUERY_SHARDINGS)}")
        if not isinstance(self.keys, PageTable) and self.keys not in KEY_SHARDINGS:
            raise ValueError(f"keys={self.keys!r}: expected one of {', '.join(KEY_SHARDINGS)}, or a PageTable")

    def __str__(self) -> str:
        return f"{self.queries}/{'pages' if isinstance(self.keys, PageTable) else self.keys}"


Sharding = ShardingName | ShardingFunction | Balancer | PageTable | QueryKeySharding


def replicates_queries(sharding: Sharding) -> bool:
    """Whether every rank holds all queries."""
    apart = isinstance(sharding, QueryKeySharding) and sharding.queries == "replicated"
    return apart or sharding == "replicated_query"


def by_documents(sharding: Sharding) -> bool:
    """Whether a sharding depends on documents."""
    return sharding == "zigzag_documents" or isinstance(sharding, Balancer)


def covering(documents: Sequence[int] | None, length: int) -> tuple[int, ...]:
    """Cumulative document lengths from 0 to `length`: what lies outside of all documents is one before or one after.

    Raises:
        ValueError: they decrease, or leave `[0, length]`.
    """
    offsets = (0, *(int(offset) for offset in documents or ()), length)
    if any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"documents={documents!r}: expected cumulative lengths, non-decreasing within [0, {length}]")
    first = 1 if len(offsets) > 2 and offsets[1] == 0 else 0
    last = -1 if len(offsets) - first > 2 and offsets[-2] == length else None
    return offsets[first:last]


def pieces(length: int, count: int) -> list[Positions]:
    """Cut `length` positions into `count` consecutive pieces whose sizes differ by at most one, larger ones first."""
    size, larger = divmod(length, count)
    starts = [piece * size + min(piece, larger) for piece in range(count + 1)]
    return [np.arange(a, b, dtype=np.int64) for a, b in pairwise(starts)]


def key_positions(
    sharding: Sharding, length: int, world_size: int, documents: Sequence[int] | None = None
) -> list[Positions]:
    """The key positions of each rank, `world_size` int64 arrays that partition `range(length)`.

    Args:
        sharding: which rank holds which positions.
        length: number of positions over all ranks.
        world_size: number of ranks.
        documents: cumulative document lengths; only `zigzag_documents` and a `Balancer` depend on them.

    Raises:
        ValueError: the name is unknown, the world is empty, or a sharding function does not return a partition, or not
            the same one twice.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected at least 1")
    match sharding:
        case "contiguous" | "replicated_query":
            return pieces(length, world_size)
        case "zigzag":
            halves = pieces(length, 2 * world_size)
            return [np.concatenate([halves[r], halves[2 * world_size - 1 - r]]) for r in range(world_size)]
        case "striped":
            return [np.arange(r, length, world_size, dtype=np.int64) for r in range(world_size)]
        case "zigzag_documents":
            return _zigzag_documents(covering(documents, length), world_size)
        case PageTable():
            return sharding.positions(length, world_size)
        case QueryKeySharding():
            return key_positions(sharding.keys, length, world_size)
        case Balancer():
            return _checked(sharding, covering(documents, length), length, world_size)
        case _ if not isinstance(sharding, str) and callable(sharding):
            return _checked(sharding, length, length, world_size)
        case _:
            raise ValueError(f"sharding={sharding!r}: expected one of {', '.join(SHARDING_NAMES)}, or a function")


def query_positions(
    sharding: Sharding, length: int, world_size: int, documents: Sequence[int] | None = None
) -> list[Positions]:
    """The query positions of each rank: sharded like keys, but for `replicated_query` and a `QueryKeySharding`.

    Raises:
        ValueError: as `key_positions`.
    """
    if replicates_queries(sharding):
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: expected at least 1")
        return [np.arange(length, dtype=np.int64) for _ in range(world_size)]
    if isinstance(sharding, QueryKeySharding):
        assert sharding.queries != "replicated"
        return key_positions(sharding.queries, length, world_size)
    return key_positions(sharding, length, world_size, documents)


def restoring_rows(sharding: Balancer, length: int, world_size: int, documents: Sequence[int] | None) -> Positions:
    """What the inverse of a balancer returns, `(N,)` int64, each row of the shards once.

    Raises:
        ValueError: it returns something else.
    """
    assert sharding.inverse is not None
    of = covering(documents, length)
    called = f"the inverse of {getattr(sharding, '__qualname__', sharding)}({of}, {world_size})"
    rows = np.asarray(sharding.inverse(of, world_size)).reshape(-1)
    if rows.size != length or (length and rows.dtype.kind not in "iu"):
        raise ValueError(f"{called} returned {rows.size} rows of dtype {rows.dtype}: expected {length} integers")
    if not np.array_equal(np.sort(rows), np.arange(length)):
        raise ValueError(f"{called} is not a permutation: every row of range({length}) must be in it once")
    return rows.astype(np.int64)


def _zigzag_documents(documents: tuple[int, ...], world_size: int) -> list[Positions]:
    """Zigzag within every document, of all but its first tokens; these, fewer than 2P, are dealt.

    Under a causal mask, the zigzag of 2P equal pieces is balanced exactly, and the first tokens of a document are those
    with the fewest keys: at most 2P - 1. They are dealt so that shards differ by at most one token: from each document
    as many consecutive ones as possible to the rank with the least work, until it has its share. The rank that is dealt
    the last of them has the first piece that follows, so that they are one run.
    """
    ends, starts = documents[1:], documents[:-1]
    over = [(end - start) % (2 * world_size) for start, end in zip(starts, ends, strict=True)]
    total = sum(count * (count + 1) // 2 for count in over)
    room = [len(piece) for piece in pieces(sum(over), world_size)]
    work = [0] * world_size
    held: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for count, start, end in sorted(zip(over, starts, ends, strict=True), key=lambda one: -one[0]):
        first_rank, stop = 0, count
        while stop:
            # Each token yet to come has at least one key.
            rank = min((rank for rank in range(world_size) if room[rank]), key=lambda rank: work[rank] + room[rank])
            first_rank, dealt = (rank if stop == count else first_rank), stop
            while dealt == stop or (stop and room[rank] and (work[rank] + stop + room[rank] - 1) * world_size <= total):
                work[rank], room[rank], stop = work[rank] + stop, room[rank] - 1, stop - 1
            held[rank].append((start + stop, start + dealt))
        size = (end - start - count) // (2 * world_size)
        for turn in range(world_size if size else 0):
            for piece in (turn, 2 * world_size - 1 - turn):
                at = start + count + piece * size
                held[(first_rank + turn) % world_size].append((at, at + size))
    return [
        np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in sorted(runs))]).astype(np.int64) for runs in held
    ]


def _checked(sharding: Callable[..., Any], of: Any, length: int, world_size: int) -> list[Positions]:
    """The positions that a function deals out of documents, or of a length."""
    called = f"sharding {getattr(sharding, '__qualname__', repr(sharding))}({of}, {world_size})"
    shards = _returned(sharding(of, world_size), called, world_size)
    held = np.sort(np.concatenate(shards))
    if not np.array_equal(held, np.arange(length)):
        raise ValueError(
            f"{called} is not a partition: every position of range({length}) must be held by exactly one rank"
        )
    if isinstance(sharding, Balancer):
        again = _returned(sharding(of, world_size), called, world_size)
        if not all(map(np.array_equal, shards, again)):
            raise ValueError(f"{called} returned other positions when it was called again: ranks would not agree")
    return shards


def _returned(returned: Any, called: str, world_size: int) -> list[Positions]:
    """What a sharding function returned, as integers, an array a rank."""
    try:
        arrays = [np.asarray(shard).reshape(-1) for shard in returned]
    except TypeError:
        raise ValueError(f"{called} returned {returned!r}: expected a list of positions, one a rank") from None
    for rank, array in enumerate(arrays):
        # An empty list is an array of floats to numpy, and a rank may hold nothing.
        if array.size and array.dtype.kind not in "iu":
            raise ValueError(f"{called} returned positions of dtype {array.dtype} for rank {rank}: expected integers")
    if len(arrays) != world_size:
        raise ValueError(f"{called} returned {len(arrays)} shards: expected one a rank, {world_size}")
    return [array.astype(np.int64) for array in arrays]
