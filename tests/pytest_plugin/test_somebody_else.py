"""Somebody else's project: their CI passes, and when they break their ring it does not, and says why."""

import shutil

import pytest
from project import ROOT, Project
from report_lines import report_lines

from ringverify.properties.catalogue import PROPERTIES

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def theirs(tmp_path):
    """A copy of theirs, far from this repository."""
    shutil.copytree(
        ROOT / "tests" / "somebody_elses_project", tmp_path / "acme", ignore=shutil.ignore_patterns("*cache*")
    )
    return Project(tmp_path / "acme")


@pytest.mark.nightly
def test_their_ci_passes_and_leaves_what_people_want_to_keep(theirs):
    """JUnit, whole reports, the case of the violation that is known; nothing else."""
    ran = theirs.run("sh", "ci.sh")
    assert ran.code == 0, ran.out + ran.err
    events = report_lines(theirs.folder / "ci-results/ring.jsonl")
    told = [event for event in events if event["event"] == "property"]
    verdicts = {event["property"]: event["verdict"] for event in told if event["implementation"] == "acme ring"}
    assert set(verdicts) == set(PROPERTIES)
    assert {name for name, verdict in verdicts.items() if verdict == "unsupported"} == {
        *("lse", "lse_gradient", "masked_rows", "precision", "memory", "balance", "determinism"),
    }
    assert set(verdicts.values()) == {"pass", "unsupported"}
    by_tests = {event["implementation"] for event in told} - {"acme ring"}
    assert by_tests == {
        "acme ring (tests/test_ring.py::test_the_ring_is_attention_between_processes)",
        "acme prototype (tests/test_ring.py::test_the_prototype_computes_what_the_ring_does)",
        "acme prototype (tests/test_ring.py::test_the_prototype_still_leaves_a_message_behind)",
    }
    assert (events[-1]["exit_code"], events[-1]["known"]) == (0, 1)
    assert {classname for classname, _ in theirs.junit("ci-results/tests.xml")} == {
        *("tests.test_layout", "tests.test_ring", "ringverify.acme.ring:attend"),
    }
    assert report_lines(theirs.folder / "ci-results/prototype.jsonl")[-1]["known"] == 2
    cases = [path.name.rpartition("-")[0] for path in (theirs.folder / "ci-results/cases").iterdir()]
    assert sorted(cases) == ["acme-prototype-attend-hazards", "acme-prototype-attend-progress"]
    assert "acme ring: conformant: 18 pass, 7 unsupported" in ran.out


@pytest.mark.nightly
def test_their_ci_fails_when_they_break_their_ring_and_says_what_they_broke(theirs):
    """One sign, right on one rank and on two: it is named, and the line that shows it again works."""
    ring = theirs.folder / "acme" / "ring.py"
    text = ring.read_text()
    assert text.count("(rank - step) % size, rank, causal)") == 1
    ring.write_text(text.replace("(rank - step) % size, rank, causal)", "(rank + step) % size, rank, causal)"))
    ran = theirs.run("sh", "ci.sh", PYTEST_ADDOPTS="--ringverify-only forward,progress")
    assert ran.code == 1
    assert "FAILED ringverify::acme.ring:attend::forward - acme ring: forward: out is wrong on rank" in ran.out
    assert "FAILED tests/test_ring.py::test_the_ring_is_attention_between_processes[forward]" in ran.out
    assert "the ring turns the other way" in ran.out
    assert "== the prototype" not in ran.out
    assert report_lines(theirs.folder / "ci-results/ring.jsonl")[-1]["exit_code"] == 1
    (case,) = (theirs.folder / "ci-results/cases").glob("acme-ring-attend-forward-*.json")
    replayed = theirs.run("ringverify", "replay", case)
    assert replayed.code == 1
    assert "exactly the recorded bits" in replayed.out


def test_their_other_tests_run_alone_when_asked_for(theirs):
    """`ringverify_targets` is for runs that are told nothing."""
    ran = theirs.pytest_apart("tests/test_layout.py")
    assert ran.code == 0
    assert ran.counts() == {"passed": 1}
