"""What one rank knows before anything is computed or sent: who holds what, who needs whom, and in which tiles.

Made from the problem, the sharding and the world size alone, so that ranks agree without a word, and kept for the next
call of the same kind. No tensors; only runs, regions, rows and moves, see those modules.
"""

from __future__ import annotations

import functools

from ringref.problem import Problem
from ringref.sharding import Sharding
from ringverify.ring.needs import needs
from ringverify.ring.parcels import Parcel, everything, parcel
from ringverify.ring.regions import Region, Span, head_classes, regions
from ringverify.ring.rows import Rows, union
from ringverify.ring.runs import Run, runs
from ringverify.ring.schedule import Schedule, schedule

SLIGHT = 32
"""One part in so many is not cut off: the last key of a striped shard, which half of the ranks do not attend."""


class Plan:
    """One attention as one rank sees it.

    Args:
        problem: what all ranks compute together.
        sharding: who holds which positions.
        world_size: ranks in the group.
        rank: this rank within the group.

    Attributes:
        replicated: whether every rank holds all queries.
        keys: every rank's keys, by rank.
        schedule: who sends what at which hop.
    """

    def __init__(self, problem: Problem, sharding: Sharding, world_size: int, rank: int) -> None:
        self.problem, self.rank, self.world_size = problem, rank, world_size
        self.replicated = sharding == "replicated_query"
        self.keys = tuple(runs(sharding, problem.nk, world_size, one) for one in range(world_size))
        self._queries: list[tuple[Run, ...]]
        if self.replicated:
            self._queries = [(Run(0, 1, problem.nq, 0),) if problem.nq else ()] * world_size
        else:
            self._queries = [runs(sharding, problem.nq, world_size, one) for one in range(world_size)]
        self._classes: tuple[Span, ...] = tuple(
            one.key_heads for one in head_classes(problem.dilation, problem.heads, problem.hk)
        )
        self._regions: dict[tuple[int, int], tuple[Region, ...]] = {}
        self._rows: dict[tuple[int, int], dict[int, Rows]] = {}
        self._parcels: dict[tuple[int, int, int], Parcel] = {}
        self._whole: dict[int, Parcel] = {}
        if self.replicated:  # nothing visits
            self.schedule = Schedule(rank, world_size, (0,) * world_size, (bool(self.regions(rank)),), ())
        else:
            needed = needs(problem, self._queries, self.keys).tolist()
            self.schedule = schedule(lambda one, owner: bool(needed[one][owner]), world_size, rank)

    @property
    def query_count(self) -> int:
        """Queries of this rank."""
        return sum(run.size for run in self._queries[self.rank])

    def key_count(self, owner: int) -> int:
        """Keys of a rank."""
        return sum(run.size for run in self.keys[owner])

    def regions(self, owner: int) -> tuple[Region, ...]:
        """How this rank's queries meet the keys of a rank."""
        return self._regions_of(self.rank, owner)

    def whole(self, owner: int) -> Parcel:
        """All keys of a rank."""
        if owner not in self._whole:
            self._whole[owner] = everything(self.problem, self._classes, self.key_count(owner))
        return self._whole[owner]

    def outward(self, owner: int, boundary: int) -> Parcel:
        """What of a block crosses a boundary: what ranks that it has not yet visited need."""
        reach = self.schedule.reach[owner]
        before = self.whole(owner) if boundary == 0 else self.outward(owner, boundary - 1)
        return _worth_cutting(self._parcel(owner, boundary + 1, reach), before)

    def homeward(self, owner: int, boundary: int) -> Parcel:
        """What of a block's gradient crosses a boundary: what ranks have added to."""
        reach = self.schedule.reach[owner]
        return _worth_cutting(self._parcel(owner, 1, min(boundary, reach)), self.whole(owner))

    def _parcel(self, owner: int, first_hop: int, last_hop: int) -> Parcel:
        key = owner, first_hop, last_hop
        if key not in self._parcels:
            ranks = [(owner + hop) % self.world_size for hop in range(first_hop, last_hop + 1)]
            needs = (self._rows_needed(rank, owner) for rank in ranks)
            self._parcels[key] = parcel(self.problem, self._classes, needs)
        return self._parcels[key]

    def _rows_needed(self, rank: int, owner: int) -> dict[int, Rows]:
        """Rows of a rank's block that another one needs, by class of heads."""
        if (rank, owner) not in self._rows:
            needed: dict[int, list[Rows]] = {}
            for region in self._regions_of(rank, owner):
                needed.setdefault(region.head_class, []).append(region.keys)
            self._rows[rank, owner] = {number: union(rows) for number, rows in needed.items()}
        return self._rows[rank, owner]

    def _regions_of(self, rank: int, owner: int) -> tuple[Region, ...]:
        if (rank, owner) not in self._regions:
            self._regions[rank, owner] = tuple(regions(self.problem, self._queries[rank], self.keys[owner]))
        return self._regions[rank, owner]


def _worth_cutting(part: Parcel, of: Parcel) -> Parcel:
    """A part of a parcel, or all of it where cutting would cost a copy and save next to nothing."""
    return of if part.numel * SLIGHT >= of.numel * (SLIGHT - 1) else part


@functools.lru_cache(maxsize=128)
def make_plan(problem: Problem, sharding: Sharding, world_size: int, rank: int) -> Plan:
    """The plan of one rank, kept for the next call."""
    return Plan(problem, sharding, world_size, rank)
