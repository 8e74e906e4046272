"""Positions that are taken instead of those of queries or keys: of another rank or place, shifted."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ringref.sharding import SHARDINGS, ShardingName, key_positions, pieces, query_positions
from ringverify.diagnosis.grids import IN_PAIRS, USUAL, Grid, joined
from ringverify.diagnosis.masks.documents import bounds
from ringverify.diagnosis.pairs import Ints, Mask, OneSide, Pairs, Rows, side
from ringverify.diagnosis.scene import Counts
from ringverify.faults.merging import TILES

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


def _numbers(pairs: Pairs, x: OneSide) -> Ints:
    """Numbers of rows by position where the shards of all ranks come one after the other; that where all have all."""
    return np.argsort(np.concatenate(x.shards)) if len(x.shards) == pairs.size else np.arange(x.total)


def _through_order(pairs: Pairs, x: OneSide) -> Ints:
    """Positions if rows are put in order by the permutation whose inverse does so, and back by the other."""
    back = _numbers(pairs, x)
    return back[back[x.p]]


def joined_rows(pairs: Pairs, x: OneSide) -> Ints:
    """Numbers of rows where the shards of all ranks come one after the other."""
    return _numbers(pairs, x)[x.p]


def _remainder_last(pairs: Pairs, x: OneSide) -> Ints:
    """Numbers of rows where length // ranks of each contiguous shard come first, and then the others, by rank."""
    each = x.total // pairs.size
    if pairs.case.sharding != "contiguous":
        return x.p
    return np.where(x.place < each, x.rank * each + x.place, pairs.size * each + x.rank)


def _filled_up(pairs: Pairs, x: OneSide) -> Ints:
    """Positions if those of all shards, filled up with 0, are joined, and as many taken as there are rows."""
    if len(x.shards) != pairs.size or not x.total:
        return x.p
    longest = max(map(len, x.shards))
    filled = np.concatenate([np.concatenate([held, np.zeros(longest - len(held), int)]) for held in x.shards])
    return filled[_numbers(pairs, x)].reshape(x.p.shape)


def _down(tile: int) -> At:
    return lambda pairs, x: x.p // tile * tile


def _whole_tiles(tile: int) -> At:
    return lambda pairs, x: x.at(x.rank, x.place // tile * tile)


def _tiled(tile: int) -> At:
    return lambda pairs, x: x.at(x.rank, x.place % tile)


def sharded(name: ShardingName) -> At:
    """Return positions of shards of another name."""

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


def _in_longest_shards(pairs: Pairs, x: OneSide) -> Ints:
    """Positions of shards that begin at their ranks times the length of the longest."""
    return x.rank * -(-x.total // pairs.size) + x.place


def _in_longest_pieces(pairs: Pairs, x: OneSide, *, own: bool = False) -> Ints:
    """Positions of zigzag pieces that begin at their numbers times the length of the longest, or their own."""
    if pairs.case.sharding != "zigzag":
        return x.p
    after, lengths = late(x, pairs), np.array([len(piece) for piece in pieces(x.total, 2 * pairs.size)])
    number = np.where(after, 2 * pairs.size - 1 - x.rank, x.rank)
    each = lengths[number] if own else lengths.max(initial=0)
    found: Ints = number * each + x.place - np.where(after, lengths[x.rank], 0)
    return found


def _of_one_piece(*, early: bool) -> At:
    """Positions of the rows of one zigzag piece for those of the other, too, which have the same places in theirs."""

    def at(pairs: Pairs, x: OneSide) -> Ints:
        if pairs.case.sharding != "zigzag":
            return x.p
        first = np.array([len(piece) for piece in pieces(x.total, 2 * pairs.size)])[x.rank]
        moved = x.place - first if early else x.place + first
        return np.where(late(x, pairs) == early, x.at(x.rank, moved), x.p)

    return at


def _whole_tiled(tile: int) -> At:
    return lambda pairs, x: x.at(x.rank, np.where(x.place < x.count // tile * tile, x.place % tile, x.place))


def _of_rank(change: Callable[[Pairs, Ints], Ints]) -> At:
    return lambda pairs, x: x.at(change(pairs, x.rank), x.place)


def _of_transposed(grid: Grid, pairs: Pairs, x: OneSide) -> Ints:
    """Positions if the ranks of a team are taken to be as far from each other as there are teams."""
    teams = grid.teams(pairs.case)
    if len(x.shards) != pairs.size or len(teams) in (1, pairs.size):
        return x.p
    found = np.arange(x.total)
    for team, ranks in enumerate(teams):
        apart = range(team, pairs.size, len(teams))
        here, there = (np.concatenate([x.shards[rank] for rank in those]) for those in (ranks, apart))
        there = np.repeat(there, len(here)) if len(there) == 1 else there[: len(here)]  # as a mask is broadcast
        found[here[: len(there)]] = there
    return found.reshape(x.p.shape)


def _of_team(grid: Grid, longest: bool, pairs: Pairs, x: OneSide) -> Ints:
    """Positions counted from the beginning of what a team holds, or from its first rank times the longest shard."""
    teams = grid.teams(pairs.case)
    if len(x.shards) != pairs.size:
        return x.p
    found, each = np.arange(x.total), max(map(len, x.shards)) if longest else 0
    for team, held in zip(teams, joined(x.shards, teams), strict=True):
        found[held] = team[0] * each + np.arange(len(held))
    return found.reshape(x.p.shape)


def _of_team_in_order(grid: Grid, pairs: Pairs, x: OneSide) -> Ints:
    """Positions of what a team holds in ascending order, of rows that lie member by member."""
    if len(x.shards) != pairs.size:
        return x.p
    found = np.arange(x.total)
    for held in joined(x.shards, grid.teams(pairs.case)):
        found[held] = np.sort(held)
    return found.reshape(x.p.shape)


def _of_teams(where: str, *, longest: bool) -> dict[str, At]:
    return {
        f"counted from {where}, teams being {grid.text}": functools.partial(_of_team, grid, longest)
        for grid in (*USUAL, IN_PAIRS)
    }


def of_world(pairs: Pairs, x: OneSide, *, first: bool = False) -> Ints:
    """Positions as if the rank in the world, or that less the first one of the ring, were the rank in the ring."""
    g: Ints = pairs.ring[x.rank] - first * pairs.ring[0]
    found = {"striped": x.place * pairs.size + g, "contiguous": g * x.count + x.place}
    return x.p if pairs.case.group == "world" else found.get(pairs.case.sharding, x.at(g, x.place))


def _begin_of_document(pairs: Pairs, x: OneSide) -> Ints:
    """Return where the document of each position begins; 0 where it lies in none, or there are none."""
    offsets = np.array(pairs.problem.documents or (0,))
    number = np.searchsorted(offsets, x.p, side="right") - 1
    return np.where((number >= 0) & (number < len(offsets) - 1), offsets[number], 0)


POSITIONS: dict[str, At] = {
    "of the rank in the world instead of the rank in the group": of_world,
    "of the rank in the world less the first one of the group": functools.partial(of_world, first=True),
    **{f"{abs(by)} too {'large' if by > 0 else 'small'}": _shifted(by) for by in (-1, 1, -2, 2)},
    "level with the last key from the first query on, as if it were the only one": lambda pairs, x: (
        x.p + pairs.problem.nq - 1
    ),
    "aligned with the first key instead of the last": lambda pairs, x: x.p - pairs.problem.diagonal,
    "counted from the beginning of the shard": lambda pairs, x: x.place,
    **_of_teams("the beginning of what a team holds", longest=False),
    **{
        f"of what a team holds in ascending order, where rows lie member by member, teams being {grid.text}": (
            functools.partial(_of_team_in_order, grid)
        )
        for grid in USUAL
    },
    "counted from the beginning of their document": lambda pairs, x: x.p - _begin_of_document(pairs, x),
    "counted on from the shard's first one": lambda pairs, x: x.at(x.rank, 0 * x.place) + x.place,
    "counted from the rank times the rank's own number of rows": lambda pairs, x: x.rank * x.count + x.place,
    "counted from the rank times length // ranks": lambda pairs, x: x.rank * (x.total // pairs.size) + x.place,
    "counted from the rank times the longest shard": _in_longest_shards,
    **_of_teams("the first rank of a team times the longest shard", longest=True),
    **{f"of {name} shards": sharded(name) for name in SHARDINGS if name != "replicated_query"},
    "that count rows where the shards of all ranks are joined, rank by rank": joined_rows,
    "that count rows where length // ranks of each shard are joined, and what is left over comes last": (
        _remainder_last
    ),
    "that come of the inverse of the permutation that puts rows in order": _through_order,
    "of the row with its number in shards that are filled up with 0 to the longest": _filled_up,
    "of zigzag pieces that are cut at half of the rows": _halves,
    "of zigzag pieces of length // (2 ranks) rows": _in_pieces(early=True),
    "of zigzag pieces that are all as long as the longest": _in_longest_pieces,
    "of zigzag pieces that begin at their numbers times their own lengths": functools.partial(
        _in_longest_pieces, own=True
    ),
    "of shards, or of zigzag pieces, that are all as long as the longest": lambda pairs, x: (
        _in_longest_shards if pairs.case.sharding == "contiguous" else _in_longest_pieces
    )(pairs, x),
    "that are not before that of the first key": lambda pairs, x: np.maximum(x.p, -pairs.problem.diagonal),
    "of the rows at the same places in the early zigzag piece": _of_one_piece(early=True),
    "of the rows at the same places in the late zigzag piece": _of_one_piece(early=False),
    "of late zigzag pieces counted back in length // (2 ranks) rows": _in_pieces(early=False),
    **{
        f"as if the members of teams {grid.text} lay apart instead of side by side": (
            functools.partial(_of_transposed, grid)
        )
        for grid in USUAL
    },
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


def own_keys(pairs: Pairs) -> Ints:
    """Return how many keys the rank of each pair holds."""
    return np.array([len(held) for held in pairs.keys.shards])[pairs.rank]


HELD: dict[str, Callable[[Pairs], Ints]] = {
    "of a rank and of the block": lambda pairs: pairs.keys.count,
    "of a rank": own_keys,
}
"""How many keys decide how cross lengths are aligned, beside the queries of the rank."""


def aligned_by_head(pairs: Pairs) -> Counts | None:
    """Counts if cross lengths are aligned by the numbers of the rank that has the head, of heads dealt in runs."""
    if pairs.case.replicated:
        return None
    found, plain = pairs.true.copy(), (pairs.queries.p, pairs.keys.p)
    sides = zip(pairs.queries.shards, pairs.keys.shards, strict=True)
    for heads, (queries, keys) in zip(np.array_split(np.arange(pairs.problem.heads), pairs.size), sides, strict=True):
        moved = plain[0] - pairs.problem.diagonal + len(keys) - len(queries), plain[1]
        m = pairs.counts(lambda name, moved=moved: moved if name in ("causal", "window") else plain)  # type: ignore[misc]
        found[:, heads] = m[:, heads]
    return found


def team_taken_for_rank(grid: Grid, pairs: Pairs) -> Counts | None:
    """Counts if a later team's keys are hidden only where its number exceeds the rank, which has a run of heads."""
    teams, p = grid.teams(pairs.case), pairs.problem
    if not p.causal or len(teams) in (1, pairs.size) or pairs.case.replicated:
        return None
    found, plain = pairs.true.copy(), (pairs.queries.p, pairs.keys.p)
    whole = pairs.counts(lambda name: None if name == "causal" else plain)
    members = len(teams[0])
    mine, theirs = pairs.rank // members, pairs.owner // members
    for member, heads in enumerate(np.array_split(np.arange(p.heads), members)):
        taken = (theirs > mine) & (theirs <= mine * members + member)
        found[:, heads] = np.where(taken, whole[:, heads], found[:, heads])
    return found


def by_own_length(pairs: Pairs) -> Ints:
    """Positions of keys counted from the owner times the number of keys of the rank in hand."""
    return pairs.owner * own_keys(pairs) + pairs.keys.place


def less_hops(pairs: Pairs) -> Ints:
    """Positions of the rank's own keys, less as many as it holds for each hop: true of contiguous shards alone."""
    return (pairs.keys.at(pairs.rank, pairs.keys.place) - pairs.hop * own_keys(pairs)) % max(1, pairs.keys.total)


def of_full_pages(pairs: Pairs) -> Ints:
    """Positions of keys as if every page of a rank's list were full."""
    table, x = pairs.case.page_table, pairs.keys
    if table is None:
        return x.p
    size = table.page_size
    listed = [held or dict.fromkeys(shard // size) for held, shard in zip(table.pages, x.shards, strict=True)]
    found = x.p.copy()
    for rank, pages in enumerate(listed):
        full = np.array([page * size + row for page in pages for row in range(size)], dtype=np.int64)
        found[0, x.shards[rank]] = full[: len(x.shards[rank])]
    return found


def aligned(held: Callable[[Pairs], Ints], pairs: Pairs) -> Ints:
    """Positions of queries, aligned by numbers of keys and queries that are not all."""
    return pairs.queries.p - pairs.problem.diagonal + held(pairs) - pairs.queries.count


def _in_whole_shards(pairs: Pairs, *, up: bool) -> int:
    keys, queries = (-(-x.total // pairs.size) if up else x.total // pairs.size for x in (pairs.keys, pairs.queries))
    return pairs.size * (keys - queries)


ALIGNED: dict[str, Callable[[Pairs], Ints | int]] = {
    "max(keys - queries, 0)": lambda pairs: max(pairs.problem.diagonal, 0),
    "min(keys - queries, 0)": lambda pairs: min(pairs.problem.diagonal, 0),
    "the longest key length - queries": lambda pairs: (
        max(pairs.problem.key_lengths or (pairs.problem.nk,)) - pairs.problem.nq
    ),
    "|keys - queries|": lambda pairs: abs(pairs.problem.diagonal),
    "the difference of both lengths, padded to a multiple of the ranks,": functools.partial(_in_whole_shards, up=True),
    "ranks * (keys // ranks - queries // ranks)": functools.partial(_in_whole_shards, up=False),
    "keys - ranks * queries of the rank": lambda pairs: pairs.keys.total - pairs.size * pairs.queries.count,
    "ranks * keys of the rank - queries": lambda pairs: pairs.size * own_keys(pairs) - pairs.queries.total,
}
"""What may stand for the difference of cross lengths."""


def shifted(by: Callable[[Pairs], Ints | int], pairs: Pairs) -> Ints:
    """Positions of queries that are aligned by something else than the difference of lengths."""
    return pairs.queries.p + by(pairs) - pairs.problem.diagonal


def queries_at(at: Callable[[Pairs, OneSide], Rows], pairs: Pairs) -> Rows:
    """Return what is so of queries."""
    return at(pairs, pairs.queries)


def keys_at(at: Callable[[Pairs, OneSide], Rows], pairs: Pairs) -> Rows:
    """Return what is so of keys."""
    return at(pairs, pairs.keys)


def late(x: OneSide, pairs: Pairs) -> Mask:
    """Whether a row is in the later piece of a zigzag shard, or in the later half of another."""
    if pairs.case.sharding != "zigzag":
        return x.place >= x.count - x.count // 2
    early = np.array([len(piece) for piece in pieces(x.total, 2 * pairs.size)])
    return x.place >= early[x.rank]


def level_with_the_last(pairs: Pairs, *, entered: bool = False) -> Ints:
    """Positions of queries if a rank's last one in a document, or in all, is level with the last key there.

    With `entered`, only in documents that began on an earlier rank.
    """
    p, i = pairs.problem, pairs.queries.p[:, 0]
    offsets = np.array(p.documents or (0, p.nk))
    number = bounds(offsets, i)
    found = i.copy()
    for rank in range(len(pairs.queries.shards)):
        for document in range(len(offsets) - 1):
            here = (pairs.queries.rank[:, 0] == rank) & (number == document)
            if here.any() and not (entered and offsets[document] >= pairs.queries.shards[rank].min()):
                found[here] += offsets[document + 1] - 1 - p.diagonal - i[here].max()
    return found[:, None]
