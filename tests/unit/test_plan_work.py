"""What a plan is said to cost: beside the oracle's pattern, beside what the ring itself moves, and in few steps."""

import pytest

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringref.sharding import key_positions, query_positions
from ringverify.cli import plan_work
from ringverify.cli.plan_work import works
from ringverify.ring.plan import plan as plan_module
from ringverify.ring.plan.plan import Plan
from ringverify.ring.plan.tiles import tiles

SHARDINGS = ("contiguous", "zigzag", "striped", "replicated_query")
BRANCHES = ((8, 1), (24, 2), (60, 3))
PROBLEMS = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window": (9, 2)},
    "documents": {"documents": (0, 7, 14, 21, 60, 101), "causal": True},
    "split": {"dilation": Dilation(BRANCHES)},
    "shared": {"dilation": Dilation(BRANCHES, heads="shared"), "causal": True},
    "batch": {"batch": 2, "key_lengths": (101, 40)},
}
RANKS, BUCKET = 5, 16


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_pairs_attended_are_those_of_the_pattern(name, sharding):
    """Rank by rank and step by step, over all heads."""
    problem = Problem(query_length=101, heads=4, **PROBLEMS[name])
    expected = multiplicity(problem)
    queries, keys = (at(sharding, problem.nq, RANKS) for at in (query_positions, key_positions))
    for one in works(problem, sharding, RANKS, BUCKET):
        assert one.queries == len(queries[one.rank])
        for step, work in enumerate(one.steps):
            owner = (one.rank - step) % RANKS
            assert work["attended"] == expected[:, :, queries[one.rank]][..., keys[owner]].sum()
            assert work["computed"] >= work["attended"]
    assert sum(one.total["attended"] for one in works(problem, sharding, RANKS, BUCKET)) == expected.sum()


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_tiles_and_bytes_are_those_of_every_ranks_own_plan(name, sharding):
    """Region by region, each on its own; and what a rank receives it finds in its plan, not in the owner's."""
    problem = Problem(query_length=101, heads=4, head_dim=8, dtype="float32", **PROBLEMS[name])
    for one in works(problem, sharding, RANKS, BUCKET):
        plan = Plan(problem, sharding, RANKS, one.rank)
        for step, work in enumerate(one.steps):
            owner, needed = plan.schedule.owner(step), plan.schedule.computes[step]
            cut = [tile.kind for of in plan.regions(owner) if needed for tile in tiles(of, BUCKET, BUCKET)]
            for kind in ("full", "causal", "band", "positions"):
                assert work[kind] == cut.count(kind)
            arrives = step > 0 and plan.schedule.receives(step - 1)
            assert work["received"] == (4 * plan.kv_slice(owner, step - 1).numel if arrives else 0)


@pytest.fixture
def counted(monkeypatch):
    """How often a block's hops are found, and how often a rectangle is cut into tiles."""
    times = {"hops": 0, "tiles": 0}

    def counting(name, function):
        def call(*arguments):
            times[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(plan_module, "hops", counting("hops", plan_module.hops))
    monkeypatch.setattr(plan_work, "tiles", counting("tiles", plan_work.tiles))
    plan_work._of_rectangle.cache_clear()
    return times


@pytest.mark.parametrize("sharding", SHARDINGS[:3])
@pytest.mark.by_day(1)
def test_a_million_positions_on_64_ranks_take_few_steps(sharding, counted):
    """Hops of a block once for all ranks, tiles once for all rectangles that are alike."""
    branches = ((2048, 1), (16_384, 4), (262_144, 16))
    problem = Problem(query_length=1_000_000, heads=8, causal=True, dilation=Dilation(branches, heads="shared"))
    found = works(problem, sharding, 64, 2048)
    assert counted["hops"] <= 64
    tiles_of_all = sum(one.total["full"] + one.total["causal"] for one in found)
    assert 0 < counted["tiles"] < tiles_of_all / 20
