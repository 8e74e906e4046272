"""What a rank has started ends with it, wherever it has hidden, and a tool that was killed leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from leaving import HIDDEN, hides, hides_and_dies
from processes import becomes_true, has_ended

from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.processes.rank import LOOPBACK, LocalRank
from ringverify.worlds.processes.wire import Seat

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sub-reapers are Linux's"),
]


@pytest.fixture(scope="module")
def world() -> Iterator[GlooWorld]:
    """Closed by the tests, which use it again."""
    opened = GlooWorld()
    yield opened
    opened.close()


def test_what_a_rank_has_started_ends_with_it_also_in_a_session_of_its_own(world: GlooWorld) -> None:
    """A child, one that called setsid, and daemons that forked twice: all of them, and nobody else."""
    bystander = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "3600")
    try:
        run = world.run(hides, None, world_size=1, seed=0, deadline=60)
        assert run.failure is None, run.failure
        (hidden,) = run.results
        assert len(set(hidden)) == len(HIDDEN)
        assert not any(map(has_ended, hidden))
        world.close()
        assert becomes_true(lambda: all(map(has_ended, hidden)))
        assert not has_ended(bystander)
    finally:
        os.kill(bystander, signal.SIGKILL)
        os.waitpid(bystander, 0)


def test_a_rank_that_dies_is_told_as_it_died_and_leaves_nobody(world: GlooWorld, tmp_path: Path) -> None:
    """The keeper ends as the rank did, after all that the rank had started."""
    run = world.run(hides_and_dies, str(tmp_path / "hidden"), world_size=1, seed=0, deadline=60)
    assert run.failure is not None
    assert (run.failure.kind, run.failure.message) == ("died", "rank 0's process was ended by signal SIGSEGV")
    hidden = [int(word) for word in (tmp_path / "hidden").read_text().split()]
    assert len(hidden) == len(HIDDEN)
    assert becomes_true(lambda: all(map(has_ended, hidden)))


def test_a_rank_that_waits_for_the_others_ends_with_the_tool_and_its_directory_with_it(tmp_path: Path) -> None:
    """Torch's `FileStore` waits minutes and lets nobody interrupt; its process can be ended all the same."""
    directory = tmp_path / "meeting"
    directory.mkdir()
    rank = LocalRank(Seat(0, 2, 0, 2, "gloo", interface=LOOPBACK), str(directory), "leaving")
    assert becomes_true((directory / "store").exists, 60)
    rank._lifeline.close()  # what its keeper sees of the tool's end
    rank._process.join(60)
    assert rank._process.exitcode == -signal.SIGKILL
    assert not directory.exists()


def _use_a_world():
    world = GlooWorld()
    assert world.run(abs, -1, world_size=1, seed=0, deadline=60.0).results == (1,)
    world.close()


@pytest.mark.timeout(120)
@pytest.mark.nightly
def test_a_child_that_uses_a_world_leaves_its_parent_the_sockets_folder():
    """A process inherits the folder of `multiprocessing` from its parent, whose fork server starts anew in it."""
    folder = Path(multiprocessing.util.get_temp_dir())
    child = multiprocessing.get_context("spawn").Process(target=_use_a_world)
    child.start()
    child.join()
    time.sleep(1.0)  # its fork server ends after it
    assert child.exitcode == 0
    assert folder.is_dir()
