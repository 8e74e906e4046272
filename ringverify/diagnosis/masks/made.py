"""Ways to make a mask: the words in which `reading` says what it read.

A mask may be made at other positions than those of the queries and keys, for other blocks, or not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from ringref import pattern
from ringverify.diagnosis.grids import USUAL
from ringverify.diagnosis.masks.dilating import ways_to_dilate
from ringverify.diagnosis.masks.documents import ways_to_tell_documents
from ringverify.diagnosis.masks.halos import ways_to_fetch_halos
from ringverify.diagnosis.masks.lengths import ways_to_take_lengths
from ringverify.diagnosis.masks.merges import ways_to_merge
from ringverify.diagnosis.masks.positions import (
    ALIGNED,
    HELD,
    OWNERS,
    POSITIONS,
    aligned,
    aligned_by_head,
    by_own_length,
    keys_at,
    late,
    less_hops,
    level_with_the_last,
    of_full_pages,
    of_world,
    queries_at,
    shifted,
    team_taken_for_rank,
)
from ringverify.diagnosis.masks.skips import (
    COMPUTED,
    HALVED,
    WHOSE,
    masked_by_shape,
    skipped,
    ways_to_leave_unmasked,
    ways_to_skip,
)
from ringverify.diagnosis.masks.tiles import ways_to_bound, ways_to_judge_tiles, ways_to_pad, ways_to_split
from ringverify.diagnosis.masks.windows import ways_to_bound_striped_blocks, ways_to_lay_one_end, ways_to_lay_windows
from ringverify.diagnosis.pairs import (
    CONSTRAINTS,
    NOT_COMPUTED,
    Ints,
    Mask,
    OneSide,
    Otherwise,
    Pairs,
    branch,
)
from ringverify.diagnosis.scene import Counts

BLOCKS: dict[str, Callable[[Pairs, OneSide, OneSide], Mask]] = {
    "a later rank": lambda pairs, i, j: _by_sharding(pairs, i.p < 0, late(i, pairs), j.place < i.place),
    "an earlier rank": lambda pairs, i, j: _by_sharding(pairs, i.p >= 0, ~late(j, pairs), j.place <= i.place),
    "the rank itself": lambda pairs, i, j: j.place <= i.place,
}
"""Which pairs a causal mask lets through that is chosen by whose block it is, where it is taken for another rank's."""

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


def _wrapped(pairs: Pairs) -> Counts | None:
    """Return counts if the owner of a block that wrapped around the ring is a negative number, and so its positions."""
    plain = pairs.queries.p, pairs.keys.p
    other = (plain[0], np.where(pairs.owner > pairs.rank, plain[1] - pairs.keys.total, plain[1]))
    return pairs.counts(lambda name: other) if pairs.present() and pairs.case.sharding == "contiguous" else None


def _aligned_to_lengths(constraints: tuple[str, ...], longest: bool, pairs: Pairs) -> Counts | None:
    """Return counts if the last query is level with the last valid key, of its batch element or of the longest."""
    p, plain = pairs.problem, (pairs.queries.p, pairs.keys.p)
    present = {one for one in constraints if getattr(p, one)}
    if p.key_lengths is None or not present:
        return None
    lengths = np.array(p.key_lengths)[:, None, None, None]
    i, j = np.broadcast_arrays(plain[0] + (lengths.max() if longest else lengths) - p.nk, plain[1])
    counts = pairs.counts(lambda name: None if name in present else plain)
    if "causal" in present:
        counts = counts * pattern.causal(i, j, diagonal=p.diagonal)
    if "window" in present:
        assert p.window is not None
        counts = counts * pattern.window(i, j, left=p.window[0], right=p.window[1], diagonal=p.diagonal)
    return counts


def _without(only: str | None) -> Callable[[Pairs], Counts | None]:
    def counts(pairs: Pairs) -> Counts | None:
        plain = pairs.queries.p, pairs.keys.p
        return pairs.counts(lambda name: None if only in (None, name) else plain)

    return counts


def _causal_by_window(pairs: Pairs) -> Counts | None:
    """Return counts if a window's right side takes the place of a causal mask; `None` where there are not both."""
    window = pairs.problem.window
    return None if window is None or window[1] is None or not pairs.problem.causal else _without("causal")(pairs)


def _made() -> Iterator[Otherwise]:
    yield Otherwise("keys that the mask allows are not attended", lambda pairs: np.zeros_like(pairs.true))
    for times, text in ((2, "twice"), (3, "three times")):
        yield Otherwise(f"keys count {text}", functools.partial(_counted, times))
    for only in CONSTRAINTS:
        yield Otherwise(f"{NAMES[only][0]} ignored", _without(only), 0.5)
    yield Otherwise("all keys are attended, whatever the mask", _without(None), 0.5)
    yield Otherwise("the causal mask is left out where a window has a right side", _causal_by_window, 0.25)
    for text, of in BLOCKS.items():
        whose = f"the causal mask is made as if the block were that of {text}"
        yield Otherwise(whose, functools.partial(_as_block, of), 1)
    yield from ways_to_lay_windows()
    yield from ways_to_bound_striped_blocks()
    yield from ways_to_fetch_halos()
    for number in ("hop", "owner"):
        says = f"the causal mask of a block is chosen by its {number} and the rank in the world, not that in the group"
        yield Otherwise(says, functools.partial(_as_block_of_the_world, number), 0.5)
    yield Otherwise("keys of blocks that have wrapped around the ring are taken for keys before the first", _wrapped, 1)
    for (whose, seen_by), spared, (text, skips) in product(WHOSE.items(), (False, True), ways_to_skip()):
        never = ", but never a rank's own" if spared else ""
        cost = 1 + 0.25 * spared + 0.5 * bool(whose)
        yield Otherwise(text + never + whose, functools.partial(skipped, skips, spared, seen_by), cost)
    ways = ((1, ""), (-1, ", in a ring that sends to the left"))
    for (which, computed), whose, (way, ring) in product(COMPUTED.items(), ("", HALVED), ways):
        says = f"a rank masks a block as the first one of as many queries and keys{which}{whose}{ring}"
        yield Otherwise(says, functools.partial(masked_by_shape, way, computed, WHOSE[whose]), 0.75)
    for text, of_tiles in ways_to_leave_unmasked():
        yield Otherwise(text, of_tiles, 1)
    yield from ways_to_merge()
    yield from ways_to_bound()
    yield from ways_to_judge_tiles()
    yield from ways_to_split()
    yield Otherwise(NOT_COMPUTED, lambda pairs: np.zeros_like(pairs.true), 0.25, lse=0.0)
    for scope in (*CONSTRAINTS, None):
        what = "the mask is made" if scope is None else NAMES[scope][1]
        cost = 1 if scope else 1.25
        for text, owner in OWNERS.items():
            keys = functools.partial(_keys_of, owner)
            whose = f"{what} as if the block were that of rank ({text}) mod ranks"
            yield Otherwise(whose, functools.partial(_in_a_ring, _at(None, keys, scope)), cost)
        says = f"{what} with the rank and the owner of the block exchanged: queries at the places of the owner's"
        yield Otherwise(says, functools.partial(_in_a_ring, functools.partial(_exchanged, scope)), cost)
        for text, at in POSITIONS.items():
            queries, keys = functools.partial(queries_at, at), functools.partial(keys_at, at)
            # Of queries nothing is said where that is the same: key_lengths are no matter of them.
            yield Otherwise(f"{what} with keys at positions {text}", _at(None, keys, scope), cost)
            if scope != "key_lengths":
                yield Otherwise(f"{what} with queries and keys at positions {text}", _at(queries, keys, scope), cost)
                yield Otherwise(f"{what} with queries at positions {text}", _at(queries, None, scope), cost)
        for text, of_blocks in (
            ("counted from the owner times the number of keys of the rank in hand", by_own_length),
            ("of the rank's own keys less the hop times their number", less_hops),
        ):
            says = f"{what} with keys at positions {text}"
            yield Otherwise(says, functools.partial(_in_a_ring, _at(None, of_blocks, scope)), cost)
        says = f"{what} with keys at positions of a rank's pages as if all of them were full"
        yield Otherwise(says, _at(None, of_full_pages, scope), cost)
        for text, held in HELD.items():
            says = f"{what} with cross lengths aligned by the numbers of queries and keys {text} instead of all"
            yield Otherwise(says, _at(functools.partial(aligned, held), None, scope), cost)
        for text, difference in ALIGNED.items():
            says = f"{what} with cross lengths aligned by {text} instead of keys - queries"
            yield Otherwise(says, _at(functools.partial(shifted, difference), None, scope), cost - 0.5)
        yield Otherwise(
            f"{what} within each shard, at positions counted from its beginning",
            functools.partial(_within, scope),
            2,
        )
    yield from ways_to_lay_one_end()
    yield Otherwise(
        "the mask is made with the rank in the world instead of the rank in the group",
        _at(
            lambda pairs: of_world(pairs, pairs.queries),
            lambda pairs: pairs.keys.at(pairs.ring[pairs.rank] - pairs.hop, pairs.keys.place),
            None,
        ),
        0.5,
    )
    yield from ways_to_tell_documents()
    for constraints, what in (
        (("causal",), "the causal mask is"),
        (("causal", "window"), "the causal mask and the window are"),
    ):
        says = f"{what} made as if a rank's last query of a document, or of all, were level with its last key"
        yield Otherwise(says, functools.partial(_level, constraints, False), 1)
        says += ", where that began on an earlier rank"
        yield Otherwise(says, functools.partial(_level, constraints, True), 1.5)
    says = "cross lengths are aligned by the numbers of queries and keys of the rank that has the head instead of all"
    yield Otherwise(f"{says}, where an exchange deals heads in runs", aligned_by_head, 1)
    for grid in USUAL:
        yield Otherwise(
            "the number of the team that holds a block is compared with the rank instead of the number of its team: "
            f"later ones up to it are attended whole, under a causal mask, teams being {grid.text}",
            functools.partial(team_taken_for_rank, grid),
            0.75,
        )
    for constraints in (("causal", "window"), ("causal",), ("window",)):
        for longest in (False, True):
            what = " and the ".join(NAMES[one][0] for one in constraints)
            by = "the longest of key_lengths" if longest else "key_lengths"
            says = f"the {what} {'are' if len(constraints) > 1 else 'is'} aligned to {by} instead of the number of keys"
            yield Otherwise(says, functools.partial(_aligned_to_lengths, constraints, longest), 0.5)
    for packed, text in ((True, "row // heads of the group"), (False, "row mod queries")):
        says = f"the heads of a group are packed as rows, of which the mask takes {text} for the query"
        yield Otherwise(says, functools.partial(_packed, packed), 0.5)
    yield from ways_to_dilate()
    yield from ways_to_pad()
    yield from ways_to_take_lengths()
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
    for whose, heads in FOLDED.items():
        for by_entry, text in ((True, "row mod batch"), (False, "row // heads")):
            fold = "batch and heads" if by_entry else "heads and batch"
            says = f"{fold} are folded into rows, which are masked by the batch entry {text}{whose}"
            yield Otherwise(says, functools.partial(_folded, heads, by_entry), 0.5)


def _of_an_exchange(pairs: Pairs) -> tuple[int, Ints]:
    each = -(-pairs.problem.heads // pairs.size)
    return each, np.arange(pairs.problem.heads) % each


FOLDED: dict[str, Callable[[Pairs], tuple[int, Ints]]] = {
    "": lambda pairs: (pairs.problem.heads, np.arange(pairs.problem.heads)),
    ", of the heads that a rank has after an exchange": _of_an_exchange,
    ", of key heads": lambda pairs: (pairs.problem.hk, np.arange(pairs.problem.heads) // pairs.problem.group_size),
}
"""How many heads are folded into rows together with the batch, and the number of each head among them."""


def _folded(heads: Callable[[Pairs], tuple[int, Ints]], by_entry: bool, pairs: Pairs) -> Counts | None:
    """Return counts if a row of batch and heads, or of heads and batch, is masked by another row's batch entry."""
    batch, (count, number) = pairs.problem.batch, heads(pairs)
    entry = np.arange(batch)[:, None]
    other = (entry * count + number) % batch if by_entry else (number * batch + entry) // count % batch
    return pairs.true[other, np.arange(pairs.problem.heads)] if (other != entry).any() else None


def _counted(times: int, pairs: Pairs) -> Counts:
    return times * pairs.true


def _level(constraints: tuple[str, ...], entered: bool, pairs: Pairs) -> Counts | None:
    """Return counts with these constraints made as if queries were level with the end of what they attend."""
    if not pairs.problem.causal:
        return None
    level, plain = (level_with_the_last(pairs, entered=entered), pairs.keys.p), (pairs.queries.p, pairs.keys.p)
    return pairs.counts(lambda name: level if name in constraints else plain)


def _packed(by_heads: bool, pairs: Pairs) -> Counts:
    """Return counts if query n of head g of a group is a row of its own, and has the mask of another row's query.

    Rows are (head, query), and the query taken is the row divided by the heads; or (query, head), and it is the row
    modulo the queries.
    """
    group, x = pairs.problem.group_size, pairs.queries
    found = np.empty_like(pairs.true)
    place, count, rank = x.place[:, 0], np.maximum(1, x.count[:, 0]), x.rank[:, 0]
    for head in range(pairs.problem.heads):
        g = head % group
        other = (g * count + place) // group if by_heads else (place * group + g) % count
        found[:, head] = pairs.true[:, head, x.at(rank, other)]
    return found


def _in_a_ring(counts: Callable[[Pairs], Counts | None], pairs: Pairs) -> Counts | None:
    """Return counts, but none where every rank attends its own block only, so that there are no hops."""
    return None if pairs.case.replicated else counts(pairs)


def _keys_of(owner: Callable[[Pairs], Ints], pairs: Pairs) -> Ints:
    return pairs.keys.at(owner(pairs), pairs.keys.place)


def _exchanged(scope: str | None, pairs: Pairs) -> Counts | None:
    """Return counts with the positions of the other rank's rows in the same places; causal in blocks that it cuts."""
    if scope not in (None, *pairs.present()) or not pairs.present():
        return None
    plain = pairs.queries.p, pairs.keys.p
    other = pairs.queries.at(pairs.owner, pairs.queries.place), pairs.keys.at(pairs.rank, pairs.keys.place)
    found = np.ones_like(pairs.true)
    for name in pairs.present():
        one = pairs.counts(lambda each, name=name: plain if each == name else None)  # type: ignore[misc]
        if scope in (None, name):
            as_other = pairs.counts(lambda each, name=name: other if each == name else None)  # type: ignore[misc]
            one = np.where(_cut(pairs, one) | (name != "causal"), as_other, one)
        found *= one
    return found


def _cut(pairs: Pairs, counts: Counts) -> Mask:
    """Return the pairs of blocks of which some are attended, and others are not."""
    found = np.zeros(counts.shape[-2:], dtype=bool)
    for queries, keys in product(pairs.queries.shards, pairs.keys.shards):
        if len(queries) and len(keys):
            block = counts[..., queries, :][..., keys] > 0
            found[np.ix_(queries, keys)] = bool(block.any()) and not block.all()
    return found


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


MADE: tuple[Otherwise, ...] = tuple(_made())
