"""A run in processes asks in a simulated world what only that one can show, and a case of it is replayed there."""

import json
from pathlib import Path

import pytest
from command_line import miniature

from ringverify.check.outcome import implementation_event
from ringverify.events import KINDS, from_json
from ringverify.testing.calls import tried_in
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.world import WorldUnavailable

pytestmark = pytest.mark.timeout(150)

IN_PROCESSES = ("--world", "gloo", "--max-examples", "3")


def test_nothing_is_unsupported_for_want_of_a_watched_world(ringverify):
    """Each kind of run is counted; world sizes are those of the simulated world, unless some were asked for."""
    outcome = ringverify.check("ring", *IN_PROCESSES, "--only", "lse,hazards,progress,traffic,memory")
    assert outcome.code == 0
    assert outcome.verdicts() == dict.fromkeys(("lse", "hazards", "progress", "traffic", "memory"), "pass")
    worlds = {event["property"]: event.get("world") for event in outcome.told("property")}
    assert worlds == {"lse": None, **dict.fromkeys(("hazards", "progress", "traffic", "memory"), "simulated")}
    (told,) = outcome.told("implementation")
    assert told["world"] == "gloo"
    assert told["runs"] >= 3
    assert told["simulated_runs"] >= 12
    assert f"runs of the gloo world and {told['simulated_runs']} of the simulated one" in outcome.out
    assert outcome.out.count("in the simulated world") == 4


def test_world_sizes_that_were_asked_for_hold_in_both(ringverify):
    """Of which one has to be twice the other for `memory`."""
    outcome = ringverify.check("ring", *IN_PROCESSES, "--world-sizes", "2", "--only", "lse,traffic,memory")
    assert outcome.verdicts() == {"lse": "pass", "traffic": "pass", "memory": "unsupported"}


def test_a_hazard_is_found_and_replayed_in_the_world_that_shows_it(ringverify):
    """And in the world of processes nothing is wrong."""
    outcome = ringverify.check(miniature("hazardous:early"), *IN_PROCESSES, "--only", "forward,hazards")
    assert outcome.code == 1
    assert outcome.verdicts() == {"forward": "pass", "hazards": "fail"}
    (counterexample,) = outcome.told("counterexample")
    assert json.loads(Path(counterexample["file"]).read_text())["world"] == "simulated"
    assert ringverify("replay", counterexample["file"]).code == 1


def test_a_simulated_world_that_nobody_asked_for_may_be_missing(ringverify, monkeypatch):
    """As with a torch that lacks what it needs: the processes have their verdict."""

    def lacking(self, *args, **named):
        raise WorldUnavailable("torch 0 lacks it")

    monkeypatch.setattr(ContainedWorld, "run", lacking)
    outcome = ringverify.check("ring", *IN_PROCESSES, "--only", "lse,hazards")
    assert outcome.code == 0
    assert outcome.verdicts() == {"lse": "pass", "hazards": "unsupported"}
    assert outcome.told("property", property="hazards")[0]["reason"] == "needs the simulated world: torch 0 lacks it"


@pytest.mark.parametrize("only", ["forward,hazards", "hazards,determinism", "hazards"])
def test_runs_of_each_world_are_added_up_again_as_they_were(ringverify, only):
    """Where a call's events are taken apart by property, as the plug-in does."""
    outcome = ringverify.check("ring", *IN_PROCESSES, "--only", only)
    (told,) = outcome.told("implementation")
    events = [from_json(KINDS[event["event"]], event) for event in outcome.events]
    again = implementation_event(tried_in(events), implementation="ring", asked=1, seconds=1.0)
    assert {name: getattr(again, name) for name in ("runs", "simulated_runs")} == {
        name: told.get(name) for name in ("runs", "simulated_runs")
    }


def test_ranks_that_cannot_share_a_process_are_not_asked(ringverify):
    """That is what `processes=True` declares."""
    outcome = ringverify.check(miniature("right:attend_in_processes"), "--max-examples", "3", "--only", "lse,hazards")
    assert outcome.told("property", property="hazards")[0]["reason"] == (
        "only the simulated world can watch ranks and delay messages, and processes=True rules it out"
    )
