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

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple


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


def schedule(needs: Callable[[int, int], bool], world_size: int, rank: int) -> Schedule:
    """The schedule of one rank.

    Args:
        needs: `(rank, owner)`: whether a query of the rank attends a key of the owner.
        world_size: ranks of the group.
        rank: this rank.
    """
    wanted = [
        [hop for hop in range(1, world_size) if needs((owner + hop) % world_size, owner)] for owner in range(world_size)
    ]
    reach = tuple(max(hops, default=0) for hops in wanted)
    sends: dict[int, list[tuple[int, int]]] = {}
    receives: dict[int, list[tuple[int, int]]] = {}
    onwards = world_size - max(reach) <= max(reach)
    for owner, hops in enumerate(wanted):
        for boundary, (source, target) in enumerate(
            _homewards(owner, hops, world_size, onwards), start=min(hops, default=0)
        ):
            if source == rank:
                sends.setdefault(boundary, []).append((owner, target))
            if target == rank:
                receives.setdefault(boundary, []).append((owner, source))
    last = max((*sends, *receives), default=-1)
    return Schedule(
        rank,
        world_size,
        reach,
        (needs(rank, rank), *(hop in wanted[(rank - hop) % world_size] for hop in range(1, max(reach) + 1))),
        tuple(
            Moves(tuple(sorted(sends.get(boundary, ()))), tuple(sorted(receives.get(boundary, ()))))
            for boundary in range(last + 1)
        ),
    )


def _homewards(owner: int, hops: list[int], world_size: int, onwards: bool) -> list[tuple[int, int]]:
    """The moves of one block's gradient, `(from, to)`, one a boundary from its first contribution on."""
    if not hops:
        return []
    places = list(range(hops[0], (world_size if onwards else hops[-1]) + 1))
    if not onwards:
        places += range(hops[-1] - 1, -1, -1)
    return list(pairwise((owner + place) % world_size for place in places))
