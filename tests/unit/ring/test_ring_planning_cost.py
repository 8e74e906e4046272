"""What a plan of a million positions on 64 ranks takes, in function calls and objects and not in seconds."""

import itertools
import random
import sys
import tracemalloc

import pytest

from ringref.problem import Dilation, Problem
from ringverify.ring.plan import geometry
from ringverify.ring.plan import plan as plan_module
from ringverify.ring.plan.geometry import cuttings
from ringverify.ring.plan.plan import KEPT_BYTES, Plan, make_plan

MILLION, RANKS = 1_000_000, 64
BRANCHES = ((2048, 1), (4096, 2), (8192, 4), (65536, 8))
WIDE = ((MILLION // 8, 1), (MILLION // 2, 4), (MILLION, 16))
UNEVEN = ((1000, 1), (5002, 3), (70001, 7))
PROBLEMS = {
    "dense": {},
    "window": {"window": (20_000, 0)},
    "split": {"dilation": Dilation(BRANCHES)},
    "shared": {"dilation": Dilation(BRANCHES, heads="shared")},
    "wide": {"dilation": Dilation(WIDE, heads="shared")},
    "uneven": {"dilation": Dilation(UNEVEN)},
    "packed": {"documents": tuple(range(0, MILLION + 1, 1000))},
}
MOST_CALLS = 25_000
"""Of functions, for one rank's plan: a quarter more than the worst of these takes."""


@pytest.fixture(autouse=True, scope="module")
def nothing_left_to_import():
    """Steps are those of plans: numpy imports some of itself when it is first asked."""
    begin(Problem(query_length=MILLION, heads=8, causal=True, **PROBLEMS["uneven"]), "zigzag", 0)


def begin(problem, sharding, rank):
    """What a rank plans before its first message leaves: the moves of all, its own tiles, the first two KV slices."""
    plan = Plan(problem, sharding, RANKS, rank)
    plan.regions(rank)
    moves = plan.schedule
    if moves.passes_on(0):
        plan.kv_slice(rank, 0)
    if moves.steps > 1 and moves.receives(0):
        plan.kv_slice(moves.owner(1), 0)
    return plan


def calls(problem, sharding, rank):
    """How many functions `begin` calls."""
    return counted(lambda: begin(problem, sharding, rank))


def counted(work):
    """How many functions, of Python or C, are called."""
    count = 0

    def event(frame, kind, argument):
        nonlocal count
        count += kind in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(event)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_plan_takes_few_steps(name, sharding):
    """At the first rank, one in the middle and the last one, causal or not; nothing is done segment by segment."""
    for causal, rank in itertools.product((False, True), (0, 21, RANKS - 1)):
        problem = Problem(query_length=MILLION, heads=8, causal=causal, **PROBLEMS[name])
        assert calls(problem, sharding, rank) <= MOST_CALLS, (causal, rank)


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped"])
def test_four_times_the_segments_take_no_more_steps(sharding):
    """All are worked on together; numbers of a few bytes are what there is more of."""
    found, held = [], []
    for length in (MILLION // 4, MILLION):
        problem = Problem(query_length=length, heads=8, causal=True, dilation=Dilation(BRANCHES, heads="shared"))
        cuttings.cache_clear()
        found.append(calls(problem, sharding, 21))
        held.append(begin(problem, sharding, 21).nbytes)
    assert found[1] <= 1.3 * found[0]
    assert held[0] < held[1] < 50 * MILLION


def test_the_count_of_steps_sees_a_plan_made_segment_by_segment(monkeypatch):
    """The same pieces, each on its own."""
    problem = Problem(query_length=MILLION, heads=8, dilation=Dilation(BRANCHES, heads="shared"))
    assert calls(problem, "striped", 21) <= MOST_CALLS
    monkeypatch.setattr(geometry, "AT_ONCE", 1)
    assert calls(problem, "striped", 21) > MOST_CALLS


def packed(count, length, seed):
    """Documents of random lengths, as packed training has them at every step."""
    rng = random.Random(seed)
    return (0, *sorted(rng.sample(range(1, length), count - 1)), length)


def passed(plan):
    """Ask a plan for all that a forward and a backward pass ask it for."""
    moves = plan.schedule
    for step in range(moves.steps):
        plan.regions(moves.owner(step))
        if moves.passes_on(step):
            plan.kv_slice(moves.owner(step), step)
        if step and moves.computes[step]:
            plan.dkv_slice(moves.owner(step), step)
    return plan


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped"])
def test_a_plan_of_many_documents_is_small_and_takes_few_steps(sharding):
    """Two thousand of them, 65,536 positions, 8 ranks: as many functions as for two hundred, and under a megabyte."""
    counts = []
    for documents in (200, 2000):
        problem = Problem(query_length=65_536, causal=True, documents=packed(documents, 65_536, 0))
        plan = Plan(problem, sharding, 8, 3)
        counts.append(counted(lambda plan=plan: passed(plan)))
        assert plan.nbytes < 1_000_000
    assert counts[1] <= 1.5 * counts[0] <= 10_000


def test_plans_are_kept_until_they_take_too_much(monkeypatch):
    """Those that were used longest ago go first, by what all have grown to; one that is asked for again stays."""
    make_plan.cache_clear()
    problems = [Problem(query_length=4096, documents=packed(500, 4096, seed)) for seed in range(6)]
    first = passed(make_plan(problems[0], "striped", 4, 0))
    monkeypatch.setattr(plan_module, "KEPT_BYTES", int(3.5 * first.nbytes))
    for problem in problems[1:]:
        passed(make_plan(problem, "striped", 4, 0))
        assert make_plan(problems[0], "striped", 4, 0) is first
    assert len(make_plan._kept) < len(problems)
    assert sum(one.nbytes for one in make_plan._kept.values()) <= 3.5 * first.nbytes
    make_plan.cache_clear()


def test_what_a_plan_says_that_it_takes_is_what_it_takes():
    """To within a third, tables and rows and documents; so what is kept is bounded by what it says."""
    problem = Problem(query_length=65_536, causal=True, documents=packed(2000, 65_536, 0))
    cuttings(problem)
    for sharding in ("contiguous", "zigzag", "striped"):
        tracemalloc.start()
        plan = passed(Plan(problem, sharding, 8, 3))
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken <= 4 / 3 * plan.nbytes
    assert KEPT_BYTES <= 64_000_000
