"""What one rank knows before anything is computed or sent: who holds what, who needs whom, and in which tiles.

Made from the problem, the sharding and the world size alone, so that ranks agree without a word, and kept for the next
call of the same kind. No tensors; only runs, regions, rows and moves, see those modules.
"""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np

from ringref.problem import Problem
from ringref.sharding import Sharding
from ringverify.ring.plan.hops import Counts, Hops, hops
from ringverify.ring.plan.joining import joined
from ringverify.ring.plan.kv_slices import ClassRows, KVSlice, everything
from ringverify.ring.plan.many import Bools
from ringverify.ring.plan.needs import needs
from ringverify.ring.plan.regions import Rectangle, Span, constrained, head_classes, regions, step_of
from ringverify.ring.plan.rows import evenly
from ringverify.ring.plan.runs import RowRun, runs
from ringverify.ring.plan.schedule import Schedule, schedule

SLIGHT = 128
"""One part in so many is not cut off: the last key of a striped shard, which half of the ranks do not attend."""
KEPT = 4
"""Blocks of which hops are kept row by row: the one that is here, the one that comes, and gradients that pass by."""


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
        self._queries: list[tuple[RowRun, ...]]
        if self.replicated:
            self._queries = [(RowRun(0, 1, problem.nq, 0),) if problem.nq else ()] * world_size
        else:
            self._queries = [runs(sharding, problem.nq, world_size, one) for one in range(world_size)]
        self._classes: tuple[Span, ...] = tuple(
            one.key_heads for one in head_classes(problem.dilation, problem.heads, problem.hk)
        )
        self._stacks: dict[int, tuple[Rectangle, ...]] = {}
        self._regions: dict[int, tuple[Rectangle, ...]] = {}
        self._hops: dict[int, Hops] = {}
        self._recent: dict[tuple[str, int], Counts] = {}
        self._cut: dict[int, list[int]] = {}
        self._added: dict[int, list[int]] = {}
        self._slices: dict[tuple[str, int, int], KVSlice] = {}
        if self.replicated:  # nothing visits
            self.schedule = Schedule(rank, world_size, (0,) * world_size, (bool(self.stacks(rank)),), ())
        else:
            self.schedule = schedule(needs(problem, self._queries, self.keys), rank)

    @functools.cached_property
    def by_position(self) -> bool:
        """Whether masks have to be looked up by position, because some rank's keys do not go with these queries."""
        queries = self._queries[self.rank]
        looked_up = any(queries and keys and step_of(queries, keys) is None for keys in self.keys)
        return looked_up and constrained(self.problem)

    @property
    def query_count(self) -> int:
        """Queries of this rank."""
        return sum(run.size for run in self._queries[self.rank])

    def key_count(self, owner: int) -> int:
        """Keys of a rank."""
        return sum(run.size for run in self.keys[owner])

    def stacks(self, owner: int) -> tuple[Rectangle, ...]:
        """How this rank's queries meet the keys of a rank, equal regions as copies of one."""
        if owner not in self._stacks:
            self._stacks[owner] = joined(regions(self.problem, self._queries[self.rank], self.keys[owner]))
        return self._stacks[owner]

    def regions(self, owner: int) -> tuple[Rectangle, ...]:
        """How this rank's queries meet the keys of a rank, every region on its own."""
        if owner not in self._regions:
            self._regions[owner] = tuple(one for several in self.stacks(owner) for one in several.apart())
        return self._regions[owner]

    def whole(self, owner: int) -> KVSlice:
        """All keys of a rank."""
        key = "whole", owner, 0
        if key not in self._slices:
            self._slices[key] = everything(self.problem, self._classes, self.key_count(owner))
        return self._slices[key]

    def kv_slice(self, owner: int, boundary: int) -> KVSlice:
        """What of a block crosses a boundary: what ranks that it has not yet visited need."""
        if owner not in self._cut:
            self._cut[owner] = self._cut_kv(owner)
        cut = self._cut[owner][boundary]
        if cut < 0:
            return self.whole(owner)
        key = "kv", owner, cut
        if key not in self._slices:
            self._slices[key] = self._slice(self._rows("furthest", owner) > cut)
        return self._slices[key]

    def dkv_slice(self, owner: int, boundary: int) -> KVSlice:
        """What of a block's gradient crosses a boundary: what ranks have added to."""
        boundary = min(boundary, self.schedule.reach[owner])
        if owner not in self._added:
            self._added[owner] = self._count(self._rows("nearest", owner))
        added = self._added[owner]
        if not _worth_cutting(sum(added[1 : boundary + 1]), sum(added)):
            return self.whole(owner)
        key = "dkv", owner, boundary
        if key not in self._slices:
            nearest = self._rows("nearest", owner)
            self._slices[key] = self._slice((nearest > 0) & (nearest <= boundary))
        return self._slices[key]

    def _cut_kv(self, owner: int) -> list[int]:
        """By boundary, the one at which what crosses it was cut out of the block; −1 if it is still whole."""
        count = self._count(self._rows("furthest", owner))
        held, cut, found = sum(count), -1, []
        for boundary in range(self.schedule.reach[owner]):
            beyond = sum(count[boundary + 1 :])
            if _worth_cutting(beyond, held):
                held, cut = beyond, boundary
            found.append(cut)
        return found

    def _count(self, hops: Counts) -> list[int]:
        """How many rows have each number of hops, over all key heads."""
        count = np.zeros(self.world_size, dtype=np.int64)
        for heads, of in zip(self._classes, hops, strict=True):
            count += heads.size * np.bincount(of, minlength=self.world_size)
        counted: list[int] = count.tolist()
        return counted

    def _slice(self, held: Bools) -> KVSlice:
        """The KV slice of some rows, `(classes, rows)`."""
        rows = {number: evenly(np.flatnonzero(of)) for number, of in enumerate(held) if of.any()}
        return KVSlice(self.problem, {number: ClassRows(self._classes[number], of) for number, of in rows.items()})

    def _rows(self, name: Literal["nearest", "furthest"], owner: int) -> Counts:
        """Hops of every row of a block; as they are as long as a block, only those asked for last are kept."""
        if owner not in self._hops:
            self._hops[owner] = hops(self.problem, self._queries, self.keys, owner)
        key = name, owner
        if key not in self._recent:
            while len(self._recent) >= KEPT:
                del self._recent[next(iter(self._recent))]
            self._recent[key] = getattr(self._hops[owner], name)()
        return self._recent[key]


def _worth_cutting(part: int, of: int) -> bool:
    """Whether to cut a part off: a copy, which next to nothing saved would not be worth."""
    return part * SLIGHT < of * (SLIGHT - 1)


@functools.lru_cache(maxsize=128)
def make_plan(problem: Problem, sharding: Sharding, world_size: int, rank: int) -> Plan:
    """The plan of one rank, kept for the next call."""
    return Plan(problem, sharding, world_size, rank)
