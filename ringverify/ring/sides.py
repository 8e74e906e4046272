"""How long the sides of a call's tiles are.

A kernel says which side it likes. A mask that is built is bounded beside that: by a part of what the rank's queries
take, so that memory stays linear in them, and by what more rows would save, so that it is small beside long ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ringref.problem import Problem
from ringverify.ring.tiles import NARROWEST, WIDEST_MASK

MASK_SHARE = 8
"""A rank's queries have so many times as many elements as a mask."""


class Sides(NamedTuple):
    """The longest sides of tiles.

    Attributes:
        bucket: of a tile that the kernel of the call computes.
        band: queries of a tile whose mask is a band.
        positions: queries and keys of a tile whose mask is looked up by position.
    """

    bucket: int
    band: int
    positions: int


def make_sides(problem: Problem, query_count: int, bucket: int) -> Sides:
    """The sides of a call on one rank.

    Args:
        problem: what all ranks compute.
        query_count: this rank's queries.
        bucket: the side that the kernel likes.
    """
    elements = problem.batch * problem.heads * problem.head_dim * query_count // MASK_SHARE
    # A mask by position may have batch elements and heads of its own.
    planes = (1 if problem.key_lengths is None else problem.batch) * (1 if problem.dilation is None else problem.heads)
    band, positions = (_side(elements // each) for each in (1, planes))
    return Sides(bucket, band, positions)


def _side(elements: int) -> int:
    """Of a square with so many elements, within the limits of masks."""
    return min(max(NARROWEST, math.isqrt(elements)), WIDEST_MASK)
