"""What one rank knows before anything is computed or sent: who holds what, who needs whom, and in which tiles.

Made from the problem, the sharding and the world size alone, so that ranks agree without a word, and kept for the next
call of the same kind. No tensors; only runs, tables of rectangles, how far rows travel, and moves, see those modules.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ringref.problem import DtypeName, Problem
from ringref.sharding import PageTable, Sharding
from ringverify.ring.plan.geometry import Bools, constrained, cuttings, settled
from ringverify.ring.plan.heads import head_classes
from ringverify.ring.plan.kv_slices import ClassRows, KVSlice, everything
from ringverify.ring.plan.needs import Counts, Hops, hops, hops_of, needs, needs_of
from ringverify.ring.plan.regions import Regions, regions, regions_of_ranks
from ringverify.ring.plan.rows import Span, evenly
from ringverify.ring.plan.runs import RowRun, apart, page_counts, runs_of_ranks
from ringverify.ring.plan.schedule import Schedule, dkv_returns, schedule, wanted

SLIGHT = 128
"""One part in so many is not cut off: the last key of a striped shard, which half of the ranks do not attend."""
KEPT_BYTES = 64_000_000
"""What the plans take that a process keeps, together."""
FEW = 1024
"""Meetings of two ranks' runs in a piece of which a plan begins with those of all ranks: it finds them at once, and all
else that ranks know alike is read off them."""
SLICE_BYTES = 1000
"""What a KV slice of evenly spaced rows takes."""
KEPT = 128
"""How many plans a process keeps at most."""


class Travel(NamedTuple):
    """How far the rows of one block travel, and how much of it where. Boundaries are those of the schedule.

    Attributes:
        hops: of every row.
        cut: by boundary, the one at which the KV slice that crosses it was cut out of the block; −1 for all of it.
        beyond: by boundary, how many rows ranks after it need, over all key heads.
        added: by boundary, to how many rows ranks before it add gradients.
    """

    hops: Hops
    cut: list[int]
    beyond: list[int]
    added: list[int]


class BytesSent(NamedTuple):
    """Bytes that a forward pass sends, by keys and values that visit the queries, or by queries that visit the keys.

    Attributes:
        keys: of KV slices.
        queries: of queries, and of the partial results that return.
        exact: whether of the rank that sends the most; else of all blocks, a hop of each, from lengths alone.
    """

    keys: int
    queries: int
    exact: bool


SIZES: dict[DtypeName, tuple[int, int]] = {"float64": (8, 8), "float32": (4, 4), "bfloat16": (2, 4), "float16": (2, 4)}
"""Bytes of an input and of a partial result."""


class _CommonPlan:
    """What every rank knows alike. Ranks that share a process, as simulated ranks do, make it once for all of them.

    Args:
        problem: what all ranks compute together.
        sharding: who holds which positions.
        world_size: ranks in the group.

    Attributes:
        replicated: whether every rank holds all queries.
        keys: every rank's keys, by rank.
        queries: every rank's queries, by rank.
        classes: key heads of each class.
        wholes: all keys of each rank, by rank.
        nbytes: about what it takes, which grows with what it is asked.
    """

    def __init__(self, problem: Problem, sharding: Sharding, world_size: int) -> None:
        self.problem, self.world_size = problem, world_size
        of_queries, of_keys = apart(sharding)
        self.replicated = of_queries is None
        self.keys = _runs(problem, of_keys, problem.nk, world_size, settled(problem))
        self.queries: Sequence[tuple[RowRun, ...]]
        if of_queries is None:
            self.queries = [(RowRun(0, 1, problem.nq, 0),) if problem.nq else ()] * world_size
        else:
            self.queries = _runs(problem, of_queries, problem.nq, world_size)
        self.classes = tuple(one.key_heads for one in head_classes(problem.dilation, problem.heads, problem.hk))
        self.wholes = [everything(problem, self.classes, sum(run.size for run in of)) for of in self.keys]
        pieces = sum(len(cutting.begin) for cutting in cuttings(problem))
        meetings = sum(map(len, self.queries)) * sum(map(len, self.keys)) * pieces
        self._regions = regions_of_ranks(problem, self.queries, self.keys) if meetings <= FEW else None
        self._travel: dict[int, Travel] = {}
        self._slices: dict[tuple[int, int, bool], KVSlice] = {}
        held = sum(map(len, (*self.keys, *self.queries)))
        self.nbytes = 200 * held + 40 * len(problem.documents or ())

    @functools.cached_property
    def needs(self) -> Bools:
        """Whether a query of a rank attends a key of an owner, `(ranks, owners)`."""
        if self._regions is not None:
            return needs_of(self._regions)
        return needs(self.problem, self.queries, self.keys)

    def regions_of(self, rank: int) -> tuple[Regions, ...]:
        """How a rank's queries meet every rank's keys."""
        return regions(self.problem, self.queries[rank], self.keys) if self._regions is None else self._regions[rank]

    def _hops(self, owner: int) -> Hops:
        if self._regions is None:
            return hops(self.problem, self.queries, self.keys, owner)
        visited = [self._regions[(owner + hop) % self.world_size][owner] for hop in range(1, self.world_size)]
        return hops_of(self.problem, visited, sum(run.size for run in self.keys[owner]))

    def rows(self, owner: int) -> int:
        """Rows of a block over all key heads."""
        return self.problem.hk * sum(run.size for run in self.keys[owner])

    def travel_of(self, owner: int) -> Travel:
        """How far the rows of an owner's block travel."""
        if owner not in self._travel:
            found = self._hops(owner)
            self.nbytes += found.nearest.nbytes + found.furthest.nbytes
            near, far = (self._cumulated(of) for of in found)
            beyond = [self.rows(owner) - reached for reached in far]
            held, cut, cuts = self.rows(owner), -1, []
            wanted = self.needs[(owner + np.arange(1, self.world_size)) % self.world_size, owner]
            for boundary in range(int(np.max(1 + np.flatnonzero(wanted), initial=0))):
                if _worth_cutting(beyond[boundary], held):
                    held, cut = beyond[boundary], boundary
                cuts.append(cut)
            self._travel[owner] = Travel(found, cuts, beyond, [reached - near[0] for reached in near])
        return self._travel[owner]

    def kv_numel(self, owner: int, boundary: int) -> int:
        """Elements of what of a block crosses a boundary."""
        rows = self.rows(owner)
        if constrained(self.problem):
            travel = self.travel_of(owner)
            cut = travel.cut[boundary]
            rows = rows if cut < 0 else travel.beyond[cut]
        return rows * self.problem.batch * (self.problem.head_dim + self.problem.dv)

    @functools.cached_property
    def sent(self) -> BytesSent:
        """What a forward pass sends either way."""
        p, (size, sums) = self.problem, SIZES[self.problem.dtype]
        query, partial = p.batch * p.heads * p.head_dim * size, p.batch * p.heads * (p.dv + 1) * sums
        keys, queries = p.batch * p.nk * p.hk * (p.head_dim + p.dv) * size, p.nq * (query + partial)
        if queries >= keys:
            return BytesSent(keys, queries, exact=False)
        world_size = self.world_size
        by_key, by_query = np.zeros((2, world_size), dtype=np.int64)
        for owner, needing in enumerate(wanted(self.needs)):
            for boundary in range(max(needing, default=0)):
                by_key[(owner + boundary) % world_size] += self.kv_numel(owner, boundary) * size
        visited = wanted(self.needs.T)
        for owner, places in enumerate(dkv_returns(visited, world_size)):
            rows = sum(run.size for run in self.queries[owner])
            for hop in range(max(visited[owner], default=0)):
                by_query[(owner + hop) % world_size] += rows * query
            for place in places[:-1]:
                by_query[(owner + place) % world_size] += rows * partial
        return BytesSent(int(by_key.max()), int(by_query.max()), exact=True)

    def slice_of(self, owner: int, boundary: int, *, ahead: bool) -> KVSlice:
        """The rows of a block that ranks beyond a boundary need, or to which ranks before it add gradients."""
        key = owner, boundary, ahead
        if (found := self._slices.get(key)) is None:
            nearest, furthest = self.travel_of(owner).hops
            held = furthest > boundary if ahead else (nearest > 0) & (nearest <= boundary)
            rows = {number: evenly(np.flatnonzero(of)) for number, of in enumerate(held) if of.any()}
            found = KVSlice(self.problem, {number: ClassRows(self.classes[number], of) for number, of in rows.items()})
            if all(isinstance(of, Span) for of in rows.values()):  # lists of rows would add up
                self._slices[key] = found
                self.nbytes += SLICE_BYTES
        return found

    def _cumulated(self, hops: Counts) -> list[int]:
        """By number of hops, how many rows have that many or fewer, over all key heads."""
        count = np.zeros(self.world_size, dtype=np.int64)
        for heads, of in zip(self.classes, hops, strict=True):
            count += heads.size * np.bincount(of, minlength=self.world_size)
        counted: list[int] = count.cumsum().tolist()
        return counted


def _runs(
    problem: Problem, sharding: Sharding, length: int, world_size: int, settled: int = 0
) -> Sequence[tuple[RowRun, ...]]:
    """Every rank's runs. Where every query attends every key, only their number counts, and one run is as good."""
    if constrained(problem):
        return runs_of_ranks(sharding, length, world_size, problem.documents, settled)
    if isinstance(sharding, PageTable):
        counts = page_counts(sharding, length, world_size)
    else:
        counts = [sum(run.size for run in of) for of in runs_of_ranks(sharding, length, world_size)]
    return [(RowRun(0, 1, count, 0),) if count else () for count in counts]


_COMMON_PLANS: weakref.WeakValueDictionary[tuple[Problem, Sharding, int], _CommonPlan] = weakref.WeakValueDictionary()
"""Kept for as long as a rank's plan is."""


def _common_plan(problem: Problem, sharding: Sharding, world_size: int) -> _CommonPlan:
    key = problem, sharding, world_size
    if (found := _COMMON_PLANS.get(key)) is None:
        _COMMON_PLANS[key] = found = _CommonPlan(*key)
    return found


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
        self._common = common = _common_plan(problem, sharding, world_size)
        self.replicated, self.keys, self._queries = common.replicated, common.keys, common.queries
        self._own_bytes = 20_000
        self._visitors: dict[int, Regions] = {}
        if self.replicated:  # nothing visits
            self.schedule = Schedule(rank, world_size, (0,) * world_size, (len(self.regions(rank)) > 0,), ())
        else:
            self.schedule = schedule(common.needs, rank)

    @property
    def nbytes(self) -> int:
        """About what the plan takes, which grows with what it is asked; what ranks share counts in each of them."""
        return self._own_bytes + self._common.nbytes

    @functools.cached_property
    def query_count(self) -> int:
        """Queries of this rank."""
        return self.queries_of(self.rank)

    def queries_of(self, owner: int) -> int:
        """Queries of a rank."""
        return sum(run.size for run in self._queries[owner])

    def key_count(self, owner: int) -> int:
        """Keys of a rank."""
        return sum(run.size for run in self.keys[owner])

    def regions(self, owner: int) -> Regions:
        """How this rank's queries meet the keys of a rank."""
        return self._regions[owner]

    @functools.cached_property
    def _regions(self) -> tuple[Regions, ...]:
        found = self._common.regions_of(self.rank)
        self._own_bytes += sum(of.nbytes for of in found)
        return found

    def whole(self, owner: int) -> KVSlice:
        """All keys of a rank."""
        return self._common.wholes[owner]

    def kv_slice(self, owner: int, boundary: int) -> KVSlice:
        """What of a block crosses a boundary: what ranks that it has not yet visited need."""
        cut = self._common.travel_of(owner).cut[boundary]
        return self.whole(owner) if cut < 0 else self._common.slice_of(owner, cut, ahead=True)

    def kv_numel(self, owner: int, boundary: int) -> int:
        """Elements of what crosses a boundary."""
        return self._common.kv_numel(owner, boundary)

    @property
    def sent(self) -> BytesSent:
        """What a forward pass sends either way, the same on every rank."""
        return self._common.sent

    @functools.cached_property
    def visits(self) -> Schedule:
        """Who sends which queries at which hop, where these visit the keys; their partial results are the gradients."""
        return schedule(self._common.needs.T, self.rank)

    def visitors(self, owner: int) -> Regions:
        """How the queries of a rank meet this rank's keys."""
        if owner not in self._visitors:
            queries, keys = self._queries[owner], self.keys[self.rank]
            ((self._visitors[owner],),) = regions_of_ranks(self.problem, [queries], [keys])
            self._own_bytes += self._visitors[owner].nbytes
        return self._visitors[owner]

    def dkv_slice(self, owner: int, boundary: int) -> KVSlice:
        """What of a block's gradient crosses a boundary: what ranks have added to."""
        boundary = min(boundary, self.schedule.reach[owner])
        travel = self._common.travel_of(owner)
        if not _worth_cutting(travel.added[boundary], self._common.rows(owner)):
            return self.whole(owner)
        return self._common.slice_of(owner, boundary, ahead=False)


def _worth_cutting(part: int, of: int) -> bool:
    """Whether to cut a part off: a copy, which next to nothing saved would not be worth."""
    return part * SLIGHT < of * (SLIGHT - 1)


class _Plans:
    """Plans for the next call of the same kind, by what they were made of; what was used longest ago goes first."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Problem, Sharding, int, int], Plan] = {}
        self._lock = threading.Lock()

    def __call__(self, problem: Problem, sharding: Sharding, world_size: int, rank: int) -> Plan:
        """The plan of one rank; it may be asked for by several threads, as simulated ranks are."""
        key = problem, sharding, world_size, rank
        with self._lock:
            plan = self._kept.pop(key, None)
        if plan is None:
            plan = Plan(*key)
        with self._lock:
            self._kept[key] = plan
            # Plans have grown since they were made.
            held = sum([one._own_bytes + one._common.nbytes for one in self._kept.values()])
            while held > KEPT_BYTES or len(self._kept) > KEPT:
                held -= self._kept.pop(next(iter(self._kept))).nbytes
        return plan

    def cache_clear(self) -> None:
        """Keep none of them."""
        with self._lock:
            self._kept.clear()


make_plan = _Plans()
