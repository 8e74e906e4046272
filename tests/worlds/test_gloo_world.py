"""The gloo world: right results from real processes, every misbehaviour named, and nothing left behind.

A run's deadline is generous where none is expected to pass: these tests share two cores with others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import by_address
import gloo_programs as programs
import numpy as np
import pytest
from processes import becomes_true, has_ended

from ringverify.worlds import reproducible
from ringverify.worlds.processes.blame import first_cause
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.processes.gloo import MOST_PROCESSES, GlooWorld
from ringverify.worlds.processes.rank import BLAS_THREADS, ThisMachine
from ringverify.worlds.processes.wire import Died, Raised, Residue, is_clean
from ringverify.worlds.world import Failure, OurError, WorldUnavailable

pytestmark = pytest.mark.timeout(60)

PLENTY = 30.0
SHORT = 2.0


@pytest.fixture(scope="module")
def world() -> Iterator[GlooWorld]:
    """One world for the tests of this file: each leaves it healthy, or the next one says so."""
    world = GlooWorld()
    yield world
    world.close()


def results(world: GlooWorld, program: Any, argument: Any = None, *, world_size: int = 3) -> tuple[Any, ...]:
    """What the program returns on each rank; no rank may fail."""
    run = world.run(program, argument, world_size=world_size, seed=0, deadline=PLENTY)
    assert run.failure is None, run.failure.detail
    return run.results


def failure(world: GlooWorld, program: Any, argument: Any = None, *, deadline: float = PLENTY) -> Failure:
    """The failure of a program on three ranks; there has to be one."""
    run = world.run(program, argument, world_size=3, seed=0, deadline=deadline)
    assert run.failure is not None
    assert run.results == (None, None, None)
    assert "\n" not in run.failure.message
    return run.failure


def end(numbers: list[int]) -> bool:
    """Whether all these processes end within some seconds."""
    return becomes_true(lambda: all(map(has_ended, numbers)))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_runs_the_program_and_knows_who_it_is(world: GlooWorld, world_size: int) -> None:
    """Results come back in rank order, the argument reaches every rank."""
    expected = tuple((rank, world_size, {"n": 3}) for rank in range(world_size))
    assert results(world, programs.who_am_i, {"n": 3}, world_size=world_size) == expected


def test_messages_and_collectives_carry_values(world: GlooWorld) -> None:
    """Point-to-point messages and collectives both work, one after the other in the same processes."""
    assert results(world, programs.pass_round) == ([2.0, 1.0], [0.0, 2.0], [1.0, 0.0])
    assert results(world, programs.collectives) == (3.0, 3.0, 3.0)


def test_the_fork_server_imports_functional_collectives_for_all_ranks() -> None:
    """A rank need not import them."""
    world = GlooWorld()
    try:
        assert results(world, programs.has_functional_collectives, world_size=2) == (True, True)
    finally:
        world.close()


@pytest.mark.parametrize(
    "program", [programs.pass_round, programs.receive_from_anyone, programs.collectives, programs.new_group]
)
def test_processes_are_kept_for_the_next_run(world: GlooWorld, program: Any) -> None:
    """A program that leaves nothing under way does not cost the pool, whatever it communicates with."""
    before = results(world, programs.process_id, world_size=2)
    results(world, program, 1.0, world_size=2)
    assert results(world, programs.process_id, world_size=2) == before


def test_a_run_of_many_groups_does_not_gather_them_for_ever(world: GlooWorld) -> None:
    """Groups that programs leave behind end with the pool, which is replaced before they are too many."""
    before = results(world, programs.process_id, world_size=2)
    for _ in range(70):
        assert results(world, programs.new_group, world_size=2) == (2, 2)
    assert results(world, programs.process_id, world_size=2) != before


MISBEHAVIOUR = {
    "raise": ("raised", "rank 1 raised ValueError: no such"),
    "raise what cannot be printed": ("raised", "rank 1 raised _Unprintable (its text cannot be read: __str__ fails)"),
    "sys.exit": ("raised", "rank 1 called sys.exit(3)"),
    "os._exit": ("died", "rank 1's process ended with exit code 3"),
    "SIGKILL": ("died", "rank 1's process was ended by signal SIGKILL"),
    "SIGABRT": ("died", "rank 1's process was ended by signal SIGABRT"),
}


@pytest.mark.parametrize("how", MISBEHAVIOUR)
def test_the_rank_that_fails_is_named_and_the_next_run_is_healthy(world: GlooWorld, how: str) -> None:
    """Rank 1 fails while its neighbours wait for it: it is the one that is named, with what it printed."""
    kind, message = MISBEHAVIOUR[how]
    found = failure(world, programs.misbehave, how)
    assert (found.kind, found.rank, found.message) == (kind, 1, message)
    assert f"rank 1 is about to {how}" in found.detail
    assert results(world, programs.collectives) == (3.0, 3.0, 3.0)


def test_a_raised_error_keeps_its_own_traceback(world: GlooWorld) -> None:
    """The detail is the rank's traceback and begins with the program, not with the world."""
    detail = failure(world, programs.misbehave, "raise").detail
    assert "gloo_programs.py" in detail
    assert "ValueError: no such\nthing" in detail
    assert "worker.py" not in detail


@pytest.mark.parametrize("how", ["spin", "sleep"])
def test_a_rank_that_never_ends_is_found_at_its_line(world: GlooWorld, how: str) -> None:
    """At the deadline every rank says where it is; then all are ended, and the next run is healthy."""
    found = failure(world, programs.misbehave, how, deadline=SHORT)
    assert (found.kind, found.rank) == ("deadline", None)
    assert found.message.startswith(f"after {SHORT:g} s ranks 0, 1, 2 had not returned: rank 0 at gloo_programs.py:")
    assert " in misbehave (recv), rank 1 at gloo_programs.py:" in found.message
    assert results(world, programs.collectives) == (3.0, 3.0, 3.0)


def test_a_rank_left_waiting_is_told_from_one_that_returned(world: GlooWorld) -> None:
    """Rank 1 returns without sending: the message says who waits, and who had returned."""
    found = failure(world, programs.misbehave, "not send", deadline=SHORT)
    assert found.kind == "deadline"
    assert found.message.startswith(f"after {SHORT:g} s ranks 0, 2 had not returned: ")
    assert found.message.endswith("; rank 1 had")
    assert results(world, programs.collectives) == (3.0, 3.0, 3.0)


def test_floods_of_output_are_kept_to_their_end_and_out_of_the_tools_own(
    world: GlooWorld, capfd: pytest.CaptureFixture[str]
) -> None:
    """Twenty megabytes a rank neither hang nor come through; the last lines are shown with a failure."""
    found = failure(world, programs.flood)
    assert found.message == "rank 1 raised ValueError: after the flood"
    assert found.detail.endswith("the end\n")
    assert len(found.detail) < 100_000
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("program", "argument"),
    [(programs.destroy, None), (programs.leave_a_message, 5.0), (programs.extra_collective, None)],
)
def test_what_a_run_leaves_under_way_does_not_reach_the_next(world: GlooWorld, program: Any, argument: Any) -> None:
    """No process group, a message that nobody received, a collective that nobody joined: the next run starts afresh."""
    results(world, program, argument, world_size=2)
    assert results(world, programs.receive, 2.0, world_size=2) == (2.0, 2.0)
    assert results(world, programs.collectives, world_size=2) == (1.0, 1.0)


def test_a_message_does_reach_the_next_run_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: in a pool that is used again regardless, rank 1 receives the last run's message."""
    monkeypatch.setattr("ringverify.worlds.processes.pool.is_clean", lambda _, most_groups: True)
    world = GlooWorld()
    try:
        results(world, programs.leave_a_message, 5.0, world_size=2)
        run = world.run(programs.receive, 2.0, world_size=2, seed=0, deadline=SHORT)
        assert run.failure is not None, run.results
        assert f"after {SHORT:g} s rank 0 had not returned: rank 0 at gloo_programs.py:" in run.failure.message
        assert run.failure.message.endswith(" in receive (send); rank 1 had")
    finally:
        world.close()


def test_settings_changed_by_one_program_are_not_met_by_the_next(world: GlooWorld) -> None:
    """Default dtype, thread count, gradient mode and random numbers are those of a fresh process in every run."""
    first = results(world, programs.change_settings, world_size=2)
    assert results(world, programs.change_settings, world_size=2) == first


def in_a_process(**environment: str) -> str:
    """What `programs.products` returns in a process of its own, under that environment and no other MKL mode."""
    others = {name: value for name, value in os.environ.items() if name != reproducible.VARIABLE}
    path = os.pathsep.join(map(str, (Path(programs.__file__).parent, Path(by_address.__file__).parent)))
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            "import gloo_programs, torch; torch.set_num_threads(1); print(gloo_programs.products(0))",
        ],
        env=others | environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PLENTY,
        check=True,
    )
    return ran.stdout.strip()


@pytest.mark.parametrize("mode", [None, "AVX2"])
@pytest.mark.by_day(1)
def test_ranks_multiply_as_every_processor_can_unless_the_user_says_otherwise(
    mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL's code for all processors, in whatever mode this process is; a mode that the user sets is the ranks' too."""
    monkeypatch.delenv(reproducible.VARIABLE, raising=False)
    if mode is not None:
        monkeypatch.setenv(reproducible.VARIABLE, mode)
    for own in (GlooWorld(), ContainedWorld()):
        with contextlib.closing(own) as world:
            run = world.run(programs.products, None, world_size=2, seed=0, deadline=PLENTY)
        assert run.failure is None, run.failure.detail
        assert set(run.results) == {in_a_process(MKL_CBWR=mode or "COMPATIBLE")}


def test_ranks_multiply_in_numpy_with_one_thread() -> None:
    """They share the cores; what the user says stands, and this process's own setting stays as it is."""
    before = os.environ.get(BLAS_THREADS)
    with contextlib.closing(GlooWorld(ThisMachine())) as world:
        assert results(world, programs.variable, BLAS_THREADS, world_size=2) == (before or "1",) * 2
    assert os.environ.get(BLAS_THREADS) == before


@pytest.mark.parametrize(("said", "threads"), [({}, 1), ({BLAS_THREADS: "2"}, 2)])
@pytest.mark.by_day(1)
def test_check_itself_multiplies_in_numpy_with_one_thread(said: dict[str, str], threads: int) -> None:
    """Without workers the oracle runs in its process; OpenBLAS counts its threads when numpy is imported."""
    libraries = list(Path(np.__file__).parents[1].glob("numpy.libs/libscipy_openblas64_*"))
    if not libraries:
        pytest.skip("this numpy does not bring OpenBLAS along")
    others = {name: value for name, value in os.environ.items() if name != BLAS_THREADS}
    program = (
        "import ctypes; from ringverify.cli.main import main; main(['check', 'ring', '--only', 'nothing']); "
        f"print(ctypes.CDLL({str(libraries[0])!r}).scipy_openblas_get_num_threads64_())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], env=others | said, capture_output=True, text=True, timeout=100, check=True
    )
    assert int(ran.stdout) == threads


def test_a_benchmark_is_not_slowed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks multiply as a process does that nobody told how."""
    monkeypatch.delenv(reproducible.VARIABLE, raising=False)
    with contextlib.closing(GlooWorld(ThisMachine(reproducible=False))) as world:
        (variable,) = results(world, programs.variable, reproducible.VARIABLE, world_size=1)
    assert variable is None


def test_the_mode_of_ranks_is_for_a_while_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `replay` needs it, whose ranks are threads; a user's own mode stays, and so does what was there before."""
    monkeypatch.delenv(reproducible.VARIABLE, raising=False)
    with reproducible.as_in_a_rank():
        assert os.environ[reproducible.VARIABLE] == "COMPATIBLE"
    assert reproducible.VARIABLE not in os.environ
    monkeypatch.setenv(reproducible.VARIABLE, "AVX2")
    with reproducible.as_in_a_rank():
        assert os.environ[reproducible.VARIABLE] == "AVX2"
    assert os.environ[reproducible.VARIABLE] == "AVX2"


def test_children_that_a_program_forks_report_nothing_and_end_with_the_pool() -> None:
    """A forked child that returns is not taken for the rank; one that stays is ended with it."""
    world = GlooWorld()
    try:
        ranks, children = zip(*results(world, programs.fork_and_return), strict=True)
        assert results(world, programs.process_id) == ranks
        assert not any(map(has_ended, children))
    finally:
        world.close()
    assert end([*ranks, *children])


def test_a_process_lost_between_runs_is_not_held_against_the_next_program(world: GlooWorld) -> None:
    """What a program does after it has returned costs its pool, and no verdict."""
    processes = results(world, programs.process_id)
    results(world, programs.die_later)
    assert end(list(processes))
    assert results(world, programs.collectives) == (3.0, 3.0, 3.0)


def test_results_that_cannot_be_sent_are_named(world: GlooWorld) -> None:
    """Sending results is our affair: one that no pickle can hold is no failure of what the program runs."""
    with pytest.raises(OurError, match="pickle"):
        failure(world, programs.unpicklable)


def test_programs_that_cannot_be_sent_are_refused(world: GlooWorld) -> None:
    """A function without an importable name is a mistake of the caller, told before anything runs."""
    with pytest.raises(TypeError, match="both have to be picklable"):
        world.run(lambda _: None, None, world_size=1, seed=0, deadline=PLENTY)


@pytest.mark.parametrize(("world_size", "deadline"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_impossible_numbers_are_refused(world: GlooWorld, world_size: int, deadline: float) -> None:
    """World sizes below 1 and deadlines that are no positive number."""
    with pytest.raises(ValueError, match="expected"):
        world.run(programs.who_am_i, None, world_size=world_size, seed=0, deadline=deadline)


def test_ranks_that_cannot_meet_make_the_world_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and no verdict on any program."""
    monkeypatch.setattr("ringverify.worlds.processes.pool.START_SECONDS", 0.0)
    world = GlooWorld()
    with pytest.raises(WorldUnavailable, match=r"^the gloo world could not start: [^\n]*$"):
        world.run(programs.who_am_i, None, world_size=2, seed=0, deadline=PLENTY)
    world.close()


def test_only_so_many_processes_are_kept() -> None:
    """World sizes used least recently give way; the most recent one always runs."""
    world = GlooWorld()
    try:
        small = results(world, programs.process_id, world_size=2)
        large = results(world, programs.process_id, world_size=MOST_PROCESSES - 1)
        assert end(list(small))
        assert not any(map(has_ended, large))
    finally:
        world.close()
    assert end(list(large))


def test_a_closed_world_leaves_no_process_and_can_be_used_again() -> None:
    """`close` ends every rank; a later run starts new ones."""
    world = GlooWorld()
    processes = results(world, programs.process_id)
    world.close()
    assert end(list(processes))
    again = results(world, programs.process_id)
    world.close()
    assert not set(again) & set(processes)


SCRIPT = """
import sys, gloo_programs as programs
from ringverify.worlds.processes.gloo import GlooWorld
world = GlooWorld()
print(*world.run(programs.process_id, None, world_size=2, seed=0, deadline=30).results, flush=True)
if sys.argv[1] != "end":
    print(world.run(programs.misbehave, sys.argv[1], world_size=2, seed=0, deadline=3600))
"""
"""A script without a main guard, which also says that ranks do not run it again."""


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("spin", signal.SIGKILL),
        pytest.param("spin", signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param("end", None, marks=pytest.mark.nightly),
    ],
)
def test_no_rank_outlives_the_tool(tmp_path: Path, how: str, number: int | None) -> None:
    """The tool ends without closing the world, by Ctrl-C, or is killed while a rank computes for ever."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(script), how]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as tool:
        assert tool.stdout is not None
        line = tool.stdout.readline()
        assert line, tool.communicate()[1]
        processes = [int(process) for process in line.split()]
        if number is not None:
            time.sleep(0.3)
            # Ctrl-C reaches every process of the terminal's foreground group, not the tool alone.
            (os.killpg if number == signal.SIGINT else os.kill)(tool.pid, number)
        rest, errors = tool.communicate(timeout=20)
    assert rest == ""
    if number == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert errors.count("Traceback") == 1
    assert end(processes)
    assert not list(tmp_path.glob("ringverify-*"))


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_worlds_of_parallel_pytest_workers_do_not_meet() -> None:
    """Two pytest workers run their own pools at the same time; no port, file or process is shared."""
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", __file__, "-k"]
    chosen = "every_rank_runs or kept_for_the_next"
    done = subprocess.run([*command, chosen], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_cause_is_told_from_its_consequences() -> None:
    """A lost connection and gloo's abort may be met before the exit that caused them is known."""
    lost = Raised("raised RuntimeError: Connection closed by peer", "lost", at=1.0, consequence=True)
    error = Raised("raised ValueError: no", "error", at=3.0, consequence=False)
    assert first_cause({0: lost, 1: Died(-signal.SIGABRT, 2.0), 2: Died(3, 4.0)}, ["", "", ""]).rank == 2
    assert first_cause({0: lost, 1: Died(-signal.SIGABRT, 2.0)}, ["", ""]).rank == 1
    assert first_cause({0: error, 1: Died(3, 4.0)}, ["", ""]).rank == 0
    assert first_cause({0: lost}, ["", ""]).message == "rank 0 raised RuntimeError: Connection closed by peer"


def test_a_rank_whose_end_takes_long_is_the_cause_all_the_same(world: GlooWorld) -> None:
    """The others have lost their connections to it long before its keeper can say how it ended."""
    failed = failure(world, programs.die_slowly)
    assert (failed.kind, failed.rank, failed.exit_code) == ("died", 1, 3)


def residue(*, groups: int = 1, collectives: int = 5, messages: Any = None) -> Residue:
    """What a rank leaves behind: by default, nothing."""
    return Residue(True, groups, {"0": collectives}, messages or {})


def test_only_ranks_in_step_are_used_again() -> None:
    """Surplus messages cancel between sender and receiver; collectives and groups are the same on all ranks."""
    sent, received = {("0", 0, 1, 4): 1}, {("0", 0, 1, 4): -1}
    assert is_clean([residue(messages=sent), residue(messages=received)], most_groups=9)
    assert is_clean([residue(messages=sent), residue(messages={("0", None, 1, 4): -1})], most_groups=9)
    assert not is_clean([residue(messages=sent), residue(messages={("0", 0, 1, 5): -1})], most_groups=9)
    assert not is_clean([residue(messages=sent), residue()], most_groups=9)
    assert not is_clean([residue(collectives=6), residue()], most_groups=9)
    assert not is_clean([residue(groups=2), residue()], most_groups=9)
    assert not is_clean([residue(groups=10), residue(groups=10)], most_groups=9)
