"""All ranks' schedules played together: what is needed arrives, gradients come home, and nothing moves for nothing."""

import itertools
import random

import numpy as np
import pytest

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringref.sharding import SHARDINGS, key_positions, query_positions
from ringverify.ring.plan import plan as plan_module
from ringverify.ring.plan import schedule as schedule_module
from ringverify.ring.plan.plan import Plan, make_plan
from ringverify.ring.plan.schedule import schedule


def drawn(rng, size):
    """Who needs whom: dense or sparse, with whole rows and columns of nothing."""
    density = rng.choice([0.0, 0.1, 0.3, 0.7, 1.0])
    idle = {rank for rank in range(size) if rng.random() < 0.2}
    return [
        [(rng.random() < density and not {rank, owner} & idle) or (rank == owner and rng.random() < 0.5)
         for owner in range(size)]
        for rank in range(size)
    ]  # fmt: skip


def stripes(length, world_size):
    """A sharding that is a function."""
    return [list(range(rank, length, world_size)) for rank in range(world_size)]


def band(size, before, after):
    """A window: a rank needs the owners from `before` ranks before it to `after` ranks after it."""
    return [[-before <= owner - rank <= after for owner in range(size)] for rank in range(size)]


def schedules(matrix):
    """Every rank's."""
    return [schedule(np.array(matrix, dtype=bool), rank) for rank in range(len(matrix))]


def played_forward(matrix):
    """Move blocks as every rank's schedule says; returns the bytes' worth of hops."""
    ranks = schedules(matrix)
    size = len(matrix)
    assert len({one.reach for one in ranks}) == 1, "ranks do not agree"
    assert len({one.steps for one in ranks}) == 1, "a rank ends the pass before the others"
    held = list(range(size))
    computed = {(rank, rank) for rank in range(size) if ranks[rank].computes[0]}
    sent = 0
    for step in range(ranks[0].steps):
        for rank, one in enumerate(ranks):
            if held[rank] is not None:
                assert one.owner(step) == held[rank]
            assert held[rank] is not None or not (one.computes[step] or one.passes_on(step))
            if one.computes[step]:
                computed.add((rank, held[rank]))
        last = step + 1 == ranks[0].steps
        sends = [one.passes_on(step) for one in ranks]
        receives = [not last and one.receives(step) for one in ranks]
        assert not (last and any(sends)), "a block is sent after the last step"
        assert receives == [sends[rank - 1] and not last for rank in range(size)], "a send that nobody meets"
        sent += sum(sends)
        held = [held[rank - 1] if receives[rank] else None for rank in range(size)]
    assert computed == {
        (rank, owner) for rank, owner in itertools.product(range(size), repeat=2) if matrix[rank][owner]
    }
    assert not any(one.passes_on(one.steps) for one in ranks)
    return sent


def furthest(matrix):
    """By owner, the last hop at which somebody still needs its block."""
    size = len(matrix)
    return [max((hop for hop in range(1, size) if matrix[(o + hop) % size][o]), default=0) for o in range(size)]


def played_backward(matrix):
    """Let gradients travel; every rank adds its part when it holds the block. Returns the most held at a rank."""
    ranks, size = schedules(matrix), len(matrix)
    steps, most = ranks[0].steps, 0
    # By rank: owner to the contributions so far. A contribution is lost if it is added where the gradient is not.
    held = [{} for _ in range(size)]
    arriving = [{} for _ in range(size)]
    boundaries = {len(one.gradients) for one in ranks}
    for boundary in range(1, max(steps, *boundaries)):
        for rank, one in enumerate(ranks):
            held[rank] |= arriving[rank]
            arriving[rank] = {}
            if boundary < steps and one.computes[boundary]:
                held[rank].setdefault(one.owner(boundary), set()).add(rank)
        posted = {}
        for rank, one in enumerate(ranks):
            moves = one.gradients[boundary] if boundary < len(one.gradients) else schedule_module.Moves()
            for owner, target in moves.sends:
                assert (target - rank) % size in (1, size - 1), "to a rank that is no neighbour"
                posted.setdefault((rank, target), []).append((owner, held[rank].pop(owner)))
        for rank, one in enumerate(ranks):
            moves = one.gradients[boundary] if boundary < len(one.gradients) else schedule_module.Moves()
            for source in dict.fromkeys(source for _, source in moves.receives):
                messages = posted.pop((source, rank))
                expected = [owner for owner, origin in moves.receives if origin == source]
                assert expected == [owner for owner, _ in messages], "messages of a pair in different orders"
                arriving[rank] |= dict(messages)
            most = max(most, len(held[rank]) + len(arriving[rank]) + len(moves.sends))
        assert not posted, "a gradient is sent that nobody receives"
    for rank in range(size):
        held[rank] |= arriving[rank]
    for owner in range(size):
        contributors = {rank for rank in range(size) if rank != owner and matrix[rank][owner]}
        assert held[owner].pop(owner, set()) == contributors, f"the gradient of {owner}"
    assert not any(held), f"gradients that are not at home: {held}"
    return most


MATRICES = [
    [band(size, before, after) for before, after in itertools.product((0, 1, 2, size), repeat=2)]
    for size in range(1, 9)
]


@pytest.mark.parametrize("size", range(1, 9))
def test_every_block_reaches_who_needs_it_and_goes_no_further(size):
    """Random needs and windows: all computed, sends and receives in pairs, and not one hop more than is needed."""
    rng = random.Random(size)
    for matrix in MATRICES[size - 1] + [drawn(rng, size) for _ in range(150)]:
        assert played_forward(matrix) == sum(furthest(matrix)), matrix


@pytest.mark.parametrize("size", range(1, 9))
def test_every_gradient_visits_its_contributors_and_comes_home(size):
    """Random needs and windows; neighbours only, every pair of ranks in one order, and all contributions in it."""
    rng = random.Random(size)
    for matrix in MATRICES[size - 1] + [drawn(rng, size) for _ in range(150)]:
        played_backward(matrix)


@pytest.mark.parametrize("size", [*range(2, 9), 16])
def test_few_gradients_are_at_a_rank_at_once(size):
    """One that comes and one that leaves where all need all, causally or not; under a short window that and the way
    back as well, and its own that is home early, however wide the world."""
    everyone, causal = band(size, size, size), band(size, size, 0)
    assert played_backward(everyone) <= 2
    assert played_backward(causal) <= 2
    for before, after in itertools.product(range(size), range(min(size, 4))):
        assert played_backward(band(size, before, after)) <= 5, (before, after)


def test_a_window_ends_the_pass_early():
    """Forward has one step more than the furthest hop, and the gradient of a short window goes back the way it came."""
    for size, before in itertools.product(range(2, 9), range(1, 4)):
        matrix = band(size, before, 0)
        one = schedules(matrix)[size - 1]
        assert one.steps == 1 + min(before, size - 1)
        assert played_forward(matrix) == sum(min(before, size - 1 - owner) for owner in range(size))
    one = schedules(band(8, 1, 0))[3]
    assert [moves.sends for moves in one.gradients] == [(), ((2, 2),)]
    assert [moves.receives for moves in one.gradients] == [(), ((3, 4),)]


def test_nobody_needs_anybody():
    """One step, no moves."""
    for size in range(1, 9):
        for one in schedules([[rank == owner for owner in range(size)] for rank in range(size)]):
            assert (one.steps, one.gradients, one.computes) == (1, (), (True,))
            assert not one.passes_on(0)


def test_hops_that_only_relay_do_not_compute():
    """Rank 0 is needed by rank 2 of 4 alone: rank 1 passes its block on, and the gradient starts at rank 2."""
    matrix = [[rank == owner for owner in range(4)] for rank in range(4)]
    matrix[2][0] = True
    ranks = schedules(matrix)
    assert ranks[1].computes == (True, False, False)
    assert ranks[1].passes_on(1)
    assert ranks[2].computes == (True, False, True)
    assert not any(moves.sends or moves.receives for moves in ranks[1].gradients)
    assert ranks[2].gradients[2].sends == ((0, 3),)


def test_the_play_sees_a_gradient_that_stops_short(monkeypatch):
    """Left one rank before home, and one that leaves its last contributor out."""
    matrix = band(4, 4, 4)
    dkv_returns = schedule_module.dkv_returns
    monkeypatch.setattr(schedule_module, "dkv_returns", lambda *them: [of[:-1] for of in dkv_returns(*them)])
    with pytest.raises(AssertionError, match="the gradient of 0"):
        played_backward(matrix)
    monkeypatch.setattr(schedule_module, "dkv_returns", lambda hops, size: dkv_returns([of[1:] for of in hops], size))
    with pytest.raises((AssertionError, KeyError)):
        played_backward(matrix)


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped"])
def test_plans_need_what_the_pattern_needs(sharding):
    """Causal, windowed and cut into documents: a rank computes on exactly the blocks where the pattern has a pair."""
    for n, size in itertools.product((1, 5, 12, 17), (1, 2, 3, 5)):
        for fields in (
            {},
            {"causal": True},
            {"causal": True, "window": (2, 0)},
            {"window": (0, 1)},
            {"documents": (0, n // 3, n)},
            {"key_lengths": (n // 2,)},
            {"key_length": n + 4, "causal": True},
        ):
            problem = Problem(query_length=n, **fields)
            m = multiplicity(problem)[0, 0]
            queries, keys = query_positions(sharding, n, size), key_positions(sharding, problem.nk, size)
            matrix = [[bool(m[queries[r]][:, keys[o]].any()) for o in range(size)] for r in range(size)]
            plans = [make_plan(problem, sharding, size, rank) for rank in range(size)]
            assert [plan.schedule for plan in plans] == schedules(matrix), (problem, size)


def test_plans_are_made_once():
    """Equal problems share a plan: nothing is planned again in the second step of a training loop."""
    problem = Problem(query_length=64, causal=True)
    assert make_plan(problem, "zigzag", 4, 1) is make_plan(Problem(query_length=64, causal=True), "zigzag", 4, 1)


@pytest.mark.parametrize("sharding", [*SHARDINGS, stripes])
@pytest.mark.parametrize("length", [3, 16, 21])
def test_ranks_of_one_process_find_their_regions_together_and_the_same_ones(length, sharding, monkeypatch):
    """The first plan finds those of all ranks, if they are few, so that no later one has to."""
    searched, together, of_ranks = [], None, plan_module.regions_of_ranks

    def counted(problem, queries, keys):
        searched.append(len(queries))
        return of_ranks(problem, queries, keys)

    monkeypatch.setattr(plan_module, "regions_of_ranks", counted)
    size, dilation = 4, Dilation(((8, 2), (5, 3)), heads="split")
    for problem in (
        Problem(query_length=length, causal=True, heads=2),
        Problem(query_length=length, window=(4, 1), batch=3, key_lengths=(length, 2, 2)),
        Problem(query_length=length, documents=(0, 1, 3)),
        Problem(query_length=length, heads=2, dilation=dilation),
    ):
        for few, expected in ((4096, [size]), (0, [])):
            monkeypatch.setattr(plan_module, "FEW", few)
            searched.clear()
            plan_module._COMMON_PLANS.clear()
            plans = [Plan(problem, sharding, size, rank) for rank in range(size)]
            found = [[list(plan.regions(owner)) for owner in range(size)] for plan in plans]
            assert searched == expected
            together = found if few else together
        assert together == found


@pytest.mark.parametrize(("form", "few"), [("hops", 0), ("hops_of", 4096)])
@pytest.mark.parametrize("other", [Problem(query_length=33, causal=True), "striped", 3])
def test_ranks_of_one_process_find_once_what_they_all_know(other, form, few, monkeypatch):
    """How far a block travels is found once for all ranks, again where anything is different, and goes with them."""
    found, hops = [], getattr(plan_module, form)

    def counted(*arguments):
        found.append(arguments)
        return hops(*arguments)

    monkeypatch.setattr(plan_module, form, counted)
    monkeypatch.setattr(plan_module, "FEW", few)
    problem, sharding, size = Problem(query_length=32, causal=True), "zigzag", 4

    def sent(problem, sharding, size):
        plans = [Plan(problem, sharding, size, rank) for rank in range(size)]
        return plans, [plan.kv_numel(owner, 0) for plan in plans for owner in range(size)]

    plans, numels = sent(problem, sharding, size)
    assert len(found) == size
    match other:
        case Problem():
            sent(other, sharding, size)
        case str():
            sent(problem, other, size)
        case int():
            sent(problem, sharding, other)
    assert len(found) == size + (other if isinstance(other, int) else size)
    del plans
    assert sent(problem, sharding, size)[1] == numels
    assert len(found) == 2 * size + (other if isinstance(other, int) else size)
