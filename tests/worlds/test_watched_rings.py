"""Correct implementations, watched under unfriendly conditions: no hazard, and the bits of a friendly run."""

import itertools
import pathlib

import pytest
import torch
from simulated_runs import WORLD

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.inputs import make_inputs
from ringverify.cases.running import Task, run_rank
from ringverify.ring.declared import allgather, ring
from ringverify.targets import load
from ringverify.worlds.world import Conditions, WorldUnavailable

pytestmark = pytest.mark.timeout(120)

EXAMPLE = pathlib.Path(__file__).parents[2] / "docs" / "examples" / "my_ring.py"
SHARDINGS = ["contiguous", "zigzag", "striped", "replicated_query"]


def bits(run):
    """Everything that came back."""
    assert run.failure is None, f"{run.failure.message}\n{run.failure.detail}"
    return [
        tensor.tobytes() for rank in run.results for tensor in (rank.out, rank.lse, rank.dq, rank.dk, rank.dv)
        if tensor is not None
    ]  # fmt: skip


def run(implementation, case, seed, **how):
    """Forward and backward."""
    make_inputs(case)
    task = Task(implementation, case, True, "cpu")
    return WORLD.run(run_rank, task, world_size=case.world_size, seed=seed, deadline=30, **how)


@pytest.mark.parametrize("implementation", [ring, allgather], ids=["ring", "allgather"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.by_day(4)
def test_our_own_rings_have_no_hazards_whatever_the_transport(implementation, world_size):
    """Thirty seeds on all world sizes together, both transports, with and without delays, uneven shards."""
    problem = Problem(query_length=11, heads=2, head_dim=4, causal=True, dtype="float64")
    for seed in range(world_size, 31, 5):
        case = Case(problem=problem, world_size=world_size, sharding=SHARDINGS[seed % 4], seed=seed)
        friendly = bits(run(implementation, case, 0))
        for transport, delayed in itertools.product(("buffered", "rendezvous"), ((), "some")):
            watched = run(implementation, case, seed, conditions=Conditions(transport, delayed), watch=True)
            assert bits(watched) == friendly
            assert [hazard.message for hazard in watched.hazards] == []
            assert watched.unreceived == ()


def test_the_example_of_a_plug_in_has_no_hazards():
    """Twenty lines with collectives, inside autograd."""
    example = load(f"{EXAMPLE}:attend")
    for world_size, seed in itertools.product((1, 2, 4), range(3)):
        case = Case(
            problem=Problem(query_length=4 * world_size, heads=2, head_dim=4, causal=True), world_size=world_size
        )
        friendly = bits(run(example, case, 0))
        watched = run(example, case, seed, conditions=Conditions("rendezvous", "some"), watch="memory")
        assert bits(watched) == friendly
        assert [hazard.message for hazard in watched.hazards] == []


def test_the_ring_talks_to_its_neighbours_alone_and_the_other_one_does_not():
    """By messages and by collectives; and what goes out comes in."""
    case = Case(problem=Problem(query_length=16, heads=2, head_dim=4), world_size=4)
    traffic = run(ring, case, 0, watch=True).traffic
    assert [traffic.peers(rank) for rank in range(4)] == [{1, 3}, {0, 2}, {1, 3}, {0, 2}]
    assert all(traffic.collectives(rank) <= {"barrier"} for rank in range(4))
    assert [traffic.messages(rank) for rank in range(4)] == [9] * 4
    assert sum(map(traffic.sent, range(4))) == sum(map(traffic.received, range(4)))
    assert run(allgather, case, 0, watch=True).traffic.collectives(0) - {"barrier"}


def test_watching_costs_no_more_than_a_small_multiple_of_the_case():
    """A guard against a blunder, on a machine of any load; what it costs is measured elsewhere."""
    case = Case(problem=Problem(query_length=16, heads=2, head_dim=4, causal=True), world_size=4)

    def seconds(watch):
        return run(ring, case, 0, watch=watch).seconds

    plain = min(seconds(False) for _ in range(5))
    assert min(seconds(True) for _ in range(5)) < 5 * plain


def test_a_torch_that_cannot_show_what_it_does_is_named_with_what_it_lacks(monkeypatch):
    """A run that is not watched needs none of it."""
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_get_dispatch_stack_at")
        assert WORLD.run(lambda _: 1, None, world_size=1, seed=0, deadline=5).results == (1,)
        with pytest.raises(WorldUnavailable, match=r"torch\._C\._get_dispatch_stack_at, which torch .* lacks"):
            WORLD.run(lambda _: 1, None, world_size=1, seed=0, deadline=5, watch=True)
