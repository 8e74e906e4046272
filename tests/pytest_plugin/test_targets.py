"""`pytest --ringverify TARGET`: a test a property, and what it says is what `ringverify check` says."""

import re
import shutil

import pytest
from report_lines import VALIDATOR, report_lines

from ringverify.properties.catalogue import PROPERTIES

pytestmark = pytest.mark.timeout(240)

RIGHT, WRONG = "right.py:attend", "faulty_rings.py:swapped_gradients"
TARGETS = ("--ringverify", RIGHT, "--ringverify", WRONG)
FEW = ("--ringverify-only", "forward,gradients,lse", "--ringverify-max-examples", "4")
THREE = ["forward", "gradients", "lse"]


@pytest.fixture(scope="module")
def ran(lasting):
    """One run that most of these tests look at; a test of the project's own runs along."""
    lasting.write(test_own="def test_own():\n    pass\n")
    written = ("--junitxml=junit.xml", "--ringverify-report=report.jsonl")
    return lasting.pytest(*TARGETS, *FEW, "-v", *written, explain=True)


def test_there_is_a_test_a_property_with_its_verdict(ran):
    """Under ids that are the target's and the property's, beside the project's own tests."""
    assert ran.code == 1, ran.out
    assert ran.ended("test_own.py::test_own") == "PASSED"
    assert [ran.ended(f"ringverify::{RIGHT}::{id}") for id in THREE] == ["PASSED", "PASSED", "SKIPPED"]
    assert [ran.ended(f"ringverify::{WRONG}::{id}") for id in THREE] == ["PASSED", "FAILED", "SKIPPED"]
    assert [ran.counts()[kind] for kind in ("failed", "passed", "skipped")] == [1, 4, 2]


def test_the_header_says_what_is_checked_where_and_under_which_seed(ran):
    """A line an implementation."""
    head = ran.out.split("collect")[0]
    for name in ("right", "swapped gradients"):
        assert re.search(rf"^ringverify \S+: {name}, simulated world, cpu, suite quick, seed 0$", head, re.MULTILINE)


def test_the_end_says_the_verdicts_and_what_was_not_declared(ran):
    """As `check` does."""
    end = ran.out.split("= ringverify =")[1]
    told = "right: conformant: 2 pass, 1 unsupported; simulated world, cpu, suite quick, seed 0; not run on gloo"
    assert re.search(rf"^{told}$", end, re.MULTILINE)
    assert "swapped gradients: violations: 1 pass, 1 fail, 1 unsupported; simulated world" in end
    assert "  not declared, so not tested: lse, lse_gradient" in end


def test_the_end_says_which_declared_features_no_example_had(lasting):
    """One example of a property has one number of ranks."""
    one = ("--ringverify-only", "forward", "--ringverify-max-examples", "1")
    end = lasting.pytest("--ringverify", RIGHT, *one).out.split("= ringverify =")[1]
    assert re.search(r"^right: conformant: .*; \d+ declared features? not tried$", end, re.MULTILINE)
    assert "  declared but in no example, so not tested: world size" in end


def test_a_failure_reads_as_check_tells_it_and_shows_no_inside_of_pytest(ran, lasting):
    """The counterexample and its replay line, word for word, and not a frame of a traceback."""
    shutil.rmtree(lasting.folder / ".ringverify")  # or it would begin with what the plugin has found
    checked = lasting.run("ringverify", "check", WRONG, "--only", "gradients", "--max-examples", "4")
    assert checked.code == 1, checked.err
    told = checked.out.split("margin", 1)[1].split("\n", 1)[1].split("  violations:")[0].rstrip()
    summary, rest = told.split("\n", 1)
    shown = ran.out.split("= FAILURES =")[1]
    assert f"swapped gradients: gradients: {summary.strip()}\n{rest}\n" in shown
    assert "replay  ringverify replay .ringverify/faulty-rings-py-swapped-gradients-gradients-" in shown
    assert "Traceback" not in ran.out
    assert "testing/session.py" not in ran.out
    assert "_pytest" not in ran.out


def test_the_short_summary_says_what_is_wrong(ran):
    """In the line that people read first."""
    line = rf"^FAILED ringverify::{WRONG}::gradients - swapped gradients: gradients: d[kv] is wrong on rank"
    assert re.search(line, ran.out, re.MULTILINE)


@pytest.mark.nightly
def test_the_replay_line_shows_the_same_bits(ran, lasting):
    """It is a command that can be copied."""
    (command,) = re.findall(r"replay  (ringverify replay \S+)", ran.out)
    replayed = lasting.run(*command.split())
    assert replayed.code == 1
    assert "exactly the recorded bits" in replayed.out


def test_a_skip_says_which_capability_is_not_declared_and_where_to_declare_it(ran, lasting):
    """The file and the line are those of the implementation, not of the plugin."""
    cases = lasting.junit("junit.xml")
    skipped = cases["ringverify.right.py:attend", "lse"].find("skipped")
    assert skipped.get("message") == "lse=True is not declared"
    assert re.search(r"right\.py:\d+: lse=True is not declared", skipped.text)


def test_junit_files_have_every_property_and_what_is_needed_to_repeat_it(ran, lasting):
    """Margins, worlds and seeds are properties of a test case; a failure's text is the counterexample."""
    cases = lasting.junit("junit.xml")
    assert {name for name in cases if name[0].startswith("ringverify")} == {
        (f"ringverify.{target}", id) for target in (RIGHT, WRONG) for id in THREE
    }
    (failure,) = [case.find("failure") for case in cases.values() if case.find("failure") is not None]
    assert "ringverify replay" in failure.text
    told = cases[f"ringverify.{RIGHT}", "forward"].find("properties")
    said = {one.get("name").removeprefix("ringverify_"): one.get("value") for one in told}
    assert said.pop("margin").startswith("0.")
    assert said == {
        "implementation": "right",
        "property": "forward",
        "world": "simulated",
        "device": "cpu",
        "suite": "quick",
        "seed": "0",
        "examples": "4",
    }


def assert_is_the_report_of_both(project, name):
    """It is whole, it is as the schema has it, and it has both implementations' verdicts."""
    events = report_lines(project.folder / name)
    for event in project.events(name):
        VALIDATOR.validate(event)
    told = [event for event in events if event["event"] == "property"]
    assert {(event["implementation"], event["property"]): event["verdict"] for event in told} == {
        ("right", "forward"): "pass",
        ("right", "gradients"): "pass",
        ("right", "lse"): "unsupported",
        ("swapped gradients", "forward"): "pass",
        ("swapped gradients", "gradients"): "fail",
        ("swapped gradients", "lse"): "unsupported",
    }
    told = [event for event in events if event["event"] == "implementation"]
    assert {event["implementation"]: (event["verdict"], event["not_run"]) for event in told} == {
        "right": ("conformant", 0),
        "swapped gradients": ("violations", 0),
    }
    assert (events[-1]["verdict"], events[-1]["exit_code"]) == ("violations", 1)


def test_the_report_is_one_that_check_could_have_written(ran, lasting):
    """Header, properties, counterexample, implementations, footer."""
    assert_is_the_report_of_both(lasting, "report.jsonl")


@pytest.mark.nightly
def test_what_failed_last_is_run_alone(ran, lasting):
    """With `--lf`, as any other test."""
    again = lasting.pytest_apart(*TARGETS, *FEW, "--lf", "-v")
    assert again.code == 1
    assert again.ended(f"ringverify::{WRONG}::gradients") == "FAILED"
    assert again.counts()["failed"] == 1
    assert "passed" not in again.counts()


@pytest.mark.nightly
def test_workers_of_xdist_share_the_work_and_one_report_comes_of_it(project):
    """The verdicts, the summary and the exit status are the same."""
    ran = project.pytest_apart(*TARGETS, *FEW, "-n", "2", "--ringverify-report=report.jsonl")
    assert ran.code == 1, ran.out + ran.err
    assert ran.counts()["failed"] == 1
    assert_is_the_report_of_both(project, "report.jsonl")
    assert "swapped gradients: violations: 1 pass, 1 fail, 1 unsupported" in ran.out
    assert f"FAILED ringverify::{WRONG}::gradients - swapped gradients: gradients: d" in ran.out
    assert "testing/session.py" not in ran.out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--ringverify", RIGHT), [f"{RIGHT}::{id}" for id in PROPERTIES]),
        (("--ringverify", RIGHT, "-k", "gradients"), [f"{RIGHT}::gradients"]),
        ((f"ringverify::{RIGHT}::forward", f"ringverify::{WRONG}"), None),
    ],
)
@pytest.mark.nightly
def test_tests_are_chosen_as_pytest_chooses(arguments, expected, project):
    """All, by words, and by id: an id alone is enough, and runs nothing else of the project."""
    project.write(test_own="def test_own():\n    pass\n")
    listed = project.pytest_apart(*arguments, "--collect-only", "-q")
    assert listed.code == 0, listed.out
    ids = [line for line in listed.out.splitlines() if "::" in line]
    if expected is None:
        assert ids == [f"ringverify::{RIGHT}::forward", *(f"ringverify::{WRONG}::{id}" for id in PROPERTIES)]
    else:
        own = ["test_own.py::test_own"] if "-k" not in arguments else []
        assert ids == [*own, *(f"ringverify::{id}" for id in expected)]


@pytest.mark.nightly
def test_workers_agree_on_the_seed_that_a_nightly_run_draws(project):
    """The one that the header says; chosen by id, workers know that too."""
    ids = [f"ringverify::{RIGHT}::{id}" for id in ("forward", "gradients")]
    ran = project.pytest_apart(*ids, "-n", "2", "--ringverify-suite", "nightly", "--ringverify-max-examples", "1")
    assert ran.code == 0, ran.out
    seeds = re.findall(r"right.* suite nightly, seed (\d+)", ran.out)
    assert len(seeds) == 2
    assert len(set(seeds)) == 1
    assert ran.counts() == {"passed": 2}
