"""What a dilated plan computes beside the pairs of its pattern, and what it moves beside the keys that are needed."""

import itertools

import numpy as np
import pytest

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringref.sharding import key_positions, query_positions
from ringverify.ring.plan import plan as plan_module
from ringverify.ring.plan import tiles as tiles_module
from ringverify.ring.plan.plan import SLIGHT, Plan
from ringverify.ring.plan.tiles import tiles

SHARDINGS = ("contiguous", "zigzag", "striped")
BRANCHES = [((256, 1), (1024, 4)), ((2048, 1), (4096, 2), (8192, 4)), ((1000, 1), (3001, 3)), ((512, 2), (5000, 5))]
MOST = 1.15


def pairs(problem, sharding, world_size):
    """Pairs that the tiles of all ranks compute, and pairs of the pattern, over all heads."""
    bucket = -(-problem.nq // world_size // 2)
    computed = attended = 0
    for rank in range(world_size):
        plan = Plan(problem, sharding, world_size, rank)
        for step in itertools.compress(range(plan.schedule.steps), plan.schedule.computes):
            for region in plan.regions(plan.schedule.owner(step)):
                times = region.heads.size
                row = np.arange(region.queries.size)
                first = np.maximum(row + (-len(row) if region.low is None else region.low), 0)
                last = np.minimum(
                    row + (region.keys.size if region.high is None else region.high), region.keys.size - 1
                )
                attended += times * int((last - first + 1).sum())
                for tile in tiles(region, bucket, bucket):
                    # A fused kernel leaves out what lies above the diagonal of a causal square.
                    rows = tile.rows[1] - tile.rows[0]
                    computed += times * (rows * (rows + 1) // 2 if tile.kind == "causal" else tile.computed)
    return computed, attended


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_segments_compute_the_pairs_of_the_pattern_and_no_other(sharding):
    """But for what a kernel does within a causal square: one to eight ranks, both head modes, causal or not."""
    for branches, mode, causal, world_size in itertools.product(
        BRANCHES, ("split", "shared"), (False, True), (1, 2, 3, 5, 8)
    ):
        problem = Problem(query_length=10_007, heads=4, causal=causal, dilation=Dilation(branches, heads=mode))
        computed, attended = pairs(problem, sharding, world_size)
        assert computed == attended > 0, (branches, mode, causal, world_size)


WINDOWS = [
    (Problem(query_length=n, causal=causal, window=window, dilation=Dilation(((n, rate),))), sharding, world_size)
    for n, causal, window, rate, sharding, world_size in itertools.product(
        (4096, 10_007), (False, True), ((600, 0), (300, 300), (1500, 0), (1000, 50)), (1, 2), SHARDINGS, (1, 2, 3, 5, 8)
    )
    # At least 256 keys of a rank's block that a query attends.
    if (window[0] + (0 if causal else window[1]) + 1) // (rate * (world_size if sharding == "striped" else 1)) >= 256
]


def ratios():
    """The ratio of every problem with a window."""
    return [computed / attended for computed, attended in (pairs(*case) for case in WINDOWS)]


def test_a_window_computes_little_more_than_its_pairs():
    """Its left edge is masked bucket by bucket, also where a block has nothing but that edge."""
    assert max(ratios()) <= MOST


def test_the_ratio_sees_wide_buckets(monkeypatch):
    """Twice as wide at the least."""
    monkeypatch.setattr(tiles_module, "NARROWEST", 256)
    assert max(ratios()) > MOST


def elements(m, problem, queries, keys, owner, hops, world_size):
    """Elements of a block that the ranks at some distances need."""
    attended = np.zeros((problem.hk, len(keys[owner])), dtype=bool)
    for hop in hops:
        part = m[:, :, queries[(owner + hop) % world_size]][..., keys[owner]].any(axis=(0, 2))
        attended |= part.reshape(problem.hk, problem.group_size, -1).any(axis=1)
    return int(attended.sum()) * problem.batch * (problem.head_dim + problem.dv)


def wrong_slices():
    """Boundaries that more crosses than ranks ahead need, or ranks behind have added to; or less."""
    found = []
    for sharding, world_size, causal, mode, branches in itertools.product(
        SHARDINGS, (2, 3, 5, 8), (False, True), ("split", "shared"), (((32, 1), (64, 2), (150, 4)), ((21, 2), (97, 5)))
    ):
        dilation = Dilation(branches, heads=mode)
        problem = Problem(query_length=211, heads=4, key_heads=2, head_dim=4, causal=causal, dilation=dilation)
        m = multiplicity(problem)
        queries = query_positions(sharding, problem.nq, world_size)
        keys = key_positions(sharding, problem.nk, world_size)
        plan = Plan(problem, sharding, world_size, 0)
        for owner, reach in enumerate(plan.schedule.reach):
            for boundary in range(reach):
                ahead = elements(m, problem, queries, keys, owner, range(boundary + 1, reach + 1), world_size)
                behind = elements(m, problem, queries, keys, owner, range(1, boundary + 1), world_size)
                for got, least in (
                    (plan.kv_slice(owner, boundary).numel, ahead),
                    (plan.dkv_slice(owner, boundary).numel, behind),
                ):
                    if not least <= got <= least * SLIGHT / (SLIGHT - 1):
                        found.append((problem, sharding, world_size, owner, boundary, got, least))
    return found


def test_what_crosses_a_boundary_is_what_somebody_needs():
    """Every distinct key once, at every hop, to within what is not worth cutting: 1.00 of the least."""
    assert wrong_slices() == []
    assert SLIGHT / (SLIGHT - 1) < 1.01


def test_the_comparison_sees_whole_blocks(monkeypatch):
    """That are never cut."""
    monkeypatch.setattr(plan_module, "_worth_cutting", lambda part, of: False)
    assert wrong_slices()
