"""What every rank of a plan computes and receives at every step, counted from the plan alone.

Rectangles of one shape are cut into tiles once. How much of a KV block crosses a boundary is taken from its owner's
plan alone, since all plans agree on it. So a million positions on 64 ranks take seconds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from ringref.problem import Problem
from ringref.sharding import ShardingName
from ringverify.ring.plan.plan import Plan
from ringverify.ring.plan.rectangles import Rectangle
from ringverify.ring.plan.regions import Alike, Regions
from ringverify.ring.plan.rows import Span
from ringverify.ring.plan.schedule import Schedule
from ringverify.ring.plan.tiles import tiles

Work = Counter[str]
"""Tiles by kind, pairs `computed` and `attended` over all heads, bytes `received`."""


class RankWork(NamedTuple):
    """What one rank of a plan computes and receives.

    Attributes:
        rank: its number.
        queries: how many queries it holds.
        steps: its work step by step, the step on its own block first.
    """

    rank: int
    queries: int
    steps: list[Work]

    @property
    def total(self) -> Work:
        """The work of all steps together."""
        return sum(self.steps, Work())


def works(problem: Problem, sharding: ShardingName, ranks: int, bucket: int) -> list[RankWork]:
    """Return the work of every rank.

    Args:
        problem: what all ranks compute.
        sharding: which rank holds which positions.
        ranks: how many ranks there are.
        bucket: longest side of a tile.
    """
    found, moves, crossing = [], [], []
    for rank in range(ranks):
        plan = Plan(problem, sharding, ranks, rank)  # not kept: the plans of many ranks take much memory
        steps = range(plan.schedule.steps)
        found.append(RankWork(rank, plan.query_count, [_computed(plan, step, bucket) for step in steps]))
        moves.append(plan.schedule)
        crossing.append([plan.kv_numel(rank, boundary) for boundary in range(plan.schedule.reach[rank])])
    itemsize: int = getattr(torch, problem.dtype).itemsize
    for of, schedule in zip(found, moves, strict=True):
        for step, numel in _received(schedule, crossing).items():
            of.steps[step]["received"] = numel * itemsize
    return found


def _received(moves: Schedule, crossing: list[list[int]]) -> Mapping[int, int]:
    """Return how many elements arrive for each step; `crossing` has their numbers by owner and boundary."""
    arriving = (step for step in range(1, moves.steps) if moves.receives(step - 1))
    return {step: crossing[moves.owner(step)][step - 1] for step in arriving}


def _computed(plan: Plan, step: int, bucket: int) -> Work:
    """Count what a rank computes at a step."""
    work = Work()
    if not plan.schedule.computes[step]:
        return work
    for region, copies in _shapes(plan.regions(plan.schedule.owner(step))):
        heads = region.heads.size * (region.batch[1] - region.batch[0])
        for name, count in _of_rectangle(_rectangle(region), bucket).items():
            work[name] += count * copies * (heads if name in ("computed", "attended") else 1)
    return work


def _shapes(regions: Regions) -> Iterator[tuple[Rectangle, int]]:
    """Yield rectangles, those of one shape once for the same heads, and how many there are."""
    if regions.joins:
        yield from ((region, 1) for region in regions)
        return
    for part in regions.parts:
        _, first, copies = np.unique(part.table[:, [1, 3, 4, 5]], axis=0, return_index=True, return_counts=True)
        yield from zip(Alike(part.common, part.step, part.table[first]), copies.tolist(), strict=True)


def _rectangle(region: Rectangle) -> Rectangle:
    """Return a rectangle reduced to what its tiles depend on, so that identical ones are counted once."""
    one, rows, keys = Span(0, 1), Span(0, region.queries.size), Span(0, region.keys.size)
    return Rectangle(0, (0, 1), one, one, rows, keys, region.low, region.high, region.by_position)


@functools.lru_cache(maxsize=4096)
def _of_rectangle(region: Rectangle, bucket: int) -> Mapping[str, int]:
    """Count tiles by kind, and pairs, of a region for one head."""
    work = Work(attended=_pairs(region))
    for tile in tiles(region, bucket, bucket):
        work[tile.kind] += 1
        rows = tile.rows[1] - tile.rows[0]
        # A fused kernel skips, block by block, what lies above the diagonal of a causal square.
        work["computed"] += rows * (rows + 1) // 2 if tile.kind == "causal" else tile.computed
    return work


def _pairs(region: Rectangle) -> int:
    """Count the pairs of a region that are in the pattern, for one head."""
    rows = np.arange(region.queries.size)
    first = np.zeros_like(rows) if region.low is None else np.maximum(rows + region.low, 0)
    end = region.keys.size - 1
    last = np.full_like(rows, end) if region.high is None else np.minimum(rows + region.high, end)
    return int(np.maximum(last - first + 1, 0).sum())
