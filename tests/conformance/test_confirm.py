"""`ringverify confirm`: what a violation's own script shows of it, and what it does not."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from command_line import assert_one_line, miniature

from ringverify.check import casefile
from ringverify.confirm.confirming import Confirmation, Scripts, names_of, read
from ringverify.errors import UsageError
from ringverify.events import CounterexampleEvent, RunFailure
from ringverify.reports.jsonl import read_report

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("unexplained")]


def violated(ringverify, target, property, examples=20):
    """The report of a check that finds a violation."""
    report = ringverify.folder / "found.jsonl"
    code = ringverify("check", target, "--only", property, "--max-examples", examples, "--report", report).code
    assert code == 1
    return report


def counterexamples(report):
    """The violations of a report."""
    return [event for event in read_report(report) if isinstance(event, CounterexampleEvent)]


def test_a_wrong_result_is_shown_by_its_script(ringverify):
    """dk and dv change places: the script says on which ranks, is kept if asked for, and JSON tells of it."""
    report = violated(ringverify, miniature("faulty_rings:swapped_gradients"), "gradients")
    outcome = ringverify("confirm", report, "--scripts", "shown", "--json", "seen.json")
    assert (outcome.code, outcome.err) == (0, "")
    imports, shown, _ = outcome.out.splitlines()
    assert imports.startswith("imports swapped_gradients of ")
    assert shown.startswith("shown       swapped gradients  gradients: wrong: d")
    assert outcome.out.endswith("1 of 1 violations are shown without ringverify\n")
    (script,) = (ringverify.folder / "shown").iterdir()
    assert script.suffix == ".py"
    (seen,) = read(ringverify.folder / "seen.json")
    assert (seen.implementation, seen.property, seen.outcome) == ("swapped gradients", "gradients", "shown")
    assert Path(seen.case).is_file()
    assert seen.said[0].startswith("wrong: dk on rank ")
    assert all("elements differ by more than allowed" in line for line in seen.said[1:])


@pytest.mark.nightly
def test_of_two_worlds_the_one_that_is_wrong_is_shown(ringverify):
    """On a world of one nothing is wrong, and the smallest case of the comparison may be that one."""
    report = violated(ringverify, miniature("ten_faults:own_gradients"), "world_size_invariance")
    outcome = ringverify("confirm", report, "--scripts", "shown")
    assert outcome.code == 0, outcome.out
    assert "world_size_invariance: wrong: d" in outcome.out
    worlds = [
        re.search(r"WORLD, RING = (\d)", script.read_text())[1] for script in (ringverify.folder / "shown").iterdir()
    ]
    assert "1" not in worlds or len(worlds) == 2


@pytest.mark.nightly
def test_a_mode_in_which_results_are_wrong_is_named(ringverify):
    """The script calls in every mode, and is right in the others."""
    report = violated(ringverify, miniature("overlapping:wrong_in_inference"), "modes", 8)
    (event,) = counterexamples(report)
    seen = Scripts(ringverify.folder, 120).confirmed(event, casefile.read(Path(event.file)))
    assert seen.outcome == "shown"
    assert all(line.endswith(" (inference_mode, gradients of nothing)") for line in seen.said[1:])


@pytest.mark.nightly
def test_an_exception_is_shown_if_it_is_the_same(ringverify):
    """What is raised in the suite is raised in the script."""
    report = violated(ringverify, miniature("misbehaving:raises_on_one_rank"), "forward", 4)
    outcome = ringverify("confirm", report)
    assert outcome.code == 0, outcome.out
    assert "shown       raises on one rank  forward: rank 1 raised ValueError: rank 1 cannot go on" in outcome.out


@pytest.mark.nightly
def test_another_exception_shows_nothing(ringverify):
    """A script that ends for a reason of its own is no confirmation."""
    report = violated(ringverify, miniature("misbehaving:raises_on_one_rank"), "forward", 4)
    (event,) = counterexamples(report)
    assert event.failure == RunFailure(kind="raised", exception="ValueError")
    event = dataclasses.replace(event, failure=RunFailure(kind="raised", exception="KeyError"))
    seen = Scripts(ringverify.folder, 120).confirmed(event, casefile.read(Path(event.file)))
    assert (seen.outcome, seen.said) == ("not shown", ("rank 1 raised ValueError: rank 1 cannot go on",))


@pytest.mark.nightly
def test_what_no_result_shows_is_told_apart(ringverify):
    """An input that is written to does not make a result wrong, which is all that a script looks at."""
    report = violated(ringverify, miniature("misbehaving:changes_its_input"), "inputs_untouched", 4)
    outcome = ringverify("confirm", report)
    assert outcome.code == 1
    assert outcome.out.splitlines()[1].startswith("not shown   ")
    assert outcome.out.endswith("0 of 1 violations are shown without ringverify\n")


@pytest.mark.nightly
def test_a_script_that_does_not_end_shows_a_deadlock(ringverify, monkeypatch):
    """And nothing else."""
    report = violated(ringverify, miniature("misbehaving:leaves_a_rank_waiting"), "forward", 4)
    (event,) = counterexamples(report)
    assert event.failure == RunFailure(kind="deadlock", exception=None)
    recorded = casefile.read(Path(event.file))
    scripts = Scripts(ringverify.folder, 3)
    seen = scripts.confirmed(event, recorded)
    assert (seen.outcome, seen.said) == ("shown", ("ranks 0, 1 had not ended after 3 s",))
    other = dataclasses.replace(event, failure=RunFailure(kind="raised", exception="ValueError"))
    assert scripts.confirmed(other, recorded).outcome == "not shown"


def test_case_files_of_one_name_have_scripts_of_two_names():
    """Case files of several folders, each with a script of its own; one that is named twice has one."""
    files = ["a/ring-forward-1.json", "b/ring-forward-1.json", "a/ring-forward-1.json", "b/ring-lse-2.json"]
    assert names_of(files) == {
        "a/ring-forward-1.json": "ring-forward-1",
        "b/ring-forward-1.json": "ring-forward-1.2",
        "b/ring-lse-2.json": "ring-lse-2",
    }


def test_bad_input_is_one_line(ringverify):
    """A report without a violation, a case that is gone, a report that is none, a file of another kind."""
    clean = ringverify.folder / "clean.jsonl"
    right = (miniature("right:attend"), "--only", "forward", "--max-examples", 2)
    assert ringverify("check", *right, "--report", clean).code == 0
    outcome = ringverify("confirm", clean)
    assert outcome.code == 3
    assert_one_line(outcome.err, ["no violation"])
    report = violated(ringverify, miniature("faulty_rings:swapped_gradients"), "gradients")
    outcome = ringverify("confirm", report, "--json", "nowhere/seen.json", "--scripts", "never")
    assert outcome.code == 2
    assert_one_line(outcome.err, ["--json nowhere/seen.json", "there is no folder"])
    assert outcome.out == ""
    assert not (ringverify.folder / "never").exists(), "found out before any script is run"
    (case,) = (ringverify.folder / ".ringverify").glob("*.json")
    case.unlink()
    outcome = ringverify("confirm", report)
    assert outcome.code == 2
    assert_one_line(outcome.err, [case.name, "the folder that check was run in"])
    outcome = ringverify("confirm", ringverify.folder / "none.jsonl")
    assert outcome.code == 2
    assert_one_line(outcome.err, ["none.jsonl"])
    (ringverify.folder / "other.json").write_text("{}")
    with pytest.raises(UsageError, match="is not what ringverify confirm --json writes"):
        read(ringverify.folder / "other.json")


def test_a_confirmation_is_read_as_it_was_written(tmp_path):
    """All fields."""
    one = Confirmation("a", "forward", "case.json", "shown", ("wrong: out on rank 0",))
    path = tmp_path / "seen.json"
    path.write_text(json.dumps({"schema": 1, "confirmations": [vars(one)]}))
    assert read(path) == [one]
