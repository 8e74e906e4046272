"""Windows that are laid in another way: at other distances, in other units, or with one end elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from ringref import pattern
from ringverify.diagnosis.masks.positions import POSITIONS, At, late
from ringverify.diagnosis.pairs import SIDES, Ints, Mask, OneSide, Otherwise, Pairs
from ringverify.diagnosis.scene import Counts

ENDS: dict[tuple[str, ...], str] = {
    SIDES: "both ends of the window are",
    SIDES[:1]: "the left end of the window is",
    SIDES[1:]: "the right end of the window is",
}
"""Which ends are meant, in words."""

UNITS: dict[str, Callable[[Pairs], int]] = {
    "the number of ranks": lambda pairs: pairs.size,
    "the longest shard": lambda pairs: max(map(len, pairs.keys.shards)),
}
"""What a distance may be counted in, in words."""

ROUNDED: dict[str, Callable[[int, int], int]] = {
    "rounded up to the last one before the next multiple": lambda side, unit: side // unit * unit + unit - 1,
    "rounded up": lambda side, unit: -(-side // unit) * unit,
    "rounded down": lambda side, unit: side // unit * unit,
}
"""What becomes of it, in words."""


SPANS: dict[str, Callable[[Pairs, OneSide], Ints]] = {
    "the query's shard": lambda pairs, x: x.rank,
    "the query's zigzag piece": lambda pairs, x: 2 * x.rank + late(x, pairs),
}
"""What keys may be sliced to before a mask is made, in words; numbers of queries and keys that are alike within one."""


def ways_to_lay_windows() -> Iterator[Otherwise]:
    """Yield masks with windows laid otherwise."""
    for ends in ENDS:
        says = f"a window that is 0 on the {' or on the '.join(ends)} is not bounded there"
        yield Otherwise(says, functools.partial(_zero_is_none, ends), 0.25)
        for span, number in SPANS.items():
            yield Otherwise(f"{says} within {span}", functools.partial(_zero_is_none_within, ends, number), 0.5)
    for ends, which in ENDS.items():
        yield Otherwise(
            f"{which} laid in rows of a striped shard, at the distance divided by the number of ranks and rounded down",
            functools.partial(_in_rows, ends),
            0.5,
        )
    for (unit, of), (rounded, to), (ends, which) in product(UNITS.items(), ROUNDED.items(), ENDS.items()):
        says = f"{which} laid at a multiple of {unit}: the distance is {rounded}"
        yield Otherwise(says, functools.partial(_in_units, ends, of, to), 0.75)


def ways_to_bound_striped_blocks() -> Iterator[Otherwise]:
    """Yield masks of which a striped block has other rows, by its division, or none, by how far it is away."""
    says = "the last row of a striped block that a query attends is rounded towards 0: its first row where it is none"
    for reached, which in {False: "", True: ", in blocks of ranks that the window reaches"}.items():
        yield Otherwise(says + which, functools.partial(_first_row_for_none, reached), 0.5 + 0.25 * reached)
    for says, row in STRIPED.items():
        yield Otherwise(
            f"{says} of a striped block that a query attends is {row[0]}", functools.partial(_of_striped, *row[1:]), 0.5
        )
    for side in SIDES:
        says = f"a striped block is skipped that is as many ranks away as a window has keys to the {side}"
        yield Otherwise(f"{says}: the last of these lies in it", functools.partial(_without_the_farthest, side), 0.5)


def _of_striped(end: str, row: Callable[[Pairs, Ints, int], Ints], pairs: Pairs) -> Counts | None:
    """Return counts if a query of row s attends keys from row s + d on, or up to it, with another d.

    Args:
        end: which mask it is: "causal", or the "left" or "right" end of the window.
        row: returns d, by how much the query's rank lies after the key's, `(Nq, Nk)`, and by the window's extent.
        pairs: the pairs.
    """
    p, left_and_right = pairs.problem, dict(zip(SIDES, pairs.problem.window or (None, None), strict=True))
    side = (0 if p.causal else None) if end == "causal" else left_and_right[end]
    if pairs.case.sharding != "striped" or side is None:
        return None
    plain = pairs.queries.p, pairs.keys.p
    found = pairs.counts(lambda name: None if name == ("causal" if end == "causal" else "window") else plain)
    i, j = (np.broadcast_to(x, (p.nq, p.nk)) for x in plain)
    if end != "causal":
        other = {one: None if one == end else extent for one, extent in left_and_right.items()}
        found = found * pattern.window(i, j, left=other["left"], right=other["right"], diagonal=p.diagonal)
    rows, bound = pairs.keys.place - pairs.queries.place, row(pairs, pairs.rank - pairs.owner, side)
    return np.where(rows >= bound if end == "left" else rows <= bound, found, 0)


def _down(x: Ints, pairs: Pairs) -> Ints:
    found: Ints = np.floor_divide(x, pairs.size)
    return found


STRIPED: dict[str, tuple[str, str, Callable[[Pairs, Ints, int], Ints]]] = {
    "the first row in the window": (
        "rounded down instead of up", "left",
        lambda pairs, after, side: _down(after + pairs.problem.diagonal - side, pairs),
    ),
    "the last row in the window": (
        "rounded up instead of down", "right",
        lambda pairs, after, side: -_down(-(after + pairs.problem.diagonal + side), pairs),
    ),
    "under a causal mask, the last row": (
        "rounded up instead of down", "causal",
        lambda pairs, after, side: -_down(-(after + pairs.problem.diagonal), pairs),
    ),
    "where causal, the last row": (
        "rounded down by ranks and by the difference of lengths apart, which may be one too few", "causal",
        lambda pairs, after, side: _down(after, pairs) + _down(np.array(pairs.problem.diagonal), pairs),
    ),
}  # fmt: skip
"""Which row of a striped block may be told otherwise, and how; the mask, and the row less the query's."""


def ways_to_lay_one_end() -> Iterator[Otherwise]:
    """Yield masks with one end of the window laid at other positions."""
    for (text, at), end in product(POSITIONS.items(), SIDES):
        says = f"the {end} end of the window is laid with queries at positions {text}"
        yield Otherwise(says, functools.partial(_one_end, end, at), 1)


def _laid(change: Callable[[int], int | None], ends: tuple[str, ...], pairs: Pairs) -> Counts | None:
    """Return counts with these ends of a window at other distances, where they are bounded; `None` is not bounded."""
    p, plain = pairs.problem, (pairs.queries.p, pairs.keys.p)
    if p.window is None:
        return None
    left, right = (
        change(side) if side is not None and end in ends else side for side, end in zip(p.window, SIDES, strict=True)
    )
    i, j = (np.broadcast_to(x, (p.nq, p.nk)) for x in plain)
    rest = pairs.counts(lambda name: None if name == "window" else plain)
    return rest * pattern.window(i, j, left=left, right=right, diagonal=p.diagonal)


def _zero_is_none(ends: tuple[str, ...], pairs: Pairs) -> Counts | None:
    """Return counts if these sides of a window are not bounded where they are 0."""
    return _laid(lambda side: side or None, ends, pairs)


def _zero_is_none_within(ends: tuple[str, ...], span: Callable[[Pairs, OneSide], Ints], pairs: Pairs) -> Counts | None:
    """Return the same for keys that lie in one span with their query, where queries and keys are sharded alike."""
    if pairs.case.replicated or (free := _zero_is_none(ends, pairs)) is None:
        return None
    return np.where(span(pairs, pairs.queries) == span(pairs, pairs.keys), free, pairs.true)


def _in_units(
    ends: tuple[str, ...], unit: Callable[[Pairs], int], rounded: Callable[[int, int], int], pairs: Pairs
) -> Counts | None:
    """Return counts if the distances of these ends of a window are rounded to multiples of a unit."""
    return _laid(lambda side: rounded(side, max(1, unit(pairs))), ends, pairs)


def _first_row_for_none(reached: bool, pairs: Pairs) -> Counts | None:
    """Return counts if queries of a rank's first row attend the first key of striped blocks that are later.

    A window that is bounded on both sides may reach no key of a rank, however long the sequence is.
    """
    p = pairs.problem
    left, right = p.window or (None, None)
    right = 0 if p.causal else right
    if pairs.case.sharding != "striped" or right is None:
        return None
    plain = pairs.queries.p, pairs.keys.p
    free = pairs.counts(lambda name: None if name in ("causal", "window") else plain)
    before = pairs.owner - pairs.queries.p - p.diagonal - right
    found = (before > 0) & (before < pairs.size) & (pairs.keys.place == 0)
    if reached and left is not None:
        found = found & _reached(pairs, left, right)
    return np.where(found, free, pairs.true)


def _reached(pairs: Pairs, left: int, right: int) -> Mask:
    """Return whether keys of a rank may lie in a window of a rank's queries, in some striped sequence."""
    found: Mask = (pairs.hop <= left) | (pairs.size - pairs.hop <= right)
    return found


def _without_the_farthest(side: str, pairs: Pairs) -> Counts | None:
    """Return counts without blocks of ranks that a window bounded on both sides reaches with its last key alone."""
    left, right = pairs.problem.window or (None, None)
    right = 0 if pairs.problem.causal else right
    if pairs.case.sharding != "striped" or left is None or right is None:
        return None
    nearer = (left - 1, right) if side == "left" else (left, right - 1)
    return np.where((pairs.hop > 0) & ~_reached(pairs, *nearer), 0, pairs.true)


def _in_rows(ends: tuple[str, ...], pairs: Pairs) -> Counts | None:
    """Return counts if ends of a window are laid in rows of striped shards, their distance divided by the ranks."""
    p = pairs.problem
    if p.window is None or pairs.case.sharding != "striped":
        return None
    plain, rows = ((x.p for x in (pairs.queries, pairs.keys)), (x.place for x in (pairs.queries, pairs.keys)))
    i, j, of_i, of_j = (np.broadcast_to(x, (p.nq, p.nk)) for x in (*plain, *rows))
    found = pairs.counts(lambda name: None if name == "window" else (pairs.queries.p, pairs.keys.p))
    for end, side in zip(SIDES, p.window, strict=True):
        of_rows = end in ends and side is not None
        sides = {one: None if one != end or side is None else side // pairs.size if of_rows else side for one in SIDES}
        at, diagonal = ((of_i, of_j), p.diagonal // pairs.size) if of_rows else ((i, j), p.diagonal)
        found = found * pattern.window(*at, left=sides["left"], right=sides["right"], diagonal=diagonal)
    return found


def _one_end(end: str, at: At, pairs: Pairs) -> Counts | None:
    """Return counts with one end of the window laid with queries at other positions."""
    p = pairs.problem
    if p.window is None or p.window[end == "right"] is None:
        return None
    plain, other, (left, right) = pairs.queries.p, at(pairs, pairs.queries), p.window
    j = np.broadcast_to(pairs.keys.p, (p.nq, p.nk))
    of_left, of_right = (np.broadcast_to(other if end == one else plain, (p.nq, p.nk)) for one in ("left", "right"))
    rest = pairs.counts(lambda name: None if name == "window" else (plain, pairs.keys.p))
    inside = pattern.window(of_left, j, left=left, right=None, diagonal=p.diagonal)
    return rest * inside * pattern.window(of_right, j, left=None, right=right, diagonal=p.diagonal)
