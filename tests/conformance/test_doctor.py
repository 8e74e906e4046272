"""`ringverify doctor` says that a world works only if what the suite's own runs need works in it."""

import dataclasses

import pytest

from ringverify.cli import doctor
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.simulated import SimulatedWorld, torch_private
from ringverify.worlds.world import Conditions, WorldUnavailable

pytestmark = pytest.mark.timeout(60)

TRIALS = {trial.what: trial for trials in doctor._TRIALS.values() for trial in trials}


def _examined(monkeypatch, world):
    """What doctor says of the simulated world if it is `world`, and its exit code."""
    monkeypatch.setattr(
        doctor, "open_world", lambda name: world if name == "simulated" else pytest.fail(f"{name} was asked for")
    )
    return doctor._try_world("simulated")


def test_the_simulated_world_passes_every_trial(monkeypatch):
    """In the process in which `check` runs it."""
    assert _examined(monkeypatch, ContainedWorld()) is None


def test_a_sub_group_that_cannot_be_made_is_said(monkeypatch):
    """As with a torch that asks for what the stand-in of its world does not have: a sum of all ranks still works."""

    def fails(*arguments, **options):
        raise WorldUnavailable("this torch is too new")

    monkeypatch.setattr(torch_private.RankThreads, "_new_process_group_helper", fails)
    assert _examined(monkeypatch, SimulatedWorld()) == "this torch is too new"


@pytest.mark.parametrize("what", list(TRIALS))
def test_a_trial_that_ends_with_other_numbers_is_said(what):
    """Each trial can fail."""
    trial = TRIALS[what]
    wrong = dataclasses.replace(trial, results=(*trial.results[1:], -1.0))
    assert "ranks returned" in doctor._try(SimulatedWorld(), wrong, "cpu")


class _Deaf:
    """A world that runs programs and neither watches nor delays."""

    name = "simulated"

    def run(self, *arguments, watch, conditions, **options):
        assert conditions is None or conditions == Conditions(transport="rendezvous")
        return dataclasses.replace(SimulatedWorld().run(*arguments, **options), traffic=None)

    def close(self):
        pass


def test_a_world_that_shows_nothing_of_a_watched_run_does_not_work(monkeypatch):
    """`hazards`, `traffic` and `memory` would have nothing to judge."""
    assert _examined(monkeypatch, _Deaf()) == "a watched run: its traffic was not recorded"


def test_a_rank_that_raises_is_said_with_the_trial(monkeypatch):
    """Which of them it was, and what the rank said."""

    def broken(device):
        raise RuntimeError("no such thing")

    monkeypatch.setitem(doctor._TRIALS, "simulated", (dataclasses.replace(TRIALS["a rendezvous"], program=broken),))
    assert _examined(monkeypatch, SimulatedWorld()) in [
        f"a rendezvous: rank {rank} raised RuntimeError: no such thing" for rank in (0, 1)
    ]
