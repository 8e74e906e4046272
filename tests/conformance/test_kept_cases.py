"""The folder of cases that failed: damaged entries, a folder that cannot be written, two runs at once."""

import os
import threading
from pathlib import Path

import pytest
from command_line import assert_one_line, miniature

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.check import casefile
from ringverify.check.casefile import remembered, save
from ringverify.check.searching import Counterexample
from ringverify.properties.property import Violation

pytestmark = pytest.mark.usefixtures("unexplained")

WRONG = (miniature("faulty_rings:dropped_key"), "--only", "forward", "--max-examples", 4)
ABOUT = {"target": "ring", "property": "forward"}


def kept(folder: Path, *, seed: int = 0) -> Path:
    """A case that failed in an earlier run."""
    case = Case(problem=Problem(query_length=2), seed=seed)
    found = Counterexample(
        case, Violation(("value", "out"), 0, "wrong"), "", case, tried=0, smallest=True, repeats=True
    )
    return save(folder, **ABOUT, world="simulated", device="cpu", counterexample=found)


DAMAGES = {
    "empty": lambda path: path.write_text(""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00" * 9),
    "not an object": lambda path: path.write_text("[1, 2]"),
    "deep": lambda path: path.write_text("[" * 10**5),
    "one digit changed": lambda path: path.write_text(
        path.read_text().replace('"query_length": 2', '"query_length": 3')
    ),
    "too large": lambda path: path.write_text(" " * (casefile.MOST + 1)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_case_is_passed_over_with_a_line_and_the_others_are_tried(damage, tmp_path):
    """The line names the file; nothing is raised, nothing hangs, and nothing is removed."""
    damaged, whole = kept(tmp_path), kept(tmp_path, seed=1)
    DAMAGES[damage](damaged)
    found, passed_over = remembered(tmp_path, **ABOUT)
    assert [path for path, _ in found] == [whole]
    (line,) = passed_over
    assert "passed over" in line
    assert damaged.name in line
    assert "\n" not in line
    assert damaged in tmp_path.iterdir()


def test_a_case_that_another_run_removed_meanwhile_is_passed_over(tmp_path, monkeypatch):
    """Between listing the folder and reading it."""
    gone, whole = kept(tmp_path), kept(tmp_path, seed=1)
    written_at = casefile._written_at

    def removed(path):
        gone.unlink(missing_ok=True)
        return written_at(path)

    monkeypatch.setattr(casefile, "_written_at", removed)
    found, passed_over = remembered(tmp_path, **ABOUT)
    assert [path for path, _ in found] == [whole]
    assert len(passed_over) == 1


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(ringverify, monkeypatch):
    """What is found would not be kept; the line says how to go on."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path("locked") and access(path, mode))
    Path("locked").mkdir()
    outcome = ringverify("check", *WRONG, "--cases", "locked")
    assert outcome.code == 2
    assert_one_line(outcome.err, ["cannot write cases to locked", "no permission", "name another with --cases"])
    assert outcome.out == ""


def test_a_folder_that_can_no_longer_be_written_costs_the_file_and_not_the_violation(ringverify, monkeypatch):
    """A disk that is full, or was mounted anew for reading; the cases in it are still tried first."""
    first = ringverify.check(*WRONG)
    (before,) = first.told("counterexample")

    def refused(path, content):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(casefile, "write_whole", refused)
    run = ringverify.check(*WRONG)
    (again,) = run.told("counterexample")
    assert (run.code, first.code) == (1, 1)
    assert run.told("property")[0]["remembered"] == 1
    assert again["case"] == before["case"]
    assert "file" not in again or again["file"] is None
    assert "Read-only file system" in again["note"]
    assert "--cases" in again["note"]


def test_two_runs_in_one_folder_leave_whole_files_and_see_only_whole_files(tmp_path):
    """Each writes the same cases again and again, and reads what the other writes."""
    problems = []

    def one_run():
        for turn in range(40):
            kept(tmp_path, seed=turn % 4)
            problems.extend(remembered(tmp_path, **ABOUT)[1])

    runs = [threading.Thread(target=one_run) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert problems == []
    found, _ = remembered(tmp_path, **ABOUT)
    assert [file.case.seed for _, file in sorted(found, key=lambda one: one[1].case.seed)] == [0, 1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 4
