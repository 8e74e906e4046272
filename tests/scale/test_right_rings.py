"""The suite `scale` has nothing to say against right implementations, and looks at all that they return."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from at_length import reports

from ringref.problem import DTYPES, Dilation, Problem
from ringverify.cases.case import Case
from ringverify.lab.false_alarms import runs_at_length
from ringverify.properties.suites import Method
from ringverify.scale.comparison import RankResults
from ringverify.scale.numbers import Numbers

N = 300
PROBLEMS = {
    "causal": Problem(query_length=N, head_dim=8, causal=True),
    "everything": Problem(query_length=N, head_dim=8),
    "window": Problem(query_length=N, head_dim=8, causal=True, window=(40, 0)),
    "documents": Problem(query_length=N, head_dim=8, documents=(3, 3, 100, 101, 290), causal=True),
    "key_lengths": Problem(query_length=N, head_dim=8, batch=2, key_lengths=(0, 200)),
    "gqa": Problem(query_length=N, heads=4, key_heads=2, head_dim=8, value_dim=5, causal=True),
    "softcap": Problem(query_length=N, head_dim=8, softcap=2.0, scale=0.3),
    "cross": Problem(query_length=N, key_length=180, head_dim=8, causal=True),
    "split": Problem(query_length=N, heads=2, head_dim=8, dilation=Dilation(((64, 1), (256, 3)))),
    "shared": Problem(
        query_length=N, heads=2, head_dim=8, causal=True, dilation=Dilation(((64, 1), (256, 3)), "shared")
    ),
    **{dtype: Problem(query_length=N, head_dim=8, causal=True, dtype=dtype) for dtype in DTYPES},
}
SHARDINGS = ("contiguous", "zigzag", "striped", "replicated_query")
RESULTS = {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_right_ring_passes(name: str) -> None:
    """On three ranks, which divide nothing; every row of every result is looked at, and none is free of any limit."""
    number = list(PROBLEMS).index(name)
    method = ("every_row", "sampled_rows")[number % 2]
    problem = PROBLEMS[name]
    case = Case(problem=problem, world_size=3, sharding=SHARDINGS[number % 4], cotangent="both")
    found = reports("ring" if number % 3 else "ringverify.faults.ring:PLAIN", case, method)
    for report in found:
        assert report.differences == ()
        assert set(report.margins) == RESULTS
        assert all(0 <= margin < 1 for margin in report.margins.values()), report.margins
    if method == "every_row":
        rows = {name: sum(one.rows[name] for one in found) for name in ("out", "dk")}
        times = 3 if case.sharding == "replicated_query" else 1
        assert rows == {"out": times * problem.batch * problem.heads * N, "dk": problem.batch * problem.hk * problem.nk}


@pytest.mark.parametrize("name", PROBLEMS)
def test_sums_over_all_rows_of_a_right_ring_agree(name: str) -> None:
    """Of every pattern, dtype and sharding."""
    sharding = SHARDINGS[list(PROBLEMS).index(name) % 4]
    case = Case(problem=PROBLEMS[name], world_size=3, sharding=sharding, cotangent="both")
    found = reports("ringverify.faults.ring:PLAIN", case, "identities")
    assert all(report.differences == () for report in found)
    assert found[0].margins.keys() == {"dk", "dv"}
    assert all(0 < margin < 1 for margin in found[0].margins.values())


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_identity_is_compared(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every element and key head, in all dimensions; the last one holds without softcap."""
    compared = []
    compare = RankResults.compare_sums

    def noted(self: RankResults, name: Any, actual: Any, expected: Any, allowed: Any, says: Any, identity: Any) -> None:
        compared.append((name, *identity, len(actual)))
        compare(self, name, actual, expected, allowed, says, identity)

    monkeypatch.setattr(RankResults, "compare_sums", noted)
    problem = Problem(query_length=20, batch=2, heads=4, key_heads=2, head_dim=8, value_dim=5, softcap=softcap)
    reports("ring", Case(problem=problem, world_size=2, sharding="zigzag", cotangent="both"), "identities")
    sums = [("dv", 0, 5), ("dv", 1, 5), ("dk", 2, 8), *([("dk", 3, 8)] if softcap is None else [])]
    assert compared == [(name, which, b, kh, n) for b in range(2) for kh in range(2) for name, which, n in sums]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROBLEMS)
def test_no_right_ring_is_accused_at_length(name: str, seed: int) -> None:
    """The same at 4,096 positions and more, by both methods."""
    problem = PROBLEMS[name]
    long = problem.replace(query_length=4096 + seed, key_length=None if problem.key_length is None else 3000)
    case = Case(problem=long, world_size=2 + seed, sharding=SHARDINGS[seed % 3], cotangent="both", seed=seed)
    for method in get_args(Method):
        assert all(report.differences == () for report in reports("ring", case, method))


def test_false_alarms_at_length_are_counted_from_where_it_ended(tmp_path: Path) -> None:
    """A run that is on record is not run again; it names what was drawn, and no alarm."""
    kept = tmp_path / "kept.jsonl"
    (one,) = runs_at_length(kept, 1)
    assert (one["target"], one["method"]) == ("ring", "every_row")
    assert "alarm" not in one
    written = kept.read_text()
    assert list(runs_at_length(kept, 1)) == [one]
    assert kept.read_text() == written


def test_numbers_depend_on_their_position_alone() -> None:
    """Whoever makes them, and in whichever order; another seed, head or tensor gives others."""
    numbers = Numbers(PROBLEMS["gqa"], 7, "free")
    every = numbers.v(0, 1, np.arange(N))
    np.testing.assert_array_equal(numbers.v(0, 1, np.array([250, 3, 9])), every[[250, 3, 9]])
    for other in (numbers.v(0, 0, np.arange(N)), Numbers(PROBLEMS["gqa"], 8, "free").v(0, 1, np.arange(N))):
        assert (other != every).mean() > 0.5
    assert abs(numbers.k(0, 0, np.arange(N)).mean()) < numbers.k(0, 0, np.arange(N)).std() / np.sqrt(N)


@pytest.mark.parametrize("kind", ["classes", "free"])
def test_every_dtype_holds_them(kind: str) -> None:
    """What the oracle is given are the very numbers that the implementation is given."""
    for dtype in DTYPES:
        numbers = Numbers(PROBLEMS[dtype], 1, kind)
        for make in (numbers.q, numbers.k, numbers.v, numbers.dout):
            made = make(0, 0, np.arange(N))
            np.testing.assert_array_equal(made, numbers._rounded(made))


def test_the_rarest_class_has_a_few_keys_at_every_length() -> None:
    """And is sought by some class of queries, which gives it about as much weight as all the other keys together."""
    for length in (1024, 1 << 20):
        problem = Problem(query_length=length, head_dim=64)
        numbers = Numbers(problem, 0, "classes")
        shares, _ = numbers.shares
        assert 1 < shares[-1] * length < 10
        queries, keys = numbers.codebooks
        weights = np.exp(queries @ keys.T * problem.scale_value) * shares
        sought = (weights / weights.sum(axis=1, keepdims=True)).max(axis=0)
        assert (sought > 0.05).all()
