"""The mean error of sampled rows in bfloat16 and float16: pipelines that do as declared pass, others are accused."""

from __future__ import annotations

from typing import Any

import pytest
from at_length import reports

from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case
from ringverify.properties.precision import FEWEST
from ringverify.scale.precision import mean_limits, rounded_more, summed_squares
from ringverify.scale.task import RankReport
from ringverify.targets import load

N = 1500
RESULTS = ("out", "dq", "dk", "dv")
PATTERNS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (300, 40), "softcap": 2.0},
    "gqa": {"heads": 4, "key_heads": 2, "value_dim": 8},
    "documents": {"documents": (0, 700, 701, 1400), "causal": True},
    "shared": {"heads": 2, "dilation": Dilation(((512, 1), (1024, 8)), "shared")},
}


def case_of(pattern: str, dtype: str, sharding: str, size: int) -> Case:
    """A case of about 1,500 positions."""
    problem = Problem(query_length=N, **{"head_dim": 16, "dtype": dtype, **PATTERNS[pattern]})
    return Case(problem=problem, world_size=size, sharding=sharding, cotangent="both", seed=11)


def run(target: str, case: Case) -> list[RankReport]:
    """What ranks found in sampled rows, of which there are enough for a mean."""
    return reports(target, case, "sampled_rows", 128)


@pytest.mark.parametrize("target", ["ring", "allgather", "ringverify.faults.ring:PLAIN"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_rounds_as_declared_passes(pattern: str, dtype: str, target: str) -> None:
    """Fused kernels that declare rounded weights, and a ring that sums in float32; every result is judged."""
    number = list(PATTERNS).index(pattern)
    case = case_of(pattern, dtype, ("zigzag", "replicated_query", "striped")[number % 3], 1 + number % 3)
    found, probabilities = run(target, case), load(target).capabilities.probabilities
    assert set(mean_limits([one.squares for one in found], probabilities)) == set(RESULTS)
    margin, violation = rounded_more(case, found, probabilities)
    assert violation is None, violation
    assert 0.3 < margin < 1


@pytest.mark.parametrize(
    ("id", "result"),
    [
        ("A12a", "out"),  # rounded after every hop
        ("A12b", "dq"),
        ("A12c", "dk"),  # which travels with dv
        ("O80", "dk"),  # ds is rounded
    ],
)
def test_a_sum_in_bfloat16_over_hops_is_accused(id: str, result: str) -> None:
    """Of eight ranks: the running sum is rounded at each."""
    case = case_of("causal", "bfloat16", "zigzag", 8)
    margin, violation = rounded_more(case, run(f"ringverify.faults.catalogue:{id}", case), "accumulates")
    assert margin > 1.1
    assert violation is not None
    assert violation.reason == ("precision", result)
    assert f"{result} in bfloat16 is rounded more than declared: root mean square error 0." in violation.summary


def test_rows_that_every_rank_holds_count_once() -> None:
    """Their errors are the same on every rank, and no more of a mean."""
    case = case_of("causal", "bfloat16", "replicated_query", 3)
    squares = summed_squares([one.squares for one in run("ring", case)])
    assert squares["out"][0, 1] == 3 * squares["out"][2, 1]
    assert squares["out"][2, 1] >= FEWEST


def test_nothing_is_judged_in_float32_or_of_every_row() -> None:
    """Keys of a class have the same weight, whose rounding is no draw; and float32 has its bound."""
    for dtype, method in (("float32", "sampled_rows"), ("bfloat16", "every_row")):
        found = reports("ring", case_of("causal", dtype, "zigzag", 2), method)
        assert mean_limits([one.squares for one in found], "input") == {}
