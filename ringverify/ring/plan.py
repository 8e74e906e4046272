"""What one rank knows before anything is computed or sent: who holds what, who needs whom, and in which tiles.

Made from the problem, the sharding and the world size alone, so that ranks agree without a word, and kept for the next
call of the same kind. No tensors; only runs, regions and moves, see those modules.
"""

from __future__ import annotations

import dataclasses
import functools

from ringref.problem import Problem
from ringref.sharding import Sharding
from ringverify.ring.regions import Region, regions
from ringverify.ring.runs import Run, runs
from ringverify.ring.schedule import Schedule, schedule


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One attention as one rank sees it.

    Attributes:
        problem: what all ranks compute together.
        rank: this rank within the group.
        world_size: ranks in the group.
        replicated: whether every rank holds all queries.
        queries: this rank's queries.
        keys: every rank's keys, by rank.
        regions: for every owner, how this rank's queries meet its keys; computed when first asked for.
        schedule: who sends what at which hop.
    """

    problem: Problem
    rank: int
    world_size: int
    replicated: bool
    queries: tuple[Run, ...]
    keys: tuple[tuple[Run, ...], ...]
    schedule: Schedule
    _regions: dict[int, tuple[Region, ...]] = dataclasses.field(default_factory=dict, repr=False)

    def regions(self, owner: int) -> tuple[Region, ...]:
        """How this rank's queries meet the keys of a rank."""
        if owner not in self._regions:
            self._regions[owner] = tuple(regions(self.problem, self.queries, self.keys[owner]))
        return self._regions[owner]

    @property
    def query_count(self) -> int:
        """Queries of this rank."""
        return sum(run.size for run in self.queries)

    def key_count(self, owner: int) -> int:
        """Keys of a rank."""
        return sum(run.size for run in self.keys[owner])


@functools.lru_cache(maxsize=128)
def make_plan(problem: Problem, sharding: Sharding, world_size: int, rank: int) -> Plan:
    """The plan of one rank.

    Args:
        problem: what all ranks compute.
        sharding: who holds which positions.
        world_size: ranks of the group.
        rank: this rank.
    """
    replicated = sharding == "replicated_query"
    keys = tuple(runs(sharding, problem.nk, world_size, one) for one in range(world_size))
    queries: list[tuple[Run, ...]]
    if replicated:
        queries = [(Run(0, 1, problem.nq, 0),) if problem.nq else ()] * world_size
    else:
        queries = [runs(sharding, problem.nq, world_size, one) for one in range(world_size)]

    @functools.cache
    def needs(one: int, owner: int) -> bool:
        return next(regions(problem, queries[one], keys[owner]), None) is not None

    if replicated:  # nothing visits
        moves = Schedule(rank, world_size, (0,) * world_size, (needs(rank, rank),), ())
    else:
        moves = schedule(needs, world_size, rank)
    return Plan(problem, rank, world_size, replicated, queries[rank], keys, moves)
