"""Errors of our own: each costs the property that was under way, no violation that was found, and no other verdict.

One is injected in every phase of a run, in a world in this process, where everything else is as in a real run.
"""

from pathlib import Path

import pytest
from command_line import miniature
from hunts import unexplained

from ringverify import targets
from ringverify.cases.shrinking import Shrunk
from ringverify.check import accounting, casefile, explaining, finishing, run, searching
from ringverify.check.options import Options, Subject
from ringverify.events import as_json
from ringverify.properties import property as properties_module
from ringverify.properties.catalogue import select
from ringverify.reports.progress import HIDDEN
from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.world import WorldUnavailable

pytestmark = pytest.mark.timeout(120)

WRONG, INCONCLUSIVE = 1, 3
WRONG_RING, RIGHT_RING = "undeclared:ALWAYS_WRONG_SCALE", "right:attend"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """A folder, a world in this process, and nothing said of a violation, which has its own tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "open_world", lambda name: SimulatedWorld())
    monkeypatch.setattr(finishing, "shrink", lambda case, *_, **__: Shrunk(case, 0, complete=True))
    unexplained(monkeypatch)


def breaks(*_, **__):
    """What every injected error is."""
    raise ZeroDivisionError("of ours")


def checked(name, properties=("forward",), tell=None, verbose=False):
    """The exit code of a run on one miniature, and its events."""
    events = []
    target = miniature(name)
    options = Options(max_examples=2, cases=Path("cases"), verbose=verbose)
    code = run.check(
        [Subject(target, targets.load(target))],
        select(properties, ()),
        options,
        tell or (lambda event: events.append(as_json(event))),
        HIDDEN,
    )
    return code, events


def of(events, kind):
    """The events of a kind."""
    return [event for event in events if event["event"] == kind]


PHASES = {
    "remembering": (casefile, "remembered"),
    "drawing": (searching, "draws"),
    "running": (SimulatedWorld, "run"),
    "judging": (properties_module, "worst"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_an_error_before_a_violation_is_found_costs_one_property_its_verdict(phase, monkeypatch):
    """What was found of another stays, and decides the exit code; the traceback is in the report."""
    owner, name = PHASES[phase]
    call, under_way, try_property = getattr(owner, name), [], run.ImplementationRun.try_property

    def noted(self, property):
        under_way[:] = [property.id]
        return try_property(self, property)

    def spoiled(*arguments, **named):
        return breaks() if under_way == ["gradients"] else call(*arguments, **named)

    monkeypatch.setattr(run.ImplementationRun, "try_property", noted)
    monkeypatch.setattr(owner, name, spoiled)
    code, events = checked(WRONG_RING, ("forward", "gradients"))
    first, second = of(events, "property")
    assert (first["verdict"], second["verdict"], code) == ("fail", "inconclusive", WRONG)
    assert "ZeroDivisionError: of ours" in second["reason"]
    assert second["traceback"].endswith("ZeroDivisionError: of ours")
    assert of(events, "footer")[0]["exit_code"] == WRONG


AFTER = {
    "shrinking": (finishing, "shrink"),
    "confirming afresh": (finishing, "afresh"),
    "varying": (accounting, "when_it_fails"),
    "diagnosing": (explaining, "diagnose"),
    "declaring": (accounting, "would_pass"),
    "hints": (accounting, "suggested"),
    "what is beside": (accounting, "beside"),
    "saving the case": (casefile, "save"),
    "drawing the region": (run, "outline"),
}


@pytest.mark.parametrize("phase", AFTER)
def test_an_error_after_a_violation_is_found_costs_only_what_would_have_been_said(phase, monkeypatch):
    """The violation stands with what is known of it, and the traceback is beside it."""
    monkeypatch.setattr(*AFTER[phase], breaks)
    if phase == "diagnosing":
        monkeypatch.setattr(accounting, "explained", explaining.explained)
    code, events = checked(WRONG_RING)
    (told,) = of(events, "property")
    (shown,) = of(events, "counterexample")
    assert (told["verdict"], code) == ("fail", WRONG)
    assert told["traceback"].endswith("ZeroDivisionError: of ours")
    assert "an error of ringverify itself while" in told["reason"]
    assert "wrong on rank" in shown["summary"]
    assert ("file" in shown) == (phase != "saving the case")


def test_an_error_in_comparing_two_violations_leaves_both(monkeypatch):
    """Neither is said to be the other."""
    monkeypatch.setattr(run, "same_as", breaks)
    monkeypatch.setattr(finishing, "repeated", breaks)
    code, events = checked(WRONG_RING, ("forward", "gradients"))
    assert code == WRONG
    assert [event["verdict"] for event in of(events, "property")] == ["fail", "fail"]
    assert [event["same_as"] for event in of(events, "counterexample")] == [None, None]


@pytest.mark.parametrize("kind", ["property", "implementation", "footer"])
def test_an_error_in_telling_costs_a_pass_and_no_violation(kind):
    """The event that could not be told is no pass; a property's is told once more, as inconclusive."""
    events, spoiled = [], []

    def tell(event):
        if event.event == kind and not spoiled:
            spoiled.append(event)
            breaks()
        events.append(as_json(event))

    code, _ = checked(RIGHT_RING, tell=tell)
    assert code == INCONCLUSIVE
    if kind == "property":
        (told,) = of(events, "property")
        assert told["verdict"] == "inconclusive"
        assert "while telling of forward" in told["reason"]
    spoiled.clear()
    code, _ = checked(WRONG_RING, tell=tell)
    assert code == WRONG


def test_an_error_in_telling_what_is_exchanged_is_no_pass(monkeypatch):
    """It was asked for."""
    monkeypatch.setattr(run, "ordinary_case", breaks)
    assert checked(RIGHT_RING, verbose=True)[0] == INCONCLUSIVE
    assert checked(WRONG_RING, verbose=True)[0] == WRONG


def test_a_limit_of_the_machine_has_no_traceback_of_ours(monkeypatch):
    """What is told is the limit."""

    def refuses(*_, **__):
        raise WorldUnavailable("no more memory")

    monkeypatch.setattr(SimulatedWorld, "run", refuses)
    code, events = checked(RIGHT_RING)
    (told,) = of(events, "property")
    assert (code, told["verdict"], told["reason"]) == (INCONCLUSIVE, "inconclusive", "no more memory")
    assert "traceback" not in told


def test_a_case_that_memory_does_not_hold_is_no_error_of_ours(monkeypatch):
    """Wherever it shows; numpy says how much was asked for."""

    def grows(*_, **__):
        raise MemoryError("Unable to allocate 1. TiB")

    monkeypatch.setattr(SimulatedWorld, "run", grows)
    code, events = checked(RIGHT_RING)
    (told,) = of(events, "property")
    reason = "this machine is out of memory while trying forward: Unable to allocate 1. TiB"
    assert (code, told["verdict"], told["reason"]) == (INCONCLUSIVE, "inconclusive", reason)
    assert "traceback" not in told
