"""The plan under shardings by documents: many short runs, and still no pair computed for nothing."""

import random

import numpy as np
import pytest
from covering import mismatch, runs_of

from ringref.problem import Problem
from ringref.sharding import balancer
from ringverify.cli.plan_work import works
from ringverify.ring.plan import geometry
from ringverify.ring.plan import needs as needs_module
from ringverify.ring.plan.needs import hops, needs
from ringverify.ring.plan.runs import MOST_RUNS, RowRun, runs_of_ranks, step_of


@balancer
def dealt(documents, world_size):
    """Three tokens at a time: as many runs in a document as it has place for."""
    return [[p for p in range(documents[-1]) if p // 3 % world_size == rank] for rank in range(world_size)]


def drawn(rng, longest=90):
    """A problem with documents, and a world size."""
    n = rng.randrange(1, longest)
    window = rng.choice([None, None, (rng.randrange(9), None), (3, rng.randrange(20))])
    batch = rng.choice([1, 1, 2])
    return Problem(
        query_length=n,
        batch=batch,
        causal=rng.random() < 0.6,
        window=window,
        documents=tuple(sorted(rng.randrange(n + 1) for _ in range(rng.randrange(1, 9)))),
        key_lengths=None if batch == 1 else (rng.randrange(n + 1), n),
    ), rng.randrange(1, 8)


@pytest.fixture(params=[None, 1], ids=["all at once", "document by document"])
def few_at_a_time(request, monkeypatch):
    """With as few runs as there are here, all documents are looked at together, or each on its own."""
    if request.param is not None:
        monkeypatch.setattr(geometry, "NEARBY", request.param)


@pytest.mark.usefixtures("few_at_a_time")
@pytest.mark.parametrize("sharding", ["zigzag_documents", dealt], ids=["ours", "dealt"])
def test_every_pair_meets_as_often_as_the_pattern_says(sharding):
    """Random documents, with padding, windows and key lengths."""
    rng = random.Random(0)
    for _ in range(40):
        problem, world_size = drawn(rng)
        why = mismatch(problem, sharding, world_size, (16, 16))
        assert why is None, (problem, world_size, why)


@pytest.mark.usefixtures("few_at_a_time")
def test_rows_travel_as_far_as_is_found_rank_by_rank():
    """And ranks need what some rectangle has."""
    rng = random.Random(1)
    for _ in range(40):
        problem, world_size = drawn(rng, 600)
        queries, keys = runs_of(problem, "zigzag_documents", world_size)
        owner = rng.randrange(world_size)
        found, plain = hops(problem, queries, keys, owner), needs_module._rank_by_rank(problem, queries, keys, owner)
        assert all(np.array_equal(*pair) for pair in zip(found, plain, strict=True)), (problem, world_size)
        needed = needs(problem, queries, keys)[(owner + np.arange(1, world_size)) % world_size, owner]
        assert needed.sum() <= np.unique(plain.furthest[plain.furthest > 0]).size + (plain.furthest > 1).sum()
        assert needed.any() == (plain.furthest > 0).any()


def test_a_rank_has_about_two_runs_of_every_document():
    """And not many more where tokens are left over."""
    lengths = np.random.default_rng(0).integers(16, 400, 64)
    documents = (0, *np.cumsum(lengths).tolist())
    held = runs_of_ranks("zigzag_documents", documents[-1], 8, documents)
    assert all(len(of) <= 2.2 * 64 for of in held)
    assert step_of(*held) is None, "without documents they are too many"
    assert step_of(*held, documents=documents) == 1
    positions = [position for run in held[0] for position in range(run.first, run.first + run.size)]
    assert [run.row for run in held[0]] == np.cumsum([0, *(run.size for run in held[0])])[:-1].tolist()
    assert positions == sorted(positions)


def test_too_many_runs_in_one_document_are_looked_up_by_position():
    """Beside a document in which they are few."""
    many = tuple(RowRun(2 * number, 1, 1, number) for number in range(MOST_RUNS + 1))
    beside = (RowRun(100, 1, 5, 0),)
    assert step_of(many, beside, documents=(0, 50, 200)) is None
    assert step_of(many, beside, documents=(0, 10, 50, 200)) == 1


def test_nothing_is_computed_for_nothing_and_every_rank_has_as_much():
    """64 documents on 8 ranks: the pairs computed are those of the pattern, shared out to a hundredth."""
    lengths = np.random.default_rng(1).integers(1, 2000, 64)
    documents = (0, *np.cumsum(lengths).tolist())
    problem = Problem(query_length=documents[-1], causal=True, documents=documents)
    found = works(problem, "zigzag_documents", 8, 512)
    computed, attended = ([one.total[name] for one in found] for name in ("computed", "attended"))
    assert sum(attended) == sum(length * (length + 1) // 2 for length in lengths.tolist())
    assert sum(computed) <= 1.01 * sum(attended)
    assert max(attended) <= 1.001 * sum(attended) / 8
