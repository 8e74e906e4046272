"""Hybrids: teams of ranks exchange heads for positions, and the positions of whole teams then go round a ring.

As seen by its ring, a case is one of fewer ranks, which hold what their members hold. So every fault of a ring may be
one of a hybrid too. How many ranks are a team, and whether these are neighbours, is not declared: it is tried.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from ringref.problem import Problem
from ringref.sharding import Positions, key_positions
from ringverify.cases.case import Case
from ringverify.cases.local import RankResult
from ringverify.cases.running import Observation
from ringverify.diagnosis.scene import Array, Scene
from ringverify.faults.place import smallest_divisor


def largest_divisor(n: int) -> int:
    """Return the largest divisor of a number but 1 and itself; itself if there is none."""
    return next((m for m in range(n - 1, 1, -1) if n % m == 0), n)


@dataclasses.dataclass(frozen=True)
class Grid:
    """A way to part ranks into teams.

    Attributes:
        text: how many ranks are a team, to follow "teams".
        members: the same, by problem and ranks.
        apart: whether the members of a team are as far from each other as there are teams, instead of neighbours.
        uneven: whether the last team may have fewer members.
    """

    text: str
    members: Callable[[Problem, int], int]
    apart: bool = False
    uneven: bool = False

    @property
    def whose(self) -> str:
        """Whose the blocks are, as the end of a sentence about blocks."""
        return f", blocks being those of teams {self.text}"

    def teams(self, case: Case) -> list[list[int]]:
        """Return the ranks of each team; one in each where every rank holds all queries, and on a cache."""
        size = case.world_size
        whole = case.replicated or case.apart is not None
        each = 1 if whole else self.members(case.problem, size)
        if self.uneven:
            return [list(range(at, min(at + each, size))) for at in range(0, size, each)]
        count = size // each
        if self.apart:
            return [list(range(team, size, count)) for team in range(count)]
        return [list(range(team * each, (team + 1) * each)) for team in range(count)]


OF: dict[str, Callable[[Problem, int], int]] = {
    "of as many ranks as divide ranks and key heads": lambda p, size: math.gcd(size, p.hk),
    "of as many ranks as divide ranks and heads": lambda p, size: math.gcd(size, p.heads),
    "of two ranks where their number is even": lambda p, size: 1 + (size % 2 == 0),
    "of as many ranks as the smallest divisor of their number": lambda p, size: smallest_divisor(size),
    "of as many ranks as the largest divisor of their number": lambda p, size: largest_divisor(size),
    "of as many ranks as the largest divisor up to the square root of their number": lambda p, size: next(
        each for each in range(math.isqrt(size), 0, -1) if size % each == 0
    ),
}

GRIDS: tuple[Grid, ...] = tuple(
    Grid(text + ", members lying apart" * apart, members, apart)
    for apart in (False, True)
    for text, members in OF.items()
)


USUAL = (*GRIDS[:3], GRIDS[5])
"""Teams of neighbours: as many as the number of heads allows, two, or so many that ranks are most nearly a square."""

HALVES = GRIDS[4]
"""Teams of neighbours, as large as they can be: two of them where the number of ranks is even."""

EVEN = Grid("of two ranks where their number and that of heads are even", lambda p, size: 2 - (size % 2 | p.heads % 2))
"""Teams of two neighbours that share out the heads, if they can."""

IN_PAIRS = Grid("of two neighbours, of which the last may be alone", lambda p, size: 2, uneven=True)
"""Teams of two."""


def joined(shards: list[Positions], teams: list[list[int]]) -> list[Positions]:
    """Return the positions of each team, member by member."""
    return [np.concatenate([shards[rank] for rank in team]) for team in teams]


def as_teams_see(scene: Scene, grid: Grid) -> Scene:
    """Return a case as one whose ranks are the teams; itself if every rank is a team."""
    teams = grid.teams(scene.case)
    if len(teams) == scene.size:
        return scene

    def seen() -> Scene:
        case = scene.case.replace(world_size=len(teams), group="world", delayed=())
        each = scene.observation.ranks
        ranks = tuple(_together([each[rank] for rank in team]) for team in teams if each)
        found = Scene(case, scene.capabilities, Observation(ranks, None))
        queries, keys = scene.shards

        def held(length: int, world_size: int) -> list[Positions]:
            return joined(key_positions(scene.sharding, length, scene.size, scene.problem.documents), teams)

        found.__dict__["sharding"] = held
        found.__dict__["shards"] = joined(queries, teams), joined(keys, teams)
        for name in ("inputs", "truth", "pipeline", "allowed"):  # of all ranks, whichever these are
            found.__dict__[name] = getattr(scene, name)
        return found

    return scene.once(("teams", tuple(map(tuple, teams))), seen)


def _together(members: list[RankResult]) -> RankResult:
    def rows(name: str, axis: int) -> Array | None:
        each = [getattr(one, name) for one in members]
        return None if each[0] is None else np.concatenate(each, axis)

    out = np.concatenate([one.out for one in members], 1)
    return dataclasses.replace(
        members[0], out=out, lse=rows("lse", 2), dq=rows("dq", 1), dk=rows("dk", 1), dv=rows("dv", 1)
    )
