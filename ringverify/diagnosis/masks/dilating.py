"""Dilations made in another way: by segments, places in them, and the offsets of heads."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from ringref import pattern
from ringref.problem import Problem
from ringref.sharding import Positions
from ringverify.diagnosis.masks.positions import At, own_keys, sharded
from ringverify.diagnosis.pairs import Ints, Mask, OneSide, Otherwise, Pairs, branch, kept
from ringverify.diagnosis.scene import Counts

OFFSETS: dict[str, Callable[[Problem, int], Ints]] = {
    "h // (H // r) mod r, where H / r is no whole number": lambda p, rate: (
        np.arange(p.heads) // max(1, p.heads // rate) % rate
    ),
    "h // (H // r), where H / r is no whole number": lambda p, rate: np.arange(p.heads) // max(1, p.heads // rate),
    "h · r // H": lambda p, rate: np.arange(p.heads) * rate // p.heads,
    "h mod r, as if head_offset were cyclic": lambda p, rate: np.arange(p.heads) % rate,
    "h // ceil(H / r), as if head_offset were block": lambda p, rate: np.arange(p.heads) // math.ceil(p.heads / rate),
    "0 in all heads": lambda p, rate: np.zeros(p.heads, dtype=np.int64),
    "that of its key head, taken for the head": lambda p, rate: np.arange(p.heads) // p.group_size % rate,
    "that of its key head among key heads": lambda p, rate: _of_key_heads(p, rate),
}
"""Offsets of heads in a segment of a shared dilation, by the rate."""


def _of_key_heads(p: Problem, rate: int) -> Ints:
    number, cyclic = np.arange(p.heads) // p.group_size, p.dilation is None or p.dilation.head_offset == "cyclic"
    return number % rate if cyclic else number // math.ceil(p.hk / rate)


def ways_to_dilate() -> Iterator[Otherwise]:
    """Yield dilations made in another way."""
    for name in ("contiguous", "striped"):
        yield Otherwise(
            f"segments of a dilation are told apart with keys at positions of {name} shards",
            functools.partial(_segments, sharded(name)),
        )
    yield Otherwise(
        "places in segments of a dilation are counted from the beginning of the shard, not of the segment",
        _placed_in_shards,
        0.75,
    )
    for counted, where in {False: "", True: ", and places in it are counted on"}.items():
        yield Otherwise(
            f"a last segment of a dilation that is shorter than the others is joined to the one before it{where}",
            functools.partial(_last_joined, counted),
            0.75,
        )
    yield Otherwise(
        "a rank asks for the segments of a dilation in which its first and its last row lie, not for those between",
        _of_the_ends,
        0.5,
    )
    for end in ("first", "last"):
        yield Otherwise(
            f"of other ranks' keys, a rank is given those of the segment of its {end} row that a branch of the "
            "dilation covers, and none of other segments",
            functools.partial(_given_of_one_segment, end),
            0.5,
        )
    for text, dropped in DROPPED.items():
        yield Otherwise(
            f"a last segment of a dilation that is shorter than {text} is left out",
            functools.partial(_without_last, dropped),
            0.5,
        )
    yield Otherwise(
        "segments of a dilation are cut to whole multiples of the rate: what a segment has after the last of these is "
        "left out, as queries and as keys",
        _in_whole_steps,
        0.5,
    )
    for text, equal in EQUAL.items():
        yield Otherwise(
            f"which segments of a dilation a rank lies in is told as if every rank held {text}: its queries in others "
            "attend nothing there",
            functools.partial(_in_segments_of_equal_shards, equal),
            0.75,
        )
    for text, local in LOCAL.items():
        yield Otherwise(
            f"a branch of a dilation whose segments {text} attends the rank's own keys alone: a segment that reaches "
            "over the end of a shard loses the others",
            functools.partial(_local, local),
            0.5,
        )
    for up in (False, True):
        yield Otherwise(
            f"a segment is looked for on segment length // shard ranks{', rounded up,' if up else ''} from that of its "
            "beginning on, and what it has on later ones is left out",
            functools.partial(_on_fewer_ranks, up),
            0.75,
        )
    for text, of in OFFSETS.items():
        yield Otherwise(f"the offset of head h in a dilation is {text}", functools.partial(_offset, of), 0.5)
        says = f"a head of a dilation takes every r-th position of a segment from its offset on, which is {text}"
        yield Otherwise(says, functools.partial(_offset_on, of), 0.75)
    for text, at in PLACES.items():
        for whose, moved in {"a query": (True, False), "a key": (False, True), "a query or key": (True, True)}.items():
            yield Otherwise(
                f"whether a branch of a dilation covers {whose} is decided by its {text} instead of its place in the "
                "segment",
                functools.partial(_covered_by, at, *moved),
                0.8,
            )
    yield Otherwise(
        "the window is compared with the distance divided by the rate in a branch of a dilation, so that it reaches so "
        "many times as far",
        _window_in_steps,
        0.5,
    )
    yield Otherwise(
        "the causal mask compares a query's place among the rank's own of a segment with a key's place among all of it",
        _causal_by_place,
        1.25,
    )
    yield Otherwise(
        "the causal mask compares places of a query and a key among the rows of their shards that a branch keeps",
        _causal_by_kept,
        1.25,
    )
    for what, alike in ALIKE.items():
        yield Otherwise(
            f"of branches of a dilation {what}, only the last that covers a query counts",
            functools.partial(_last_of_alike, alike),
            0.5,
        )
    yield Otherwise(
        "branches of a dilation with the same rate and offset all have the segments of the first of them",
        _of_the_first_alike,
        0.5,
    )
    for from_last, what in {True: "back from its last", False: "on from its first"}.items():
        yield Otherwise(
            "the keys of other ranks are left out in segments of a dilation beyond those that a rank's number of rows, "
            f"less 1, divided by the segment gives, counted {what}",
            functools.partial(_as_many_as_fit, from_last),
            0.75,
        )
    for what, rows in SPANS.items():
        yield Otherwise(
            f"a rank's segments of a dilation are not told apart where {what} lie less than a segment apart, first and "
            "last",
            functools.partial(_not_told_apart, rows),
            0.75,
        )
    for what, until in ENDING.items():
        yield Otherwise(
            f"a block is left out from the first branch of a dilation on in which {what}: the loop over branches ends",
            functools.partial(_until_a_branch, until),
            0.5,
        )


def _of_the_ends(pairs: Pairs) -> Counts | None:
    """Return counts without the queries that lie in no segment of their rank's first row or of its last one."""
    p, x = pairs.problem, pairs.queries
    if p.dilation is None:
        return None
    total, plain = np.zeros_like(pairs.true), (x.p, pairs.keys.p)
    for number, (w, _) in enumerate(p.dilation.branches):
        first, last = (x.at(x.rank, place) // w for place in (np.zeros_like(x.place), x.count - 1))
        total += branch(pairs, number, *plain) * ((x.p // w == first) | (x.p // w == last))
    return total * pairs.counts(lambda name: None if name == "dilation" else plain)


def _given_of_one_segment(end: str, pairs: Pairs) -> Counts | None:
    """Return counts without other ranks' keys, but for the segment of the first, or last, row that a branch covers."""
    p, x = pairs.problem, pairs.queries
    if p.dilation is None:
        return None
    total, plain = np.zeros_like(pairs.true), (x.p, pairs.keys.p)
    for number, (w, _) in enumerate(p.dilation.branches):
        covered, given = kept(pairs, number), np.full((p.heads, p.nq, 1), -1)
        for held, (head, of_head) in itertools.product(x.shards, enumerate(covered)):
            if of_head[held].any():
                given[head, held] = held[of_head[held]][0 if end == "first" else -1] // w
        own = pairs.rank == pairs.owner
        total += branch(pairs, number, *plain) * (own | (pairs.keys.p // w == given))
    return total * pairs.counts(lambda name: None if name == "dilation" else plain)


PLACES: dict[str, Callable[[OneSide, int], Ints]] = {
    "position": lambda x, w: x.p,
    "place in the shard": lambda x, w: x.place,
    "place in the shard, as if the segments began there": lambda x, w: x.place % w,
}
"""What may decide whether a branch covers a row, by the segment length, in words."""


def _covered_by(at: Callable[[OneSide, int], Ints], queries: bool, keys: bool, pairs: Pairs) -> Counts | None:
    """Return counts if segments are right, but queries or keys, or both, are covered by another number."""
    p = pairs.problem
    if p.dilation is None:
        return None
    i, j = pairs.queries.p, pairs.keys.p
    total = np.zeros_like(pairs.true)
    for number, (w, r) in enumerate(p.dilation.branches):
        # A place below the rate, in the first segment, is covered as its remainder decides.
        places = [(at(x, w) if moved else x.p % w) % r for x, moved in ((pairs.queries, queries), (pairs.keys, keys))]
        total += _let_through(pairs, number, *places) * (i // w == j // w)
    return total * pairs.counts(lambda name: None if name == "dilation" else (i, j))


def _let_through(pairs: Pairs, number: int, i: Ints, j: Ints) -> Counts | Mask:
    """Return whether a branch covers both of two places in a segment, however short the segments are."""
    p = pairs.problem
    assert p.dilation is not None
    branches = tuple((max(w, r), r) for w, r in p.dilation.branches)
    one = copy.copy(pairs)
    one.problem = p.replace(dilation=dataclasses.replace(p.dilation, branches=branches))
    return branch(one, number, i, j)


def _window_in_steps(pairs: Pairs) -> Counts | None:
    """Return counts if a window counts the positions that a branch takes, instead of all."""
    p = pairs.problem
    if p.dilation is None or p.window is None:
        return None
    i, j = pairs.queries.p, pairs.keys.p
    (left, right), total = p.window, np.zeros_like(pairs.true)
    for number, (_, r) in enumerate(p.dilation.branches):
        ahead = (j - i - p.diagonal) // r
        inside = (left is None or ahead >= -left) & (right is None or ahead <= right)
        total += branch(pairs, number, i, j) * inside
    return total * pairs.counts(lambda name: None if name in ("dilation", "window") else (i, j))


SHARDS: dict[str, Callable[[Pairs], Ints]] = {
    "the shortest shard": lambda pairs: np.array(min(map(len, pairs.keys.shards))),
    "the longest shard": lambda pairs: np.array(max(map(len, pairs.keys.shards))),
    "the rank's shard": own_keys,
}
"""With what the length of a segment may be compared, in words."""


def _no_longer(of: Callable[[Pairs], Ints], w: int, pairs: Pairs) -> Mask:
    return np.asarray(w <= of(pairs))


def _dividing(of: Callable[[Pairs], Ints], w: int, pairs: Pairs) -> Mask:
    return np.asarray(of(pairs) % w == 0)


LOCAL: dict[str, Callable[[int, Pairs], Mask]] = {
    **{f"are no longer than {text}": functools.partial(_no_longer, of) for text, of in SHARDS.items()},
    **{f"divide {text}": functools.partial(_dividing, of) for text, of in SHARDS.items()},
}
"""Which segments may be taken to lie within a shard each, by their length, in words."""


def _local(local: Callable[[int, Pairs], Mask], pairs: Pairs) -> Counts | None:
    """Return counts without other ranks' keys in branches whose segments are such."""
    p = pairs.problem
    if p.dilation is None or pairs.case.replicated:
        return None
    plain = pairs.queries.p, pairs.keys.p
    rest, total = pairs.counts(lambda name: None if name == "dilation" else plain), np.zeros_like(pairs.true)
    for number, (w, _) in enumerate(p.dilation.branches):
        total += branch(pairs, number, *plain) * (~local(w, pairs) | (pairs.rank == pairs.owner))
    return rest * total


DROPPED: dict[str, Callable[[int, int], int]] = {
    "the rate": lambda w, rate: rate,
    "the others": lambda w, rate: w,
}
"""Up to which length a last segment may be left out, by the length of the others and the rate, in words."""


def _without_last(least: Callable[[int, int], int], pairs: Pairs) -> Counts | None:
    """Return counts without the last segment of each branch, if it is that short."""
    p = pairs.problem
    if p.dilation is None:
        return None
    plain = pairs.queries.p, pairs.keys.p
    rest, total = pairs.counts(lambda name: None if name == "dilation" else plain), np.zeros_like(pairs.true)
    for number, (w, r) in enumerate(p.dilation.branches):
        short = p.nk % w < least(w, r)
        total += branch(pairs, number, *plain) * ~(short & (plain[0] >= p.nk - p.nk % w))
    return rest * total


def _in_whole_steps(pairs: Pairs) -> Counts | None:
    """Return counts without the positions of each segment, a last shorter one too, past a multiple of the rate."""
    p = pairs.problem
    if p.dilation is None:
        return None
    i, j = pairs.queries.p, pairs.keys.p
    rest, total = pairs.counts(lambda name: None if name == "dilation" else (i, j)), np.zeros_like(pairs.true)
    for number, (w, r) in enumerate(p.dilation.branches):
        of_query, of_key = (x % w < np.minimum(w, p.nk - x // w * w) // r * r for x in (i, j))
        total += branch(pairs, number, i, j) * (of_query & of_key)
    return rest * total


EQUAL: dict[str, Callable[[int, int], int]] = {
    "ceil(length / ranks) positions": lambda n, ranks: -(-n // ranks),
    "length // ranks positions": lambda n, ranks: n // ranks,
}
"""How many positions every rank may be taken to hold, by the length and the number of ranks, in words."""


def _in_segments_of_equal_shards(equal: Callable[[int, int], int], pairs: Pairs) -> Counts | None:
    """Return counts without queries in segments in which their rank would hold nothing with equal shards."""
    p = pairs.problem
    here = equal(p.nk, pairs.size)
    if pairs.case.sharding != "contiguous" or not here:
        return None
    i, j, rank = pairs.queries.p, pairs.keys.p, pairs.rank
    rest, total = pairs.counts(lambda name: None if name == "dilation" else (i, j)), np.zeros_like(pairs.true)
    last = np.minimum((rank + 1) * here, p.nk) - 1
    for number, (w, _) in enumerate(((p.nk, 1),) if p.dilation is None else p.dilation.branches):
        through = 1 if p.dilation is None else branch(pairs, number, i, j)
        total += through * ((i // w >= rank * here // w) & (i // w <= last // w))
    return rest * total


def _segments(at: At, pairs: Pairs) -> Counts | None:
    """Return counts if the segment of a key, but not its place in it, is that of another position."""
    p = pairs.problem
    if p.dilation is None:
        return None
    plain = pairs.queries.p, pairs.keys.p
    rest, total = pairs.counts(lambda name: None if name == "dilation" else plain), np.zeros_like(pairs.true)
    keys = at(pairs, pairs.keys)
    for number, (w, _) in enumerate(p.dilation.branches):
        i = plain[0] % w  # in one segment, where only places in it decide
        through = branch(pairs, number, i, plain[1] % w)
        total += through * (plain[0] // w == keys // w)
    return rest * total


def _last_joined(counted: bool, pairs: Pairs) -> Counts | None:
    """Return counts if as many segments are told apart as there are whole ones.

    Args:
        counted: whether places in the last one are counted from the beginning of the one that it is joined to.
        pairs: the pairs.
    """
    p = pairs.problem
    if p.dilation is None:
        return None
    i, j = pairs.queries.p, pairs.keys.p
    rest, total = pairs.counts(lambda name: None if name == "dilation" else (i, j)), np.zeros_like(pairs.true)
    for number, (w, r) in enumerate(p.dilation.branches):
        last = max(p.nk // w, 1) - 1
        of_i, of_j = (np.minimum(x // w, last) for x in (i, j))
        places = ((x - of * w) % r if counted else x % w for x, of in ((i, of_i), (j, of_j)))
        total += branch(pairs, number, *places) * (of_i == of_j)
    return rest * total


def _placed_in_shards(pairs: Pairs) -> Counts | None:
    """Return counts if segments are right, but places in them are counted from the shard's first position."""
    p = pairs.problem
    if p.dilation is None or pairs.case.sharding != "contiguous":
        return None
    plain = pairs.queries.p, pairs.keys.p
    rest, total = pairs.counts(lambda name: None if name == "dilation" else plain), np.zeros_like(pairs.true)
    for number, (w, _) in enumerate(p.dilation.branches):
        through = branch(pairs, number, pairs.queries.place % w, pairs.keys.place % w)
        total += through * (plain[0] // w == plain[1] // w)
    return rest * total


def _offset(of: Callable[[Problem, int], Ints], pairs: Pairs) -> Counts | None:
    """Return counts with other offsets of heads, which take no position if they are no remainder of the rate."""
    return _taking(of, lambda place, rate, offset: place % rate == offset, pairs)


def _offset_on(of: Callable[[Problem, int], Ints], pairs: Pairs) -> Counts | None:
    """Return counts with other offsets of heads, from which on they take every position that is a rate further."""
    return _taking(of, lambda place, rate, offset: (place >= offset) & ((place - offset) % rate == 0), pairs)


def _taking(
    of: Callable[[Problem, int], Ints], takes: Callable[[Ints, int, Ints], Mask], pairs: Pairs
) -> Counts | None:
    p = pairs.problem
    if p.dilation is None or p.dilation.heads != "shared":
        return None
    i, j = pairs.queries.p, pairs.keys.p
    total = np.zeros((p.heads, p.nq, p.nk), dtype=np.int64)
    for w, r in p.dilation.branches:
        offset = of(p, r)[:, None, None]
        total += (i // w == j // w) & takes(i % w, r, offset) & takes(j % w, r, offset)
    return total * pairs.counts(lambda name: None if name == "dilation" else (i, j))


def _causal_by_place(pairs: Pairs) -> Counts | None:
    """Return counts if the n-th query of a rank in a segment attends its first n keys, counted in each branch."""
    p = pairs.problem
    if not p.causal or pairs.case.replicated:
        return None
    plain = pairs.queries.p, pairs.keys.p
    rest = pairs.counts(lambda name: None if name in ("dilation", "causal") else plain)
    total = np.zeros_like(pairs.true)
    for number in range(1 if p.dilation is None else len(p.dilation.branches)):
        through = np.ones_like(pairs.true) if p.dilation is None else branch(pairs, number, *plain) + 0 * pairs.true
        total += through * (_place_of_query(through, pairs) >= np.cumsum(through, axis=-1) - 1)
    return rest * total


def _causal_by_kept(pairs: Pairs) -> Counts | None:
    """Return counts if a key is hidden whose number among those of its shard is larger than that of the query."""
    p, plain = pairs.problem, (pairs.queries.p, pairs.keys.p)
    if not p.causal or pairs.case.replicated or p.nq != p.nk:
        return None
    rest = pairs.counts(lambda name: None if name in ("dilation", "causal") else plain)
    total = np.zeros_like(pairs.true)
    for number in range(1 if p.dilation is None else len(p.dilation.branches)):
        through = np.ones_like(pairs.true[0]) if p.dilation is None else branch(pairs, number, *plain)
        rows = np.ones((p.heads, p.nk), dtype=bool) if p.dilation is None else kept(pairs, number)
        place = np.zeros(rows.shape, dtype=np.int64)
        for held in pairs.keys.shards:
            place[:, held] = rows[:, held].cumsum(axis=1)
        total += through * (place[:, None, :] <= place[:, :, None])
    return rest * total


ENDING: dict[str, Callable[[Pairs, int], Mask]] = {
    "its segments are none of those of the rank's queries": lambda pairs, w: _by_block(
        pairs, pairs.queries.p // w == pairs.keys.p // w
    ),
    "its segments, from first to last, are none of those of the rank's queries, from first to last": lambda pairs, w: (
        _by_block(pairs, _overlapping(pairs, w))
    ),
    "no query of the rank attends any of its keys": lambda pairs, w: _by_block(pairs, pairs.true.any(axis=(0, 1))),
}
"""When a loop over branches may end for a block, in words; whether it goes on, `(Nq, Nk)`, by the segment length."""


def _overlapping(pairs: Pairs, w: int) -> Mask:
    """Return whether segments of a rank's queries and of a block, from first to last of each, have any in common."""
    mine, theirs = ([np.array([held[at] // w if len(held) else -1 for held in x.shards])[x.rank] for at in (0, -1)]
                   for x in (pairs.queries, pairs.keys))  # fmt: skip
    found: Mask = (mine[0] <= theirs[1]) & (theirs[0] <= mine[1])
    return found


def _by_block(pairs: Pairs, holds: Mask | np.bool_) -> Mask:
    """Return whether something holds of any pair of a block, for each of its pairs."""
    holds = np.asarray(holds)
    found = np.zeros(holds.shape, dtype=bool)
    for queries, keys in itertools.product(pairs.queries.shards, pairs.keys.shards):
        found[np.ix_(queries, keys)] = holds[np.ix_(queries, keys)].any()
    return found


def _until_a_branch(goes_on: Callable[[Pairs, int], Mask], pairs: Pairs) -> Counts | None:
    """Return counts without a block in branches from the first one on that ends the loop."""
    if pairs.problem.dilation is None or len(pairs.of_branches) == 1:
        return None
    going, total = np.ones(pairs.true.shape[2:], dtype=bool), np.zeros_like(pairs.true)
    for one in pairs.of_branches:
        going &= goes_on(one, one.segment[0])
        total += one.true * going
    return total


ALIKE: dict[str, Callable[[tuple[int, int]], int]] = {
    "with the same rate": lambda segment: segment[1],
    "with segments of the same length": lambda segment: segment[0],
}
"""By what results of branches may be kept, in words."""


def _last_of_alike(of: Callable[[tuple[int, int]], int], pairs: Pairs) -> Counts | None:
    """Return counts without a branch in rows that a later one covers, too, of which the same is true."""
    p = pairs.problem
    if p.dilation is None or len(pairs.of_branches) == len({of(one) for one in p.dilation.branches}):
        return None
    total = np.zeros_like(pairs.true)
    for number, one in enumerate(pairs.of_branches):
        later = [
            at for at in range(number + 1, len(pairs.of_branches)) if of(p.dilation.branches[at]) == of(one.segment)
        ]
        total += one.true * ~_covered(pairs, later)[..., None]
    return total


def _of_the_first_alike(pairs: Pairs) -> Counts | None:
    """Return counts if branches have the segments of the first with their rate and offset, by which these are kept.

    With shared heads every branch of a rate has all of its offsets.
    """
    dilation = pairs.problem.dilation
    if dilation is None:
        return None
    alike = [
        (rate, number % rate if dilation.heads == "split" else 0) for number, (_, rate) in enumerate(dilation.branches)
    ]
    if len(alike) == len(set(alike)):
        return None
    segments = tuple((dilation.branches[alike.index(one)][0], one[0]) for one in alike)
    plain, shape = (pairs.queries.p, pairs.keys.p), (pairs.problem.nq, pairs.problem.nk)
    i, j = (np.broadcast_to(x, shape) for x in plain)
    other = dataclasses.replace(dilation, branches=segments)
    rest = pairs.counts(lambda name: None if name == "dilation" else plain)
    found: Counts = rest * pattern.branches_through(i, j, dilation=other, heads=pairs.problem.heads)
    return found


def _as_many_as_fit(from_last: bool, pairs: Pairs) -> Counts | None:
    """Return counts without keys of other ranks in segments past as many as a rank's rows would fill from one's start.

    Where a shard does not begin, or end, with a segment, it may touch one more.
    """
    if pairs.problem.dilation is None or pairs.case.sharding != "contiguous" or pairs.case.replicated:
        return None
    ends = np.array([(held[0], held[-1]) if len(held) else (0, 0) for held in pairs.queries.shards])
    first, last = (ends[:, end][pairs.queries.rank] for end in (0, 1))
    total = np.zeros_like(pairs.true)
    for one in pairs.of_branches:
        w = one.segment[0]
        filled, of_key = (pairs.queries.count - 1) // w, pairs.keys.p // w
        lost = of_key < last // w - filled if from_last else of_key > first // w + filled
        total += np.where(lost & (pairs.hop > 0), 0, one.true)
    return total


def _covered(pairs: Pairs, branches: list[int]) -> Mask:
    """Return which queries any of some branches covers, `(H, Nq)`."""
    found: Mask = np.any([kept(pairs, at) for at in branches], axis=0) if branches else np.zeros((1, 1), dtype=bool)
    return found


SPANS: dict[str, Callable[[Positions, Mask], Positions]] = {
    "the queries of its shard that a branch covers": lambda held, covered: held[covered],
    "the queries of its shard": lambda held, covered: held,
}
"""Of which queries the first and the last may be compared, in words, by those that a branch covers."""


def _not_told_apart(rows: Callable[[Positions, Mask], Positions], pairs: Pairs) -> Counts | None:
    """Return counts if queries of a rank attend what a branch covers in all segments of the shard."""
    p = pairs.problem
    if p.dilation is None or pairs.case.sharding != "contiguous" or p.nq != p.nk:
        return None
    total, plain = np.zeros_like(pairs.true), (pairs.queries.p, pairs.keys.p)
    for number, (w, _) in enumerate(p.dilation.branches):
        through, covered, j = branch(pairs, number, *plain) + 0, kept(pairs, number), pairs.keys.p[0]
        for held, head in itertools.product(pairs.queries.shards, range(p.heads)):
            mine, those = held[covered[head, held]], rows(held, covered[head, held])
            if len(mine) and those[-1] - those[0] < w:
                inside = (j >= held[0] // w * w) & (j < (held[-1] // w + 1) * w)
                through[head, mine] = covered[head] & inside
        total += through
    return total * pairs.counts(lambda name: None if name == "dilation" else plain)


def _place_of_query(through: Counts, pairs: Pairs) -> Ints:
    """Return the place of each query among those of its rank that attend something of the same segment."""
    found = np.zeros(through.shape[:3], dtype=np.int64)
    for held in pairs.queries.shards:
        here = through[:, :, held]
        same: Mask = np.all(here[:, :, :, None] == here[:, :, None, :], axis=-1)  # one segment: the same keys
        covered: Mask = np.any(here, axis=-1)
        earlier = np.tril(np.ones((len(held), len(held)), dtype=bool), -1)
        found[:, :, held] = (same & earlier & covered[:, :, None, :]).sum(axis=-1)
    return found[..., None]


def _on_fewer_ranks(up: bool, pairs: Pairs) -> Counts | None:
    """Return counts without the keys of a segment that lie too many ranks after its beginning."""
    p, shards = pairs.problem, pairs.keys.shards
    if p.dilation is None or pairs.case.sharding != "contiguous":
        return None
    i, j = pairs.queries.p, pairs.keys.p
    rest, total = pairs.counts(lambda name: None if name == "dilation" else (i, j)), np.zeros_like(pairs.true)
    here = max(1, *(len(held) for held in shards))
    for number, (w, _) in enumerate(p.dilation.branches):
        begins = pairs.keys.rank[0, np.minimum(j[0] // w * w, p.nk - 1)][None]
        ranks = max(1, -(-w // here) if up else w // here)
        total += branch(pairs, number, i, j) * (pairs.keys.rank < begins + ranks)
    return rest * total
