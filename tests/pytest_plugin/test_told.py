"""What tests in files check is told like what targets are: in the report, and held to the baseline."""

import pytest
from report_lines import report_lines

from ringverify.reports.jsonl import read_report
from ringverify.reports.results import results_of

pytestmark = pytest.mark.timeout(240)

INCONCLUSIVE = 3
REPORT = ("--ringverify-report", "report.jsonl")
TESTS = """
import pytest
from faulty_rings import swapped_gradients, wrong_scale
from right import attend

import ringverify

few = {"max_examples": 2}


@ringverify.conformance(attend, only=["forward", "lse"], **few)
def test_right():
    pass


@pytest.mark.parametrize("kind", ["forward", "other-kind"])
@ringverify.conformance(attend, only="forward", world_sizes=[2], seed=5, **few)
def test_right_on_two(kind):
    assert kind


@ringverify.conformance(swapped_gradients, only=["forward", "gradients"], max_examples=4)
def test_swapped():
    pass


@pytest.mark.xfail(raises=ringverify.ConformanceError, reason="the scale is wrong", strict=True)
@ringverify.conformance(wrong_scale, only="forward", max_examples=4)
def test_scale():
    pass


@pytest.fixture
def checked():
    return ringverify.run_conformance("ring", only="inputs_untouched", **few)


def test_calls(checked):
    for _ in range(2):
        ringverify.run_conformance(attend, only="inputs_untouched", **few)
    with pytest.raises(ringverify.ConformanceError):
        ringverify.run_conformance(wrong_scale, only="forward", max_examples=4)
"""
SWAPPED = """
[[violation]]
implementation = "swapped gradients"
property = "gradients"
reason = "dK and dV change places"
link = "https://example.org/issues/12"
"""
GONE = SWAPPED.replace("gradients", "forward").replace("swapped forward", "swapped gradients")
MISNAMED = SWAPPED.replace('"swapped gradients"', '"swaped gradients"')
CALLS = "test_ring.py::test_calls"
VERDICTS = {
    ("right (test_ring.py::test_right)", "forward"): "pass",
    ("right (test_ring.py::test_right)", "lse"): "unsupported",
    ("right (test_ring.py::test_right_on_two[forward])", "forward"): "pass",
    ("right (test_ring.py::test_right_on_two[other-kind])", "forward"): "pass",
    ("swapped gradients", "forward"): "pass",
    ("swapped gradients", "gradients"): "fail",
    ("wrong scale", "forward"): "known",
    (f"ring ({CALLS})", "inputs_untouched"): "pass",
    (f"right ({CALLS})", "inputs_untouched"): "pass",
    (f"right ({CALLS}, call 2)", "inputs_untouched"): "pass",
    (f"wrong scale ({CALLS})", "forward"): "known",
}


def verdicts(path):
    """What became of every property, by the name of its implementation."""
    found = results_of(read_report(path))  # it has one verdict on each
    return {(one.name, id): of.verdict.kind for one in found.implementations for id, of in one.outcomes.items()}


@pytest.fixture
def theirs(project):
    """With a file of tests."""
    project.write(test_ring=TESTS)
    return project


@pytest.mark.nightly
def test_the_report_has_decorated_tests_and_calls(theirs):
    """Under the implementation's name, with the test behind it where several check one."""
    ran = theirs.pytest_apart(*REPORT)
    assert ran.code == 1, ran.out + ran.err
    assert ran.counts()["failed"] == 1
    events = report_lines(theirs.folder / "report.jsonl")
    assert verdicts(theirs.folder / "report.jsonl") == VERDICTS
    assert (events[0]["seed"], events[-1]["exit_code"], events[-1]["known"]) == (0, 1, 2)
    of_two = [event.get("seed") for event in events if event["event"] == "implementation" and event.get("seed")]
    assert of_two == [5, 5]
    marked, caught = (event["known"] for event in events if event["event"] == "property" and "known" in event)
    assert (marked["reason"], marked["link"]) == ("the scale is wrong", "test_ring.py::test_scale[forward]")
    assert (caught["reason"], caught["link"]) == ("its test expects it", CALLS)
    assert len([event for event in events if event["event"] == "counterexample"]) == 3
    assert "swapped gradients: violations: 1 pass, 1 fail; simulated world" in ran.out
    assert f"({CALLS})" not in ran.out.split("= ringverify =")[1]


@pytest.mark.nightly
def test_among_workers_all_of_it_is_told_and_known_too(theirs):
    """With a target, which keeps its name; known is an expected failure. A call has a baseline of its own."""
    (theirs.folder / "known.toml").write_text(SWAPPED)
    targets = ("--ringverify", "right.py:attend", "--ringverify-only", "forward", "--ringverify-max-examples", "1")
    ran = theirs.pytest_apart(*REPORT, *targets, "--ringverify-baseline", "known.toml", "-rx", "-n", "2")
    assert ran.code == 0, ran.out + ran.err
    assert ran.counts()["xfailed"] == 2
    assert "dK and dV change places (https://example.org/issues/12)" in ran.out
    events = report_lines(theirs.folder / "report.jsonl")
    known = {("swapped gradients", "gradients"): "known"}
    assert verdicts(theirs.folder / "report.jsonl") == {("right", "forward"): "pass", **VERDICTS, **known}
    assert (events[-1]["exit_code"], events[-1]["known"], events[-1]["verdict"]) == (0, 3, "violations")


def test_a_violation_that_is_gone_fails_its_test(theirs):
    """With the line that says which entry to take out. Another entry may be about tests that are not run."""
    (theirs.folder / "known.toml").write_text(GONE + MISNAMED)
    ran = theirs.pytest("--ringverify-baseline", "known.toml", "test_ring.py::test_swapped")
    assert ran.code == 1
    assert ran.counts() == {"failed": 2}
    assert "forward of swapped gradients passes, but is listed as violated" in ran.out


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
@pytest.mark.nightly
def test_a_baseline_may_name_who_is_not_tested(workers, project):
    """It excuses nobody else: the violation stays a failure, alone and among workers."""
    (project.folder / "known.toml").write_text(MISNAMED)
    project.write(
        test_ring="import ringverify\nfrom faulty_rings import swapped_gradients\n\n\n"
        "@ringverify.conformance(swapped_gradients, only='gradients')\ndef test_it():\n    pass\n"
    )
    ran = project.pytest_apart("--ringverify-baseline", "known.toml", *workers)
    assert ran.code == 1, ran.out + ran.err
    assert ran.counts()["failed"] == 1


def test_a_report_of_nothing_is_not_written_and_no_pass(project):
    """Who asks for a report and tests no implementation has forgotten something."""
    project.write(test_own="def test_own():\n    pass\n")
    ran = project.pytest(*REPORT)
    assert ran.code == INCONCLUSIVE
    assert "report report.jsonl was not written: no test checked an implementation" in ran.out
    assert not list(project.folder.glob("report.jsonl*"))
    assert project.pytest(*REPORT, "--collect-only").code == 0
