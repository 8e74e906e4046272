"""What every rank of a plan computes and receives at every step, counted from the plan alone.

Segments that are alike are counted once, with as many copies; tiles of rectangles that are alike are cut once; and what
of a block crosses a boundary is asked of its owner's plan alone, as it is the same in all of them. So a million
positions on 64 ranks take seconds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from ringref.problem import Problem
from ringref.sharding import ShardingName
from ringverify.ring.plan.plan import Plan
from ringverify.ring.plan.regions import Rectangle, Span
from ringverify.ring.plan.schedule import Schedule
from ringverify.ring.plan.tiles import tiles

Work = Counter[str]
"""Tiles by kind, pairs `computed` and `attended` over all heads, bytes `received`."""


class RankWork(NamedTuple):
    """One rank's part.

    Attributes:
        rank: its number.
        queries: how many it holds.
        steps: its work step by step, that on its own block first.
    """

    rank: int
    queries: int
    steps: list[Work]

    @property
    def total(self) -> Work:
        """Over all steps."""
        return sum(self.steps, Work())


def works(problem: Problem, sharding: ShardingName, ranks: int, bucket: int) -> list[RankWork]:
    """The work of every rank.

    Args:
        problem: what all ranks compute.
        sharding: who holds which positions.
        ranks: how many.
        bucket: longest side of a tile.
    """
    found, moves, crossing = [], [], []
    for rank in range(ranks):
        plan = Plan(problem, sharding, ranks, rank)  # not kept: of so many ranks it is much
        steps = range(plan.schedule.steps)
        found.append(RankWork(rank, plan.query_count, [_computed(plan, step, bucket) for step in steps]))
        moves.append(plan.schedule)
        crossing.append([plan.kv_slice(rank, boundary).numel for boundary in range(plan.schedule.reach[rank])])
    itemsize: int = getattr(torch, problem.dtype).itemsize
    for of, schedule in zip(found, moves, strict=True):
        for step, numel in _received(schedule, crossing).items():
            of.steps[step]["received"] = numel * itemsize
    return found


def _received(moves: Schedule, crossing: list[list[int]]) -> Mapping[int, int]:
    """By step the numbers in what arrives for it; `crossing` has them by owner and boundary."""
    arriving = (step for step in range(1, moves.steps) if moves.receives(step - 1))
    return {step: crossing[moves.owner(step)][step - 1] for step in arriving}


def _computed(plan: Plan, step: int, bucket: int) -> Work:
    """What a rank computes at a step."""
    work = Work()
    if not plan.schedule.computes[step]:
        return work
    for region in plan.stacks(plan.schedule.owner(step)):
        heads = region.heads.size * (region.batch[1] - region.batch[0])
        for name, count in _of_rectangle(_rectangle(region), bucket).items():
            work[name] += count * region.copies * (heads if name in ("computed", "attended") else 1)
    return work


def _rectangle(region: Rectangle) -> Rectangle:
    """What the tiles of one copy depend on, and nothing else."""
    one, rows, keys = Span(0, 1), Span(0, region.queries.size), Span(0, region.keys.size)
    return Rectangle(0, (0, 1), one, one, rows, keys, region.low, region.high, region.by_position)


@functools.lru_cache(maxsize=4096)
def _of_rectangle(region: Rectangle, bucket: int) -> Mapping[str, int]:
    """Tiles by kind, and pairs, of a region for one head."""
    work = Work(attended=_pairs(region))
    for tile in tiles(region, bucket, bucket):
        work[tile.kind] += 1
        rows = tile.rows[1] - tile.rows[0]
        # A fused kernel leaves out what lies above the diagonal of a causal square, block by block.
        work["computed"] += rows * (rows + 1) // 2 if tile.kind == "causal" else tile.computed
    return work


def _pairs(region: Rectangle) -> int:
    """Pairs of a region, per head."""
    rows = np.arange(region.queries.size)
    first = np.zeros_like(rows) if region.low is None else np.maximum(rows + region.low, 0)
    end = region.keys.size - 1
    last = np.full_like(rows, end) if region.high is None else np.minimum(rows + region.high, end)
    return int(np.maximum(last - first + 1, 0).sum())
