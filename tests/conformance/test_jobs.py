"""`check --jobs N`: several processes try cases side by side, and nobody can tell from what is reported."""

import dataclasses
import os
import signal
from collections import Counter
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from command_line import assert_one_line, miniature
from report_lines import report_lines, without_times

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.check import jobs, workers
from ringverify.check.jobs import Jobs, setup_of
from ringverify.check.options import Options, Subject
from ringverify.check.run import check
from ringverify.check.units import Finish, Judge, Wanted
from ringverify.check.workers import Worker, Workers
from ringverify.describing import describe
from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.masks.made import MADE
from ringverify.diagnosis.parts import PARTS
from ringverify.diagnosis.reading import Rule, hypothesis_of
from ringverify.diagnosis.scene import Scene
from ringverify.faults.ring import STEPS, ring_of
from ringverify.implementation import Capabilities, Implementation, implementation
from ringverify.properties.catalogue import select
from ringverify.reports.progress import HIDDEN, Hidden
from ringverify.worlds import limits
from ringverify.worlds.limits import cores
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.simulated import SimulatedWorld


def checked(ringverify, count, *arguments):
    """The outcome of `check` with so many jobs, in a folder of cases that is empty before and afterwards."""
    outcome = ringverify.check(*arguments, "--jobs", count)
    for file in Path(".ringverify").glob("*.json"):
        file.unlink()
    return outcome


RUNS = {
    "right": (miniature("right:attend"), "--only", "forward,masked_rows,memory", "--max-examples", 12),
    "wrong": (miniature("faulty_rings:wrong_scale"), "--only", "forward,exact_selection"),
    "dies": (miniature("misbehaving:ends_its_process_on_one_rank"), "--only", "forward", "--max-examples", 4),
    "another one after the first": (miniature("right:attend"), miniature("faulty_rings:wrong_scale"), "--only",
                                    "forward,lse", "--max-examples", 20, "-x"),
}  # fmt: skip


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=() if run in ("wrong", "dies") else pytest.mark.nightly) for run in RUNS]
)
def test_the_report_does_not_depend_on_the_number_of_jobs(run, ringverify):
    """Cases, numbers of examples and runs, margins, counterexamples, causes and files: all but times."""
    one, several = (checked(ringverify, count, *RUNS[run]) for count in (1, 2))
    assert without_times(several.events) == without_times(one.events)
    assert several.code == one.code != 2


@pytest.mark.nightly
def test_what_depends_on_earlier_cases_does_not_depend_on_the_number_of_jobs(ringverify):
    """Workers see other cases before; the cases of the property from the beginning decide, in a fresh process."""
    asked = (miniature("stateful:remembers"), "--only", "forward,exact_selection", "--max-examples", 20)
    one, several = (checked(ringverify, count, *asked) for count in (1, 2))
    assert without_times(several.events) == without_times(one.events)
    assert all(event["after"] for event in one.told("counterexample"))
    assert one.told("counterexample")


@pytest.mark.nightly
def test_earlier_failures_are_tried_first_by_workers_too(ringverify):
    """They are counted as remembered, and decide at once."""
    asked = (miniature("faulty_rings:wrong_scale"), "--only", "forward", "--max-examples", 20, "--jobs", 2)
    first, second = ringverify.check(*asked), ringverify.check(*asked)
    assert first.told("property")[0].get("remembered") is None
    assert (second.told("property")[0]["remembered"], second.told("property")[0]["examples"]) == (1, 1)


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
@pytest.mark.parametrize("command", [("check", "ring"), ("mutants",), ("vectors", "check", "--target", "ring")])
def test_an_impossible_number_of_jobs_is_one_line(command, text, ringverify):
    """It says what was typed, and what is expected."""
    outcome = ringverify(*command, "--jobs", text)
    assert outcome.code == 2
    assert_one_line(outcome.err, ["--jobs", repr(text), "a whole number of at least 1, or auto"])


@pytest.mark.parametrize("value", ["0", '"many"', "true", "[2]"])
def test_an_impossible_number_of_jobs_in_the_project_is_one_line(value, ringverify):
    """So it is there."""
    Path("pyproject.toml").write_text(f"[tool.ringverify]\njobs = {value}\n")
    outcome = ringverify("check", "ring")
    assert outcome.code == 2
    assert_one_line(outcome.err, ["pyproject.toml", "jobs", "expected a whole number"])


def test_several_jobs_are_for_the_simulated_world(ringverify):
    """Where ranks are processes, one case at a time uses the cores already."""
    outcome = ringverify("check", "ring", "--world", "gloo", "--jobs", 2)
    assert outcome.code == 2
    assert_one_line(outcome.err, ["--jobs 2", "gloo", "leave --jobs out"])


def test_a_time_budget_is_kept_by_all_workers(ringverify):
    """A property that is cut short says so; none goes on for as long as it would."""
    asked = (miniature("right:attend"), "--only", "forward,gradients", "--suite", "nightly", "--time-budget", 4)
    outcome = ringverify.check(*asked, "--jobs", 2)
    assert outcome.code in (0, 3)  # 3 on a machine that is too busy to begin in time
    assert [event["reason"].startswith("the time budget ended") for event in outcome.told("property")] == [True, True]


def test_vectors_are_tried_by_workers_with_the_same_report(ringverify):
    """Vector by vector."""
    found = []
    for count in (1, 2):
        report = f"{count}.jsonl"
        asked = ("vectors", "check", "--target", miniature("faulty_rings:wrong_scale"), "--report", report)
        assert ringverify(*asked, "--jobs", count).code == 1
        found.append(without_times(report_lines(Path(report))))
    assert found[0] == found[1]


# -- workers that end --------------------------------------------------------------------------------------------------


def killing(monkeypatch, chosen):
    """End each worker when it is given a unit for which `chosen` is true; count these units by property."""
    begin, killed = Worker.begin, Counter()

    def begin_and_kill(self, task, unit, setup):
        begin(self, task, unit, setup)
        if chosen(unit, killed):
            killed[unit.wanted.property] += 1
            os.kill(self._process.pid, signal.SIGKILL)

    monkeypatch.setattr(Worker, "begin", begin_and_kill)
    return killed


ASKED = (miniature("right:attend"), "--only", "forward,gradients", "--max-examples", 6)


def test_the_unit_of_a_worker_that_is_killed_is_done_by_another_one(ringverify, monkeypatch):
    """Once; the report is the one of a run in which nothing happened."""
    quiet = checked(ringverify, 2, *ASKED)
    killed = killing(monkeypatch, lambda unit, killed: isinstance(unit, Judge) and not killed[unit.wanted.property])
    outcome = checked(ringverify, 2, *ASKED)
    assert killed == {"forward": 1, "gradients": 1}
    assert without_times(outcome.events) == without_times(quiet.events)


def test_a_property_whose_workers_are_killed_again_is_inconclusive(ringverify, monkeypatch):
    """The others have their verdicts."""
    killed = killing(monkeypatch, lambda unit, killed: unit.wanted.property == "gradients")
    outcome = checked(ringverify, 2, *ASKED)
    assert outcome.code == 3
    assert outcome.verdicts() == {"forward": "pass", "gradients": "inconclusive"}
    assert killed == {"gradients": 2}
    reason = outcome.told("property", property="gradients")[0]["reason"]
    assert reason == "the worker process that tried it was ended by signal SIGKILL, and so did another one"


def test_a_violation_stands_though_its_workers_are_killed(ringverify, monkeypatch):
    """It is reported as it was found."""
    killing(monkeypatch, lambda unit, killed: isinstance(unit, Finish))
    outcome = checked(ringverify, 2, miniature("faulty_rings:wrong_scale"), "--only", "forward", "--max-examples", 20)
    assert outcome.code == 1
    (counterexample,) = outcome.told("counterexample")
    assert (counterexample["smallest"], counterexample["tried"]) == (False, 0)
    assert "SIGKILL" in outcome.told("property")[0]["reason"]


@pytest.mark.nightly
def test_after_the_first_look_only_the_property_seen_violated_is_tried(ringverify, monkeypatch):
    """With -x the run ends after it: others would take processors from it."""
    begin, tried = Worker.begin, set()

    def begin_and_note(self, task, unit, setup):
        tried.update([] if isinstance(task, workers._Several) else [unit.wanted.property])
        begin(self, task, unit, setup)

    monkeypatch.setattr(Worker, "begin", begin_and_note)
    outcome = checked(ringverify, 2, miniature("faulty_rings:wrong_scale"), "-x", "--only", "forward,gradients,dtypes")
    assert outcome.code == 1
    assert tried == set(outcome.verdicts())
    assert len(tried) == 1


class Told(Hidden):
    """Progress that keeps what was found, with whether the violation had been reported by then."""

    def __init__(self):
        self.events, self.violations = [], []

    def found(self, violation):
        self.violations.append((violation, any(event.event == "counterexample" for event in self.events)))


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_violation_is_told_before_it_is_made_smaller(count, tmp_path, monkeypatch):
    """To whoever watches, in this process and in workers."""
    monkeypatch.chdir(tmp_path)
    target, progress = miniature("faulty_rings:wrong_scale"), Told()
    options = Options(max_examples=4, jobs=count, cases=Path("cases"))
    assert (
        check([Subject(target, describe(target))], select(["forward"], ()), options, progress.events.append, progress)
        == 1
    )
    ((violation, reported),) = progress.violations
    assert violation.startswith("forward: out is wrong")
    assert not reported


# -- how many ----------------------------------------------------------------------------------------------------------


def begun(monkeypatch, count, examples, target="ring", on=8):
    """Whether workers try two properties of so many examples each, and how many there may be, on so many cores."""
    monkeypatch.setattr(jobs, "cores", lambda: on)
    monkeypatch.setattr(Workers, "_start", lambda self: None)

    @implementation(name="here")
    def attend(q, k, v, call):
        return q

    many = Jobs(count, HIDDEN)
    asked = [Wanted(property=id, examples=examples, seed=0) for id in ("forward", "gradients")]
    return many.begin(setup_of(Runner(attend, ContainedWorld(), target=target)), "", asked, None), many._workers.most


def test_auto_starts_no_workers_for_few_examples(monkeypatch):
    """They would cost more than they gain; a number that is asked for is kept."""
    assert begun(monkeypatch, None, 30) == (False, 0)
    assert begun(monkeypatch, None, 200) == (True, 4)
    assert begun(monkeypatch, None, 4000) == (True, 8)
    assert begun(monkeypatch, None, 4000, on=1) == (False, 1)
    assert begun(monkeypatch, 3, 1) == (True, 3)
    assert begun(monkeypatch, 1, 4000) == (False, 1)


def test_an_implementation_without_a_target_is_tried_in_this_process(monkeypatch):
    """No other process could import it."""
    assert not begun(monkeypatch, 2, 4000, target=None)[0]


def test_a_container_may_use_less_than_the_machine_has(monkeypatch, tmp_path):
    """A quota of one and a half cores is two jobs at most."""
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(limits, "QUOTA", quota)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    assert cores() == 8
    for text, expected in (("max 100000\n", 8), ("150000 100000\n", 2), ("1000 100000\n", 1), ("nonsense", 8)):
        quota.write_text(text)
        assert cores() == expected


@pytest.mark.nightly  # by day, two threads write and read one folder: test_kept_cases.py
def test_two_runs_in_one_folder_do_not_disturb_each_other(ringverify):
    """They write the same file of the same case, and each its own report."""
    asked = ("check", miniature("faulty_rings:wrong_scale"), "--only", "gradients", "--max-examples", 20)
    runs = [ringverify.apart(*asked, "--jobs", 2, "--report", f"{number}.jsonl") for number in (1, 2)]
    told = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [1, 1]
    assert [err for _, err in told] == ["", ""]
    (file,) = Path(".ringverify").glob("*.json")
    assert "exactly the recorded bits" in ringverify("replay", file).out


def test_a_cause_that_was_made_for_a_case_explains_the_same_in_another_process():
    """It is in no catalogue: a worker that finishes another property is sent it by value."""

    def attend(q, k, v, call):
        return ring_of(STEPS)(q, k, v, dataclasses.replace(call, problem=call.problem.replace(causal=False)))

    plain = Capabilities(gradients=False, lse=True)
    case = Case(problem=Problem(query_length=6, causal=True), world_size=2)
    ignored = next(made for made in MADE if made.text == "causal mask ignored")
    (rule,) = [part for part in PARTS if part.text == "under a causal mask"]
    cause = hypothesis_of(Rule(ignored, (rule,)), "always")
    sent = ForkingPickler.loads(ForkingPickler.dumps(cause))
    scene = Scene(
        case, plain, Runner(Implementation(attend, "subject", plain), SimulatedWorld()).run(case, gradients=False)
    )
    assert sent is not cause
    assert sent.explains(scene) == cause.explains(scene) is not None
    assert ForkingPickler.loads(ForkingPickler.dumps(HYPOTHESES[3])) is HYPOTHESES[3]
