"""Learned sinks in the suite `scale`: right rings pass, and each fault of sinks is found by every method."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from at_length import reports

from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case
from ringverify.events import WrongPair
from ringverify.lab.faults_at_length import case_of
from ringverify.properties.suites import Method
from ringverify.scale.comparison import RankResults
from ringverify.scale.numbers import Numbers

N = 300
METHODS: tuple[Method, ...] = get_args(Method)
PROBLEMS = {
    "causal": Problem(query_length=N, head_dim=8, causal=True, sinks=True),
    "window": Problem(query_length=N, head_dim=8, window=(40, 0), softcap=2.0, scale=0.3, sinks=True),
    "key_lengths": Problem(query_length=N, heads=4, key_heads=2, head_dim=8, batch=2, key_lengths=(0, 200), sinks=True),
    "documents": Problem(query_length=N, head_dim=8, documents=(3, 3, 100, 101, 290), causal=True, sinks=True),
    "cross": Problem(query_length=N, key_length=180, head_dim=8, causal=True, dtype="float64", sinks=True),
    "split": Problem(
        query_length=N, heads=2, head_dim=8, dilation=Dilation(((64, 1), (256, 3))), dtype="float16", sinks=True
    ),
    "shared": Problem(
        query_length=N, heads=2, head_dim=8, dilation=Dilation(((64, 2),), "shared"), dtype="bfloat16", sinks=True
    ),
}
"""Some with rows that have no keys, and an lse that is the sink alone."""
RIGHT = ("ring", "allgather")
"""One returns a rank's part of the gradient of sinks, the other the whole."""


@pytest.mark.parametrize("name", PROBLEMS)
def test_right_rings_pass_with_sinks(name: str) -> None:
    """By all methods, on shardings that take turns; the gradient of sinks is compared, and its bound is finite."""
    number = list(PROBLEMS).index(name)
    for offset, method in enumerate(METHODS):
        target = RIGHT[(number + offset) % 2]
        sharding = ("zigzag", "replicated_query", "striped", "contiguous")[(number + offset) % 4]
        case = Case(problem=PROBLEMS[name], world_size=3, sharding=sharding, cotangent="both", seed=number)
        found = reports(target, case, method)
        assert all(report.differences == () for report in found), (target, sharding, method)
        assert 0 < max(report.margins.get("dsinks", 0.0) for report in found) < 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("id", "tensors"),
    [
        ("O152", {"dsinks", "dv", "lse", "out"}),  # it counts once for every rank
        ("O153", {"dsinks", "dv", "lse", "out"}),  # and at every hop that has keys
        ("O155", {"lse", "dsinks", "dv"}),  # it is left out of lse
        ("O160", {"dsinks", "dv"}),  # and out of the backward
        ("O161", {"dsinks"}),  # its gradient is not summed over the ranks
    ],
)
def test_faults_of_sinks_are_found(id: str, tensors: set[str], method: Method) -> None:
    """In those results that the method compares; sums of out and lse are not among them."""
    case = Case(problem=PROBLEMS["causal"], world_size=3, sharding="zigzag", cotangent="both", seed=1)
    found = {one.tensor for of in reports(f"ringverify.faults.catalogue:{id}", case, method) for one in of.differences}
    assert found & tensors
    if method != "identities":
        assert tensors <= found
    elif id == "O161":
        assert found == tensors


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_that_is_not_summed_is_told_in_words(method: Method) -> None:
    """By head, with what is expected of all queries."""
    case = Case(problem=PROBLEMS["causal"], world_size=2, sharding="zigzag", cotangent="both", seed=1)
    for report in reports("ringverify.faults.catalogue:O161", case, method):
        (one,) = report.differences
        assert str(one.identity).startswith("what all queries give to the sink of head 0: ")
        assert one.sum == ((4, 0, 0, 0) if method == "identities" else None)


def test_without_lse_only_identities_that_need_none_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a row add up to 1 less that of the sink, which lse says."""
    compared: list[Any] = []
    monkeypatch.setattr(RankResults, "compare_sums", lambda self, name, *rest: compared.append((name, rest[-1][0])))
    case = Case(problem=PROBLEMS["causal"], world_size=2, sharding="zigzag", cotangent="out")
    target = f"{Path(__file__).parents[1] / 'miniatures/long_faults.py'}:without_lse"
    reports(target, case, "identities")
    assert compared == [("dv", 0), ("dk", 2)]
    compared.clear()
    reports("ring", dataclasses.replace(case, cotangent="both"), "identities")
    assert compared == [("dv", 0), ("dv", 1), ("dk", 2), ("dk", 3), ("dsinks", 4)]


def test_the_block_that_is_lost_is_named_beside_a_sink() -> None:
    """The sink is a partial result of its own, which no rank's keys hold."""
    case = case_of("far_block_lost", 512).replace(sinks=True)
    found = [
        (rank, one.pair)
        for rank, report in enumerate(reports("ringverify.faults.length:far_block_lost", case))
        for one in report.differences
        if one.pair is not None
    ]
    assert found
    assert all(pair == WrongPair(rank, (rank - 9) % 16, 9, (), "missing") for rank, pair in found)


def test_sinks_weigh_as_much_as_the_root_of_the_number_of_keys() -> None:
    """They are the same for everybody, float32 numbers, and −inf in some heads but the first."""
    problem = Problem(query_length=1 << 16, heads=64, sinks=True)
    sinks = [Numbers(problem, seed, "free").sinks for seed in (1, 1, 2)]
    assert np.array_equal(sinks[0], sinks[1])
    assert not np.array_equal(sinks[0], sinks[2])
    for one in sinks:
        finite = one[np.isfinite(one)]
        assert np.array_equal(finite, finite.astype(np.float32))
        assert (np.abs(finite - np.log(256)) <= 2).all()
        assert 1 <= np.isneginf(one).sum() <= 20
        assert one[0] > -np.inf
    assert Numbers(problem.replace(sinks=False), 1, "free").sinks is None
