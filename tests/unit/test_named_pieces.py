"""Mechanisms of tiles, pieces, teams and what travels, written by hand: each is named by its own cause."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from mechanisms import case_of, explaining, library, of_all_ranks, of_gradients, seen, where

from ringref.problem import Dilation
from ringref.sharding import key_positions, pieces
from ringverify.diagnosis import reading
from ringverify.diagnosis.filling import FILLED
from ringverify.diagnosis.fitting import in_ring_of_teams
from ringverify.diagnosis.rearranging import REARRANGED
from ringverify.diagnosis.rounding_digits import ROUNDED
from ringverify.diagnosis.standing import Standing
from ringverify.diagnosis.substituting import SUBSTITUTED
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.place import Block, Partial
from ringverify.faults.ring import EVERYTHING, PLAIN, STEPS, multiplicity, ring_of
from ringverify.faults.wire import arrive
from ringverify.implementation import Capabilities, Implementation


def attending(attends):
    """Those pairs of a block count, whatever the mask: by what a rank knows, the owner and the positions."""

    def pattern(steps, here, hop, owner):
        i, j = here.call.positions[:, None], here.shards[owner][None]
        return multiplicity(STEPS, here, hop, owner) * 0 + attends(here, owner, i, j)

    return replace(STEPS, pattern=pattern)


def near(here, i, j):
    """The window."""
    left, right = here.problem.window or (None, None)
    return (left is None or j >= i - left) & (right is None or j <= i + right)


def in_rounds(here, owner, i, j):
    """How far a key lies behind is counted in rounds of the ring."""
    left, right = here.problem.window or (99, 99)
    return (torch.div(i - j, here.size, rounding_mode="floor") <= left // here.size) & (j - i <= right)


def placed(here, owner, i, j):
    """Shards begin at rank times the longest; what is past the end is nowhere."""
    n, each = here.problem.nk, -(-here.problem.nk // here.size)
    i = here.rank * each + torch.arange(len(i))[:, None]
    j = owner * each + torch.arange(j.size(1))[None]
    return ((j <= i) if here.problem.causal else True) & (i < n) & (j < n)


def local_branches(here, owner, i, j):
    """A short segment has the keys of the rank alone."""
    found = 0
    for w, r in here.problem.dilation.branches:
        there = (i // w == j // w) & (i % w % r == 0) & (j % w % r == 0)
        found = found + there * (w > min(map(len, here.shards)) or owner == here.rank)
    return found


def beginning_late(here, owner, i, j):
    """The keys of a piece of queries begin one after the left end of its first query's window."""
    early = len(pieces(here.problem.nq, 2 * here.size)[here.rank]) if here.call.sharding == "zigzag" else len(i)
    first = i.clone()
    for piece in (slice(0, early), slice(early, None)):
        first[piece] = i[piece].min() if len(i[piece]) else 0
    left = (here.problem.window or (None, None))[0]
    return near(here, i, j) & (left is None or j > first - left)


def earlier_document(here, owner, i, j):
    """A block is left out whose first key's document comes before that of the first query."""
    bounds = torch.tensor(here.problem.documents or (0, here.problem.nk))
    of_key, of_query = torch.bucketize(j[0, 0], bounds, right=True), torch.bucketize(i[0, 0], bounds, right=True)
    return of_key >= of_query


def consecutive(here, owner, i, j):
    """Rows of a shard follow its first one."""
    return j[0, 0] + torch.arange(j.size(1))[None] <= i[0, 0] + torch.arange(len(i))[:, None]


def until_a_right_side(here, owner, i, j):
    """A window's right side takes the place of the causal mask."""
    right = (here.problem.window or (None, None))[1]
    return near(here, i, j) & (not here.problem.causal or right is not None or j <= i)


def document_of_the_first(here, owner, i, j):
    """Four queries attend no key after the end of the first one's document, or of the first document."""
    bounds = torch.tensor(here.problem.documents or (0, here.problem.nk))
    number = (torch.searchsorted(bounds, i // 4 * 4, right=True) - 1).clamp(min=0)
    return j < bounds[(number + 1).clamp(max=len(bounds) - 1)]


def up_to_a_hop_of_none(here, owner, i, j):
    """Hops after the first on which no query of any rank attends a key are left out."""

    def used(hop):
        shards = enumerate(here.shards)
        return any(near(here, x[:, None], here.shards[(rank - hop) % here.size][None]).any() for rank, x in shards)

    last = next((hop for hop in range(1, here.size) if not used(hop)), here.size)
    return (here.rank - owner) % here.size <= last


def up_to_an_empty_tile(here, owner, i, j):
    """The tiles of 3 keys of a block are visited until there is one of which the rank attends nothing."""
    there = near(here, i, j).any(dim=0).split(3)
    used = [bool(tile.any()) for tile in there]
    return torch.arange(j.size(1)) < 3 * (used.index(False) if False in used else len(used))


def from_offsets_on(here, owner, i, j):
    """Head h begins at h // (H // r) in a segment, rounded down."""
    found = 0
    for w, r in here.problem.dilation.branches:
        start = (torch.arange(here.problem.heads) // (here.problem.heads // r))[:, None, None]
        i_there, j_there = ((x % w >= start) & ((x % w - start) % r == 0) for x in (i, j))
        found = found + (i // w == j // w) * i_there * j_there
    return found


def by_place(here, owner, i, j):
    """The n-th query of a rank in a segment attends its first n keys."""
    w = here.problem.nk if here.problem.dilation is None else here.problem.dilation.branches[0][0]
    place = ((i // w == i.T // w) & (i > i.T)).sum(dim=1, keepdim=True)
    return (i // w == j // w) & (not here.problem.causal or j % w <= place)


def of_early_rows(here, owner, i, j):
    """Of a later rank's block, the window of the late piece's queries is that of the early ones."""
    early = len(pieces(here.problem.nq, 2 * here.size)[here.rank])
    rows = torch.cat([i[:early], i[: len(i) - early]])
    causal = here.problem.causal
    return near(here, rows if causal and owner > here.rank else i, j) & (not causal or j <= i)


def as_if_consecutive(here, owner, i, j):
    """A rank's queries of a document end their keys where as many rows as they are would end."""
    bounds = torch.tensor(here.problem.documents or (0, here.problem.nk))
    number = torch.bucketize(i, bounds, right=True)
    first = torch.stack([i[number == number[row]].min() for row in range(len(i))])[:, None]
    return not here.problem.causal or j < first + (number == number.T).sum(dim=1, keepdim=True)


def tiles_as_if_consecutive(here, owner, i, j):
    """The same of 4 rows at a time."""
    first = torch.cat([rows[:1] + len(rows) + 0 * rows for rows in i.split(4)])
    return not here.problem.causal or j < first


def past_the_shortest(here, owner, i, j):
    """A block of which one batch entry has nothing is left out of all."""
    lengths = here.problem.key_lengths
    return lengths is None or j.min() < min(lengths)


def counted_by_keys(here, owner, i, j):
    """The last query of a rank is taken to be as far from its first as the block's last key from its first."""
    p = here.problem
    return not p.causal or j.min() <= i.min() + p.nk - p.nq + j.numel() - 1


def counted_by_queries(here, owner, i, j):
    """The last key of a block is taken to be as far from its first as the rank's last query from its first."""
    p = here.problem
    return p.window is None or j.min() + i.numel() - 1 >= i.min() + p.nk - p.nq - p.window[0]


def cut_at_floors(here, owner, i, j):
    """Keys of zigzag shards are put where pieces would lie that are cut at i * length // (2 ranks)."""
    n, count = here.problem.nk, 2 * here.size
    taken = [range(piece * n // count, (piece + 1) * n // count) for piece in (owner, count - 1 - owner)]
    at = torch.tensor([*taken[0], *taken[1]])
    return not here.problem.causal or at <= i


def by_the_longest(here, owner, i, j):
    """Queries are level with the end of the longest batch entry."""
    lengths = here.problem.key_lengths or (here.problem.nk,)
    there = j < torch.tensor(lengths)[:, None, None, None]
    return there & (not here.problem.causal or j <= i + max(lengths) - here.problem.nq)


def begun_by_the_window(here, owner, i, j):
    """The left end of a window takes the place of the beginning of the document."""
    bounds = torch.tensor(here.problem.documents or (0, here.problem.nk))
    left = (here.problem.window or (None, None))[0]
    of_query, of_key = (torch.bucketize(x, bounds, right=True) for x in (i, j))
    there = (of_key == of_query) | ((left is not None) & (of_key < of_query))
    return near(here, i, j) & there & (of_query > 0) & (of_query < len(bounds))


def free_within_a_piece(here, owner, i, j):
    """A zigzag piece is sliced to its own keys, and then a side of a window that is 0 is taken for none."""
    left, right = here.problem.window or (None, None)
    cuts = torch.tensor([0, *map(len, pieces(here.problem.nk, 2 * here.size))]).cumsum(0)
    together = torch.bucketize(i, cuts, right=True) == torch.bucketize(j, cuts, right=True)
    free = (not left or j >= i - left) & (not right or j <= i + right)
    return near(here, i, j) | (together & free)


def in_order_of_teams(here, owner, i, j):
    """Positions of a team of two are put in order, while its rows lie member by member."""
    at = torch.arange(here.problem.nk)
    for first in range(0, here.size, 2):
        held = torch.cat(here.shards[first : first + 2])
        at[held] = held.sort().values
    return near(here, at[i], at[j]) & ((not here.problem.causal) | (at[j] <= at[i]))


def rounded_towards_0(here, owner, i, j):
    """The last row of a block that a query attends, as a language divides that has no floor."""
    right = 0 if here.problem.causal else (here.problem.window or (None, None))[1]
    last = here.size * torch.div(
        i + 99 - owner if right is None else i + right - owner, here.size, rounding_mode="trunc"
    )
    left = (here.problem.window or (None, None))[0]
    reached = (
        left is None
        or right is None
        or (here.rank - owner) % here.size <= left
        or (owner - here.rank) % here.size <= right
    )
    return (j - owner <= last) & (left is None or j >= i - left) & reached


def nearer_than_left(here, owner, i, j):
    """The block of the rank that is as many ranks away as the window's left is skipped."""
    left = (here.problem.window or (99, 0))[0]
    return near(here, i, j) & ((here.rank == owner) | ((here.rank - owner) % here.size < left) | (left >= here.size))


BLOCK = [Dilation(((w, r),), heads="shared", head_offset="block") for w, r in ((7, 3), (6, 2))]
SPLIT = [Dilation(((w, 1),), heads="split") for w in (2, 3, 4)]


def level_with_a_team(here, owner, i, j):
    """The keys of a team are left out if the first one is level with the last query of the team."""
    together = math.gcd(here.size, here.problem.hk)
    of_keys, of_queries = owner // together * together, here.rank // together * together
    first = min(int(held[0]) for held in here.shards[of_keys : of_keys + together] if len(held))
    last = max(int(held[-1]) for held in here.shards[of_queries : of_queries + together] if len(held))
    return not here.problem.causal or first < last


READ = {
    "the causal mask is left out where a window has a right side": (
        attending(until_a_right_side),
        [case_of(causal=True, window=(2, 1)), case_of(causal=True, window=(None, 3), size=2)],
        [case_of(causal=True, window=(2, None)), case_of(window=(1, 2))],
    ),
    "a tile of 4 queries, cut from position 0 on, attends no key after the end of the document, or of the first one, "
    "of its first query": (
        where(document_of_the_first),
        [case_of(documents=(0, 5, 12), size=2), case_of(documents=(1, 6, 9, 14), size=2, query_length=14)],
        [case_of(documents=(0, 8, 12)), case_of()],
    ),
    "a block is skipped if it comes after the first hop on which no rank attends anything": (
        where(up_to_a_hop_of_none),
        [case_of(window=(0, 1), size=4), case_of(window=(1, 2), size=5, query_length=16)],
        [case_of(window=(0, 1), size=2), case_of(window=(2, 0), size=4), case_of(window=(None, 1))],
    ),
    "a tile of 3 keys of a shard is skipped if it comes after one of which the rank attends nothing": (
        where(up_to_an_empty_tile),
        [case_of(window=(2, 0), size=2), case_of(window=(3, 0), size=2), case_of(window=(1, 1), size=2,
                                                                                 query_length=14)],
        [case_of(window=(4, 0), size=2), case_of(size=2)],
    ),
    "a head of a dilation takes every r-th position of a segment from its offset on, which is h // (H // r), where "
    "H / r is no whole number": (
        attending(from_offsets_on),
        [case_of(dilation=BLOCK[0], heads=4), case_of(dilation=BLOCK[1], heads=5)],
        [case_of(dilation=BLOCK[0], heads=3), case_of(dilation=BLOCK[1], heads=4)],
    ),
    "the causal mask compares a query's place among the rank's own of a segment with a key's place among all of it": (
        attending(by_place),
        [case_of(causal=True), case_of(causal=True, dilation=Dilation(((5, 1),), heads="split"))],
        [case_of(causal=True, size=1), case_of()],
    ),
    "a block is skipped under a causal mask if its first key is level with the rank's last query, blocks being those "
    "of teams of as many ranks as divide ranks and key heads": (
        where(level_with_a_team),
        [case_of(causal=True, query_length=2, size=2, heads=1), case_of(causal=True, query_length=3, size=2, heads=1),
         case_of(causal=True, query_length=3, size=4)],
        [case_of(causal=True, query_length=4, size=4), case_of(query_length=3, size=2, heads=1)],
    ),
    "the window is laid with queries at positions level with the last key from the first query on, as if it were the "
    "only one": (
        attending(lambda here, owner, i, j: near(here, i + here.problem.nk - 1, j)),
        [case_of(window=(2, 1), query_length=3, key_length=9), case_of(window=(3, 0), query_length=5, key_length=7)],
        [case_of(window=(2, 2), query_length=1, key_length=6)],
    ),
    "the left end of the window is laid at a multiple of the number of ranks: the distance is rounded up to the last "
    "one before the next multiple": (
        attending(in_rounds),
        [case_of(window=(3, 2), sharding="striped"), case_of(window=(4, 9), size=4, sharding="striped", seed=2)],
        [case_of(window=(2, 2), sharding="striped"), case_of()],
    ),
    "queries and keys are placed at positions counted from the rank times the longest shard, and those past the end "
    "are in no sequence": (
        attending(placed),
        [case_of(query_length=10, size=4), case_of(query_length=7, causal=True), case_of(query_length=10, causal=True)],
        [case_of(), case_of(query_length=11, causal=True)],
    ),
    "a branch of a dilation whose segments are no longer than the shortest shard attends the rank's own keys alone: a "
    "segment that reaches over the end of a shard loses the others": (
        attending(local_branches),
        [case_of(dilation=SPLIT[1], query_length=7, size=2), case_of(dilation=SPLIT[0], query_length=10),
         case_of(dilation=SPLIT[1])],
        [case_of(dilation=SPLIT[2]), case_of(dilation=SPLIT[2], query_length=7)],
    ),
    "a shard of queries, and each piece of a zigzag one, attends no key at the beginning of the window of its first "
    "query, which is taken for one before it": (
        attending(beginning_late),
        [case_of(window=(2, 2), sharding="zigzag"), case_of(window=(1, None), sharding="zigzag", size=2),
         case_of(window=(2, 1))],
        [case_of(window=(None, 1), sharding="zigzag")],
    ),
    "on blocks of later ranks, under a causal mask: the window is laid with queries at positions of the rows at the "
    "same places in the early zigzag piece": (
        attending(of_early_rows),
        [case_of(causal=True, window=(3, None), sharding="zigzag", size=2),
         case_of(causal=True, window=(5, 1), sharding="zigzag", query_length=19)],
        [case_of(causal=True, window=(11, None), sharding="zigzag"), case_of(window=(3, None), sharding="zigzag")],
    ),
    "under a causal mask, a rank's queries of each document, or of a sequence without documents, attend no key from "
    "the first one's position + their number on, as if they were consecutive": (
        where(as_if_consecutive),
        [case_of(causal=True, sharding="zigzag"),
         case_of(causal=True, sharding="zigzag", documents=(0, 10, 12), size=2)],
        [case_of(causal=True), case_of(sharding="zigzag"),
         case_of(causal=True, sharding="zigzag", documents=(0, 6, 12), size=2)],
    ),
    "under a causal mask, each tile of 4 queries of a shard attends no key from the first one's position + their "
    "number on, as if they were consecutive": (
        where(tiles_as_if_consecutive),
        [case_of(causal=True, sharding="zigzag", query_length=n, size=2) for n in (8, 12)],
        [case_of(causal=True), case_of(causal=True, sharding="zigzag", query_length=16, size=2)],
    ),
    "a block is skipped in all batch entries if its first key is past the shortest of key_lengths": (
        where(past_the_shortest),
        [case_of(batch=2, key_lengths=(3, 11)), case_of(batch=2, key_lengths=(2, 12), window=(2, 0), size=2)],
        [case_of(batch=2, key_lengths=(7, 8), size=2), case_of(batch=2, key_lengths=(5, 5))],
    ),
    "a block is skipped under a causal mask if its first key comes after the rank's last query, as if the rank held as "
    "many queries as the block holds keys": (
        where(counted_by_keys),
        [case_of(causal=True, key_length=8), case_of(causal=True, key_length=5, size=2)],
        [case_of(causal=True), case_of(key_length=8), case_of(causal=True, query_length=8, key_length=12)],
    ),
    "a block is skipped if its last key lies before the window of the rank's first query, as if the block held as many "
    "keys as the rank holds queries": (
        where(counted_by_queries),
        [case_of(window=(2, None), query_length=6, key_length=12),
         case_of(window=(3, 1), query_length=4, key_length=14)],
        [case_of(window=(2, None)), case_of(query_length=6, key_length=12), case_of(window=(9, 0), key_length=6)],
    ),
    "a window that is 0 on the left or on the right is not bounded there within the query's zigzag piece": (
        attending(free_within_a_piece),
        [case_of(window=(0, 2), sharding="zigzag"),
         case_of(window=(3, 0), sharding="zigzag", size=2, query_length=13)],
        [case_of(window=(1, 2), sharding="zigzag"), case_of(sharding="zigzag")],
    ),
    "the mask is made with queries and keys at positions of what a team holds in ascending order, where rows lie "
    "member by member, teams being of two ranks where their number is even": (
        attending(in_order_of_teams),
        [case_of(causal=True, sharding="striped", size=4, query_length=11, heads=3),
         case_of(window=(3, 1), sharding="striped", size=4, query_length=8)],
        [case_of(sharding="striped", size=4, query_length=8), case_of(causal=True, size=4)],
    ),
    "the last row of a striped block that a query attends is rounded towards 0: its first row where it is none": (
        attending(rounded_towards_0),
        [case_of(causal=True, sharding="striped"), case_of(window=(None, 0), sharding="striped", size=4)],
        [case_of(sharding="striped"), case_of(window=(None, 3), sharding="striped", size=4)],
    ),
    "the last row of a striped block that a query attends is rounded towards 0: its first row where it is none, in "
    "blocks of ranks that the window reaches": (
        attending(rounded_towards_0),
        [case_of(causal=True, sharding="striped"), case_of(window=(1, 0), sharding="striped", size=4),
         case_of(window=(2, 0), sharding="striped", causal=True, size=4)],
        [case_of(sharding="striped"), case_of(window=(0, 0), sharding="striped", size=4)],
    ),
    "a striped block is skipped that is as many ranks away as a window has keys to the left: the last of these lies in "
    "it": (
        attending(nearer_than_left),
        [case_of(window=(1, 0), sharding="striped"), case_of(window=(2, 0), sharding="striped", size=4)],
        [case_of(window=(3, 0), sharding="striped"), case_of(window=(0, 0), sharding="striped")],
    ),
    "pieces of zigzag shards of keys are taken to be cut at i * length // (2 ranks): keys are put at other positions, "
    "and what is longer than that is lost, what is shorter filled up with zeros": (
        attending(cut_at_floors),
        [case_of(causal=True, sharding="zigzag", query_length=n) for n in (9, 15)],
        [case_of(causal=True, sharding="zigzag", query_length=8, size=2), case_of(sharding="zigzag", query_length=9)],
    ),
    "the causal mask is made with cross lengths aligned by the longest key length - queries instead of keys - "
    "queries": (
        attending(by_the_longest),
        [case_of(causal=True, batch=2, key_lengths=(9, 5)), case_of(causal=True, key_lengths=(7,), key_length=14)],
        [case_of(causal=True, batch=2, key_lengths=(12, 5)), case_of(batch=2, key_lengths=(9, 5))],
    ),
    "keys before a document are attended by its queries where a window is bounded on the left: that takes the place of "
    "the document's beginning": (
        attending(begun_by_the_window),
        [case_of(documents=(1, 5, 12), window=(2, 1)), case_of(documents=(0, 4, 9, 11), window=(3, None), size=2)],
        [case_of(documents=(0, 4, 12), window=(None, 1)), case_of(documents=(0, 5, 12)), case_of(window=(2, 1))],
    ),
    "a block is skipped if its first key lies in an earlier document than the rank's first query": (
        where(earlier_document),
        [case_of(documents=(0, 3, 9, 12)), case_of(documents=(2, 16), size=4, query_length=16)],
        [case_of(documents=(0, 4, 8, 12)), case_of(documents=(0, 12)), case_of()],
    ),
    "the causal mask is made with queries and keys at positions counted on from the shard's first one": (
        attending(consecutive),
        [case_of(causal=True, sharding="striped"), case_of(causal=True, sharding="striped", size=2, query_length=9)],
        [case_of(causal=True)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", READ)
@pytest.mark.by_day(4)
def test_what_is_read_of_a_mask_is_told(words):
    """The first rule that predicts the numbers of all cases, right ones included."""
    steps, cases, right = READ[words]
    scenes, probe = seen(Implementation(ring_of(steps), "read", EVERYTHING), [*cases, *right], gradients=False)
    assert [bool(wrong_tensors(scene)) for scene in scenes] == [True] * len(cases) + [False] * len(right)
    found = reading.hypotheses(scenes, probe, lambda: 1)
    assert next(one.sentence() for one in found if all(one.explains(scene) is not None for scene in scenes)) == words


def test_blocks_that_are_taken_to_be_as_long_as_the_own_one_are_told():
    """A longer one loses its last key, and a shorter one has one of zeros, which a window may hide."""

    def attend(q, k, v, call):
        size, p = call.world_size, call.problem
        counts = [len(held) for held in key_positions("striped", p.nk, size)]
        every = []
        for x in (k, v):
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, max(counts) - x.size(1)))
            dist.all_gather(into := [torch.empty_like(x) for _ in range(size)], x.contiguous(), group=call.group)
            every.append(torch.cat([x[:, : k.size(1)] for x in into], dim=1))
        j = torch.cat([rank + size * torch.arange(k.size(1)) for rank in range(size)])
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, every[0])
        right = (p.window or (None, None))[1]
        s = s.masked_fill((right is not None) & (j > call.positions[:, None] + (right or 0)), -math.inf)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), every[1]), s.logsumexp(-1)

    declared = Capabilities(sharding="striped", uneven=True, causal="never", window=True, lse=True, gradients=False)
    problems = [{"query_length": 11}, {"query_length": 13}, {"query_length": 10, "window": (None, 4)}]
    cases = [case_of(sharding="striped", **problem) for problem in problems]
    scenes, probe = seen(Implementation(attend, "own count", declared), cases, gradients=False)
    found = explaining(reading.hypotheses(scenes, probe, lambda: 1), scenes)
    assert found[0].startswith("every block is taken to hold as many keys as the rank's own shard: ")


def test_another_block_whose_padding_was_cleared_is_told():
    """Its zeros stand at other places than the padding of the block that it replaces: they decide what is seen."""
    which = "the rank's own was one of two buffers, and its place on the way is taken by the last one received into it"
    (cause,) = library(f"keys and values of the wrong block: {which}, in the backward only")
    mixed = ring_of(STEPS, cause.steps)

    def attend(q, k, v, call):
        lengths = torch.as_tensor(call.problem.key_lengths or (call.problem.nk,))
        there = (call.key_positions[None] < lengths[:, None])[..., None, None]
        return mixed(q, torch.where(there, k, 0), torch.where(there, v, 0), call)

    cases = [case_of(), case_of(key_lengths=(5,))]
    (whole, padded), _ = seen(Implementation(attend, "cleared", EVERYTHING), cases, gradients=True)
    assert cause.explains(whole) is not None
    assert cause.explains(padded) is None
    assert Standing(cause, 0.0).stands(padded)
    other = library("the rank's own keys and values are used at every hop, in the backward only")[0]
    assert not Standing(other, 0.0).stands(whole)


# -- merges ------------------------------------------------------------------------------------------------------------


def in_tiles(merge, tile=3):
    """Parts of a block that are merged one after the other."""

    def partial(s, m, v):
        found = None
        for part in range(0, max(1, s.size(-1)), tile):
            here = slice(part, part + tile)
            new = STEPS.partial(s[..., here], m[..., here], v[..., here, :])
            found = new if found is None else merge(found, new)
        return found

    return replace(STEPS, partial=partial)


def lse_first(first, second):
    """Update lse, and then compute the weight with it."""
    lse = torch.logaddexp(first.lse, second.lse)
    return Partial(first.out - torch.sigmoid(second.lse - lse)[..., None] * (first.out - second.out), lse)


def faded_too_late(first, second):
    """Rescale what came before from the new sum to the new sum."""
    lse = torch.logaddexp(first.lse, second.lse)
    return Partial(first.out + (second.lse - lse).exp()[..., None] * second.out, lse)


def test_an_lse_that_the_late_piece_of_a_zigzag_shard_takes_from_the_new_block_is_told():
    """What a later rank's block gives is merged into this piece alone; out is right until lse is used again."""

    def accumulate(steps, here, hop, running, new):
        found = new if running is None else steps.merge(running, new)
        if hop <= here.rank:
            return found
        late = here.call.positions >= here.problem.nq / 2
        return found._replace(lse=torch.where(late, new.lse, found.lse))

    steps = replace(STEPS, accumulate=accumulate)
    cases = [case_of(sharding="zigzag", causal=True, query_length=n, window=w) for n, w in ((6, None), (18, (3, 1)))]
    scenes, _ = seen(Implementation(ring_of(steps), "replaced", EVERYTHING), cases, gradients=False)
    words = "the merged lse is the new block's, where a later rank's block meets a late zigzag piece"
    assert explaining(library(words), scenes) == [words]
    assert explaining(library("the merged lse is the new block's"), scenes) == []


def as_it_was(first, second):
    """Forget the new lse."""
    return STEPS.merge(first, second)._replace(lse=first.lse)


MERGED = {
    "the new block's weight in the merge is sigmoid(its lse - merged lse): lse is updated before out, so that it "
    "counts too little": replace(STEPS, merge=lse_first),
    "merges of tiles of 3 keys of a block weigh the new one by sigmoid(its lse - merged lse)": in_tiles(lse_first),
    "merges of tiles of 3 keys of a block do not rescale the out that came before": in_tiles(faded_too_late),
    "merges of tiles of 3 keys of a block keep the earlier lse": in_tiles(as_it_was),
}


@pytest.mark.parametrize("words", MERGED)
def test_a_merge_of_blocks_or_of_tiles_is_told(words):
    """Which of the two, and how long tiles are."""
    cases = [case_of(size=2), case_of(query_length=15), case_of(size=2, query_length=17, seed=3)]
    scenes, _ = seen(Implementation(ring_of(MERGED[words]), "merged", EVERYTHING), cases, gradients=False)
    assert explaining(library(words), scenes) == [words]
    others = [one for other in MERGED if other != words for one in library(other)]
    assert explaining(others, scenes) == []


def test_a_merge_of_zigzag_pieces_is_told():
    """Of each block, the early piece is merged first, and then the late one; all pieces are of one length."""

    def attend(q, k, v, call):
        blocks, found = [of_all_ranks(x, call) for x in (k, v)], None
        for hop in range(call.world_size):
            every = (x[(call.rank - hop) % call.world_size].chunk(2, dim=1) for x in blocks)
            for of_k, of_v in zip(*every, strict=True):
                s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, of_k)
                new = Partial(torch.einsum("bhqk,bkhd->bhqd", s.softmax(-1), of_v), s.logsumexp(-1))
                found = new if found is None else faded_too_late(found, new)
        return found.out.transpose(1, 2), found.lse

    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    cases = [case_of(sharding="zigzag", size=size, query_length=4 * size) for size in (1, 2, 3)]
    scenes, _ = seen(Implementation(attend, "pieces", declared), cases, gradients=False)
    words = "the merge does not rescale the out that came before"
    assert explaining(library(words), scenes) == []
    more = ", where zigzag pieces are merged one by one"
    assert explaining(library(words + more), scenes) == [words + more]


@pytest.mark.parametrize(("sums", "of"), [(True, "exponentials"), (False, "weighted values")])
def test_a_sum_over_tiles_that_is_not_rescaled_is_told(sums, of):
    """An online softmax within a block; the other sum is right."""

    def partial(s, m, v):
        top, out, total = torch.full_like(s[..., 0], -math.inf), 0.0, 0.0
        for s_t, v_t in zip(s.split(4, dim=-1), v.split(4, dim=-2), strict=True):
            above = torch.maximum(top, s_t.amax(-1))
            fade, w, top = (top - above).exp(), (s_t - above[..., None]).exp(), above
            out = out * (fade[..., None] if sums else 1) + w @ v_t
            total = total * (1 if sums else fade) + w.sum(-1)
        return Partial(out / total[..., None], top + total.log())

    cases = [case_of(size=2), case_of(size=1, query_length=9), case_of(size=2, query_length=17, seed=3)]
    implementation = Implementation(ring_of(replace(STEPS, partial=partial)), "online", EVERYTHING)
    scenes, _ = seen(implementation, cases, gradients=False)
    words = f"the running sum of {of} over tiles of 4 keys of a block is not rescaled where the maximum grows"
    assert explaining(library(words), scenes) == [words]


def test_sums_that_are_added_each_relative_to_its_own_maximum_are_told():
    """The maximum is reduced in place, so that nothing is left to rescale by; or each hop adds what it has."""

    def attend(q, k, v, call):
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        top = s.amax(-1)
        w = (s - top[..., None]).exp()
        out, total = torch.einsum("bhqk,bkhd->bhqd", w, v), w.sum(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=call.group)
        for x in (out, total):
            dist.all_reduce(x, group=call.group)
        return (out / total[..., None]).transpose(1, 2), top + total.log()

    words = "sums over blocks are added as they are, each relative to the largest score of its own block"
    declared = Capabilities(sharding="replicated_query", causal="never", lse=True, gradients=False)
    cases = [case_of(sharding="replicated_query", size=size) for size in (2, 3)]
    scenes, _ = seen(Implementation(attend, "reduced", declared), cases, gradients=False)
    assert explaining(library(words), scenes) == [words]
    (cause,) = library(words)
    scenes, _ = seen(
        Implementation(ring_of(cause.steps), "ring", EVERYTHING), [case_of(), case_of(size=2)], gradients=False
    )
    assert explaining(library(words), scenes) == [words]


def test_an_lse_of_the_maximum_before_the_sink_is_told():
    """Where the sink is the larger one; a row without keys has none."""

    def attend(q, k, v, call):
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        top = s.amax(-1)
        new = torch.maximum(top, call.sinks[:, None])
        w = (s - new[..., None]).exp()
        total = w.sum(-1) + (call.sinks[:, None] - new).exp()
        return torch.einsum("bhqk,bkhd->bqhd", w / total[..., None], v), top + total.log()

    declared = Capabilities(world_sizes=(1,), causal="never", sinks=True, lse=True, gradients=False)
    cases = [case_of(size=1, query_length=3, sinks=True, seed=seed) for seed in range(1, 12)]
    scenes, _ = seen(Implementation(attend, "sunk", declared), cases, gradients=False)
    wrong = [scene for scene in scenes if wrong_tensors(scene)]
    assert len(wrong) > 3
    words = "lse is computed with the maximum of the scores, where the sum is shifted by the sink, which is larger"
    assert explaining(SUBSTITUTED, wrong) == [words]


def latest(steps, here, hop, running, new):
    """Sums that are shifted by the maximum of the block in hand, whatever came before."""
    top = here.notes.get("top", new.lse)
    above = here.notes["top"] = new.lse  # of one key a block, the score is both
    fade = (top - torch.where(above == -math.inf, 0.0, above)).exp()
    if running is None:
        return new
    total = fade * (running.lse - torch.where(top == -math.inf, 0.0, top)).exp() + (above > -math.inf)
    out = (fade * (running.lse - torch.where(top == -math.inf, 0.0, top)).exp())[..., None] * running.out
    out = (out + (above > -math.inf)[..., None] * new.out) / torch.where(total == 0, 1.0, total)[..., None]
    return Partial(out, above + total.log())


def test_a_maximum_of_the_latest_block_is_told():
    """A row that has no key in a block forgets all that it had before."""
    cases = [case_of(size=size, query_length=size, window=(left, 0)) for size, left in ((3, 1), (4, 1), (4, 2))]
    implementation = Implementation(ring_of(replace(STEPS, accumulate=latest)), "latest", EVERYTHING)
    scenes, _ = seen(implementation, cases, gradients=False)
    says = "the running maximum is that of the latest block alone{}: rows without a key in it lose what came before"
    known = library(says.format("")) + library(says.format(", where a rank attends some of it"))
    assert explaining(known, scenes) == [says.format("")]


def test_a_maximum_of_the_latest_block_that_ends_as_0_is_told():
    """A row without a key in the last block has lost nothing: its sums are relative to 0 then."""

    def attend(q, k, v, call):
        top, total = torch.full((*q.shape[:2], q.size(2)), -math.inf), torch.zeros(q.shape[:3])
        sums = torch.zeros(*q.shape[:3], v.size(-1))
        keys, values = (of_all_ranks(x, call) for x in (k, v))
        for hop in range(call.world_size):
            owner = (call.rank - hop) % call.world_size
            s = call.scale * torch.einsum("bqhd,bkhd->bqhk", q, keys[owner])
            later = owner * k.size(1) + torch.arange(k.size(1)) > call.positions[:, None]
            s = s.masked_fill(later[None, :, None], -math.inf)
            latest = s.amax(-1)
            level = latest.masked_fill(latest == -math.inf, 0)
            factor, weights = (top - level).exp(), (s - level[..., None]).exp()
            total = total * factor + weights.sum(-1)
            sums, top = sums * factor[..., None] + torch.einsum("bqhk,bkhd->bqhd", weights, values[owner]), latest
        lse = total.log() + top.masked_fill(top == -math.inf, 0)
        return sums / total.where(total > 0, torch.ones(()))[..., None], lse.transpose(1, 2)

    declared = Capabilities(causal="always", lse=True, gradients=False)
    cases = [case_of(size=size, query_length=2 * size, causal=True) for size in (3, 4)]
    scenes, _ = seen(Implementation(attend, "latest", declared), cases, gradients=False)
    says = "the running maximum is that of the latest block alone: rows without a key in it lose what came before"
    more = ", unless it is the last one"
    assert explaining(library(says) + library(says + more), scenes) == [says + more]


@pytest.mark.parametrize("whose", ["of rank 0", "of the last rank", "of the own rank"])
def test_sinks_that_are_lost_without_a_key_of_a_rank_are_told(whose):
    """One rank brings them in, and clears rows of which it has nothing."""

    def attend(q, k, v, call):
        last, n = call.world_size - 1, k.size(1)
        rank = {"of rank 0": 0, "of the last rank": last, "of the own rank": call.rank}[whose]
        k, v = (torch.cat(of_all_ranks(x, call), dim=1) for x in (k, v))
        i, j = call.positions[:, None] + call.problem.nk - call.problem.nq, torch.arange(k.size(1))
        seen = (j >= i - call.window[0]) & (j <= i + call.window[1])
        s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(~seen, -math.inf)
        there = seen[:, rank * n : rank * n + n].any(1)
        lse = torch.logaddexp(s.logsumexp(-1), call.sinks[:, None].masked_fill(~there, -math.inf))
        return torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp(), v), lse

    declared = Capabilities(
        causal="never", window=True, sinks=True, lse=True, cross_lengths=True, uneven=True, gradients=False
    )
    shapes = [((1, 0), 2, 6), ((0, 0), 3, 6)] if whose == "of the own rank" else [((2, 1), 3, 12), ((1, 4), 4, 12)]
    cases = [case_of(window=window, sinks=True, size=size, query_length=n, key_length=12) for window, size, n in shapes]
    scenes, _ = seen(Implementation(attend, "brought in", declared), cases, gradients=False)
    found = [text for text in explaining(SUBSTITUTED, scenes) if text.startswith("the sink is lost")]
    assert found == [f"the sink is lost in rows without a key {whose}"]


def test_a_mask_before_the_softcap_is_told_beside_sinks():
    """They take a part of the weight, and have a gradient."""

    def attend(q, k, v, call):
        i, j = call.positions[:, None], call.key_positions
        s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(j > i, -math.inf)
        s = call.softcap * torch.tanh(s / call.softcap)
        lse = torch.logaddexp(s.logsumexp(-1), call.sinks[:, None])
        return torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp(), v), lse

    declared = Capabilities(world_sizes=(1,), causal="always", softcap=True, sinks=True, lse=True, lse_gradient=True)
    cases = [case_of(size=1, query_length=n, causal=True, softcap=2.0, sinks=True, seed=n) for n in (4, 6)]
    scenes, _ = seen(Implementation(attend, "sunk", declared), cases, gradients=True)
    (found,) = {text.split(",")[0] for text in explaining(FILLED, scenes)}
    assert found == "the mask is applied before the softcap: excluded keys have the score -softcap instead of -inf"


OF_PAIRS = ", blocks being those of teams of as many ranks as divide ranks and heads"


@pytest.mark.parametrize(
    ("which", "team"),
    [
        ("a rank attends some", 1),
        ("a rank attends some but for the window", 1),
        ("the query attends some", 1),
        (f"the query attends some{OF_PAIRS}", 2),
    ],
)
def test_a_mask_before_the_softcap_is_told_where_blocks_are_skipped(which, team):
    """Those that are skipped have no score at all; which these are, the window decides or not."""

    def attend(q, k, v, call):
        p, i, found = call.problem, call.positions[:, None], []
        every = [[torch.cat(some, dim=1) for some in zip(*[iter(of_all_ranks(x, call))] * team, strict=True)]
                 for x in (k, v)]  # fmt: skip
        for number, of_k in enumerate(every[0]):
            j = number * of_k.size(1) + torch.arange(of_k.size(1))
            mask, near = j <= i, j >= i - p.window[0]
            s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, of_k)).masked_fill(~(mask & near), -math.inf)
            s = p.softcap * torch.tanh(s / p.softcap)
            some = mask if "but for" in which else mask & near
            found.append(torch.where(some.any(-1, keepdim=True) if "query" in which else some.any(), s, -math.inf))
        s = torch.cat(found, dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), torch.cat(every[1], dim=1)), s.logsumexp(-1)

    declared = Capabilities(causal="always", window=True, softcap=True, lse=True, gradients=False)
    size = 3 if team == 1 else 4
    cases = [
        case_of(causal=True, window=(left, None), softcap=cap, size=size, query_length=3 * size)
        for left, cap in ((1, 1.0), (2, 2.0), (0, 1.0))
    ]
    scenes, _ = seen(Implementation(attend, "capped", declared), cases, gradients=False)
    found = {text.removesuffix(", except in rows without keys") for text in explaining(FILLED, scenes)}
    assert any(text.endswith(f"in blocks of which {which}") for text in found)
    assert "query" in which or len(found) == 1


# -- gradients ---------------------------------------------------------------------------------------------------------


def once_more(steps, here, hop, owner, carried, part):
    """What arrives is dropped by a rank that has nothing to add; it sends what it has sent before."""
    adds = bool(multiplicity(STEPS, here, hop, owner).any())
    if adds or carried is None:
        here.notes["total"] = part if carried is None else Block(carried.k + part.k, carried.v + part.v)
    return arrive(STEPS.move(STEPS, here, here.notes["total"], STEPS.owner(here, hop + 1)))


def of_the_next_team(here, dq, dk, dv):
    """The dk and dv of a rank of the next team, of as many ranks as divide ranks and key heads."""
    found = []
    for x in (dk, dv):
        dist.all_gather(every := [torch.empty_like(x) for _ in range(here.size)], x.contiguous(), group=here.group)
        found.append(every[(here.rank + math.gcd(here.size, here.problem.hk)) % here.size])
    return dq, *found


def test_gradients_that_are_sent_once_more_are_told():
    """In place of those that arrive."""
    cases = [case_of(causal=True, size=size, query_length=4 * size) for size in (2, 3, 4)]
    implementation = Implementation(ring_of(replace(STEPS, travel=once_more)), "again", EVERYTHING)
    scenes, _ = seen(implementation, cases, gradients=True)
    words = (
        "a rank that skips a hop does not take the dk and dv that arrive: it sends those of the hop before once more"
    )
    assert explaining(library(words), scenes) == [words]


@pytest.mark.parametrize(
    ("last", "whose"), [(True, "the last block that a rank attends"), (False, "a rank's own block")]
)
def test_an_lse_of_one_block_that_is_kept_is_told(last, whose):
    """For all blocks of the backward."""

    def kept(here, saved):
        q, k, v, out, _ = saved
        owner = ((0 if here.problem.causal else here.rank + 1) if last else here.rank) % here.size
        dist.all_gather(every := [torch.empty_like(k) for _ in range(here.size)], k.contiguous(), group=here.group)
        s = here.problem.scale_value * torch.einsum("bqhd,bkhd->bhqk", q, every[owner])
        mask = here.shards[owner] <= here.call.positions[:, None] if here.problem.causal else s < math.inf
        return q, k, v, out, s.masked_fill(~mask, -math.inf).logsumexp(-1)

    cases = [case_of(size=size, query_length=2 * size, causal=causal) for size in (2, 3) for causal in (True, False)]
    scenes, _ = seen(Implementation(ring_of(replace(STEPS, kept=kept)), "kept", EVERYTHING), cases, gradients=True)
    words = f"the lse that is kept for the backward is that of {whose} instead of the merged one"
    assert explaining(library(words), scenes) == [words]


def test_gradients_that_come_back_to_another_team_are_told():
    """By as many ranks as share the key heads."""
    cases = [
        case_of(size=4, heads=2),
        case_of(size=4, heads=6),
        case_of(size=6, heads=3),
        case_of(size=2, heads=1),
        case_of(size=3),
    ]
    steps = replace(STEPS, returned_gradients=of_the_next_team)
    scenes, _ = seen(Implementation(ring_of(steps), "teams", EVERYTHING), cases, gradients=True)
    asked = [one for alike in in_ring_of_teams(REARRANGED, [], scenes[0]) for one in alike]
    whose = ", blocks being those of teams of as many ranks as divide ranks and "
    assert explaining(asked, scenes) == [
        f"dk and dv that are right come back in another place: whole shards, one place back{whose}{heads}"
        for heads in ("key heads", "heads")
    ]


class Chunks(torch.autograd.Function):
    """Attention of one rank by chunks of queries, whose dk is assigned in the keys that each of them writes."""

    @staticmethod
    def forward(ctx, q, k, v, call, chunks, writes):
        """Right."""
        i, j, window = call.positions[:, None], call.key_positions, call.problem.window
        hidden = (j > i) if window is None else (j > i) | (j < i - window[0])
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        p = s.masked_fill(hidden, -math.inf).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        ctx.call, ctx.chunks, ctx.writes = call, chunks, writes
        return torch.einsum("bhqk,bkhd->bqhd", p, v)

    @staticmethod
    def backward(ctx, dout):
        """With `=` where `+=` should be."""
        q, k, v, p = ctx.saved_tensors
        call, dk = ctx.call, torch.zeros_like(k)
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * call.scale
        for chunk in ctx.chunks(call):
            part = torch.einsum("bhqk,bqhd->bkhd", ds[:, :, chunk], q[:, chunk])
            for keys in ctx.writes(call, chunk, p[:, :, chunk].amax(dim=(0, 1, 2)) > 0):
                dk[:, keys] = part[:, keys]
        return torch.einsum("bhqk,bkhd->bqhd", ds, k), dk, torch.einsum("bhqk,bqhd->bkhd", p, dout), *[None] * 3


def up_to_the_last(call, chunk, attended):
    """The keys up to a chunk's last query."""
    return [call.key_positions <= call.positions[chunk].max()]


def pieces_attended(call, chunk, attended):
    """The pieces of keys of which a chunk attends any."""
    early = torch.arange(call.problem.nk) < len(pieces(call.problem.nk, 2)[0])
    return [piece for piece in (early, ~early) if (attended & piece).any()]


CHUNKS = {
    "zigzag: the dk of a rank's later piece of queries are written over those of its earlier piece": (
        "zigzag",
        in_pieces := lambda call: torch.arange(len(call.positions)).tensor_split([len(pieces(call.problem.nq, 2)[0])]),
        up_to_the_last,
        {},
    ),
    "zigzag: the dk of a rank's later piece of queries are written over those of its earlier piece, piece by piece of "
    "keys": ("zigzag", in_pieces, pieces_attended, {"window": (2, None)}),
    "the dk of each tile of 4 queries are written over those of the tile before": (
        "contiguous",
        lambda call: torch.arange(len(call.positions)).split(4),
        up_to_the_last,
        {},
    ),
}


def test_gradients_of_tiles_from_position_0_on_that_are_assigned_are_told():
    """As where all positions are gathered before they are cut in tiles."""

    def attend(q, k, v, call):
        return Chunks.apply(q, k, v, call, lambda call: torch.arange(len(call.positions)).split(4), up_to_the_last)

    declared = Capabilities(world_sizes=(1,), causal="always")
    scenes, _ = seen(
        Implementation(attend, "assigned", declared),
        [case_of(size=1, causal=True, query_length=n) for n in (7, 12)],
        gradients=True,
    )
    words = "the dk of each tile of 4 queries, cut from position 0 on, are written over those of the tile before"
    assert words in explaining(of_gradients(scenes), scenes)


@pytest.mark.parametrize("words", CHUNKS)
def test_gradients_of_chunks_of_queries_that_are_assigned_are_told(words):
    """Of keys that the later chunk reads, or of pieces of which it attends a key."""
    sharding, chunks, writes, mask = CHUNKS[words]
    declared = Capabilities(world_sizes=(1,), sharding=sharding, causal="always", window=bool(mask))
    attend = Implementation(lambda q, k, v, call: Chunks.apply(q, k, v, call, chunks, writes), "assigned", declared)
    cases = [case_of(size=1, sharding=sharding, causal=True, query_length=n, **mask) for n in (7, 12)]
    scenes, _ = seen(attend, cases, gradients=True)
    assert explaining(library(words), scenes) == [words]


def test_heads_that_an_all_to_all_deals_out_in_turn_are_told():
    """Right where no heads are grouped, and where ranks and key heads have no common divisor."""

    def attend(q, k, v, call):
        ranks = math.gcd(call.world_size, call.problem.hk)
        dealt = [torch.arange(x.size(2)).reshape(-1, ranks).T.flatten() for x in (q, k)]
        out, lse = PLAIN.function(q[:, :, dealt[0]], k[:, :, dealt[1]], v[:, :, dealt[1]], call)
        back = dealt[0].argsort()
        return out[:, :, back], lse[:, back]

    cases = [
        case_of(heads=8, key_heads=4, size=2),
        case_of(heads=6, key_heads=2, size=4),
        case_of(heads=6, key_heads=2),
    ]
    scenes, _ = seen(Implementation(attend, "dealt", EVERYTHING), cases, gradients=True)
    *wrong, right = scenes
    assert not wrong_tensors(right)
    (found,) = [
        one
        for one in library(
            "grouped heads: an all-to-all deals heads out in turn (rank u has u, u + U, …; U divides ranks and key "
            "heads), so that query heads meet other key heads than their own"
        )
        if one.explains(right) is not None
    ]
    assert explaining([found], wrong)


def test_gradients_that_travel_in_the_input_dtype_are_told():
    """Each part is rounded before it is added, and every sum."""

    def travel(steps, here, hop, owner, carried, part):
        low = Block(*(x.to(torch.bfloat16) for x in part))
        total = low if carried is None else Block(carried.k + low.k, carried.v + low.v)
        return arrive(STEPS.move(STEPS, here, total, STEPS.owner(here, hop + 1)))

    cases = [case_of(size=size, query_length=4 * size, dtype="bfloat16", head_dim=16) for size in (2, 3, 4)]
    implementation = Implementation(ring_of(replace(STEPS, travel=travel)), "low", EVERYTHING)
    scenes, _ = seen(implementation, cases, gradients=True)
    words = "dk and dv travel in the input dtype: what each rank adds, and every sum, is rounded to it"
    (found,) = [one for one in ROUNDED if one.sentence() == words]
    assert all(found.explains(scene) is not None for scene in scenes)


class SentOn(torch.autograd.Function):
    """A block that goes to the next rank, and its gradient back."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return moved(x, call, 1)

    @staticmethod
    def backward(ctx, dx):
        return moved(dx, ctx.call, -1), None


def moved(x, call, by):
    """What the rank so far before sends."""
    into, size = torch.empty_like(x), call.world_size
    peers = [dist.get_global_rank(call.group, (call.rank + step) % size) for step in (by, -by)]
    sent = dist.P2POp(dist.isend, x.contiguous(), peers[0], group=call.group)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, into, peers[1], group=call.group)]):
        work.wait()
    return into


def test_gradients_that_autograd_sends_back_in_the_input_dtype_are_told():
    """Those of the last hop set out first, and each rank adds its own."""

    def attend(q, k, v, call):
        block, parts = torch.cat([k, v], dim=-1), []
        for hop in range(call.world_size):
            block = SentOn.apply(block, call) if hop else block
            k, v = (x.float() for x in block.split((k.size(-1), v.size(-1)), dim=-1))
            s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q.float(), k)
            parts.append((s.logsumexp(-1), torch.einsum("bhqk,bkhd->bhqd", s.softmax(-1), v)))
        lse = torch.stack([one for one, _ in parts]).logsumexp(0)
        out = sum((one - lse).exp()[..., None] * x for one, x in parts)
        return out.transpose(1, 2).to(q.dtype), lse

    declared = Capabilities(causal="never", lse=True, lse_gradient=True, dtypes=("bfloat16",))
    cases = [case_of(size=size, query_length=4 * size, dtype="bfloat16", head_dim=16) for size in (2, 3, 4)]
    scenes, _ = seen(Implementation(attend, "back", declared), cases, gradients=True)
    words = (
        "dk and dv go back through the ring in the input dtype, those of the last hop first: what each rank adds, and "
        "every sum, is rounded to it"
    )
    (found,) = [one for one in ROUNDED if one.sentence() == words]
    assert all(found.explains(scene) is not None for scene in scenes)
