"""Partial results that are lost, or added twice, where they are merged two by two or exchanged in rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from ringverify.diagnosis.pairs import INNER, Ints, Otherwise, Pairs
from ringverify.diagnosis.scene import Counts


def _by_twos(size: int, *, halves: bool) -> list[int]:
    """Return whose results are left if two at a time are merged: neighbours, or one of each half."""
    have = [[number] for number in range(size)]
    while len(have) > 1:
        half = len(have) // 2
        two = (have[:half], have[half : 2 * half]) if halves else (have[::2], have[1::2])
        have = [a + b for a, b in zip(*two, strict=False)]
    return have[0]


def _left_over(order: Callable[[Pairs], Ints], halves: bool, pairs: Pairs) -> Counts:
    """Return counts if partial results are merged two by two, in this order, and an odd one is dropped."""
    return np.where(np.isin(order(pairs), _by_twos(pairs.size, halves=halves)), pairs.true, 0)


Partner = Callable[[int, int, int], int]
"""The rank from which a rank takes partial results, by rank, how far away that is, and ranks; outside of all, none."""


def _exchanged(partner: Partner, rounded_down: bool, pairs: Pairs) -> Counts:
    """Return counts if every rank adds what its partners have: those 1, 2, 4 … away, where there is such a rank."""
    size, step = pairs.size, 1
    have = np.eye(size, dtype=np.int64)
    while step < size and (not rounded_down or 2 * step <= size):
        other = np.array([partner(rank, step, size) for rank in range(size)])
        inside = (other >= 0) & (other < size)
        have, step = have + np.where(inside[:, None], have[other % size], 0), 2 * step
    return pairs.true * have[pairs.rank, pairs.owner]


def _of_rings(inner: Callable[[int], int], pairs: Pairs) -> tuple[Ints, int]:
    of_ring = inner(pairs.size)
    rings = pairs.size // of_ring
    return (pairs.rank // of_ring - pairs.owner // of_ring) % rings, rings


ROUNDS: dict[str, Callable[[Pairs], tuple[Ints, int]]] = {
    "hops": lambda pairs: (pairs.hop, pairs.size),
    **{f"rounds of inner rings, of {text}": functools.partial(_of_rings, of) for text, of in INNER.items()},
}
"""Rounds in which partial results are merged: of each pair the number of its round, and how many there are."""

PARTNERS: dict[str, Partner] = {
    "rank XOR 1, 2, 4, …": lambda rank, step, size: rank ^ step,
    "the ranks 1, 2, 4, … before": lambda rank, step, size: (rank - step) % size,
    "the ranks 1, 2, 4, … after": lambda rank, step, size: (rank + step) % size,
}
"""With whom a rank may exchange in rounds, which is right of a number of ranks that is a power of 2."""


def _again(rounds: Callable[[Pairs], tuple[Ints, int]], pairs: Pairs) -> Counts:
    """Return counts if all that was merged so far is merged again at the end of each round."""
    number, count = rounds(pairs)
    return pairs.true * (count - number)


def _partners(pairs: Pairs) -> Counts:
    """Return counts if a rank meets the ranks `rank XOR step`, and a step without such a rank is left out."""
    return np.where((pairs.rank ^ pairs.owner) < pairs.size, pairs.true, 0)


def _last_piece(own: bool, pairs: Pairs) -> Counts | None:
    """Return counts if, of the pieces of a zigzag shard of keys, the last counts that a piece of queries attends.

    A causal mask and a window alone decide which pieces these are.

    Args:
        own: whether that is so of a rank's own keys only.
        pairs: the pairs.
    """
    if (by_piece := pairs.of_pieces()) is pairs:
        return None
    found, shards = pairs.true.copy(), by_piece.keys.shards
    last = len(shards) - 1
    for rows in by_piece.queries.shards:
        for number in range(pairs.size):
            early, late = shards[number], shards[last - number]
            there = len(rows) > 0 and (not own or int(pairs.queries.rank[rows[0], 0]) == number)
            if there and pairs.within_bounds[np.ix_(rows, late)].any():
                found[:, :, rows[:, None], early] = 0
    return found


def ways_to_merge() -> Iterator[Otherwise]:
    """Yield ways to lose partial results, or to add them twice, where they are merged."""
    for whose, own in {"of a rank's own zigzag shard": True, "of a zigzag shard": False}.items():
        says = f"what the late piece {whose} of keys gives takes the place of what the early one gives"
        yield Otherwise(says, functools.partial(_last_piece, own), 0.5)
    yield Otherwise(
        "ranks meet two by two, rank with rank XOR step for steps below the number of ranks: right only of 2, 4, 8, …, "
        "others miss those for which that is no step",
        _partners,
        0.5,
    )
    for text, rounds in ROUNDS.items():
        says = f"what was merged in earlier {text} is merged again with each later one"
        yield Otherwise(says, functools.partial(_again, rounds), 0.75)
    orders: dict[str, Callable[[Pairs], Ints]] = {
        "by rank": lambda pairs: pairs.owner + 0 * pairs.rank,
        "by hop": lambda pairs: pairs.hop,
    }
    for halves, (text, order) in product((False, True), orders.items()):
        which = ", one of each half" if halves else ""
        says = f"partial results are merged two by two, {text}{which}, and an odd one that is left over is dropped"
        yield Otherwise(says, functools.partial(_left_over, order, halves), 0.5)
    for whom, partner in PARTNERS.items():
        for rounded_down in (False, True):
            which = "log2(ranks) rounds, rounded down" if rounded_down else "rounds"
            yield Otherwise(
                f"partial results are exchanged in {which}, with {whom}: right only for 2, 4, 8, … ranks",
                functools.partial(_exchanged, partner, rounded_down),
                0.75,
            )
