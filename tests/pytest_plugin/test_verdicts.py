"""What is neither a pass nor a violation: not learned, known, gone; and the exit status that each comes to."""

import json
import re
import shutil

import pytest
from report_lines import without_times

pytestmark = pytest.mark.timeout(240)

INCONCLUSIVE, USAGE = 3, 4
RIGHT = ("--ringverify", "right.py:attend")
WRONG = ("--ringverify", "faulty_rings.py:swapped_gradients")
FEW = ("--ringverify-only", "forward,gradients", "--ringverify-max-examples", "4")


def test_what_was_not_learned_is_an_error_and_the_exit_status_is_3(project):
    """Never a pass, never a failure; other tests that pass do not make it one."""
    project.write(test_own="def test_own():\n    pass\n")
    ran = project.pytest(*RIGHT, *FEW, "--ringverify-time-budget", "0.000001", "-v", "--junitxml=junit.xml")
    assert ran.code == INCONCLUSIVE, ran.out
    assert ran.counts() == {"passed": 1, "errors": 2}
    assert "right: forward: inconclusive: the time budget ended before the first example" in ran.out
    assert "right: inconclusive: 2 inconclusive" in ran.out
    assert "Traceback" not in ran.out
    case = project.junit("junit.xml")["ringverify.right.py:attend", "forward"]
    assert case.find("error") is not None
    assert case.find("failure") is None


IN_A_CALL = """
import ringverify


def test_call():
    ringverify.run_conformance("right.py:attend", only="forward", suite="full", time_budget=2)
"""


@pytest.mark.nightly
def test_a_pass_that_the_time_budget_cut_short_says_so(project):
    """As `check` does: at the end, however quiet, and in JUnit. Of what was done in time there is no such word."""
    project.write(test_call=IN_A_CALL)
    budget = ("--ringverify-only", "forward", "--ringverify-suite", "full", "--ringverify-time-budget", "2")
    ran = project.pytest(*RIGHT, *budget, "-q", "--junitxml=junit.xml")
    assert ran.code == 0, ran.out
    said = r"the time budget ended after \d+ of \d{3,} examples$"
    assert re.search(rf"^right: forward: {said}", ran.out, re.MULTILINE)
    assert re.search(rf"^right \(test_call\.py::test_call\): forward: {said}", ran.out, re.MULTILINE)
    properties = project.junit("junit.xml")["ringverify.right.py:attend", "forward"].iter("property")
    assert re.fullmatch(said, {one.get("name"): one.get("value") for one in properties}["ringverify_reason"])
    assert "ended after" not in project.pytest(*RIGHT, *FEW, "--deselect", "test_call.py::test_call").out


def test_a_violation_weighs_more_than_what_was_not_learned(project):
    """As it does for `check`; so does another test's failure."""
    project.write(
        conftest="import time\n\n\ndef pytest_runtest_setup(item):\n    item.name == 'gradients' and time.sleep(1.5)\n",
        test_own="def test_own():\n    raise OSError\n",
    )
    ran = project.pytest(*RIGHT, *FEW, "--ringverify-time-budget", "0.000001")
    assert ran.code == 1, ran.out
    assert ran.counts() == {"failed": 1, "errors": 2}


def test_a_run_in_which_nothing_applied_is_no_pass(project):
    """All skipped is nothing learned."""
    ran = project.pytest(*RIGHT, "--ringverify-only", "lse,masked_rows")
    assert ran.code == INCONCLUSIVE
    assert ran.counts() == {"skipped": 2}
    assert "right: inconclusive: 2 unsupported" in ran.out


def test_a_target_that_cannot_be_checked_here_is_one_error_that_says_why(project):
    """A peer whose package is another one; what else was asked for is checked all the same."""
    project.with_another_version_of("ring-attention-pytorch")
    peer = "peer:ring-attention-pytorch"
    ran = project.pytest("--ringverify", peer, *RIGHT, *FEW, "-v", "--ringverify-report", "r.jsonl")
    assert ran.code == INCONCLUSIVE, ran.out
    assert ran.counts() == {"passed": 2, "error": 1}
    assert ran.ended(f"ringverify::{peer}::loads") == "ERROR"
    reason = rf"^{peer} cannot be checked here: .*ring-attention-pytorch.*pip install 'ringverify\[peers\]'$"
    assert re.search(reason, ran.out, re.MULTILINE)
    assert f"{peer}: inconclusive: 1 inconclusive; suite quick, seed 0" in ran.out
    told = [json.loads(line) for line in (project.folder / "r.jsonl").read_text().splitlines()]
    verdicts = {one["implementation"]: one["verdict"] for one in told if one["event"] == "implementation"}
    assert verdicts == {peer: "inconclusive", "right": "conformant"}


BASELINE = """
[[violation]]
implementation = "swapped gradients"
property = "gradients"
reason = "dK and dV change places"
link = "https://example.org/issues/12"

[[violation]]
implementation = "right"
property = "forward"
reason = "it was wrong once"
link = "https://example.org/issues/13"
"""


@pytest.mark.nightly
def test_known_violations_are_expected_failures_and_those_that_are_gone_fail(project):
    """The file of `check --baseline`."""
    (project.folder / "known.toml").write_text(BASELINE)
    ran = project.pytest(*RIGHT, *WRONG, *FEW, "--ringverify-baseline", "known.toml", "-v", "-rx")
    assert ran.code == 1, ran.out
    assert ran.counts() == {"failed": 1, "passed": 2, "xfailed": 1}
    assert ran.ended("swapped_gradients::gradients") == "XFAIL"
    assert "dK and dV change places (https://example.org/issues/12)" in ran.out
    assert "right: forward: baseline known.toml: forward of right passes, but is listed as violated" in ran.out
    assert "swapped gradients: violations: 1 pass, 1 fail (1 known)" in ran.out


NIGHTLY = """
import ringverify

nightly = {"only": "forward", "suite": "nightly", "max_examples": 2}


@ringverify.conformance("right.py:attend", **nightly)
def test_decorated():
    pass


def test_call():
    ringverify.run_conformance("faulty_rings.py:wrong_scale", **nightly, cases="found")
"""


@pytest.mark.nightly
def test_the_seed_of_a_night_is_said_however_quiet(project):
    """Of each that was drawn, at the end and in the properties of the test; else nobody sees that night again."""
    project.write(test_night=NIGHTLY)
    ran = project.pytest("-q", "--junitxml=junit.xml")
    assert ran.code == 1, ran.out
    said = re.findall(r"^suite nightly, seed (\d+): --ringverify-seed \1, or seed=\1 in a call", ran.out, re.MULTILINE)
    kept = {one.get("value") for case in project.junit("junit.xml").values() for one in case.iter("property")
            if one.get("name") == "ringverify_seed"}  # fmt: skip
    assert set(said) == kept
    assert len(said) == 2
    assert "seed" not in project.pytest(*RIGHT, *FEW, "-q", "--deselect", "test_night.py").out


CONFIGURED = """[pytest]
ringverify_targets =
    right.py:attend
    faulty_rings.py:swapped_gradients
ringverify_baseline = known.toml
"""


@pytest.mark.nightly
def test_a_baseline_may_name_what_is_not_run(project):
    """One file serves several jobs, as it does for `check`; where all of it is run, nothing else is expected."""
    (project.folder / "pytest.ini").write_text(CONFIGURED)
    (project.folder / "known.toml").write_text(BASELINE.split("\n\n")[0].replace("swapped gradients", "another ring"))
    ran = project.pytest_apart(*RIGHT, *FEW)
    assert ran.code == 0, ran.out + ran.err
    assert project.pytest_apart(*FEW).code == 1, "what it does not name fails"


@pytest.mark.nightly
def test_a_run_whose_only_violations_are_known_ends_with_0(project):
    """Settings come from the project's own file; the path of the baseline is that file's."""
    (project.folder / "known.toml").write_text(BASELINE.split("\n\n")[0])
    (project.folder / "below").mkdir()
    (project.folder / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\n"
        'ringverify_targets = ["faulty_rings.py:swapped_gradients"]\n'
        'ringverify_only = "gradients"\n'
        'ringverify_max_examples = "4"\n'
        'ringverify_seed = "7"\n'
        'ringverify_baseline = "known.toml"\n'
        'ringverify_cases = "found"\n'
    )
    ran = project.pytest_apart("--rootdir", project.folder, folder="below")
    assert ran.code == 0, ran.out
    assert ran.counts() == {"xfailed": 1}
    assert "suite quick, seed 7" in ran.out
    assert len(list((project.folder / "found").glob("*.json"))) == 1
    assert project.pytest_apart("test_none.py").out.count("swapped gradients") == 0


def test_several_processes_try_the_cases_of_a_test_with_the_same_report(project):
    """By option or by setting; workers stay for the next test, also of another implementation."""
    asked = ("--ringverify", "right.py:attend", "--ringverify", "faulty_rings.py:wrong_scale", *FEW)
    found = []
    for count in (1, 2):
        how = ("--ringverify-jobs", str(count), "--ringverify-report", "report.jsonl")
        assert project.pytest(*asked, *how, explain=True).code == 1
        found.append(without_times(project.events("report.jsonl")))
        shutil.rmtree(project.folder / ".ringverify")
    assert found[0] == found[1]
