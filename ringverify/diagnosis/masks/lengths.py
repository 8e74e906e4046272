"""Shards that are taken for longer or shorter than they are, or for beginning elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from ringref import pattern
from ringref.sharding import pieces
from ringverify.diagnosis.grids import GRIDS, Grid
from ringverify.diagnosis.masks.positions import POSITIONS, At, joined_rows, own_keys
from ringverify.diagnosis.pairs import Ints, Mask, OneSide, Otherwise, Pairs
from ringverify.diagnosis.scene import Counts

LENGTHS: dict[str, Callable[[Pairs, Ints | int], Ints]] = {
    "the rank's own shard": lambda pairs, owner: own_keys(pairs),
    "the first rank's shard": lambda pairs, owner: np.array(len(pairs.keys.shards[0])),
    "the last rank's shard": lambda pairs, owner: np.array(len(pairs.keys.shards[-1])),
    "the shard of the rank that is as many hops away in the other direction": lambda pairs, owner: np.array(
        [len(held) for held in pairs.keys.shards]
    )[(2 * pairs.rank - owner) % pairs.size],
}
"""How many keys every block is taken to hold, by pairs and the block's owner: `(Nq, 1)`, `(Nq, Nk)` or one number."""


def ways_to_take_lengths() -> Iterator[Otherwise]:
    """Yield masks of shards of other lengths."""
    for (whose, those), (queries_too, keys_too, rows) in {
        ("queries and keys are", "those"): (True, True, True),
        ("queries and keys are", "keys"): (True, True, False),
        ("queries are", "those"): (True, False, True),
        ("keys are", "those"): (False, True, True),
    }.items():
        for counted in ("length // ranks", "the longest shard"):
            at = POSITIONS[f"counted from the rank times {counted}"]
            yield Otherwise(
                f"{whose} placed at positions counted from the rank times {counted}, and {those} past the end are in "
                "no sequence",
                functools.partial(_placed, at, queries_too, keys_too, rows),
                1,
            )
    for whose, count in LENGTHS.items():
        yield Otherwise(
            f"every block is taken to hold as many keys as {whose}: the last ones of a longer block are left out, and "
            "a shorter one is filled up with keys and values of 0",
            functools.partial(_cut_to, count),
            0.75,
            functools.partial(_filled_up_to, count),
        )
        yield Otherwise(
            f"a block is cut to as many keys as {whose} holds: the last ones of a longer block are left out",
            functools.partial(_cut_to, count),
            0.5,
        )
    yield Otherwise(
        "keys and values are cleared where they are padding, or are attended by no query, in the first batch entry: "
        "they count as keys of 0 in the others",
        lambda pairs: np.where(_unused_by_first(pairs), 0, pairs.true),
        0.5,
        lambda pairs: np.where(_unused_by_first(pairs), pairs.true, 0).sum(axis=-1),
    )
    yield _with_zeros(
        "keys and values are cleared by key_lengths as if rows, where the shards of all ranks are joined, rank by "
        "rank, lay in the order of positions: others than the padding count as keys of 0",
        _cleared_by_row,
        0.5,
    )
    for up in (False, True):
        says = f"every rank has key_lengths // ranks keys{', rounded up' if up else ''}, and the others are padding"
        yield Otherwise(says, functools.partial(_share_of_lengths, up), 0.75)
    for whose, (queries_too, keys_too) in {
        "queries and keys": (True, True), "queries": (True, False), "keys": (False, True),
    }.items():  # fmt: skip
        for then, once in {
            "pieces overlap by a row": False,
            "the row in the middle is computed with the late piece alone": True,
        }.items():
            if queries_too or not once:
                yield Otherwise(
                    f"the late piece of a zigzag shard is taken to begin at half of its rows, of {whose}: where the "
                    f"early one is longer, {then} and the last row is in none",
                    functools.partial(_overlapping, queries_too, keys_too, once),
                    0.75,
                )
    for text, of_queries in {
        "keys of an earlier rank's zigzag shard are taken up to the length of the rank's own early piece": False,
        "queries meet a later rank's zigzag shard from the length of that rank's early piece on": True,
    }.items():
        says = f"under a causal mask, {text}: where the two pieces differ in length, a row is one too few or too many"
        yield Otherwise(says, functools.partial(_cut_at_other_pieces, of_queries), 0.75)
    yield _with_zeros(
        "shorter shards are padded to the longest in front of their rows, and as many rows as they have are taken: "
        "zeros are attended first, and the last keys are lost",
        _padded_in_front,
        0.5,
    )
    yield _with_zeros(
        "shards are gathered with the padding that makes them equally long: zeros are attended as keys between them, "
        "and the last keys are cut off",
        _gathered,
        0.5,
    )
    yield Otherwise(
        "rows that pad shorter shards to the longest are attended as zeros unless their position, counted on from the "
        "shard, is past the end",
        lambda pairs: pairs.true,
        0.5,
        _counted_on,
    )
    yield Otherwise(
        "which rows of a block are padding is told by those of the rank in hand at the same places: where they differ, "
        "keys are left out, or attended as zeros",
        lambda pairs: np.where(_told_by_own_rows(pairs), pairs.true, 0) if pairs.problem.key_lengths else None,
        0.5,
        lambda pairs: _told_by_own_rows(pairs, of_padding=True).sum(axis=-1),
    )
    for grid in GRIDS[2:5]:
        yield _with_zeros(
            "the next team is sent the block that is at hand after the ring within a team, not the one that this began "
            "with: it is taken for that of another member, of its length and at its positions" + grid.whose,
            functools.partial(_of_another_member, _further_on, grid),
            1.0,
        )
        yield _with_zeros(
            "whose block it is, in a ring of teams, is told by subtracting hops from the rank, as in one ring: a later "
            "member's is taken for that of the same member of the team before, of its length and at its positions"
            + grid.whose,
            functools.partial(_of_another_member, _of_team_before, grid),
            1.0,
        )
    for where, begins in CUT.items():
        says = f"pieces of zigzag shards of keys are taken to be cut at {where}: keys are put at other positions, and "
        says += "what is longer than that is lost, what is shorter filled up with zeros"
        yield _with_zeros(says, functools.partial(_cut_elsewhere, begins), 0.5)
    for lse, what in ((0.0, "0, lse too"), (-np.inf, "those of a row without keys")):
        yield _with_zeros(
            "rows of shards that are padded to the longest are taken for positions 0, 1, …: those of padding are "
            f"attended as zeros, and of rows past the length, of queries and keys, results are {what}",
            _in_rows,
            0.75,
            lse,
        )


def _with_zeros(
    says: str, of: Callable[[Pairs], tuple[Counts, Counts]], cost: float, lse: float = -np.inf
) -> Otherwise:
    """Return a mask by what gives counts of keys and of zeros together."""
    return Otherwise(says, lambda pairs: of(pairs)[0], cost, lambda pairs: of(pairs)[1], lse)


def _placed(at: At, queries: bool, keys: bool, rows: bool, pairs: Pairs) -> Counts | None:
    """Return counts with queries or keys, or both, at other positions.

    Keys past the end count nowhere, nor do queries if it is said of `rows`.
    """
    i, j = (at(pairs, x) if moved else x.p for x, moved in ((pairs.queries, queries), (pairs.keys, keys)))
    if pairs.case.sharding != "contiguous" or ((i == pairs.queries.p).all() and (j == pairs.keys.p).all()):
        return None
    return pairs.counts(lambda name: (i, j)) * (((i < pairs.problem.nq) | (not rows)) & (j < pairs.problem.nk))


def _overlapping(queries: bool, keys: bool, once: bool, pairs: Pairs) -> Counts | None:
    """Return counts if a row in the middle is of both pieces, and the last row of none.

    Args:
        queries, keys: of which sides it is so.
        once: a query in the middle attends what it does in the late piece, if anything, and not what it does in both.
        pairs: the pairs.
    """
    if pairs.case.sharding != "zigzag" or pairs.case.replicated:
        return None
    of_queries, of_keys = (
        _pieces(pairs, x) if moved else [(x.p, x.p >= 0)] for x, moved in ((pairs.queries, queries), (pairs.keys, keys))
    )

    def counts(i: Ints, j: Ints) -> Counts:
        return pairs.counts(lambda name: (i, j))

    found = np.zeros_like(pairs.true)
    for i, of_q in of_queries:
        here = np.sum([counts(i, j) * (of_q & of_k) for j, of_k in of_keys], axis=0)
        found = np.where(here.any(axis=-1, keepdims=True), here, found) if once else found + here
    return found


def _cut_at_other_pieces(of_queries: bool, pairs: Pairs) -> Counts | None:
    """Return counts if the early piece of a zigzag shard is taken for as long as that of the other side."""
    p, i, j = pairs.problem, pairs.queries, pairs.keys
    if not p.causal or pairs.case.sharding != "zigzag" or pairs.case.replicated or p.nq != p.nk:
        return None
    early = np.array([len(piece) for piece in pieces(p.nk, 2 * pairs.size)])
    if not of_queries:
        return np.where((j.rank < i.rank) & (j.place >= early[i.rank]), 0, pairs.true)
    rest = pairs.counts(lambda name: None if name == "causal" else (i.p, j.p))
    return np.where(j.rank > i.rank, rest * (i.place >= early[j.rank]), pairs.true)


def _pieces(pairs: Pairs, x: OneSide) -> list[tuple[Ints, Mask]]:
    """Return positions of rows in the early piece and in the late one, and which rows these are."""
    early = np.array([len(piece) for piece in pieces(x.total, 2 * pairs.size)])[x.rank]
    begin, behind = x.count // 2, x.count - early
    late = np.clip(early + x.place - begin, 0, None)
    return [(x.p, x.place < early), (x.at(x.rank, late), (x.place >= begin) & (x.place < begin + behind))]


def _told_by_own_rows(pairs: Pairs, *, of_padding: bool = False) -> Mask:
    """Return which keys are taken for none of the padding, by positions of the rank in hand; or which padding is."""
    place = np.broadcast_to(pairs.keys.place, (pairs.problem.nq, pairs.problem.nk))
    striped = pairs.case.sharding == "striped"  # which goes on past the end of a shard too
    own = pairs.rank + pairs.size * place if striped else pairs.keys.at(pairs.rank, place)
    lengths = np.array(pairs.problem.key_lengths or (pairs.problem.nk,))[:, None, None, None]
    found = own < lengths
    if of_padding:
        plain = pairs.queries.p, pairs.keys.p
        others = pairs.counts(lambda name: None if name == "key_lengths" else plain)
        found = found & (pairs.keys.p >= lengths) & (others > 0)
    return np.broadcast_to(found, pairs.true.shape)


def _cut_to(count: Callable[[Pairs, Ints | int], Ints], pairs: Pairs) -> Counts | None:
    if pairs.case.replicated or len({len(held) for held in pairs.keys.shards}) == 1:
        return None
    return np.where(pairs.keys.place < count(pairs, pairs.owner), pairs.true, 0)


def _filled_up_to(count: Callable[[Pairs, Ints | int], Ints], pairs: Pairs) -> Counts:
    """Return how many rows of 0 fill up shorter blocks, where no mask hides what comes after a shard."""
    p, keys, i = pairs.problem, pairs.keys, pairs.queries.p
    found, shards = np.zeros(pairs.true.shape[:3], dtype=np.int64), keys.shards
    if pairs.case.replicated or p.documents is not None or p.dilation is not None:
        return found
    valid = np.array(p.key_lengths or (p.nk + pairs.size * keys.of.shape[1],) * p.batch)[:, None, None]
    for rank, place in ((rank, n) for rank, held in enumerate(shards) for n in range(len(held), keys.of.shape[1])):
        at = place * len(shards) + rank if pairs.case.sharding == "striped" else keys.of[rank, place]
        seen = place < count(pairs, rank)
        if p.causal:
            seen = seen & pattern.causal(i, np.array([[at]]), diagonal=p.diagonal)
        if p.window is not None:
            seen = seen & pattern.window(i, np.array([[at]]), left=p.window[0], right=p.window[1], diagonal=p.diagonal)
        found += np.broadcast_to(seen, (p.nq, 1))[:, 0] & (at < valid)
    return found


def _unused_by_first(pairs: Pairs) -> Mask:
    """Return the keys `(1, H, 1, Nk)` that no query of the first batch entry attends."""
    found: Mask = (pairs.true[:1] == 0).all(axis=2, keepdims=True)
    return found


def _cleared_by_row(pairs: Pairs) -> tuple[Counts, Counts]:
    """Return counts of keys, and of zeros, if key_lengths clear those from a number of rows on."""
    lengths = np.array(pairs.problem.key_lengths or (pairs.problem.nk,))[:, None, None, None]
    cleared = joined_rows(pairs, pairs.keys) >= lengths
    return np.where(cleared, 0, pairs.true), np.where(cleared, pairs.true, 0).sum(axis=-1)


def _share_of_lengths(up: bool, pairs: Pairs) -> Counts | None:
    """Return counts if each rank's keys that are no padding are a whole share of the key length."""
    if pairs.problem.key_lengths is None:
        return None
    lengths = np.array(pairs.problem.key_lengths)
    each = (-(-lengths // pairs.size) if up else lengths // pairs.size)[:, None, None, None]
    rest = pairs.counts(lambda name: None if name == "key_lengths" else (pairs.queries.p, pairs.keys.p))
    return np.where(pairs.keys.place < each, rest, 0)


def _in_rows(pairs: Pairs) -> tuple[Counts, Counts]:
    """Return counts of keys, and of zeros, if positions are numbers of rows of shards padded to the longest."""
    p, zeros = pairs.problem, np.zeros(pairs.true.shape[:3], dtype=np.int64)
    queries, keys = ((x.rank * max(map(len, x.shards)) + x.place).ravel() for x in (pairs.queries, pairs.keys))
    moved = (queries != pairs.queries.p.ravel()).any() or (keys != pairs.keys.p.ravel()).any()
    if pairs.case.sharding != "contiguous" or not moved:
        return pairs.true, zeros
    there = queries < p.nq
    counts, as_row = np.zeros_like(pairs.true), pairs.true[:, :, queries[there]]
    counts[:, :, there] = np.where(keys < p.nk, as_row[..., np.minimum(keys, p.nk - 1)], 0)
    zeros[:, :, there] = as_row.sum(axis=-1) - counts[:, :, there].sum(axis=-1)
    return counts, zeros


def _counted_on(pairs: Pairs) -> Counts:
    """Return how many rows of padding are taken for keys at positions of the next shards, which masks allow."""
    zeros = np.zeros(pairs.true.shape[:3], dtype=np.int64)
    if pairs.case.sharding != "contiguous" or pairs.case.replicated:
        return zeros
    longest = max(map(len, pairs.keys.shards))
    for held in (held for held in pairs.keys.shards if len(held)):
        for position in range(held[-1] + 1, min(held[0] + longest, pairs.problem.nk)):
            zeros += pairs.true[..., position]
    return zeros


def _padded_in_front(pairs: Pairs) -> tuple[Counts, Counts]:
    """Return counts of keys, and of zeros, if each shard is moved back by as many rows as it is shorter."""
    keys, counts = pairs.keys, np.zeros_like(pairs.true)
    zeros, longest = counts.sum(axis=-1), max(map(len, pairs.keys.shards))
    for held in pairs.keys.shards:
        short = min(longest - len(held), len(held))
        counts[..., held[: len(held) - short]] = pairs.true[..., held[short:]]
        zeros = zeros + pairs.true[..., held[:short]].sum(axis=-1)
    return (pairs.true, zeros * 0) if keys.total == 0 or pairs.case.replicated else (counts, zeros)


CUT: dict[str, Callable[[int, int], list[int]]] = {
    "i * length // (2 ranks)": lambda n, count: [i * n // count for i in range(count + 1)],
    "i * (length // (2 ranks)), what is left over being of the last one": lambda n, count: [
        *(i * (n // count) for i in range(count)),
        n,
    ],
    "i * (length // (2 ranks)), the last of them one longer each": lambda n, count: [
        i * (n // count) + max(0, i - count + n % count) for i in range(count + 1)
    ],
    "i * ceil(length / (2 ranks))": lambda n, count: [min(n, i * -(-n // count)) for i in range(count + 1)],
}
"""Where the pieces of a sequence may be taken to begin, and the last one to end, by its length and their number."""


def _cut_elsewhere(begins: Callable[[int, int], list[int]], pairs: Pairs) -> tuple[Counts, Counts]:
    """Return counts of keys, and of zeros, if zigzag shards of keys are taken for those of other pieces."""
    counts, count = np.zeros_like(pairs.true), 2 * pairs.size
    zeros, every = counts.sum(axis=-1), begins(pairs.keys.total, count)
    if pairs.case.sharding != "zigzag":
        return pairs.true, zeros
    for rank, held in enumerate(pairs.keys.shards):
        taken = [j for piece in (rank, count - 1 - rank) for j in range(every[piece], every[piece + 1])]
        for place, position in enumerate(taken):
            if place < len(held):
                counts[..., held[place]] = pairs.true[..., position]
            else:
                zeros = zeros + pairs.true[..., position]
    return counts, zeros


Mistaken = Callable[[Pairs, int, Ints, int], Ints]
"""Whose block one is that is taken for an owner's (`way` 1), or for whose it is taken (−1), by ranks of a team."""


def _further_on(pairs: Pairs, each: int, owner: Ints, way: int) -> Ints:
    """A block that comes from t teams away is that of a member t further on."""
    away: Ints = (pairs.rank // each - owner // each) % (pairs.size // each)
    found: Ints = owner // each * each + (owner + way * away) % each
    return found


def _of_team_before(pairs: Pairs, each: int, owner: Ints, way: int) -> Ints:
    """A block of a later member is taken for one of the team before: hops are subtracted from the rank."""
    found: Ints = (owner + way * each * (owner % each > pairs.rank % each)) % pairs.size
    return found


def _of_another_member(mistaken: Mistaken, grid: Grid, pairs: Pairs) -> tuple[Counts, Counts]:
    """Return counts of keys, and of zeros, if a block in a ring of teams is taken for that of another rank."""
    teams, keys, size = grid.teams(pairs.case), pairs.keys, pairs.size
    zeros = np.zeros(pairs.true.shape[:3], dtype=np.int64)
    each = len(teams[0])
    if each in (1, size) or pairs.case.replicated:
        return pairs.true, zeros

    def shifted(owner: Ints, way: int) -> Ints:
        return mistaken(pairs, each, owner, way)

    lengths = np.array([len(held) for held in keys.shards])
    as_of = np.broadcast_to(shifted(pairs.owner, -1), pairs.true.shape[2:])
    place = np.broadcast_to(keys.place, as_of.shape)
    there, i = place < lengths[as_of], pairs.queries.p
    j = np.where(there, keys.of[as_of, np.minimum(place, keys.of.shape[1] - 1)], keys.p)
    counts = pairs.counts(lambda name: (i, j)) * there
    for rank, held in enumerate(keys.shards):
        sent = lengths[shifted(np.array([[rank]]), 1)][:, 0]
        for at, position in enumerate(held):
            zeros += np.where(sent <= at, pairs.true[..., position], 0)
    return counts, zeros


def _gathered(pairs: Pairs) -> tuple[Counts, Counts]:
    """Return counts of keys, and of zeros, if shards padded to the longest are joined and the first Nk rows taken."""
    keys, counts = pairs.keys, np.zeros_like(pairs.true)
    zeros = counts.sum(axis=-1)
    longest = max(map(len, keys.shards))
    for row, position in enumerate(np.concatenate(keys.shards)):
        rank, place = divmod(row, longest)
        if rank < len(keys.shards) and place < len(keys.shards[rank]):
            counts[..., keys.shards[rank][place]] += pairs.true[..., position]
        else:
            zeros += pairs.true[..., position]
    return counts, zeros
