"""`ringverify confirm` of failures of the suite scale: by scripts of their own, which accuse nobody wrongly."""

import numpy as np
import pytest
from command_line import miniature

from ringref.problem import Dilation, Problem
from ringref.rounding import witness_bound
from ringref.sampled import SampledRows
from ringverify.cases.case import Case
from ringverify.check.casefile import CaseFile
from ringverify.confirm.confirming import RIGHT, Scripts, read
from ringverify.confirm.long_script import long_script
from ringverify.events import CounterexampleEvent
from ringverify.faults.ring import EVERYTHING
from ringverify.scale.comparison import stacked
from ringverify.scale.numbers import Numbers

pytestmark = [pytest.mark.timeout(240)]

FAULT = "ringverify.faults.length:mask_off_by_one"
SCALE = ("--suite", "scale", "--seed", 0)
N = 300
PROBLEMS = {
    "causal": Problem(query_length=N, head_dim=8, causal=True),
    "gqa": Problem(query_length=N, heads=4, key_heads=2, head_dim=8, value_dim=5, causal=True, batch=2),
    "lengths": Problem(query_length=N, head_dim=8, batch=2, key_lengths=(0, 200)),
    "documents": Problem(query_length=N, head_dim=8, documents=(3, 3, 100, 101, 290), causal=True),
    "softcap": Problem(query_length=N, key_length=180, head_dim=8, softcap=2.0, scale=0.3),
    "sinks": Problem(query_length=N, heads=4, key_heads=2, head_dim=8, batch=2, key_lengths=(0, 200), sinks=True),
    "shared": Problem(query_length=N, heads=2, head_dim=8, dilation=Dilation(((64, 1), (256, 3)), "shared")),
}


def failing(case, method, **fields):
    """The case file of a failure, and what a report says of it."""
    recorded = CaseFile("ring", method, "simulated", "cpu", case, (), "", "", "")
    numbers = dict.fromkeys(("rank", "hop", "tensor", "index", "error", "allowed", "diagnosis", "case"))
    return recorded, CounterexampleEvent(implementation="ring", property=method, replay="", **{**numbers, **fields})


def module(script, monkeypatch):
    """What a script defines."""
    monkeypatch.setattr("sys.argv", ["script.py"])
    defined = {"__name__": "a_script"}
    exec(compile(script.text, "script.py", "exec"), defined)
    return defined


@pytest.mark.parametrize("method", ["every_row", "sampled_rows"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_script_computes_what_the_oracle_does(name, method, monkeypatch):
    """From its own numbers, by its own formulas: rows, and gradients of keys; errors allowed are positive and small."""
    p = PROBLEMS[name]
    case = Case(problem=p, world_size=3, sharding="zigzag", cotangent="both", seed=5)
    script = module(long_script(*failing(case, method, tensor="dk", position=7), EVERYTHING), monkeypatch)
    rows, chosen = script["ROWS"], script["CHOSEN"]
    assert 7 in chosen
    numbers = Numbers(p, 5, "classes" if method == "every_row" else "free")
    q, dout = (stacked(make, p.batch, p.heads, rows) for make in (numbers.q, numbers.dout))
    dlse = np.stack([np.stack([numbers.dlse(b, h, rows) for h in range(p.heads)]) for b in range(p.batch)])
    k, v = (stacked(make, p.batch, p.hk, np.arange(p.nk)) for make in (numbers.k, numbers.v))
    oracle = SampledRows(p, rows, q, dout, dlse)
    oracle.see(np.arange(p.nk), k, v)
    if p.sinks:
        oracle.join(numbers.sinks)
    dk, dv, _ = oracle.differentiate(np.arange(p.nk), k, v)
    found = script["dense"]()
    expected = {"out": oracle.out, "lse": oracle.lse.swapaxes(1, 2)[..., None], "dq": oracle.dq}
    expected |= {"dk": dk[:, chosen], "dv": dv[:, chosen]}
    for result, right in expected.items():
        finite = np.isfinite(right)
        assert (finite == np.isfinite(found[result])).all()
        most = witness_bound("float64", p.nk * p.head_dim) * np.abs(right[finite]).max()
        assert np.abs(found[result][finite] - right[finite]).max() <= most, result
        allowed = script["ALLOWED"][result]
        assert allowed.shape == right.shape
        assert (allowed >= 0).all()
        assert allowed.max() < 0.1
    if p.sinks:
        right, allowed = oracle.gradient_of_sinks(numbers.sinks).sum(axis=0), script["ALLOWED"]["dsinks"]
        most = witness_bound("float64", p.nk * p.head_dim) * np.abs(right).max()
        assert np.abs(found["dsinks"] - right).max() <= most
        assert (allowed[np.isfinite(numbers.sinks)] > 0).all()
        assert (allowed < np.abs(right).sum()).all()


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("every_row", FAULT),
        pytest.param("sampled_rows", FAULT, marks=pytest.mark.nightly),
        ("identities", miniature("long_faults:tile_detached")),
    ],
)
def test_a_failure_at_length_is_shown_without_the_suite(method, target, ringverify):
    """The script makes the same inputs, runs the ring over gloo, and finds rows or sums wrong."""
    ran = ringverify.check(target, *SCALE, "--length", 1200, "--only", method, "--problem", '{"head_dim": 16}')
    assert ran.code == 1
    outcome = ringverify("confirm", "report-1.jsonl", "--scripts", "shown", "--json", "seen.json", "--trust")
    assert (outcome.code, outcome.err) == (0, "")
    (seen,) = read(ringverify.folder / "seen.json")
    assert (seen.property, seen.outcome) == (method, "shown")
    assert seen.said[0].startswith("wrong: ")


@pytest.mark.parametrize(
    ("method", "id"),
    [
        *((method, "O161") for method in ("every_row", "sampled_rows", "identities")),
        ("identities", "O155"),
    ],
)
@pytest.mark.nightly
def test_faults_of_sinks_are_shown_without_the_suite(method, id, ringverify):
    """The script has the sinks, and computes their gradient again."""
    asked = ("--length", 600, "--only", method, "--problem", '{"head_dim": 16, "sinks": true}')
    ran = ringverify.check(f"ringverify.faults.catalogue:{id}", *SCALE, *asked)
    assert ran.code == 1
    (event,) = ran.told("counterexample")
    outcome = ringverify("confirm", "report-1.jsonl", "--json", "seen.json", "--trust")
    assert outcome.code == 0, outcome.out
    seen = read(ringverify.folder / "seen.json")[0]
    assert (seen.case, seen.outcome) == (event["file"], "shown")
    assert event["tensor"] in seen.said[0]


@pytest.mark.nightly
def test_the_smaller_case_of_it_is_shown_too(ringverify):
    """The one that the ordinary suite found, by a script of the ordinary kind."""
    asked = ("--length", 600, "--only", "sampled_rows", "--problem", '{"head_dim": 16}')
    ran = ringverify.check("ringverify.faults.catalogue:B3", *SCALE, *asked)
    (event,) = ran.told("counterexample")
    outcome = ringverify("confirm", "report-1.jsonl", "--json", "seen.json", "--trust")
    assert outcome.code == 0, outcome.out
    long, small = read(ringverify.folder / "seen.json")
    assert (long.property, small.property) == ("sampled_rows", event["smaller_property"])
    assert (long.case, small.case) == (event["file"], event["smaller"])
    assert outcome.out.endswith("2 of 2 violations are shown without ringverify\n")


@pytest.mark.parametrize(
    ("method", "name", "fields"),
    [
        ("every_row", "causal", {"tensor": "dv", "position": 40}),
        pytest.param("sampled_rows", "causal", {"tensor": "dv", "position": 40}, marks=pytest.mark.nightly),
        ("identities", "causal", {"tensor": "dv", "sum": (1, 0, 0, 3), "allowed": 1e-2}),
        ("every_row", "sinks", {"tensor": "dsinks"}),
        *(
            pytest.param("identities", "sinks", {"tensor": "dk", "sum": which, "allowed": 1e-2}, marks=marks)
            for which, marks in (((4, 0, 0, 2), ()), ((1, 1, 1, 3), pytest.mark.nightly), ((3, 1, 0, 3), ()))
        ),
    ],
)
@pytest.mark.by_day(1)
def test_a_right_ring_is_not_accused(method, name, fields, tmp_path):
    """Whatever a report says of it."""
    case = Case(problem=PROBLEMS[name], world_size=2, sharding="zigzag", cotangent="both", seed=5)
    recorded, event = failing(case, method, file="case.json", **fields)
    seen = Scripts(tmp_path, None).confirmed(event, recorded)
    assert (seen.outcome, seen.said) == ("not shown", (RIGHT,))


@pytest.mark.nightly
def test_what_ranks_raise_at_length_is_shown(ringverify):
    """By the same script."""
    target = miniature("misbehaving:raises_on_one_rank")
    assert ringverify.check(target, *SCALE, "--length", 64, "--only", "every_row").code == 1
    outcome = ringverify("confirm", "report-1.jsonl", "--trust")
    assert outcome.code == 0, outcome.out
    assert "every_row: rank 1 raised ValueError: rank 1 cannot go on" in outcome.out


@pytest.mark.parametrize(
    "fields", [{"tensor": "out", "position": 10**9}, {"tensor": "dv", "sum": (9, -1, 7, 10**6), "allowed": 1.0}]
)
def test_a_report_of_what_there_is_not_makes_a_script_all_the_same(fields, monkeypatch):
    """Of other rows; a row or a sum that the problem does not have is left out."""
    case = Case(problem=PROBLEMS["causal"], world_size=2, sharding="zigzag", seed=5)
    script = module(long_script(*failing(case, "identities", **fields), EVERYTHING), monkeypatch)
    assert script["SUM"] is None
    assert script["ROWS"].max() < N
