"""How long the sides of a call's tiles are.

A kernel says which side it likes, and what a tile costs it. A mask that is built is bounded beside that: by a part of
what the rank's queries take, so that memory stays linear in them, and by what more rows would save, so that it is small
beside long ones. With a memory budget tiles and masks are as large as fit it together.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from numbers import Integral
from typing import NamedTuple

from ringref.problem import Problem
from ringverify.ring import masks
from ringverify.ring.kernels.kernel import Extent, Kernel, Setting
from ringverify.ring.kernels.streaming import STREAMING
from ringverify.ring.plan.geometry import constrained
from ringverify.ring.plan.tiles import NARROWEST, WIDEST_MASK

SMALLEST = 32
"""Rows of a tile below which calls cost more than what they compute, whatever the budget."""
MASK_SHARE = 8
"""A rank's queries have so many times as many elements as a mask."""
BUDGET_SHARE = 4
"""A mask takes at most one part in so many of a memory budget, and tiles the others."""


class Sides(NamedTuple):
    """The longest sides of tiles.

    Attributes:
        bucket: of a tile that the kernel of the call computes.
        streaming: of a tile that is left to the streaming kernel.
        band: queries of a tile whose mask is a band.
        positions: queries and keys of a tile whose mask is looked up by position.
        bounded: whether a memory budget bounds them.
        all_keys: whether a forward that cuts tiles itself may have all keys of a block at once.
        at_once: whether one call may have all queries and keys.
    """

    bucket: int
    streaming: int
    band: int
    positions: int
    bounded: bool = False
    all_keys: bool = True
    at_once: bool = True


def make_sides(
    problem: Problem, setting: Setting, kernel: Kernel, queries: int, keys: int, memory_budget: int | None
) -> Sides:
    """The sides of a call on one rank.

    Args:
        problem: what all ranks compute.
        setting: of the call.
        kernel: that was chosen.
        queries: of this rank.
        keys: of this rank; other blocks are about as long.
        memory_budget: bytes for a tile and its mask, or `None`. It is exceeded where not even the smallest tile fits.

    Raises:
        ValueError: the budget is no positive integer.
    """
    liked = kernel.bucket(setting, max(queries, keys))
    streaming = min(liked, STREAMING.bucket(setting, liked))
    elements = problem.batch * problem.heads * problem.head_dim * queries // MASK_SHARE
    # A mask by position may have batch elements and heads of its own.
    planes = masks.planes(problem)
    band, positions = (min(max(NARROWEST, math.isqrt(elements // each)), WIDEST_MASK) for each in (1, planes))
    if memory_budget is None:
        return Sides(liked, streaming, band, positions)
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, Integral) or memory_budget <= 0:
        raise ValueError(f"memory_budget={memory_budget!r}: expected a positive number of bytes, an integer, or None")

    def extent(rows: int, keys: int) -> Extent:
        return Extent(problem.batch, problem.heads, problem.hk, rows, keys)

    for_masks = memory_budget // BUDGET_SHARE if constrained(problem) else 0
    for_tiles = memory_budget - for_masks
    bucket = _largest(liked, for_tiles, lambda side: kernel.held(setting, extent(side, side)))
    return Sides(
        bucket,
        _largest(streaming, for_tiles, lambda side: STREAMING.held(setting, extent(side, side))),
        _largest(band, for_masks, lambda side: masks.held(setting.accumulates, side, 2 * side)),
        _largest(positions, for_masks, lambda side: masks.held(setting.accumulates, side, side, planes=planes)),
        bounded=True,
        all_keys=kernel.held(setting, extent(bucket, keys)) <= for_tiles,
        at_once=kernel.held(setting, extent(queries, keys)) <= for_tiles,
    )


def _largest(liked: int, budget: int, cost: Callable[[int], int]) -> int:
    """The largest side up to the one that is liked whose cost fits, and the smallest if none does."""
    return min(liked, SMALLEST + bisect_right(range(SMALLEST + 1, liked + 1), budget, key=cost))
