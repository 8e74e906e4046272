"""An exception that cannot say what it is, is told by its type at once; it is no deadline, and nobody else's fault."""

from __future__ import annotations

import sys
import time

import pytest
import unspeakable

from ringverify import targets
from ringverify.errors import UsageError
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(60)

DEADLINE = 50.0


@pytest.fixture(scope="module")
def worlds():
    """Threads, and processes, whose fork server is shared by all tests."""
    opened = {"simulated": SimulatedWorld(), "gloo": GlooWorld()}
    yield opened
    for world in opened.values():
        world.close()


def failure(world, program, argument):
    """How a run ended, long before its deadline."""
    began = time.monotonic()
    run = world.run(program, argument, world_size=2, seed=0, deadline=DEADLINE)
    assert time.monotonic() - began < DEADLINE
    assert run.failure is not None
    return run.failure


@pytest.mark.parametrize("name", unspeakable.SAID)
@pytest.mark.parametrize("world", ["simulated", "gloo"])
def test_an_exception_that_cannot_be_asked_is_told_by_its_type(world, name, worlds):
    """With the line that raised it, whatever its class does."""
    found = failure(worlds[world], unspeakable.raises, name)
    assert (found.kind, found.rank) == ("raised", 1)
    assert found.message == f"rank 1 {unspeakable.SAID[name]}"
    assert "unspeakable.py" in found.detail


@pytest.mark.parametrize("world", ["simulated", "gloo"])
def test_so_is_one_that_comes_through_the_engine_of_autograd(world, worlds):
    """Which asks for its text as well."""
    found = failure(worlds[world], unspeakable.raises_in_backward, "StrRaises")
    assert (found.kind, found.rank, found.exception) == ("raised", 1, "StrRaises")


def test_one_that_ends_its_process_when_it_is_asked_has_ended_its_process(worlds):
    """By a thread as by a process of a rank's own: at once, and by that rank."""
    found = failure(worlds["simulated"], unspeakable.raises, "StrLeaves")
    assert (found.kind, found.message) == ("raised", "rank 1 called os._exit(9)")
    found = failure(worlds["gloo"], unspeakable.raises, "StrLeaves")
    assert (found.kind, found.message) == ("died", "rank 1's process ended with exit code 9")


@pytest.mark.parametrize("name", ["StrRaises", "StrExits", "StrReturnsANumber", "ClassRaises", "NameIsANumber"])
def test_a_target_that_raises_one_on_import_does_not_import(name, tmp_path, monkeypatch):
    """The message names its type, and the line."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken.py").write_text(f"import unspeakable\nraise unspeakable.{name}('me')\n")
    with pytest.raises(UsageError) as refused:
        targets.load(f"{tmp_path}/broken.py:attend")
    said = unspeakable.SAID[name].removeprefix("raised ")
    assert f"does not import: {said} (at broken.py:2)" in str(refused.value)
