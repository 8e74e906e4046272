"""Who sends what at which hop, for every rank alike, from which ranks need which blocks.

A block of keys and values travels to the right and stops at the last rank that needs it. In backward its gradient
starts at the first rank after the owner that needs the block, follows it, and goes home from the last one: onwards
round the ring or, where no block travels further than half of it (a short window), back the way it came. All gradients
take the same way, so that a rank rarely holds more than one that comes and one that leaves. Nothing is negotiated:
every rank knows the moves of all.

Hops are numbered by their boundary: boundary t lies between step t and step t + 1, and at step t rank r holds the
block of rank r - t.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Moves(NamedTuple):
    """Gradients of blocks that one rank sends and receives at one boundary, as `(owner, other rank)` by owner."""

    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[tuple[int, int], ...] = ()


class Schedule(NamedTuple):
    """One rank's part in a pass.

    Attributes:
        rank: this rank.
        world_size: ranks of the group.
        reach: for every owner, how many hops its block travels.
        computes: whether this rank needs the block it holds at each step.
        gradients: this rank's moves of gradients at each boundary.
    """

    rank: int
    world_size: int
    reach: tuple[int, ...]
    computes: tuple[bool, ...]
    gradients: tuple[Moves, ...]

    @property
    def steps(self) -> int:
        """Steps of the forward pass, its own block's included."""
        return len(self.computes)

    def owner(self, step: int) -> int:
        """Whose block this rank holds at a step, if it holds one."""
        return (self.rank - step) % self.world_size

    def passes_on(self, step: int) -> bool:
        """Whether the block held at a step is sent on at its end."""
        return self.reach[self.owner(step)] > step

    def receives(self, step: int) -> bool:
        """Whether a block arrives for the step after this one."""
        return self.reach[self.owner(step + 1)] > step


def schedule(needs: NDArray[np.bool_], rank: int) -> Schedule:
    """The schedule of one rank.

    Args:
        needs: `(ranks, owners)`: whether a query of the rank attends a key of the owner.
        rank: this rank.
    """
    world_size, hops_of = len(needs), wanted(needs)
    reach = tuple(max(hops, default=0) for hops in hops_of)
    sends: dict[int, list[tuple[int, int]]] = {}
    receives: dict[int, list[tuple[int, int]]] = {}
    for owner, (hops, places) in enumerate(zip(hops_of, dkv_returns(hops_of, world_size), strict=True)):
        here = (rank - owner) % world_size
        for at, place in enumerate(places):
            if place == here:
                boundary = hops[0] + at
                if at + 1 < len(places):
                    sends.setdefault(boundary, []).append((owner, (owner + places[at + 1]) % world_size))
                if at > 0:
                    receives.setdefault(boundary - 1, []).append((owner, (owner + places[at - 1]) % world_size))
    last = max((*sends, *receives), default=-1)
    return Schedule(
        rank,
        world_size,
        reach,
        tuple(needs[rank, (rank - np.arange(max(reach) + 1)) % world_size].tolist()),
        tuple(
            Moves(tuple(sorted(sends.get(boundary, ()))), tuple(sorted(receives.get(boundary, ()))))
            for boundary in range(last + 1)
        ),
    )


def wanted(needs: NDArray[np.bool_]) -> list[list[int]]:
    """By owner, the hops after which its block is at a rank that needs it, in ascending order."""
    hop, owners = np.arange(1, len(needs))[:, None], np.arange(len(needs))
    by_hop = needs[(owners + hop) % len(needs), owners]
    return [(1 + np.flatnonzero(of)).tolist() for of in by_hop.T]


def dkv_returns(hops_of: list[list[int]], world_size: int) -> list[list[int]]:
    """By owner, where its block's gradient is, in hops from it, at every boundary from its first contribution on."""
    reach = max(max(hops, default=0) for hops in hops_of)
    if world_size - reach <= reach:  # onwards
        return [[*range(hops[0], world_size), 0] if hops else [] for hops in hops_of]
    return [[*range(hops[0], hops[-1]), *range(hops[-1], -1, -1)] if hops else [] for hops in hops_of]
