"""Shrinking: what cannot matter goes away, what matters stays, and it always ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.shrinking import shrink
from ringverify.implementation import Capabilities
from ringverify.ring.declared import ring
from ringverify.strategies import cases

LARGE = Case(
    problem=Problem(
        batch=3,
        query_length=24,
        key_length=24,
        heads=6,
        key_heads=3,
        head_dim=8,
        value_dim=5,
        dtype="bfloat16",
        causal=True,
        window=(5, None),
        key_lengths=(24, 3, 10),
        scale=0.3,
        softcap=5.0,
    ),
    sharding="striped",
    world_size=8,
    values="rising_blocks",
    memory="offset",
    cotangent="both",
    seed=4321,
    schedule=77,
)
SMALLEST = Case(problem=Problem(query_length=0, head_dim=1), values="integers")


def test_where_everything_fails_the_smallest_case_of_all_is_left():
    """One rank, no tokens, one head, one dimension, no constraint, float32, integers, seed 0."""
    shrunk = shrink(LARGE, lambda case: True, ring.capabilities)
    assert shrunk.case == SMALLEST
    assert shrunk.complete
    assert shrunk.tried < 100


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (lambda c: c.world_size >= 3, {"world_size": 3}),
        (lambda c: c.world_size >= 2 and c.problem.nq >= 4, {"world_size": 2, "query_length": 4}),
        (lambda c: c.problem.nq > c.world_size > 1, {"world_size": 2, "query_length": 3}),
        (lambda c: c.problem.group_size > 1, {"heads": 2, "key_heads": 1}),
        (lambda c: c.problem.dv != c.problem.head_dim, {"value_dim": 1, "head_dim": 2}),
        (lambda c: c.problem.causal and c.problem.nq > 1, {"causal": True, "query_length": 2}),
        (lambda c: c.problem.window is not None, {"window": (0, 0)}),
        (lambda c: c.problem.key_lengths is not None and c.problem.nk, {"key_lengths": (0,), "query_length": 1}),
        (lambda c: c.values == "rising_blocks", {"values": "rising_blocks"}),
        (lambda c: c.problem.dtype == "bfloat16", {"dtype": "bfloat16"}),
        (lambda c: c.memory != "contiguous", {"memory": "transposed"}),
        (lambda c: c.cotangent != "out", {"cotangent": "lse"}),
    ],
)
def test_what_a_failure_needs_stays_and_the_rest_goes(needs, expected):
    """For each kind of need: the shrunk case still has it, at its smallest, and is otherwise the plainest case."""
    shrunk = shrink(LARGE, needs, ring.capabilities, budget=2000)
    assert needs(shrunk.case)
    kept = {**SMALLEST.to_json(), **SMALLEST.problem.to_json()}
    found = {**shrunk.case.to_json(), **shrunk.case.problem.to_json()}
    for name, value in expected.items():
        assert (tuple(found[name]) if isinstance(found[name], list) else found[name]) == value
    for name in set(found) - set(expected) - {"problem", "value_dim", "head_dim"}:
        assert found[name] == kept.get(name), name


def test_dilation_and_documents_shrink_too():
    """Branches, segments, rates and boundaries that cannot matter go away."""
    dilated = LARGE.replace(
        dilation=Dilation(((7, 3), (9, 2), (4, 4)), "shared", "block"), window=None, softcap=None, key_lengths=None
    )
    shrunk = shrink(dilated, lambda c: c.problem.dilation is not None, ring.capabilities)
    assert shrunk.case.problem.dilation == Dilation(((1, 1),), "shared", "cyclic")
    packed = LARGE.replace(documents=(0, 3, 9, 9, 24), window=None, key_lengths=None)
    shrunk = shrink(packed, lambda c: c.problem.documents is not None and c.problem.nq > 2, ring.capabilities)
    assert shrunk.case.problem.documents is not None
    assert len(shrunk.case.problem.documents) <= 2
    assert shrunk.case.problem.nq == 3


def test_shrinking_stays_within_what_is_declared():
    """An implementation that needs even shards on two or four ranks is never asked for anything else."""
    declared = Capabilities(world_sizes=(2, 4), sharding="zigzag", causal="always")
    case = Case(problem=Problem(query_length=16, heads=2, causal=True), sharding="zigzag", world_size=4)
    asked = []

    def fails(candidate):
        asked.append(candidate)
        return True

    shrunk = shrink(case, fails, declared)
    assert all(why_unsupported(candidate, declared) is None for candidate in asked)
    assert (shrunk.case.world_size, shrunk.case.problem.nq) == (2, 4)


def test_the_budget_ends_shrinking_and_is_told():
    """A slow world is asked no more often than allowed."""
    shrunk = shrink(LARGE, lambda case: case.world_size == 8 and case.seed == 4321, ring.capabilities, budget=5)
    assert shrunk.tried <= 5
    assert not shrunk.complete
    assert not shrink(LARGE, lambda case: False, ring.capabilities, seconds=0).complete


@settings(max_examples=60)
@given(cases(ring.capabilities), st.integers(0, 3))
def test_shrinking_always_ends_with_a_case_that_fails(case, salt):
    """Under an arbitrary but fixed rule of failing, no proposal is malformed and the result still fails."""

    def fails(candidate):
        return candidate == case or (hash((candidate.problem.nq, candidate.world_size, salt)) % 3 == 0)

    shrunk = shrink(case, fails, ring.capabilities)
    assert fails(shrunk.case)
    assert shrunk.complete
