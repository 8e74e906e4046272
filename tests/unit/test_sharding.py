"""Shardings: partitions of any length over any number of ranks, and a user's own, checked."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ringref.sharding import (
    SHARDINGS,
    PageTable,
    QueryKeySharding,
    balancer,
    key_positions,
    pieces,
    query_positions,
    replicates_queries,
)

LENGTHS, WORLD_SIZES = range(41), range(1, 10)


def piece_sizes(length: int, count: int) -> list[int]:
    """Sizes that differ by at most one, larger first: deal the positions round the pieces and count."""
    return [sum(1 for position in range(length) if position % count == piece) for piece in range(count)]


def sizes_by_definition(sharding: str, length: int, world_size: int) -> list[int]:
    """How many positions each rank holds, from the table of the design."""
    if sharding == "zigzag":
        halves = piece_sizes(length, 2 * world_size)
        return [halves[rank] + halves[2 * world_size - 1 - rank] for rank in range(world_size)]
    return piece_sizes(length, world_size)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_keys_are_partitioned_into_the_sizes_of_the_definition(sharding: Any) -> None:
    """For every length up to 40 and every world up to 9: int64, each position once, each rank's in ascending order."""
    for length, world_size in itertools.product(LENGTHS, WORLD_SIZES):
        shards = key_positions(sharding, length, world_size)
        assert [len(shard) for shard in shards] == sizes_by_definition(sharding, length, world_size)
        assert sorted(itertools.chain.from_iterable(shard.tolist() for shard in shards)) == list(range(length))
        assert all(shard.dtype == np.int64 and (np.diff(shard) > 0).all() for shard in shards)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_sharding_and_putting_back_gives_what_was_there(sharding: Any) -> None:
    """unshard(shard(arange)) == arange, of queries and of keys."""
    for length, world_size in itertools.product(LENGTHS, WORLD_SIZES):
        whole = np.arange(length) * 10
        for positions in (key_positions, query_positions):
            back = np.full(length, -1)
            for held in positions(sharding, length, world_size):
                back[held] = whole[held]
            np.testing.assert_array_equal(back, whole)


@pytest.mark.parametrize("sharding", [name for name in SHARDINGS if name != "replicated_query"])
def test_queries_are_sharded_as_keys_are(sharding: Any) -> None:
    """Each over its own length."""
    for length, world_size in ((0, 2), (7, 3), (12, 4)):
        for query, key in zip(
            query_positions(sharding, length, world_size), key_positions(sharding, length, world_size), strict=True
        ):
            np.testing.assert_array_equal(query, key)


def test_replicated_query_puts_all_queries_on_every_rank_and_keys_as_contiguous() -> None:
    """The whole output is on every rank."""
    for query in query_positions("replicated_query", 5, 3):
        np.testing.assert_array_equal(query, np.arange(5))
    for mine, contiguous in zip(
        key_positions("replicated_query", 5, 3), key_positions("contiguous", 5, 3), strict=True
    ):
        np.testing.assert_array_equal(mine, contiguous)


@pytest.mark.parametrize(
    ("sharding", "length", "world_size", "expected"),
    [
        ("contiguous", 7, 3, [[0, 1, 2], [3, 4], [5, 6]]),
        ("contiguous", 2, 3, [[0], [1], []]),
        ("zigzag", 8, 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("zigzag", 7, 2, [[0, 1, 6], [2, 3, 4, 5]]),
        ("zigzag", 3, 3, [[0], [1], [2]]),
        ("striped", 7, 3, [[0, 3, 6], [1, 4], [2, 5]]),
        ("striped", 1, 2, [[0], []]),
    ],
)
def test_shardings_written_out_by_hand(sharding: Any, length: int, world_size: int, expected: list[list[int]]) -> None:
    """Small enough to read off the table of the design."""
    assert [shard.tolist() for shard in key_positions(sharding, length, world_size)] == expected


def test_pieces_differ_by_at_most_one_larger_first() -> None:
    """The cut that contiguous and zigzag are made of."""
    for length, count in itertools.product(LENGTHS, range(1, 19)):
        cut = pieces(length, count)
        assert [len(piece) for piece in cut] == piece_sizes(length, count)
        np.testing.assert_array_equal(np.concatenate(cut), np.arange(length))


@pytest.mark.parametrize(
    "shards",
    [
        lambda n, p: [list(range(r, n, p)) for r in range(p)],
        lambda n, p: [torch.arange(r, n, p, dtype=torch.int32) for r in range(p)],
        lambda n, p: tuple(np.arange(n)[::-1][r::p] for r in range(p)),
        lambda n, p: [[], *[[]] * (p - 2), list(range(n))],
    ],
    ids=["lists", "tensors", "descending arrays", "all on the last"],
)
def test_a_sharding_may_be_a_function(shards: Callable[[int, int], Any]) -> None:
    """Lists, tensors or arrays of integers, in any order, empty ones too; the order is kept."""
    held = key_positions(shards, 7, 3)
    assert [shard.tolist() for shard in held] == [np.asarray(shard).astype(int).tolist() for shard in shards(7, 3)]
    assert all(shard.dtype == np.int64 for shard in held)


def too_few(length, world_size):
    """One shard, whatever the world."""
    return [range(length)]


def overlapping(length, world_size):
    """Position 0 is on two ranks."""
    return [range(length), range(1)]


def missing(length, world_size):
    """The last position is on none."""
    return [range(length - 1), []]


def outside(length, world_size):
    """Positions from 1, one past the end."""
    return [range(1, length + 1), []]


def halves(length, world_size):
    """Positions that are no integers."""
    return [[0.0, 1.5], [2.0]]


def nothing(length, world_size):
    """A function that forgot to return."""
    return


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (too_few, r"sharding too_few\(4, 2\) returned 1 shards: expected one a rank, 2"),
        (overlapping, r"sharding overlapping\(4, 2\) is not a partition: every position of range\(4\) must be held by"),
        (missing, r"sharding missing\(4, 2\) is not a partition"),
        (outside, r"sharding outside\(4, 2\) is not a partition"),
        (halves, r"sharding halves\(4, 2\) returned positions of dtype float64 for rank 0: expected integers"),
        (nothing, r"sharding nothing\(4, 2\) returned None: expected a list of positions, one a rank"),
        (
            "zig-zag",
            "sharding='zig-zag': expected one of contiguous, zigzag, striped, replicated_query, zigzag_documents, or a",
        ),
        (
            None,
            "sharding=None: expected one of contiguous, zigzag, striped, replicated_query, zigzag_documents, or a",
        ),
    ],
)
@pytest.mark.parametrize("positions", [key_positions, query_positions])
def test_what_is_not_a_sharding_is_refused(positions: Callable[..., Any], sharding: Any, message: str) -> None:
    """The message names the sharding, what came back and what was expected."""
    with pytest.raises(ValueError, match=message):
        positions(sharding, 4, 2)


@pytest.mark.parametrize("sharding", [*SHARDINGS, too_few])
@pytest.mark.parametrize("positions", [key_positions, query_positions])
def test_an_empty_world_is_refused(positions: Callable[..., Any], sharding: Any) -> None:
    """Whatever the sharding."""
    with pytest.raises(ValueError, match="world_size=0: expected at least 1"):
        positions(sharding, 4, 0)


def zigzag_of(documents: tuple[int, ...], world_size: int) -> list[list[int]]:
    """What each rank holds under zigzag_documents."""
    return [held.tolist() for held in key_positions("zigzag_documents", documents[-1], world_size, documents)]


def test_every_document_is_zigzagged_and_its_first_tokens_are_dealt() -> None:
    """Written out by hand: where 2P divides a length nothing is dealt, and without documents there is one."""
    assert zigzag_of((0, 4, 12), 2) == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    assert zigzag_of((0, 5), 2) == [[0, 1, 4], [2, 3]]
    assert zigzag_of((0, 1, 2, 3), 2) == [[1, 2], [0]]
    assert zigzag_of((0, 0, 0), 2) == [[], []]
    assert zigzag_of((0, 2, 6), 2) == [[1, 2, 5], [0, 3, 4]], "the dealt token with more keys, and the other"
    assert [held.tolist() for held in key_positions("zigzag_documents", 8, 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    padded = [held.tolist() for held in query_positions("zigzag_documents", 8, 2, (4, 8))]
    assert padded == [[0, 3, 4, 7], [1, 2, 5, 6]], "what is outside of documents is dealt as one"


def test_documents_of_any_lengths_are_balanced_in_work_and_in_tokens() -> None:
    """Of 64 documents on 8 ranks; where nearly all have one token, as far as the longest query allows."""
    rng = np.random.default_rng(0)
    for draw in range(200):
        length = rng.integers(1, 513, 64)
        kinds = (length, rng.geometric(1 / 100, 64), np.where(rng.random(64) < 0.9, 1, length))
        documents = (0, *np.cumsum(kinds[draw % 3]).tolist())
        held = key_positions("zigzag_documents", documents[-1], 8, documents)
        assert np.array_equal(np.sort(np.concatenate(held)), np.arange(documents[-1]))
        sizes = [len(positions) for positions in held]
        assert max(sizes) - min(sizes) <= 1
        keys = np.concatenate([np.arange(1, count + 1) for count in kinds[draw % 3]])
        work = [int(keys[positions].sum()) for positions in held]
        assert max(work) <= 1.001 * sum(work) / 8 + 8


@pytest.mark.parametrize(
    "lengths",
    [
        [8192] + [1] * 63, [1] * 63 + [9973], [1] * 64, [15] * 64, [17] * 64, [127] * 64, [15] * 63 + [16383],
        [2 ** (number % 14) for number in range(64)], [0] * 32 + [257] * 32, [0] * 63 + [5000], [2, 3, 5, 7] * 16,
    ],
    ids=[
        "a giant", "a giant at last", "one token each", "2P-1 each", "2P+1 each", "equal", "a giant, 2P-1 left over",
        "powers of two", "half of them empty", "one that is not empty", "a few tokens each",
    ],
)  # fmt: skip
def test_documents_of_lengths_that_invite_trouble_are_balanced_to_a_thousandth(lengths: list[int]) -> None:
    """64 documents on 8 ranks: each position on one rank, tokens that differ by one, and work of the mean."""
    documents = (0, *np.cumsum(lengths).tolist())
    held = key_positions("zigzag_documents", documents[-1], 8, documents)
    assert np.array_equal(np.sort(np.concatenate(held)), np.arange(documents[-1]))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    pairs = np.concatenate([np.arange(1, length + 1) for length in lengths])
    work = [int(pairs[one].sum()) for one in held]
    assert max(work) * 8 <= 1.001 * sum(work)


@balancer
def by_turns(documents, world_size):
    """One document after another, each to the next rank."""
    held = [[] for _ in range(world_size)]
    for number, (start, end) in enumerate(itertools.pairwise(documents)):
        held[number % world_size] += range(start, end)
    return held


@pytest.mark.parametrize(
    ("documents", "length", "expected"),
    [
        (None, 4, [[0, 1, 2, 3], []]),
        ((0, 1, 4), 4, [[0], [1, 2, 3]]),
        ((1, 3), 5, [[0, 3, 4], [1, 2]]),
        ((0, 1, 1, 2), 2, [[0, 1], []]),
        ((2,), 3, [[0, 1], [2]]),
    ],
)
def test_a_balancer_is_given_documents_from_the_first_position_to_the_last(
    documents: Any, length: int, expected: list[list[int]]
) -> None:
    """Padding before and after is a document each; empty documents stay."""
    assert [held.tolist() for held in key_positions(by_turns, length, 2, documents)] == expected


COUNT = itertools.count()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda documents, size: [range(documents[-1])], r"\(\(0, 3, 4\), 2\) returned 1 shards: expected one a rank"),
        (lambda documents, size: [range(4), [0]], r"\(\(0, 3, 4\), 2\) is not a partition"),
        (lambda documents, size: None, r"\(\(0, 3, 4\), 2\) returned None: expected a list of positions"),
        (
            lambda documents, size: [range(4), []] if next(COUNT) % 2 else [[], range(4)],
            r"\(\(0, 3, 4\), 2\) returned other positions when it was called again: ranks would not agree",
        ),
    ],
)
def test_what_a_balancer_returns_is_checked(function: Any, message: str) -> None:
    """The message names the documents."""
    with pytest.raises(ValueError, match=message):
        key_positions(balancer(function), 4, 2, (0, 3))


def test_documents_that_do_not_fit_are_refused() -> None:
    """By shardings that depend on them."""
    for documents in ((0, 5), (2, 1), (-1, 2)):
        with pytest.raises(ValueError, match=r"documents=.*: expected cumulative lengths, non-decreasing within"):
            key_positions("zigzag_documents", 4, 2, documents)


def test_only_a_function_is_a_balancer() -> None:
    """Two of one function are the same sharding."""
    with pytest.raises(TypeError, match=r"balancer\('zigzag'\): expected a function \(documents, world_size\)"):
        balancer("zigzag")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"inverse=\[1, 0\]: expected a function \(documents, world_size\) -> rows"):
        balancer(by_turns.function, inverse=[1, 0])  # type: ignore[call-overload]
    assert by_turns == balancer(by_turns.function)
    assert hash(by_turns) == hash(balancer(by_turns.function))


def test_a_page_table_holds_rows_in_the_order_of_its_pages() -> None:
    """A page that the sequence ends in is short, and one beyond its end holds nothing yet."""
    table = PageTable(2, ((3, 0), (5,), (2, 1)))
    assert [rows.tolist() for rows in key_positions(table, 7, 3)] == [[6, 0, 1], [], [4, 5, 2, 3]]
    assert [rows.tolist() for rows in key_positions(table, 2, 3)] == [[0, 1], [], []]
    assert all(rows.dtype == np.int64 for rows in key_positions(table, 0, 3))
    huge = PageTable(2**60, ((0,), (2**60,)))
    assert [rows.tolist() for rows in key_positions(huge, 2, 2)] == [[0, 1], []]  # as a file may say it


def test_a_page_table_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call looks its plan up by it several times, and a cache has thousands of pages. Equal tables hash alike."""
    tables = [PageTable(2, ((0, 2), (1,))) for _ in range(2)]
    hashed: list[Any] = []
    monkeypatch.setattr("ringref.sharding.hash", lambda of: hashed.append(of) or hash(of), raising=False)
    assert len({hash(table) for _ in range(3) for table in tables}) == 1
    assert len({QueryKeySharding("replicated", table) for table in tables}) == 1
    assert hashed.count((2, tables[0].pages)) == 2
    assert hash(PageTable(2, ((0, 2), (1, 3)))) != hash(tables[0])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PageTable(0, ((0,),)), "page_size=0: expected an integer of at least 1"),
        (lambda: PageTable(2, ((0, 1), (1,))), "page 1 is held twice, by ranks 0 and 1: expected once"),
        (lambda: PageTable(2, ((-1,),)), "page -1 of rank 0: expected page numbers from 0"),
        (lambda: PageTable(2, (0, 1)), "pages=(0, 1): expected the numbers of the pages of each rank"),
        (
            lambda: key_positions(PageTable(2, ((0,), (2,))), 5, 2),
            "page 1 (positions 2 to 3) is held by no rank: expected by one",
        ),
        (lambda: key_positions(PageTable(2, ((0,),)), 2, 2), "a page table of 1 ranks on a world of 2"),
        (lambda: QueryKeySharding("pages", "striped"), "queries='pages': expected one of replicated"),
        (lambda: QueryKeySharding("striped", "replicated"), "keys='replicated': expected one of contiguous"),
    ],
)
def test_a_page_table_or_a_pair_of_shardings_that_makes_no_sense_is_refused(make: Any, said: str) -> None:
    """In one line that names the page, and the ranks."""
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        make()


def test_queries_may_lie_otherwise_than_keys() -> None:
    """On every rank, or by another sharding."""
    apart = QueryKeySharding("replicated", "striped")
    assert str(apart) == "replicated/striped"
    assert replicates_queries(apart)
    assert [rows.tolist() for rows in query_positions(apart, 3, 2)] == [[0, 1, 2]] * 2
    assert [rows.tolist() for rows in key_positions(apart, 5, 2)] == [[0, 2, 4], [1, 3]]
    other = QueryKeySharding("contiguous", PageTable(1, ((1, 0), (2,))))
    assert not replicates_queries(other)
    assert [rows.tolist() for rows in query_positions(other, 3, 2)] == [[0, 1], [2]]
