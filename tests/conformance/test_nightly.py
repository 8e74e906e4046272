"""The suites: all but nightly repeat, nightly sees other cases each time; and each tries first what failed before."""

import importlib
import json
import sys
from pathlib import Path

import hypothesis
import pytest
from command_line import miniature
from report_lines import resealed

from ringverify.check.drawing import drawn
from ringverify.check.options import MOST_DRAWN, seed_for
from ringverify.implementation import Capabilities
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.suites import SUITES

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("unexplained")]

WRONG = (miniature("faulty_rings:dropped_key"), "--only", "forward")


def test_only_the_suites_nightly_and_scale_draw_their_seed():
    """And only where none is asked for."""
    assert seed_for("smoke", None) == seed_for("quick", None) == seed_for("full", None) == 0
    assert seed_for("nightly", 5) == seed_for("quick", 5) == 5
    assert seed_for("nightly", None, 77) == 77
    assert all(len({seed_for(suite, None) for _ in range(20)}) > 1 for suite in ("nightly", "scale"))
    assert 0 <= seed_for("nightly", None) < MOST_DRAWN


def test_the_cases_drawn_are_those_of_the_seed_whatever_profile_is_in_force():
    """Such as one of a project's own tests."""
    usual = drawn(PROPERTIES["forward"], Capabilities(), 5)
    hypothesis.settings.register_profile("a project's", derandomize=True, max_examples=1)
    hypothesis.settings.register_profile("as it was", hypothesis.settings.default)
    try:
        hypothesis.settings.load_profile("a project's")
        assert drawn(PROPERTIES["forward"], Capabilities(), 5) == usual
    finally:
        hypothesis.settings.load_profile("as it was")


@pytest.mark.parametrize("id", ["forward", "precision", "memory"])
def test_the_cases_drawn_are_those_of_the_seed_whatever_is_imported(id, tmp_path, monkeypatch):
    """Hypothesis would mix in numbers from imported source: an edit of the code under test would give other cases."""
    declared = Capabilities(dtypes=("float32", "bfloat16"), memory="sharded")
    usual = drawn(PROPERTIES[id], declared, 100)
    (tmp_path / f"numbers_for_{id}.py").write_text(f"NUMBERS = {[*range(101 + len(id), 2**16, 131)]}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(f"numbers_for_{id}")
    assert drawn(PROPERTIES[id], declared, 100) == usual


def test_a_nightly_run_says_its_seed_and_is_repeated_by_it(ringverify):
    """In the header, for people and in the report."""
    drawn = ringverify.check(*WRONG, "--suite", "nightly", "--max-examples", 60)  # enough with any seed
    seed = drawn.events[0]["seed"]
    assert f"suite nightly, seed {seed}" in drawn.out
    for case in Path(".ringverify").glob("*.json"):
        case.unlink()  # or it would begin with this
    again = ringverify.check(*WRONG, "--suite", "nightly", "--max-examples", 60, "--seed", seed)
    assert drawn.told("counterexample")[0]["shrunk_from"] == again.told("counterexample")[0]["shrunk_from"]


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.by_day(1)
def test_every_suite_begins_with_what_failed_before(suite, ringverify):
    """And says so; the cases that the seed draws come after it."""
    (first,) = ringverify.check(*WRONG, "--max-examples", 4).told("counterexample")
    run = ringverify.check(*WRONG, "--max-examples", 4, "--suite", suite)
    (again,) = run.told("counterexample")
    (event,) = run.told("property")
    assert (event["examples"], event["remembered"]) == (1, 1)
    assert again["shrunk_from"] == first["case_text"] != first["shrunk_from"]
    assert "1 of them failed in an earlier run" in run.out


def test_a_case_that_holds_by_now_is_tried_each_time_and_kept(ringverify):
    """Beside the cases that are asked for: what was mended once is what breaks again, and a report names the file."""
    fixed = ringverify.folder / "mended.py"
    fixed.write_text(Path(miniature("faulty_rings:").removesuffix(":")).read_text())
    target = (f"{fixed}:dropped_key", "--only", "forward", "--max-examples", 4)
    (found,) = ringverify.check(*target).told("counterexample")
    fixed.write_text(Path(miniature("right:").removesuffix(":")).read_text().replace("def attend(", "def dropped_key("))
    forget_the_module(fixed)
    for _ in range(2):
        run = ringverify.check(*target)
        assert run.code == 0, run.out
        (event,) = run.told("property")
        assert (event["examples"], event["remembered"]) == (5, 1)
    assert Path(found["file"]).is_file()


def forget_the_module(file):
    """Have a file loaded again."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == str(file):
            del sys.modules[name]


def test_a_case_that_cannot_be_tried_is_passed_over_with_a_word(ringverify):
    """Edited, damaged, of another schema, or of a capability that is no longer declared; and others' are not ours."""
    (first,) = ringverify.check(*WRONG, "--max-examples", 4).told("counterexample")
    found = Path(first["file"])
    content = json.loads(found.read_text())
    found.write_text(json.dumps({**content, "summary": "edited"}))
    found.with_name(found.stem + "0.json").write_text("{")
    found.with_name(found.stem + "1.json").write_text(json.dumps({**content, "schema": 99}))
    windowed = {**content, "case": {**content["case"], "problem": {**content["case"]["problem"], "window": [1, 0]}}}
    found.with_name(found.stem + "2.json").write_text(resealed(windowed))
    found.with_name(found.stem + "3.json").write_text(resealed({**content, "target": "somebody else's"}))
    run = ringverify.check(*WRONG, "--max-examples", 4)
    (event,) = run.told("property")
    assert "remembered" not in event
    words = ("was edited after it was recorded", "is truncated or not JSON", "has schema 99", "window")
    assert len(event["passed_over"]) == len(words)
    for word, line in zip(words, sorted(event["passed_over"], key=lambda line: found_in(words, line)), strict=True):
        assert "passed over: " in line
        assert word in line
        assert line in run.out
    assert run.told("counterexample")[0]["shrunk_from"] == first["shrunk_from"]


def found_in(words, line):
    """Which of the words is in a line."""
    return [word in line for word in words].index(True)


def test_the_smoke_suite_tries_ten_examples_of_each_property_at_most():
    """Those that have fewer in the quick suite keep them."""
    for property in PROPERTIES.values():
        assert property.examples_in("smoke") == min(10, property.examples_in("quick"))
        assert property.examples_in("quick") * 10 == property.examples_in("full")


@pytest.mark.parametrize("fault", ["dropped_key", "wrong_scale"])
def test_the_smoke_suite_finds_a_simple_fault(fault, ringverify):
    """What it is there for."""
    assert ringverify.check(miniature(f"faulty_rings:{fault}"), "--only", "forward", "--suite", "smoke").code == 1
