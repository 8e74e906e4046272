"""Masks that are made otherwise are told by what is read of them: tiles, slices, positions, heads."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mechanisms import case_of, seen, where

from ringref.problem import Dilation
from ringref.sharding import pieces
from ringverify.diagnosis import reading
from ringverify.diagnosis.pairs import pairs_of
from ringverify.diagnosis.parts import PARTS
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.ring import EVERYTHING, STEPS, multiplicity, ring_of
from ringverify.implementation import Capabilities, Implementation


def ends(rows, tile):
    """The last of each tile of rows, for each of them."""
    return rows[torch.minimum(torch.arange(len(rows)) // tile * tile + tile, torch.tensor(len(rows))) - 1]


def tile_skipped(here, owner, i, j):
    """Tiles of 4 queries and 2 keys, of which the last ones are compared."""
    return ends(j[0], 2)[None] >= ends(i[:, 0], 4)[:, None] - here.problem.window[0]


def first_key_lost(here, owner, i, j):
    """Of every document."""
    return ~torch.isin(j, torch.tensor(here.problem.documents or (0,)))


def slice_ends_early(here, owner, i, j):
    """The last query that a rank has of a document loses the last key that it attends."""
    cuts = torch.tensor(here.problem.documents or (0, here.problem.nk))
    of = torch.searchsorted(cuts, i[:, 0].contiguous(), right=True)
    last = torch.stack([i[of == number].max() for number in of])
    return j < last[:, None]


def early_piece_lost(here, owner, i, j):
    """Of the rank's own keys, where its piece of queries looks at the late piece too."""
    cut = sum(map(len, pieces(here.problem.nk, 2 * here.size)[: here.size]))
    looks = (i >= cut) if here.problem.causal else torch.tensor(True)
    return ~(looks & (j < cut)) if owner == here.rank else torch.tensor(True)


def alone_ignored(here, owner, i, j):
    """A document that is alone, in blocks that a causal mask lets through whole."""
    begin, *_, end = here.problem.documents
    inside = (i >= begin) & (i < end) & (j >= begin) & (j < end)
    let_through = j <= i if here.problem.causal else torch.ones(len(i), j.size(1), dtype=torch.bool)
    return let_through if let_through.all() else let_through & inside


def lengths_in_documents(here, owner, i, j):
    """Key lengths are compared with the place of a key in its document."""
    cuts = torch.tensor(here.problem.documents)
    of_i, of_j = (torch.searchsorted(cuts, x.contiguous(), right=True) - 1 for x in (i, j))
    return (of_i == of_j) & (j - cuts[of_j] < torch.tensor(here.problem.key_lengths)[:, None, None, None])


def without_short_segment(here, owner, i, j):
    """The last segment is left out if it is shorter than the rate."""
    ((w, r),), n = here.problem.dilation.branches, here.problem.nk
    offset = (torch.arange(here.problem.heads) % r)[:, None, None]
    covered = (i // w == j // w) & (i % w % r == offset) & (j % w % r == offset)
    return covered & ~((n % w < r) & (i >= n - n % w))


def own_where_segments_divide(here, owner, i, j):
    """Segments whose length divides the longest shard are taken to lie on one rank each."""
    longest = -(-here.problem.nk // here.size)
    return sum((i // w == j // w) & (longest % w != 0 or owner == here.rank) for w, _ in here.problem.dilation.branches)


def outside_exchanged_window(here, owner, i, j):
    """Whole blocks."""
    right, left = here.problem.window
    return (j.max() >= i.min() - left) & (j.min() <= i.max() + right)


def cut_as_on_the_other_side(here, owner, i, j):
    """Each block is as long as that of the rank from which a ring the other way round would have brought it."""
    return torch.arange(j.size(1))[None] < len(here.shards[(2 * here.rank - owner) % here.size])


def in_whole_steps(here, owner, i, j):
    """The last positions of a segment, which are no whole step, are left out."""
    ((w, r),), n = here.problem.dilation.branches, here.problem.nk

    def inside(x):
        return x % w < (n - x // w * w).clamp(max=w) // r * r

    return inside(i) & inside(j)


def in_segments_of_equal_shards(here, owner, i, j):
    """Queries in segments before that in which their rank would begin."""
    ((w, _),) = here.problem.dilation.branches
    return i // w >= here.rank * -(-here.problem.nk // here.size) // w


def in_segments_of_short_shards(here, owner, i, j):
    """Queries in the segments in which their rank would lie, were all shards as long as the shortest."""
    ((w, _),) = here.problem.dilation.branches
    share = here.problem.nk // here.size
    return (i // w >= here.rank * share // w) & (i // w <= ((here.rank + 1) * share - 1) // w)


def given_of_last_segment(here, owner, i, j):
    """Of other ranks' keys, those of the segment of the last row."""
    ((w, _),) = here.problem.dilation.branches
    return (j // w == i.max() // w) | torch.tensor(owner == here.rank)


def from_later_piece(here, owner, i, j):
    """Queries meet later ranks' keys from as many rows on as the early piece of those has positions."""
    early = len(pieces(here.problem.nk, 2 * here.size)[owner])
    return torch.arange(len(i))[:, None] >= early if owner > here.rank else j <= i


def skipped_by(*, last_query=None, last_key=None):
    """Blocks whose ends are compared, one of which is miscounted from the first row of its shard."""

    def kept(here, owner, i, j):
        if not i.numel() or not j.numel():
            return True
        query = int(i.max()) if last_query is None else int(i.min()) + last_query(here) - 1
        key = int(j.max()) if last_key is None else int(j.min()) + last_key(here) - 1
        left, right = here.problem.window
        return (right is None or int(j.min()) <= query + right) and (left is None or key >= int(i.min()) - left)

    return where(lambda *at: torch.tensor(kept(*at)))


def up_to_own_piece(here, owner, i, j):
    """Of earlier ranks, as many keys as the rank's own early piece has positions."""
    early = len(pieces(here.problem.nk, 2 * here.size)[here.rank])
    return (torch.arange(j.size(1))[None] < early) | torch.tensor(owner >= here.rank)


def up_to_first_document(here, owner, i, j):
    """Nothing after the document of the rank's first query."""
    cuts = torch.tensor(here.problem.documents)
    return j < min([int(cut) for cut in cuts if cut > i.min()], default=int(cuts[-1]))


def from_last_document(here, owner, i, j):
    """Nothing before the document of the rank's last query."""
    cuts = torch.tensor(here.problem.documents)
    return j >= max([int(cut) for cut in cuts if cut <= i.max()], default=int(cuts[0]))


def as_another_member(here, owner, i, j):
    """Blocks of the n-th team before are taken for those of a member n before, in teams of two."""
    away = (here.rank // 2 - owner // 2) % (here.size // 2)
    j = here.shards[owner // 2 * 2 + (owner - away) % 2][None]
    return (j <= i) & (j >= i - here.problem.window[0])


def by_pattern(counts):
    """Steps with these counts of a rank and an owner, `(S, T)` or more."""

    def pattern(steps, here, hop, owner):
        m = counts(here, owner, here.call.positions[:, None], here.shards[owner][None])
        p = here.problem
        return torch.as_tensor(m).expand(p.batch, p.heads, len(here.call.positions), len(here.shards[owner])).long()

    return replace(STEPS, pattern=pattern)


def cut_by_the_window(here, owner, i, j):
    """Keys from the first in the window of the rank's first query on are numbered from 0."""
    left, first, last = here.problem.window[0], here.call.positions[0], here.call.positions[-1]
    cut = (first - left).clamp(min=0)
    return (j >= cut) & (j <= last) & (j - cut <= i) & (j - cut >= i - left)


def half(here, owner):
    """Which of a rank's queries and of another's keys a zigzag ring computes together under a causal mask."""
    cut, i, j = here.problem.causal * here.problem.nk // 2, here.shards[here.rank], here.shards[owner]
    return i >= cut * (owner > here.rank), j < here.problem.nk - cut * (owner < here.rank)


def up_to_the_farthest_before(here, owner, i, j):
    """Hops end when the farthest rank before has come that a rank attends, by the window."""
    reached = [
        rank - other
        for rank in range(here.size)
        for other in range(rank)
        if here.shards[other][-1] >= here.shards[rank][0] - here.problem.window[0]
    ]
    return torch.tensor((here.rank - owner) % here.size <= max(reached, default=0))


def aligned_by_own_rows(here, owner, i, j):
    """As if all ranks had as many queries."""
    return j <= i + here.problem.nk - here.size * len(i)


def documents_that_meet(here, owner, i, j):
    """A hop is skipped if the last key's document is no later than the first query's, and not the rank's own."""
    rows, columns = half(here, owner)
    ends = torch.stack([i[rows].min(), j[:, columns].max()])
    first, last = torch.searchsorted(torch.tensor(here.problem.documents), ends, right=True)
    return torch.tensor(owner == here.rank or bool(last > first))


def masks_by_shape(computed):
    """Each half of a block that is computed has the mask of the first with as many queries and keys."""

    def pattern(steps, here, hop, owner):
        def block(hop, owner):
            rows, columns = half(here, owner)
            m = multiplicity(steps, here, hop, owner)[..., rows, :][..., columns]
            return m, computed(here, here.shards[here.rank][rows], here.shards[owner][columns], m)

        found, (mine, there) = multiplicity(steps, here, hop, owner), block(hop, owner)
        rows, columns = half(here, owner)
        for earlier in range(hop if there else 0):
            m, kept = block(earlier, (here.rank - earlier) % here.size)
            if kept and m.shape == mine.shape:
                found[..., rows.nonzero(), columns.nonzero()[:, 0]] = m
                break
        return found

    return pattern


def documents_overlap(here, i, j, m):
    """From first to last."""
    cuts = torch.tensor(here.problem.documents)
    mine, theirs = (torch.searchsorted(cuts, x.contiguous(), right=True) for x in (i, j))
    return bool(mine[0] <= theirs[-1] and theirs[0] <= mine[-1])


def of_rows(here, j):
    """The rows of keys in striped shards."""
    return j // here.size


def last_joined(here, owner, i, j):
    """Segments and places in them, of which the last ones are in as many segments as there are whole ones."""
    ((w, r),), n = here.problem.dilation.branches, here.problem.nk
    of_i, of_j = (torch.clamp(x // w, max=n // w - 1) for x in (i, j))
    offset = (torch.arange(here.problem.heads) % r)[:, None, None]
    return (of_i == of_j) & ((i - of_i * w) % r == offset) & ((j - of_j * w) % r == offset)


def before_an_absent_one(here, owner, i, j):
    """Queries count up to the first document of which their rank has none."""
    cuts = here.problem.documents
    absent = [end for begin, end in itertools.pairwise(cuts) if not ((i >= begin) & (i < end)).any()]
    return i < min(absent, default=cuts[-1])


def after_an_empty_one(here, owner, i, j):
    """Queries count up to the first empty document that begins inside their zigzag piece."""
    cuts, found = here.problem.documents, []
    empty = [begin for begin, end in itertools.pairwise(cuts) if begin == end]
    for row in i[:, 0].tolist():
        (piece,) = [piece for piece in pieces(here.problem.nq, 2 * here.size) if row in piece]
        found.append(not any(piece[0] < begin <= row for begin in empty))
    return torch.tensor(found)[:, None]


def of_nearest_documents(here, owner, i, j):
    """What lies outside all documents is of the first one or the last."""
    cuts = torch.tensor(here.problem.documents[1:-1])
    of_i, of_j = (torch.searchsorted(cuts, x.contiguous(), right=True) for x in (i, j))
    return of_i == of_j


def documents_in_turn(here, owner, i, j):
    """The documents of a rank's queries are taken for the first ones."""
    cuts = torch.tensor(here.problem.documents)
    of_i, of_j = (torch.searchsorted(cuts, x.contiguous(), right=True) - 1 for x in (i, j))
    return torch.unique(of_i, return_inverse=True)[1] == of_j


def in_pieces_of_their_own(here, owner, i, j):
    """A piece begins at its number times its own length."""
    every = pieces(here.problem.nk, 2 * here.size)
    of = {position: number * len(piece) + place
          for number, piece in enumerate(every) for place, position in enumerate(piece)}  # fmt: skip
    keys, queries = (torch.tensor([of[position] for position in x.ravel().tolist()]) for x in (j, i))
    return keys <= queries[:, None]


def as_many_segments_as_fit(from_last):
    """Of segments of 4, as many as the rows of a rank fill from its last one, or its first, of other ranks' keys."""

    def keeps(here, owner, i, j):
        filled = (len(i) - 1) // 4
        beyond = j // 4 < i[-1] // 4 - filled if from_last else j // 4 > i[0] // 4 + filled
        return ~beyond if owner != here.rank else torch.tensor(True)

    return keeps


def past_the_longer_side(here, owner, i, j):
    """Blocks come hop by hop, up to as many as the longer side of the window reaches in the longest shards."""
    zigzag = here.call.sharding == "zigzag"
    longest = (1 + zigzag) * len(pieces(here.problem.nk, here.size * (1 + zigzag))[0])
    return torch.tensor((here.rank - owner) % here.size <= -(-max(here.problem.window) // longest))


def ends_in_both_directions(here, owner, i, j):
    """After as many hops as the longest shard of 4 goes into each side of the window, rounded up."""
    left, right = (-(-extent // 4) for extent in here.problem.window)
    hop, back = (here.rank - owner) % here.size, (owner - here.rank) % here.size
    return torch.tensor(hop <= left or back <= right or left + right >= here.size - 1)


def in_longest_pieces(here, owner, i, j):
    """Keys of a piece lie where they would if all pieces before it were as long as the longest."""
    n, zigzag = here.problem.nk, here.call.sharding == "zigzag"
    every = pieces(n, 2 * here.size if zigzag else here.size)
    begins = {piece[0]: number * len(every[0]) for number, piece in enumerate(every) if len(piece)}
    of = {position: begins[piece[0]] + place for piece in every for place, position in enumerate(piece)}
    return torch.tensor([[of[position] for position in j[0].tolist()]]) <= i


def of_team_before(here, owner, i, j):
    """In teams of two, the second member's block is taken by the first one for that of the team before."""
    taken = (owner - 2) % here.size if owner % 2 > here.rank % 2 else owner
    return here.shards[taken][None] <= i


def exchanged(here, owner, i, j):
    """Padding is that of the rank's own keys, in the blocks of others."""
    return here.shards[here.rank][None] < torch.tensor(here.problem.key_lengths)[:, None, None, None]


def in_joined_order(here, owner, i, j):
    """Key lengths are compared with the number of a row among all."""
    order = torch.cat([torch.as_tensor(held) for held in here.shards])
    return torch.argsort(order)[j[0]] < torch.tensor(here.problem.key_lengths)[:, None, None, None]


def remainder_last(here, owner, i, j):
    """Causal by numbers of rows, where the last row of each longer shard stands behind all others."""
    each = here.problem.nk // here.size

    def number(rank):
        place = torch.arange(len(here.shards[rank]))
        return torch.where(place < each, rank * each + place, here.size * each + rank)

    return number(owner)[None] <= number(here.rank)[:, None]


def placed_by_the_longest(here, owner, i, j):
    """Positions are counted from the rank times the longest shard; keys past the end are in no sequence."""
    longest = -(-here.problem.nk // here.size)
    keys, queries = (rank * longest + torch.arange(len(here.shards[rank])) for rank in (owner, here.rank))
    return (keys[None] <= queries[:, None]) & (keys < here.problem.nk)[None]


def transposed(here, owner, i, j):
    """Two teams of two ranks, whose members are taken to lie apart."""
    other = (0, 2, 1, 3)
    return here.shards[other[owner]][None] <= here.shards[other[here.rank]][:, None]


def aligned_by_head(here, owner, i, j):
    """By how many keys and queries that rank has which an exchange gives the head."""
    p, size = here.problem, here.size
    count = [n // size + (rank < n % size) for n in (p.nk, p.nq) for rank in range(size)]
    runs = np.array_split(np.arange(p.heads), size)
    by = torch.tensor([count[rank] - count[size + rank] for rank, run in enumerate(runs) for _ in run])
    return j <= i + by[:, None, None]


def in_whole_shards(here, owner, i, j):
    """Cross lengths are aligned by lengths that are padded to a multiple of the ranks."""
    p, size = here.problem, here.size
    return j <= i + size * (-(-p.nk // size) - -(-p.nq // size))


def folded(here, owner, i, j):
    """Row b * heads + h of batch and heads has the key length of entry row mod batch, of heads dealt to two ranks."""
    p, each = here.problem, -(-here.problem.heads // here.size)
    lengths = [[p.key_lengths[(b * each + h % each) % p.batch] for h in range(p.heads)] for b in range(p.batch)]
    return j < torch.tensor(lengths)[..., None, None]


def rows_of_pieces(here, rank):
    """The positions that each row is taken for, of a zigzag shard whose late piece begins at half of its rows."""
    cut, held = len(pieces(here.problem.nk, 2 * here.size)[rank]), here.shards[rank].tolist()
    found = [[] for _ in held]
    for row, position in [*enumerate(held[:cut]), *enumerate(held[cut:], len(held) // 2)]:
        found[row].append(position)
    return found


def overlapping_queries(here, owner, i, j):
    """A row is taken for the last of the positions that it has."""
    rows = rows_of_pieces(here, here.rank)
    return [[j <= row[-1] if row else False for j in j[0].tolist()] for row in rows]


def overlapping(here, owner, i, j):
    """Rows are counted once for every pair of positions that they are taken for."""
    rows, columns = rows_of_pieces(here, here.rank), rows_of_pieces(here, owner)
    return [[sum(b <= a for a in row for b in column) for column in columns] for row in rows]


def covered_by_position(here, owner, i, j):
    """Queries of a branch with segments of 5 and a rate of 2; keys by their place in the segment."""
    return (i // 5 == j // 5) & (i % 2 == 0) & (j % 5 % 2 == 0)


def last_segment_joined(here, owner, i, j):
    """Segments of 5 and a rate of 2, of which the last, if it is shorter, is one with that before it."""
    last = here.problem.nk // 5 - 1
    one_segment = (i // 5).clamp(max=last) == (j // 5).clamp(max=last)
    return one_segment & (i % 5 % 2 == 0) & (j % 5 % 2 == 0)


def covered_from_the_shard(here, owner, i, j):
    """Queries of a branch with segments of 5 and a rate of 2, as if segments began where the shard does."""
    return (i // 5 == j // 5) & ((i - i[0]) % 5 % 2 == 0) & (j % 5 % 2 == 0)


def spanning_lost(here, owner, i, j):
    """Queries of a document that begins before the shard and ends after it attend nothing."""
    cuts = torch.tensor(here.problem.documents or (0, here.problem.nk))
    number = torch.searchsorted(cuts, i.contiguous(), right=True)
    return ~((cuts[number - 1] < i[0]) & (cuts[number] - 1 > i[-1]))


BLOCKS_OF_LAST = {3: 0, 10: 1}
"""How many blocks before its own the last of 9 queries needs, by the window's extent to the left."""


def halo_too_short(here, owner, i, j):
    """Blocks that the last query of a shard does not need are not fetched."""
    return torch.tensor(here.rank - owner <= BLOCKS_OF_LAST[here.problem.window[0]])


def a_hop_too_few(here, owner, i, j):
    """Some first query needs a block of which the last key is as far away as the window reaches: it counts as none."""
    left, held = here.problem.window[0], here.shards
    pairs = [(r, o) for r in range(here.size) for o in range(r) if len(held[r]) and len(held[o])]
    hops = max((r - o for r, o in pairs if held[r][0] - held[o][-1] < left), default=0)
    return torch.tensor(here.rank - owner <= hops)


def halo_reversed(here, owner, i, j):
    """The last of three ranks takes each of the two blocks before its own for the other."""
    j = j + {0: 9, 1: -9}[owner] if here.rank == 2 and owner < 2 else j
    return (j <= i) & (j >= i - here.problem.window[0])


def halo_misnumbered(here, owner, i, j):
    """Of one block before the own, the first key is taken for the first in a window of 3."""
    return (j + 6 * (here.rank > 0) <= i) & (j + 6 * (here.rank > 0) >= i - 3)


def tile_skipped_by_either(here, owner, i, j):
    """Tiles of 2 queries and 2 keys of a shard, by their first ones."""
    p, first, begin = here.problem, here.call.positions[torch.arange(len(i)) // 2 * 2], here.shards[owner]
    begin = begin[torch.arange(len(begin)) // 2 * 2]
    return begin[None] <= first[:, None] + (0 if p.causal else p.window[1])


def tile_full_by_its_first(here, owner, i, j):
    """Tiles of 2 queries of a shard and 2 keys of all, under a causal mask and a window of 2."""
    first, begin = here.call.positions[torch.arange(len(i)) // 2 * 2][:, None], j // 2 * 2
    full = begin + 1 <= torch.minimum(first, torch.tensor(here.problem.nk - 1))
    full = full & (begin >= first - 2)
    return full | ((j <= i) & (j >= i - 2))


def block_level_skipped(here, owner, i, j):
    """Of which the first key is the last that the rank's last query may attend."""
    right = 0 if here.problem.causal else here.problem.window[1]
    return here.shards[owner][0] != here.call.positions[-1] + right


def after_an_absent_document(here, owner, i, j):
    """Only rank 0 has any of the first document, and none has an empty one."""
    return torch.tensor(here.rank == owner == 0)


def lengths_in_pairs(here, owner, i, j):
    """Positions of keys counted from the first of two neighbours on."""
    return j - here.shards[owner // 2 * 2][0] < torch.tensor(here.problem.key_lengths)[:, None, None, None]


def window_between_teams(here, owner, i, j):
    """Under a window of 3, as if every team of two began after shards as long as the longest."""
    first = [rank - rank % (1 + (here.size % 2 == 0)) for rank in (here.rank, owner)]
    longest = max(map(len, here.shards))
    i, j = (x - here.shards[rank][0] + rank * longest for x, rank in zip((i, j), first, strict=True))
    return (j <= i) & (j >= i - 3)


def window_in_steps(here, owner, i, j):
    """Of a dilation with segments of 6 and a rate of 2, and a window of 2."""
    ahead = (j - i) // 2
    return (i // 6 == j // 6) & (i % 6 % 2 == 0) & (j % 6 % 2 == 0) & (ahead >= -2) & (ahead <= 0)


def by_kept_rows(here, owner, i, j):
    """Of a dilation with segments of 6 and a rate of 2, whose kept rows are numbered on each rank."""
    first, second = (x.flatten() % 6 % 2 == 0 for x in (i, j))
    numbers = first.cumsum(0)[:, None] >= second.cumsum(0)[None]
    return first[:, None] & second[None] & (i // 6 == j // 6) & numbers


def last_of_one_rate(here, owner, i, j):
    """Of one head, whose offset is 0, and rates that divide the segments."""
    segments, found = here.problem.dilation.branches, 0
    for number, (w, r) in enumerate(segments):
        again = any(r == rate and bool(place) for place, (_, rate) in enumerate(segments) if place > number)
        found += ((i // w == j // w) & (i % r == 0) & (j % r == 0)).long() * (not again)
    return found


def not_told_apart(here, owner, i, j):
    """Segments of 4, told apart only where the rank's first and last query are as far from each other."""
    if here.call.positions[-1] - here.call.positions[0] >= 4:
        return i // 4 == j // 4
    return (j // 4 >= here.call.positions[0] // 4) & (j // 4 <= here.call.positions[-1] // 4)


def until_no_segment(spans):
    """Branches of (2, 1) and (12, 1), the second of which is left out with blocks of which the first has no segment."""

    def counts(here, owner, i, j):
        short = i // 2 == j // 2
        among = (i.min() // 2 <= j.max() // 2) & (j.min() // 2 <= i.max() // 2) if spans else short.any()
        return short.long() + among.long()

    return counts


def slices_exchanged(here, owner, i, j):
    """A triangle of the slices that two ranks have of a document, whose diagonal has the wrong sign."""
    cuts = torch.tensor(here.problem.documents or (0, here.problem.nk))
    documents = [torch.searchsorted(cuts, x.contiguous(), right=True) for x in (i, j)]
    begins = [
        torch.maximum(cuts[of - 1], here.shards[rank][0])
        for of, rank in zip(documents, (here.rank, owner), strict=True)
    ]
    ahead = begins[1] - begins[0]
    return (documents[0] == documents[1]) & (j - begins[1] <= i - begins[0] + ahead)


def piece_skipped(here, owner, i, j):
    """Of a zigzag shard, if its last key is just within the window of the first query of another piece."""
    every = pieces(here.problem.nk, 2 * here.size)
    of_query, of_key = ([next(piece for piece in every if p in piece) for p in x.flatten().tolist()] for x in (i, j))
    left = here.problem.window[0]
    return torch.tensor([[int(b[-1] != a[0] - left) for b in of_key] for a in of_query])


def tile_unmasked(here, owner, i, j):
    """Tiles of 2 queries of a shard and 3 keys of all, by the last ones of each."""
    cut = torch.minimum(j // 3 * 3 + 2, torch.tensor(here.problem.nk - 1))
    return (j <= i) | (cut <= ends(i[:, 0], 2)[:, None])


def tile_skipped_early(here, owner, i, j):
    """Tiles of 2 queries of a shard and 3 keys of all, if their first key comes after their first query."""
    first = here.call.positions[torch.arange(len(i)) // 2 * 2]
    return (j <= i) & (j // 3 * 3 <= first[:, None])


def team_taken_for_rank(here, owner, i, j):
    """Two teams of two ranks, each of which has half of the heads: rank 1 hides nothing of the later team."""
    whole = torch.tensor([here.rank // 2 < owner // 2 <= here.rank // 2 * 2 + member for member in (0, 1)])
    return (j <= i) | whole.repeat_interleave(here.problem.heads // 2)[:, None, None]


TWO, THREE = ({"size": size, "query_length": 9 * size} for size in (2, 3))
OF_TWO_BRANCHES = [
    case_of(dilation=Dilation(((2, 1), (12, 1)), heads="shared"), size=size, sharding=sharding)
    for size, sharding in ((3, "contiguous"), (4, "striped"), (2, "contiguous"))
]


def from_the_first_cut_out(here, owner, i, j):
    """Whether a key is so far from the first in the window of the piece's first query as a query is from this one."""
    starts = torch.tensor([piece[0] for piece in pieces(here.problem.nq, 2 * here.size)])
    first = starts[torch.searchsorted(starts, i, right=True) - 1]
    return j >= (first - here.problem.window[0]).clamp(min=0) + i - first


TOLD = {
    "keys are left out where the key's position < the left end of the window of the shard's first query, counted "
    "from 0": (
        where(lambda here, owner, i, j: j >= here.call.positions[0] - here.problem.window[0]),
        [
            case_of(query_length=n, key_length=n - 4, window=(left, right), size=size)
            for n, left, right, size in ((12, 1, 2, 3), (14, 2, 5, 2), (16, 0, 3, 4))
        ],
    ),
    "keys are left out where the key's position ≥ the last query of the query's shard, counted from 0 + 1": (
        where(lambda here, owner, i, j: j <= here.call.positions[-1]),
        [
            case_of(causal=True, query_length=n, key_length=n + more, size=size)
            for n, more, size in ((6, 4, 2), (9, 5, 3), (8, 3, 2))
        ],
    ),
    "what queries of a rank may attend is cut from the first key in the window of the first of them on, and masked as "
    "if it began where the sequence, or their document, does": (
        by_pattern(cut_by_the_window),
        [case_of(window=(left, 0), **shape) for left in (3, 4) for shape in (TWO, THREE)],
    ),
    "the left end of the window moves on from the first key that is cut out for queries of a rank, as if none were "
    "missing there before the sequence, or their document, begins": (
        where(from_the_first_cut_out),
        [
            case_of(window=(left, 0), query_length=n, sharding="zigzag", size=size)
            for n, left, size in ((12, 2, 1), (13, 4, 2), (20, 6, 2))
        ],
    ),
    "the first row in the window of a striped block that a query attends is rounded down instead of up": (
        by_pattern(
            lambda here, owner, i, j: (
                (j <= i) & (of_rows(here, j) >= (i - here.problem.window[0] - owner) // here.size)
            )
        ),
        [
            case_of(causal=True, sharding="striped", window=(left, None), size=size, query_length=13)
            for size, left in ((2, 2), (3, 3), (3, 4))
        ],
    ),
    "the last row in the window of a striped block that a query attends is rounded up instead of down": (
        by_pattern(
            lambda here, owner, i, j: of_rows(here, j) <= -((owner - i - here.problem.window[1]) // here.size)
        ),
        [
            case_of(sharding="striped", window=(None, right), size=size, query_length=13)
            for size, right in ((2, 2), (3, 3), (3, 4))
        ],
    ),
    "under a causal mask, the last row of a striped block that a query attends is rounded up instead of down": (
        by_pattern(lambda here, owner, i, j: of_rows(here, j) <= -((owner - i) // here.size)),
        [case_of(causal=True, sharding="striped", size=size, query_length=13) for size in (2, 3, 4)],
    ),
    "where causal, the last row of a striped block that a query attends is rounded down by ranks and by the difference "
    "of lengths apart, which may be one too few": (
        by_pattern(
            lambda here, owner, i, j: (
                of_rows(here, j) <= (i - owner) // here.size + (here.problem.nk - here.problem.nq) // here.size
            )
        ),
        [
            case_of(causal=True, sharding="striped", size=size, query_length=12, key_length=12 + more)
            for size, more in ((2, 1), (3, 2), (3, 4))
        ],
    ),
    "a last segment of a dilation that is shorter than the others is joined to the one before it, and places in it are "
    "counted on": (
        by_pattern(last_joined),
        [
            case_of(query_length=n, dilation=Dilation(((w, r),), "shared"))
            for n, w, r in ((14, 5, 2), (20, 7, 2), (16, 5, 3))
        ],
    ),
    "what a rank has of documents after the first one of which it has nothing is left out, of queries": (
        where(before_an_absent_one),
        [case_of(causal=True, documents=cuts, **TWO) for cuts in ((0, 5, 11, 18), (0, 4, 4, 18))]
        + [case_of(causal=True, documents=(0, 4, 13, 27), **THREE)],
    ),
    "the mask is made with keys at positions of shards, or of zigzag pieces, that are all as long as the longest": (
        by_pattern(in_longest_pieces),
        [
            case_of(causal=True, sharding=sharding, size=size, query_length=n)
            for sharding, size, n in (("contiguous", 3, 10), ("contiguous", 4, 13), ("zigzag", 2, 9), ("zigzag", 2, 5))
        ],
    ),
    "the mask is made with queries at positions that are not before that of the first key": (
        by_pattern(lambda here, owner, i, j: j <= (i + here.problem.nk - here.problem.nq).clamp(min=0)),
        [
            case_of(causal=True, size=size, query_length=nq, key_length=nk)
            for size, nq, nk in ((2, 8, 5), (3, 12, 7), (1, 6, 2))
        ],
    ),
    "whose block it is, in a ring of teams, is told by subtracting hops from the rank, as in one ring: a later "
    "member's is taken for that of the same member of the team before, of its length and at its positions, blocks "
    "being those of teams of two ranks where their number is even": (
        by_pattern(of_team_before),
        [case_of(causal=True, size=size, query_length=3 * size) for size in (4, 6)],
    ),
    "a tile of 4 queries and 2 keys is skipped if its last key lies before the window of its last query": (
        where(tile_skipped),
        [case_of(window=(side, None), **shape) for side in (2, 3) for shape in (TWO, THREE)],
    ),
    "the first position of each document is taken for one of the document before, of the first for one of none, in the "
    "keys only, and a sequence without documents is one": (
        where(first_key_lost),
        [case_of(causal=True, documents=cuts, **TWO) for cuts in ((0, 5, 11, 18), None)]
        + [case_of(causal=True, documents=(2, 6, 20), **THREE)],
    ),
    "what a shard of queries has of a document attends no key at the end of the keys of its last query, which is taken "
    "for one past it": (
        where(slice_ends_early),
        [case_of(causal=True, documents=cuts, **TWO) for cuts in ((0, 5, 11, 18), None)]
        + [case_of(causal=True, documents=(0, 4, 13, 27), **THREE)],
    ),
    "key_lengths are compared with the rank and the owner of the block exchanged: queries at the places of the "
    "owner's": (
        by_pattern(exchanged),
        [case_of(batch=2, key_lengths=lengths, **shape) for shape in (TWO, THREE) for lengths in ((4, 13), (11, 7))],
    ),
    "key_lengths are compared with keys at positions that count rows where the shards of all ranks are "
    "joined, rank by rank": (
        by_pattern(in_joined_order),
        [case_of(batch=2, sharding="zigzag", size=size, query_length=8 * size, key_lengths=(5, 11)) for size in (2, 3)],
    ),
    "the mask is made with queries and keys at positions that count rows where length // ranks of each shard are "
    "joined, and what is left over comes last": (
        by_pattern(remainder_last),
        [case_of(causal=True, size=size, query_length=n) for size, n in ((2, 9), (3, 11), (4, 14))],
    ),
    "queries and keys are placed at positions counted from the rank times the longest shard, and keys past the end are "
    "in no sequence": (
        by_pattern(placed_by_the_longest),
        [case_of(causal=True, size=size, query_length=n) for size, n in ((3, 10), (4, 13), (4, 9))],
    ),
    "the mask is made with queries and keys at positions as if the members of teams of as many ranks as divide ranks "
    "and key heads lay apart instead of side by side": (
        by_pattern(transposed),
        [case_of(causal=True, size=4, query_length=n, heads=2) for n in (12, 16)],
    ),
    "cross lengths are aligned by the numbers of queries and keys of the rank that has the head instead of all, where "
    "an exchange deals heads in runs": (
        by_pattern(aligned_by_head),
        [
            case_of(causal=True, size=size, query_length=nq, key_length=nk, heads=heads)
            for size, nq, nk, heads in ((2, 7, 12, 3), (3, 7, 14, 5), (3, 8, 12, 4))
        ],
    ),
    "the causal mask is made with cross lengths aligned by the difference of both lengths, padded to a multiple of the "
    "ranks, instead of keys - queries": (
        by_pattern(in_whole_shards),
        [case_of(causal=True, size=size, query_length=nq, key_length=nk) for size, nq, nk in ((2, 5, 12), (3, 7, 14))],
    ),
    "the causal mask moves the slices apart that two ranks have of a document, or of all, with the wrong sign: as if "
    "that of the keys began where that of the queries does, and the other way round": (
        by_pattern(slices_exchanged),
        [case_of(causal=True, documents=cuts, **TWO) for cuts in ((0, 5, 18), (0, 12, 18), None)],
    ),
    "a block is skipped if its last key is the first in the window of the rank's first query, blocks being those of "
    "the two pieces of each zigzag shard": (
        where(piece_skipped),
        [case_of(sharding="zigzag", size=size, query_length=12, window=(left, 0)) for size, left in ((2, 1), (3, 1))],
    ),
    "a tile of 2 queries and 3 keys, cut from all keys in the order of positions, has no mask if its last query "
    "attends its last key": (
        by_pattern(tile_unmasked),
        [case_of(causal=True, sharding="striped", size=size, query_length=13) for size in (1, 2, 3)],
    ),
    "a tile of 2 queries and 3 keys, cut from all keys in the order of positions, is skipped if its first key lies "
    "after its first query, and there is a causal mask": (
        by_pattern(tile_skipped_early),
        [case_of(causal=True, sharding="striped", size=size, query_length=13) for size in (1, 2, 3)],
    ),
    "the number of the team that holds a block is compared with the rank instead of the number of its team: later ones "
    "up to it are attended whole, under a causal mask, teams being of as many ranks as divide ranks and key heads": (
        by_pattern(team_taken_for_rank),
        [case_of(causal=True, size=4, query_length=n, heads=2) for n in (8, 12)],
    ),
    "batch and heads are folded into rows, which are masked by the batch entry row mod batch, of the heads that a rank "
    "has after an exchange": (
        by_pattern(folded),
        [case_of(batch=b, size=2, heads=6, key_lengths=n) for b, n in ((2, (3, 10)), (4, (9, 2, 12, 5)))],
    ),
    "the late piece of a zigzag shard is taken to begin at half of its rows, of queries and keys: where the early one "
    "is longer, pieces overlap by a row and the last row is in none": (
        by_pattern(overlapping),
        [case_of(causal=True, sharding="zigzag", size=size, query_length=n) for size, n in ((2, 10), (3, 9))],
    ),
    "the late piece of a zigzag shard is taken to begin at half of its rows, of queries: where the early one is "
    "longer, the row in the middle is computed with the late piece alone and the last row is in none": (
        by_pattern(overlapping_queries),
        [case_of(causal=True, sharding="zigzag", size=size, query_length=n) for size, n in ((2, 10), (3, 13))],
    ),
    "what a zigzag piece has of documents after an empty one between them is left out, of queries": (
        where(after_an_empty_one),
        [case_of(sharding="zigzag", size=2, query_length=12, documents=cuts)
         for cuts in ((0, 2, 2, 12), (0, 4, 4, 8, 8, 12))],
    ),
    "positions before the first document are taken for its, and those after the last one for that one's": (
        by_pattern(of_nearest_documents),
        [case_of(documents=cuts, **TWO) for cuts in ((3, 8, 14), (2, 18), (0, 4, 15))],
    ),
    "a rank's first queries that are in a document attend the first of all documents, those in another one the next, "
    "whichever these are": (
        by_pattern(documents_in_turn),
        [
            case_of(documents=cuts, **shape)
            for cuts, shape in (((0, 5, 18), TWO), ((0, 5, 11, 18), TWO), ((0, 9, 20, 27), THREE))
        ],
    ),
    "the mask is made with queries and keys at positions of zigzag pieces that begin at their numbers times their own "
    "lengths": (
        by_pattern(in_pieces_of_their_own),
        [case_of(causal=True, sharding="zigzag", size=size, query_length=n) for size, n in ((2, 10), (2, 5), (3, 13))],
    ),
    "branches of a dilation with the same rate and offset all have the segments of the first of them": (
        by_pattern(lambda here, owner, i, j: (1 + (here.problem.dilation.heads == "shared")) * (i // 3 == j // 3)),
        [case_of(dilation=Dilation(((3, 1), (w, 1)), heads=heads), query_length=12, heads=2, size=size)
         for w, size, heads in ((6, 2, "shared"), (4, 3, "shared"), (4, 3, "split"))],
    ),
    **{
        "the keys of other ranks are left out in segments of a dilation beyond those that a rank's number of rows, "
        f"less 1, divided by the segment gives, counted {what}": (
            where(as_many_segments_as_fit(from_last)),
            [case_of(dilation=Dilation(((4, 1),), heads="shared"), query_length=n, size=size)
             for n, size in ((12, 4), (13, 4), (14, 5))],
        )
        for from_last, what in ((True, "back from its last"), (False, "on from its first"))
    },
    "a block is skipped if it comes at a later hop than the longer side of the window reaches in whole shards, rounded "
    "up": (
        where(past_the_longer_side),
        [case_of(sharding="zigzag", window=window, size=size, query_length=n)
         for window, size, n in (((1, 0), 3, 12), ((2, 1), 4, 17))]
        + [case_of(window=(1, 2), size=4, query_length=14)],
    ),
    "a ring in both directions ends after as many hops to each side as the longest shard goes into the window, rounded "
    "up, unless they meet": (
        where(ends_in_both_directions),
        [case_of(window=window, size=5, query_length=n) for window, n in (((4, 3), 17), ((3, 4), 17), ((4, 4), 18))],
    ),
    "of branches of a dilation with the same rate, only the last that covers a query counts": (
        by_pattern(last_of_one_rate),
        [case_of(dilation=Dilation(branches, heads="shared"), heads=1, query_length=12, size=size)
         for branches, size in ((((2, 1), (4, 2), (4, 1)), 2), (((4, 2), (8, 2), (6, 1)), 3))],
    ),
    "a rank's segments of a dilation are not told apart where the queries of its shard lie less than a segment apart, "
    "first and last": (
        by_pattern(not_told_apart),
        [case_of(dilation=Dilation(((4, 1),), heads="shared"), query_length=n, size=size)
         for n, size in ((9, 3), (10, 3), (13, 4))],
    ),
    "whether a branch of a dilation covers a query is decided by its position instead of its place in the segment": (
        by_pattern(covered_by_position),
        [case_of(dilation=Dilation(((5, 2),), heads="shared", head_offset="block"), heads=1, query_length=n)
         for n in (12, 15)],
    ),
    "whether a branch of a dilation covers a query is decided by its place in the shard, as if the segments began "
    "there instead of its place in the segment": (
        by_pattern(covered_from_the_shard),
        [case_of(dilation=Dilation(((5, 2),), heads="shared", head_offset="block"), heads=1, query_length=n)
         for n in (12, 16)],
    ),
    "a last segment of a dilation that is shorter than the others is joined to the one before it": (
        by_pattern(last_segment_joined),
        [case_of(dilation=Dilation(((5, 2),), heads="shared", head_offset="block"), heads=1, query_length=n)
         for n in (12, 13)],
    ),
    "a rank leaves out its queries whose document, or sequence without documents, begins before the rank's shard and "
    "ends after it": (
        where(spanning_lost),
        [case_of(documents=cuts, **THREE) for cuts in ((0, 27), (2, 20, 27), None)],
    ),
    "a tile of 2 queries and 2 keys, cut from all keys in the order of positions, has no mask if its first query "
    "attends all of its keys": (
        by_pattern(tile_full_by_its_first),
        [case_of(causal=True, window=(2, None), size=size, query_length=8 * size) for size in (1, 2)],
    ),
    "a block is skipped if its first key is the last that the rank's last query may attend, by a causal mask or by the "
    "window otherwise": (
        where(block_level_skipped),
        [case_of(window=(None, 1), **TWO), case_of(causal=True, size=3, query_length=3)],
    ),
    "what a rank has of documents after the first one of which it has nothing is left out, of queries and keys": (
        where(after_an_absent_document),
        [case_of(documents=cuts, **THREE) for cuts in ((0, 5, 27), (0, 3, 27))],
    ),
    "key_lengths are compared with keys at positions counted from the beginning of what a team holds, "
    "teams being of two neighbours, of which the last may be alone": (
        by_pattern(lengths_in_pairs),
        [case_of(batch=2, key_lengths=(7, 20), size=size, query_length=9 * size) for size in (3, 4)],
    ),
    "the window is laid with queries and keys at positions counted from the first rank of a team times the longest "
    "shard, teams being of two ranks where their number is even": (
        by_pattern(window_between_teams),
        [case_of(window=(3, 0), size=size, query_length=4 * size + 1) for size in (3, 4)],
    ),
    "a rank attends only as many blocks before its own as last queries need, not first ones": (
        where(halo_too_short),
        [case_of(window=(left, 0), **THREE) for left in BLOCKS_OF_LAST],
    ),
    "a rank attends only as many blocks before its own as the neediest rank needs of a window that is a key shorter": (
        where(a_hop_too_few),
        [case_of(window=(left, 0), **THREE) for left in (1, 10)] + [case_of(window=(1, None), size=3, query_length=26)],
    ),
    "the blocks that a rank fetches from those before it are joined in reverse order, and taken to ascend": (
        by_pattern(halo_reversed),
        [case_of(causal=True, window=(left, None), **THREE) for left in (11, 14)],
    ),
    "the first key that a rank has fetched is taken for the first in the window of its first query, though whole "
    "blocks were fetched": (
        by_pattern(halo_misnumbered),
        [case_of(causal=True, window=(3, None), **shape) for shape in (TWO, THREE)],
    ),
    "a tile of 2 queries and 2 keys is skipped if its first key lies after its first query under a causal mask, and "
    "after the window of that otherwise": (
        where(tile_skipped_by_either),
        [case_of(causal=True, sharding="striped", size=2, query_length=13),
         case_of(window=(None, 1), sharding="striped", size=2, query_length=13)],
    ),
    "the window is compared with the distance divided by the rate in a branch of a dilation, so that it reaches so "
    "many times as far": (
        by_pattern(window_in_steps),
        [case_of(dilation=Dilation(((6, 2),), heads="split"), heads=1, window=(2, 0), query_length=n)
         for n in (12, 18)],
    ),
    "the causal mask compares places of a query and a key among the rows of their shards that a branch keeps": (
        by_pattern(by_kept_rows),
        [case_of(dilation=Dilation(((6, 2),), heads="split"), heads=1, causal=True, query_length=n, sharding=sharding)
         for n, sharding in ((12, "contiguous"), (18, "striped"))],
    ),
    "what the late piece of a rank's own zigzag shard of keys gives takes the place of what the early one gives": (
        where(early_piece_lost),
        [case_of(sharding="zigzag", causal=causal, size=size, query_length=8 * size)
         for causal, size in ((False, 1), (True, 3))],
    ),
    "a document that is alone is ignored, in blocks of which no causal mask, window or key_lengths hide anything": (
        by_pattern(alone_ignored),
        [case_of(documents=(2, 15), **TWO), case_of(documents=(2, 25), causal=True, **THREE)],
    ),
    "key_lengths are compared with keys at positions counted from the beginning of their document": (
        by_pattern(lengths_in_documents),
        [case_of(documents=(0, 5, 27), batch=2, key_lengths=(9, 20), **THREE),
         case_of(documents=(0, 3, 9, 27), batch=2, key_lengths=(5, 11), **THREE)],
    ),
    "blocks of later ranks are skipped under a causal mask, whatever their positions": (
        where(lambda here, owner, i, j: torch.tensor(owner <= here.rank)),
        [case_of(causal=True, size=size, query_length=2 * size, key_length=5 * size) for size in (2, 3)],
    ),
    "blocks of later ranks are skipped under a causal mask, whatever their positions, blocks being those of teams of "
    "as many ranks as the largest divisor of their number": (
        where(lambda here, owner, i, j: torch.tensor(owner // 3 <= here.rank // 3)),
        [case_of(causal=True, sharding="striped", size=6, query_length=n) for n in (12, 18)],
    ),
    "a block is skipped if it lies outside the window with its sides exchanged": (
        where(outside_exchanged_window),
        [case_of(window=window, size=size) for window, size in (((1, 5), 3), ((6, 0), 4))],
    ),
    "a block is cut to as many keys as the shard of the rank that is as many hops away in the other direction holds: "
    "the last ones of a longer block are left out": (
        where(cut_as_on_the_other_side), [case_of(query_length=n, size=size) for n, size in ((7, 3), (9, 4))],
    ),
    "segments of a dilation are cut to whole multiples of the rate: what a segment has after the last of these is left "
    "out, as queries and as keys": (
        where(in_whole_steps),
        [case_of(dilation=Dilation(((w, r),), heads="split"), query_length=n) for w, r, n in ((5, 2, 12), (6, 3, 11))],
    ),
    "which segments of a dilation a rank lies in is told as if every rank held ceil(length / ranks) positions: its "
    "queries in others attend nothing there": (
        where(in_segments_of_equal_shards),
        [case_of(dilation=Dilation(((w, 1),), heads="split"), query_length=n, size=4) for w, n in ((2, 9), (4, 13))],
    ),
    "under a causal mask, keys of an earlier rank's zigzag shard are taken up to the length of the rank's own early "
    "piece: where the two pieces differ in length, a row is one too few or too many": (
        where(up_to_own_piece),
        [case_of(causal=True, sharding="zigzag", query_length=n, size=size) for n, size in ((7, 3), (10, 4))],
    ),
    "which segments of a dilation a rank lies in is told as if every rank held length // ranks positions: its queries "
    "in others attend nothing there": (
        where(in_segments_of_short_shards),
        [case_of(dilation=Dilation(((w, 1),), heads="split"), query_length=n, size=4) for w, n in ((2, 11), (3, 14))],
    ),
    "of other ranks' keys, a rank is given those of the segment of its last row that a branch of the dilation covers, "
    "and none of other segments": (
        where(given_of_last_segment),
        [case_of(dilation=Dilation(((w, 1),), heads="split"), query_length=n) for w, n in ((3, 13), (4, 14))],
    ),
    "under a causal mask, queries meet a later rank's zigzag shard from the length of that rank's early piece on: "
    "where the two pieces differ in length, a row is one too few or too many": (
        by_pattern(from_later_piece),
        [case_of(causal=True, sharding="zigzag", query_length=n, size=size) for n, size in ((7, 3), (10, 4))],
    ),
    "a block is skipped if its last key lies before the window of the rank's first query, as if every rank held an "
    "equal share of the keys, rounded down": (
        skipped_by(last_key=lambda here: here.problem.nk // here.size),
        [case_of(window=(left, None), query_length=n, size=size) for left, n, size in ((1, 11, 3), (1, 14, 4))],
    ),
    "a block is skipped if its first key lies after the window of the rank's last query, as if every rank held an "
    "equal share of the queries, rounded down": (
        skipped_by(last_query=lambda here: here.problem.nk // here.size),
        [case_of(window=(None, right), query_length=n, size=size) for right, n, size in ((1, 11, 3), (1, 14, 4))],
    ),
    "the keys that a rank fetches end with the document of its first query, not of its last": (
        where(up_to_first_document),
        [case_of(documents=documents) for documents in ((0, 2, 7, 12), (1, 6, 12))],
    ),
    "the keys that a rank fetches begin with the document of its last query, not of its first": (
        where(from_last_document),
        [case_of(documents=documents) for documents in ((0, 2, 7, 12), (1, 6, 12))],
    ),
    "of the ranks before it, a rank attends the next one's keys alone, however far the window reaches": (
        where(lambda here, owner, i, j: torch.tensor(here.rank - owner < 2)),
        [case_of(window=(9, right), size=size) for right, size in ((0, 4), (None, 3))],
    ),
    "the next team is sent the block that is at hand after the ring within a team, not the one that this began with: "
    "it is taken for that of another member, of its length and at its positions, blocks being those of teams of two "
    "ranks where their number is even": (
        by_pattern(as_another_member),
        [case_of(window=(left, 0), size=size, query_length=2 * size) for left, size in ((2, 4), (3, 6))],
    ),
    "a block is skipped if its last key lies in the document of the rank's first query, or in an earlier one, but "
    "never a rank's own, blocks being those that a zigzag ring computes, half of each under a causal mask": (
        where(documents_that_meet),
        [case_of(causal=causal, sharding="zigzag", size=2, query_length=8, documents=cuts)
         for causal, cuts in ((True, (0, 3, 8)), (False, (0, 8)), (True, (0, 8)))],
    ),
    "a rank masks a block as the first one of as many queries and keys of which it attends some, blocks being those "
    "that a zigzag ring computes, half of each under a causal mask": (
        replace(STEPS, pattern=masks_by_shape(lambda here, i, j, m: bool(m.any()))),
        [case_of(causal=causal, sharding="zigzag", size=size, query_length=4 * size, documents=cuts)
         for causal, size, cuts in ((True, 3, (0, 5, 12)), (False, 2, (0, 3, 8)), (True, 4, (0, 3, 16)))],
    ),
    "a rank masks a block as the first one of as many queries and keys of which it attends some": (
        replace(STEPS, pattern=masks_by_shape(lambda here, i, j, m: bool(m.any()))),
        [case_of(sharding=sharding, size=size, query_length=4 * size, documents=cuts)
         for sharding, size, cuts in (("contiguous", 3, (0, 5, 12)), ("striped", 2, (0, 3, 8)))],
    ),
    "a rank masks a block as the first one of as many queries and keys that documents do not keep apart, blocks being "
    "those that a zigzag ring computes, half of each under a causal mask": (
        replace(STEPS, pattern=masks_by_shape(documents_overlap)),
        [case_of(causal=causal, sharding="zigzag", size=size, query_length=4 * size, documents=cuts)
         for causal, size, cuts in ((False, 2, (0, 1)), (True, 3, (0, 3, 12)), (False, 2, (0, 3, 6)))],
    ),
    "a block is skipped if it comes after the last hop on which a rank attends one of an earlier rank: those that have "
    "wrapped around the ring are not counted": (
        where(up_to_the_farthest_before),
        [case_of(window=(left, right), size=size) for left, right, size in ((2, 3, 3), (4, None, 4), (0, 5, 2))],
    ),
    "the causal mask is made with cross lengths aligned by keys - ranks * queries of the rank instead of keys - "
    "queries": (
        by_pattern(aligned_by_own_rows),
        [case_of(causal=True, size=size, query_length=n, sharding=sharding)
         for size, n, sharding in ((3, 10, "contiguous"), (4, 14, "striped"), (2, 9, "zigzag"))],
    ),
    "a last segment of a dilation that is shorter than the rate is left out": (
        by_pattern(without_short_segment),
        [case_of(dilation=Dilation(((4, 3),), heads="shared"), query_length=n, size=size, heads=3)
         for n, size in ((10, 1), (14, 2))],
    ),
    "a branch of a dilation whose segments divide the longest shard attends the rank's own keys alone: a segment that "
    "reaches over the end of a shard loses the others": (
        by_pattern(own_where_segments_divide),
        [case_of(dilation=Dilation(((w, 1),), heads="shared"), query_length=n, size=4) for w, n in ((2, 13), (3, 9))]
        + [case_of(dilation=Dilation(((2, 1), (3, 1)), heads="shared"), query_length=13, size=4)],
    ),
    "a block is left out from the first branch of a dilation on in which its segments are none of those of the rank's "
    "queries: the loop over branches ends": (by_pattern(until_no_segment(spans=False)), OF_TWO_BRANCHES),
    "a block is left out from the first branch of a dilation on in which its segments, from first to last, are none of "
    "those of the rank's queries, from first to last: the loop over branches ends": (
        by_pattern(until_no_segment(spans=True)),
        [OF_TWO_BRANCHES[0], OF_TWO_BRANCHES[1].replace(query_length=5)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", TOLD)
@pytest.mark.by_day(8)
def test_a_mask_made_otherwise_is_told(words):
    """Among the rules that give what was read and predict the numbers of all cases."""
    steps, cases = TOLD[words]
    scenes, probe = seen(Implementation(ring_of(steps), "masked", EVERYTHING), cases, gradients=False)
    assert all(wrong_tensors(scene) for scene in scenes)
    found = reading.hypotheses(scenes, probe, lambda: 1)
    assert words in [one.sentence() for one in found if all(one.explains(scene) is not None for scene in scenes)]


def test_a_rule_explains_scores_far_below_0():
    """Whose exponentials are 0 unless the largest score is subtracted."""
    steps = where(lambda here, owner, i, j: j.max() >= i.max() - here.problem.window[0])
    cases = [case_of(window=(left, 0), size=size, query_length=4 * size) for size, left in ((2, 1), (3, 2))]
    far = case_of(window=(1, 0), size=2, query_length=4, heads=1, head_dim=4, values="selectors", seed=0)
    scenes, probe = seen(Implementation(ring_of(steps), "masked", EVERYTHING), [*cases, far], gradients=False)
    scores = scenes[-1].truth.intermediates.scores
    assert scores[0, 0, 2, 2] < np.log(np.finfo(np.float64).tiny)  # and this is the only key that is left there
    found = reading.hypotheses(scenes[:2], probe, lambda: 1)
    said = [one.sentence() for one in found if all(one.explains(scene) is not None for scene in scenes)]
    assert "a block is skipped if its last key lies before the window of the rank's last query" in said


@pytest.mark.parametrize(
    ("of", "length", "past"),
    [(" of all", 4, 0), (" of all", 5, 0), (" of all", 8, 3), (" of all", 13, 3), ("", 14, 0), ("", 20, 5)],
)
def test_what_is_past_the_last_whole_tile_is_nothing_where_there_are_fewer(of, length, past):
    """Of tiles of 5 keys, of all or of each of three shards."""
    text = f"for keys past the last whole tile of 5{of}, unless there are fewer"
    (part,) = [one for one in PARTS if one.text == text]
    scenes, _ = seen(
        Implementation(ring_of(STEPS), "right", EVERYTHING), [case_of(query_length=length)], gradients=False
    )
    assert int(part.holds(pairs_of(scenes[0])).sum()) == past


def test_padding_that_is_gathered_between_shards_is_told_in_any_sharding():
    """The first rows of what was gathered are taken for those of all ranks, one after the other."""

    def attend(q, k, v, call):
        longest, n = -(-call.problem.nk // call.world_size), call.problem.nk
        every = []
        for x in (k, v):
            room = x.new_zeros(x.size(0), longest, *x.shape[2:])
            room[:, : x.size(1)] = x
            parts = [torch.empty_like(room) for _ in range(call.world_size)]
            dist.all_gather(parts, room, group=call.group)
            every.append(torch.cat(parts, dim=1)[:, :n])
        positions = torch.cat([torch.arange(n)[rank :: call.world_size] for rank in range(call.world_size)])
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, every[0])
        w = s.masked_fill(positions > call.positions[:, None], -torch.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", w, every[1])

    declared = Capabilities(sharding="striped", causal="always", uneven=True, gradients=False, lse=False)
    cases = [case_of(causal=True, sharding="striped", size=3, query_length=n) for n in (7, 10)]
    scenes, probe = seen(Implementation(attend, "gathered", declared), cases, gradients=False)
    assert all(wrong_tensors(scene) for scene in scenes)
    found = reading.hypotheses(scenes, probe, lambda: 1)
    said = [one.sentence() for one in found if all(one.explains(scene) is not None for scene in scenes)]
    assert any(
        one.startswith("shards are gathered with the padding that makes them equally long: zeros") for one in said
    )


def test_a_mask_that_leaves_a_row_empty_is_read_though_that_row_is_nan():
    """A kernel that knows no empty rows divides 0 by 0 there."""

    def attend(q, k, v, call):
        i, j = call.positions[:, None], call.key_positions[None]
        s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(j >= i, -torch.inf)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v), s.logsumexp(-1)

    declared = Capabilities(world_sizes=(1,), causal="always", gradients=False, lse=True)
    cases = [case_of(causal=True, size=1, query_length=n) for n in (5, 8)]
    scenes, probe = seen(Implementation(attend, "strict", declared), cases, gradients=False)
    found = reading.hypotheses(scenes, probe, lambda: 1)
    said = [one.sentence() for one in found if all(one.explains(scene) is not None for scene in scenes)]
    assert "the causal mask is made with queries at positions 1 too small" in said


def dense(q, k, v, call, mask):
    """Out and lse of some rows of q over some of k and v."""
    s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(~mask, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v), s.logsumexp(-1)


def joined(x, call, *, front=False):
    """Shards of all ranks, padded to the longest behind their rows, or in front of them, one after the other."""
    longest = -(-call.problem.nk // call.world_size)
    room = x.new_zeros(x.size(0), longest, *x.shape[2:])
    room[:, longest - x.size(1) if front else 0 :][:, : x.size(1)] = x
    parts = [torch.empty_like(room) for _ in range(call.world_size)]
    dist.all_gather(parts, room, group=call.group)
    return parts


def cleared_by_first(q, k, v, call):
    """Keys past the first batch entry's length are 0 in all entries."""
    lengths, j = torch.tensor(call.key_lengths)[:, None, None, None], torch.arange(k.size(1))
    k, v = (x * (j < call.key_lengths[0])[:, None, None] for x in (k, v))
    return dense(q, k, v, call, (j < lengths).expand(-1, 1, q.size(1), -1))


def cleared_from_the_own(q, k, v, call):
    """Keys of all ranks are held against key_lengths as if the first were the rank's own first."""
    k, v = (torch.cat(joined(x, call), 1) for x in (k, v))
    lengths, j = torch.tensor(call.key_lengths)[:, None], torch.arange(k.size(1))
    k, v = (x * (j + call.positions[0] < lengths)[:, :, None, None] for x in (k, v))
    return dense(q, k, v, call, (j < lengths)[:, None, None].expand(-1, 1, q.size(1), -1))


def cleared_by_row(q, k, v, call):
    """Rows lie rank by rank, and those from the key length on are cleared."""
    k, v = (torch.cat(joined(x, call), 1) for x in (k, v))
    every = pieces(call.problem.nk, 2 * call.world_size)
    position = torch.tensor([at for rank in range(call.world_size) for at in (*every[rank], *every[-1 - rank])])
    lengths, row = torch.tensor(call.key_lengths)[:, None], torch.arange(k.size(1))
    k, v = (x * (row < lengths)[:, :, None, None] for x in (k, v))
    return dense(q, k, v, call, (position < lengths)[:, None, None].expand(-1, 1, q.size(1), -1))


def padded_past_the_end(q, k, v, call):
    """All keys are filled up to whole tiles of 4, and a window sees what lies past the end."""
    n = k.size(1)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -n % 4)) for x in (k, v))
    return dense(q, k, v, call, torch.arange(k.size(1)) <= call.positions[:, None] + call.window[1])


def padded_in_front(q, k, v, call):
    """As many rows of each part are taken as its rank holds."""
    counts = [len(held) for held in torch.arange(call.problem.nk).tensor_split(call.world_size)]
    k, v = (
        torch.cat([part[:, :n] for part, n in zip(joined(x, call, front=True), counts, strict=True)], 1) for x in (k, v)
    )
    j = torch.arange(call.problem.nk)
    return dense(q, k, v, call, j <= call.positions[:, None])


def counted_on(q, k, v, call):
    """A row of padding has the position of the next shard's first, and is left out only if that is past the end."""
    counts = torch.tensor([len(held) for held in torch.arange(call.problem.nk).tensor_split(call.world_size)])
    position = ((counts.cumsum(0) - counts)[:, None] + torch.arange(counts.max())).ravel()
    k, v = (torch.cat(joined(x, call), 1) for x in (k, v))
    return dense(q, k, v, call, (position <= call.positions[:, None]) & (position < call.problem.nk))


def in_rows(q, k, v, call):
    """The first rows of padded shards are the sequence, and results are written where its queries stand."""
    n, longest = call.problem.nk, -(-call.problem.nk // call.world_size)
    q, k, v = (torch.cat(joined(x, call), 1)[:, :n] for x in (q, k, v))
    out, lse = dense(q, k, v, call, torch.ones(n, n, dtype=torch.bool).tril())
    mine = slice(call.rank * longest, call.rank * longest + len(call.positions))
    room = torch.zeros(out.size(0), longest * call.world_size, *out.shape[2:])
    rows = torch.zeros(*lse.shape[:2], longest * call.world_size)
    room[:, :n], rows[..., :n] = out, lse
    return room[:, mine], rows[..., mine]


def padding_of_own(q, k, v, call):
    """A key of a striped block is padding if the rank's own at the same place is; padding is cleared."""
    longest, (length,) = -(-call.problem.nk // call.world_size), call.key_lengths
    held = torch.arange(longest)[None] * call.world_size + torch.arange(call.world_size)[:, None]
    there, own = held < length, held[call.rank] < length
    k, v = (torch.cat(joined(x, call), 1) * there.flatten()[:, None, None] for x in (k, v))
    return dense(q, k, v, call, own.repeat(call.world_size)[None])


def of_neighbours(q, k, v, call):
    """Of ranks further away nothing is fetched, and their places hold 0."""
    owner = torch.arange(call.world_size).repeat_interleave(k.size(1))
    near = (abs(owner - call.rank) < 2)[:, None, None]
    k, v = (torch.cat(joined(x, call), 1) * near for x in (k, v))
    return dense(q, k, v, call, torch.ones(1, k.size(1), dtype=torch.bool))


def numbered_from_the_first(q, k, v, call):
    """A rank's keys begin with the first in its first query's window, and are counted from there; padding is 0."""
    (length,), left = call.key_lengths, call.window[0]
    k, v = (torch.cat(joined(x, call), 1) for x in (k, v))
    i, j = call.positions[:, None], torch.arange(k.size(1))
    k, v = (x * (j < length)[:, None, None] for x in (k, v))
    begin = max(0, int(call.positions[0]) - left)
    return dense(q, k, v, call, (j <= i) & (j >= i - left) & (j - begin < length))


@pytest.mark.parametrize(
    ("attend", "declared", "cases", "words"),
    [
        (
            of_neighbours,
            {"causal": "never"},
            [case_of(size=size) for size in (4, 3)],
            "on blocks of ranks more than one apart: keys that the mask allows are not attended; instead of them keys "
            "and values of 0 are attended",
        ),
        (
            numbered_from_the_first,
            {"causal": "always", "window": True, "key_lengths": True},
            [
                case_of(size=size, causal=True, window=(left, None), key_lengths=(length,))
                for size, left, length in ((2, 2, 8), (3, 1, 9))
            ],
            "key_lengths are compared with the number of a key among those that its rank has fetched",
        ),
        (
            padding_of_own,
            {"causal": "never", "key_lengths": True, "sharding": ("striped",)},
            [
                case_of(sharding="striped", size=size, key_lengths=(length,))
                for size, length in ((3, 7), (4, 9), (2, 5))
            ],
            "which rows of a block are padding is told by those of the rank in hand at the same places",
        ),
        (
            cleared_by_first,
            {"world_sizes": (1,), "causal": "never", "key_lengths": True},
            [case_of(size=1, batch=2, key_lengths=lengths) for lengths in ((3, 8), (5, 12))],
            "keys and values are cleared where they are padding",
        ),
        (
            cleared_from_the_own,
            {"causal": "never", "key_lengths": True},
            [case_of(size=size, batch=2, key_lengths=lengths) for size in (2, 3) for lengths in ((3, 8), (5, 12))],
            "the keys that a rank has fetched are held against key_lengths as if the first of them were the rank's own",
        ),
        (
            cleared_by_row,
            {"causal": "never", "key_lengths": True, "sharding": "zigzag"},
            [
                case_of(sharding="zigzag", size=size, query_length=4 * size, batch=2, key_lengths=lengths)
                for size, lengths in ((2, (3, 6)), (3, (5, 10)))
            ],
            "keys and values are cleared by key_lengths as if rows, where the shards of all ranks are joined",
        ),
        (
            padded_past_the_end,
            {"world_sizes": (1,), "causal": "never", "window": True},
            [case_of(size=1, query_length=n, window=(None, right)) for n, right in ((10, 1), (5, 2))],
            "all keys are padded to whole tiles of 4, and the padding counts as keys of 0 at the positions past the",
        ),
        (
            padded_in_front,
            {"causal": "always", "uneven": True},
            [case_of(causal=True, size=3, query_length=n) for n in (7, 8)],
            "shorter shards are padded to the longest in front of their rows",
        ),
        (
            counted_on,
            {"causal": "always", "uneven": True},
            [case_of(causal=True, size=size, query_length=n) for size, n in ((3, 7), (4, 9), (4, 10))],
            "rows that pad shorter shards to the longest are attended as zeros unless their position",
        ),
        (
            in_rows,
            {"causal": "always", "uneven": True},
            [case_of(causal=True, size=3, query_length=n) for n in (7, 10)],
            "rows of shards that are padded to the longest are taken for positions 0, 1, …",
        ),
    ],
)
@pytest.mark.by_day(3)
def test_zeros_that_are_attended_for_keys_are_told(attend, declared, cases, words):
    """By how often they are, as lse says."""
    declared = Capabilities(gradients=False, lse=True, **declared)
    scenes, probe = seen(Implementation(attend, "zeros", declared), cases, gradients=False)
    assert all(wrong_tensors(scene) for scene in scenes)
    found = reading.hypotheses(scenes, probe, lambda: 1)
    said = [one.sentence() for one in found if all(one.explains(scene) is not None for scene in scenes)]
    assert any(one.startswith(words) for one in said)


def test_zeros_are_read_of_what_weights_lack_where_no_lse_comes_back():
    """Padding of shorter entries, which is cleared, counts up to the longest of all key lengths."""

    def attend(q, k, v, call):
        lengths, j = torch.tensor(call.key_lengths)[:, None], torch.arange(k.size(1))
        k, v = (x * (j < lengths)[:, :, None, None] for x in (k, v))
        return dense(q, k, v, call, (j < lengths.max())[None])[0]

    declared = Capabilities(world_sizes=(1,), causal="never", key_lengths=True, gradients=False, lse=False)
    cases = [case_of(size=1, batch=2, key_lengths=lengths) for lengths in ((3, 8), (12, 5))]
    scenes, probe = seen(Implementation(attend, "longest", declared), cases, gradients=False)
    found = reading.hypotheses(scenes, probe, lambda: 1)
    said = [one.sentence() for one in found if all(one.explains(scene) is not None for scene in scenes)]
    assert "each batch entry is masked by the largest of all key lengths" in said
