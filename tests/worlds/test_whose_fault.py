"""Whose doing the end of a run is: the implementation's only if it ended in the implementation's code."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import our_programs as programs
import pytest

from ringref import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.implementation import implementation
from ringverify.worlds import limits
from ringverify.worlds.limits import limit_of, too_many
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.simulated.baton import Baton
from ringverify.worlds.world import (
    LOAD_SECONDS,
    Load,
    LoadTooLong,
    OurError,
    Run,
    TooEarly,
    World,
    WorldUnavailable,
)

pytestmark = pytest.mark.timeout(120)

PLENTY = 60.0
SLOW = "import time\nuntil = time.monotonic() + 1\nwhile time.monotonic() < until: pass\n"


@pytest.fixture(scope="module", params=[ContainedWorld, GlooWorld], ids=["simulated", "gloo"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Both worlds that start processes, each for all tests of this file."""
    world: World = request.param()
    yield world
    world.close()


def ran(world: World, program: Any, argument: Any = None, deadline: float = PLENTY, load: Load | None = None) -> Run:
    """A run on two ranks."""
    return world.run(program, argument, world_size=2, seed=0, deadline=deadline, load=load)


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_exception_of_ours_on_a_rank_says_nothing_of_the_implementation(world: World, where: str) -> None:
    """And its whole traceback is at hand."""
    with pytest.raises(OurError, match="not of your code, on a rank: KeyError") as raised:
        ran(world, programs.raises_in_ours, where)
    assert "in _raise_if" in raised.value.detail


@pytest.mark.parametrize("where", ["inside", "charge"])
def test_an_exception_of_the_implementation_or_a_charge_of_ours_is_its_failure(world: World, where: str) -> None:
    """What our code says of what it got back is as good as what the implementation says itself."""
    failure = ran(world, programs.raises_in_ours, where).failure
    assert failure is not None
    assert failure.kind == "raised"
    assert failure.exception == {"inside": "KeyError", "charge": "Charge"}[where]


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_process_that_ends_in_our_code_says_nothing_of_the_implementation(world: World, where: str) -> None:
    """What ended it may have been the implementation, and it may not."""
    with pytest.raises(OurError, match="SIGSEGV"):
        ran(world, programs.ends_in_ours, where)


def test_an_error_of_ours_while_a_simulated_rank_passes_the_baton_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rank could go on; nobody waits for the deadline, and nothing is said of the implementation."""

    def broken(*_: Any) -> None:
        raise KeyError("baton")

    monkeypatch.setattr(Baton, "leave", broken)
    began = time.monotonic()
    with pytest.raises(OurError, match="not of your code, on a rank: KeyError"):
        SimulatedWorld().run(programs.raises_in_ours, "nowhere", world_size=2, seed=0, deadline=PLENTY)
    assert time.monotonic() - began < PLENTY / 2


def test_a_process_that_ends_in_the_implementation_is_its_failure(world: World) -> None:
    """As it was before."""
    failure = ran(world, programs.ends_in_ours, "inside").failure
    assert failure is not None
    assert failure.kind == "died"


def test_a_thread_that_sends_when_its_call_has_returned_cannot_end_the_simulated_world() -> None:
    """During the run, and in one that comes after it; both are right, and the process is the same."""
    world = ContainedWorld()
    try:
        for seconds in (0.0, 0.2):
            assert ran(world, programs.sends_late, seconds).failure is None
        (process,) = world.processes
        time.sleep(1.0)
        assert ran(world, programs.raises_in_ours, "nowhere").failure is None
        assert world.processes == [process]
    finally:
        world.close()


def test_a_deadline_that_ends_in_our_code_says_nothing_of_the_implementation(world: World) -> None:
    """It was late because of us, or of the machine."""
    with pytest.raises(TooEarly, match="in code of ringverify itself"):
        ran(world, programs.waits_in_ours, "before", deadline=0.5)
    failure = ran(world, programs.waits_in_ours, "inside", deadline=0.5).failure
    assert failure is not None
    assert failure.kind == "deadline"


def test_a_rank_that_is_woken_by_the_question_where_it_is_was_where_it_slept() -> None:
    """The signal by which a process is asked ends `sleep` and `pause` in C, and the run goes on."""
    world = GlooWorld()
    try:
        failure = ran(world, programs.sleeps_until_a_signal, deadline=1.0).failure
    finally:
        world.close()
    assert failure is not None
    assert failure.kind == "deadline"


@pytest.mark.parametrize(("importing", "deadlines"), [(False, [1.0, 4.0]), (True, [1.0])])
def test_a_run_that_time_ended_in_our_code_is_run_once_more(importing: bool, deadlines: list[float]) -> None:
    """With more time. An import is the implementation's, which takes as long the next time."""
    given = []

    class SlowWorld(SimulatedWorld):
        def run(self, program: Any, argument: Any, *, deadline: float, **options: Any) -> Run:
            given.append(deadline)
            if len(given) == 1:
                raise TooEarly.at(deadline, 0, "", importing=importing)
            return super().run(program, argument, deadline=deadline, **options)

    runner = Runner(implementation()(lambda q, k, v, call: q.clone()), SlowWorld(), deadline=1.0)
    case = Case(problem=Problem(query_length=4))
    with pytest.raises(TooEarly) if importing else contextlib.nullcontext():
        assert runner.run(case, gradients=False).failure is None
    assert given == deadlines


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module that takes a second to import."""
    name = f"slow_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module whose import no test waits for."""
    (tmp_path / "imported_for_minutes.py").write_text("import time\ntime.sleep(300)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "imported_for_minutes"


def test_a_deadline_that_ends_in_an_import_says_nothing_of_the_implementation(world: World, endless: str) -> None:
    """Nor does a module that it imports late, and slowly, make it one that hangs."""
    with pytest.raises(TooEarly, match="importing"):
        ran(world, programs.imports, endless, deadline=0.5)


def test_loading_is_no_part_of_a_run_and_is_told(world: World, slow: str) -> None:
    """A right program passes under a deadline that its import alone would have broken."""
    told: list[str | None] = []
    load = Load(slow, programs.load, told=told.append)
    for _ in range(2):
        assert ran(world, programs.imports, slow, deadline=0.9, load=load).failure is None
    assert told == [slow, None]


def test_loading_has_a_deadline_of_its_own(world: World, endless: str) -> None:
    """Which ends without a verdict, and names the option."""
    with pytest.raises(LoadTooLong, match=r"still loading after 0\.2 s: allow more with --load-deadline"):
        ran(world, programs.imports, endless, load=Load(endless, programs.load, deadline=0.2))


def test_what_cannot_be_loaded_is_no_failure_of_a_program(world: World) -> None:
    """The reason is told."""
    with pytest.raises(OurError, match=r"could not be loaded: rank . raised ModuleNotFoundError"):
        ran(world, programs.imports, "no_such_module", load=Load("no_such_module", programs.load))


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (MemoryError("no more"), "memory"),
        (OSError(errno.EMFILE, "Too many open files"), "file descriptors"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "memory"),
        (RuntimeError(f"[socket.cc:1] socket: {os.strerror(errno.EMFILE)}"), "file descriptors"),
        (RuntimeError("no such thing"), None),
        (OSError(errno.ENOENT, "No such file"), None),
    ],
)
def test_a_limit_of_the_machine_is_told_as_such(world: World, error: Exception, limit: str | None) -> None:
    """By a field, whatever the words of the error are."""
    failure = ran(world, programs.meets_a_limit, error).failure
    assert failure is not None
    assert failure.limit == limit


def test_what_keeps_a_process_or_a_thread_from_starting_is_named() -> None:
    """EAGAIN means something else everywhere else."""
    refused = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    assert limit_of(refused, starting=True) == "processes"
    assert limit_of(refused) is None
    assert limit_of(RuntimeError("can't start new thread"), starting=True) == "threads"


def test_more_ranks_than_a_simulated_world_holds_are_refused_before_anything_starts() -> None:
    """Whatever the implementation, its threads would still be at work at any deadline."""
    with pytest.raises(WorldUnavailable, match="a simulated world holds at most 1024 ranks, not 20000"):
        SimulatedWorld().run(programs.load, "os", world_size=20_000, seed=0, deadline=1.0)


def test_more_ranks_than_the_machine_has_file_descriptors_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sentence that names the limit and how it is raised."""
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (1024, 1024))
    reason = too_many(20_000, "file descriptors")
    assert reason is not None
    assert "at least 80000 file descriptors" in reason
    assert "the limit is 1024: ulimit -n" in reason
    world = GlooWorld()
    with pytest.raises(WorldUnavailable, match="80000 file descriptors"):
        world.run(programs.load, "os", world_size=20_000, seed=0, deadline=1.0)
    assert too_many(2, "file descriptors", "processes", "threads", "memory") is None


def test_a_process_that_cannot_be_started_is_told_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is what the system says."""

    def refused(*_: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("ringverify.worlds.processes.rank.LocalRank", refused)
    with pytest.raises(WorldUnavailable, match="this machine is out of processes"):
        GlooWorld().run(programs.load, "os", world_size=2, seed=0, deadline=1.0)


def test_a_thread_that_cannot_be_started_is_told_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for ranks that are threads."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("ringverify.worlds.simulated.world.threading.Thread.start", refused)
    with pytest.raises(WorldUnavailable, match="this machine is out of threads"):
        SimulatedWorld().run(programs.load, "os", world_size=2, seed=0, deadline=1.0)


def test_ranks_have_children_and_leave_none_behind(world: World) -> None:
    """A DataLoader with a worker reads on every rank, in a process that is gone when the world is closed."""
    seen = ran(world, programs.reads_with_a_child)
    assert seen.failure is None, seen.failure
    for numbers, processes in seen.results:
        assert numbers == [0, 1, 2]
        assert processes != [os.getpid()]
    world.close()
    children = [process for _, processes in seen.results for process in processes]
    assert not [process for process in children if Path(f"/proc/{process}").exists()]


def test_loading_is_given_two_minutes_unless_something_else_is_said() -> None:
    """As the help of the option says."""
    assert Load("x", programs.load).deadline == LOAD_SECONDS == 120.0
