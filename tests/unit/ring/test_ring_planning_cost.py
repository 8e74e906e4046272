"""What a plan of a million positions on 64 ranks takes, in function calls and objects and not in seconds."""

import itertools
import sys

import pytest

from ringref.problem import Dilation, Problem
from ringverify.ring.plan import cuts as cuts_module
from ringverify.ring.plan import hops as hops_module
from ringverify.ring.plan import regions as regions_module
from ringverify.ring.plan.plan import Plan

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


def begin(problem, sharding, rank):
    """What a rank plans before its first message leaves: the moves of all, its own tiles, the first two KV slices."""
    plan = Plan(problem, sharding, RANKS, rank)
    plan.stacks(rank)
    moves = plan.schedule
    if moves.passes_on(0):
        plan.kv_slice(rank, 0)
    if moves.steps > 1 and moves.receives(0):
        plan.kv_slice(moves.owner(1), 0)
    return plan


def calls(problem, sharding, rank):
    """How many functions, of Python or C, `begin` calls."""
    count = 0

    def event(frame, kind, argument):
        nonlocal count
        count += kind in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(event)
    try:
        begin(problem, sharding, rank)
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
def test_four_times_the_segments_take_no_more_regions(sharding):
    """Those within a rank are copies of one: regions are as many as branches, heads' offsets and runs ask for."""
    found = []
    for length in (MILLION, 4 * MILLION):
        problem = Problem(query_length=length, heads=8, causal=True, dilation=Dilation(BRANCHES, heads="shared"))
        stacks = begin(problem, sharding, 21).stacks(21)
        assert sum(one.copies for one in stacks) > len(stacks)
        found.append(len(stacks))
    # Eight classes of heads with four branches; of each the first segment, those within and the last one. A half of a
    # zigzag meets itself and the other one.
    assert max(found) <= 8 * 4 * 3 * (4 if sharding == "zigzag" else 1)


def test_the_count_of_steps_sees_a_plan_made_segment_by_segment(monkeypatch):
    """The same pieces, each on its own."""

    def apart(*them):
        for one in cuts_module.alike(*them):
            for number in range(one.copies):
                moved = one.distance * number
                yield cuts_module.Alike(one.low + moved, one.high + moved)

    problem = Problem(query_length=MILLION, heads=8, dilation=Dilation(BRANCHES, heads="shared"))
    monkeypatch.setattr(regions_module, "alike", apart)
    monkeypatch.setattr(hops_module, "alike", apart)
    assert calls(problem, "striped", 21) > MOST_CALLS
