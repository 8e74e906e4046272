"""The fault matrix: every way to misbehave, in every world, gets its verdict and costs nobody else anything.

`simulated` is what `ringverify check` and `replay` run: threads in a process of their own. `threads` is the same in
this process, as `replay --in-process` runs it: what would end or spoil the process itself is not tried there, because
nothing could survive it. `gloo` is a process a rank.
"""

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import becomes_true, descendants, orphans_come_to_us
from verdicts import verdict_of

from ringverify import targets
from ringverify.cases.shrinking import Shrunk
from ringverify.check import planning
from ringverify.check import run as running
from ringverify.check.options import Options, Subject
from ringverify.interrupts import interrupts
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc"),
]

MINIATURES = Path(__file__).resolve().parent.parent / "miniatures"
PLENTY = 30.0
GENEROUS = 8.0
"""What is promised within two seconds may take this long where others use the machine too."""
SHORT = 0.7
"""The deadline of what hangs, which is given three of them; of nothing that is expected to end."""

OPEN = {"simulated": lambda: planning.open_world("simulated"), "threads": SimulatedWorld,
        "gloo": lambda: planning.open_world("gloo")}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a fault comes to.

    Attributes:
        verdict: of the property.
        says: what the violation's summary or the property's reason contains, with threads.
        processes: the same with a process a rank, where it differs.
        hangs: the worlds in which only the deadline ends it.
        spoils: it cannot be tried with threads in this process.
        property: which property it is seen by.
    """

    verdict: str
    says: str = ""
    processes: str | None = None
    hangs: tuple[str, ...] = ()
    spoils: bool = False
    property: str = "forward"


EVERYWHERE = ("simulated", "threads", "gloo")
raises = functools.partial(Expected, "fail")
waits = functools.partial(Expected, "fail", hangs=("gloo",))
hangs = functools.partial(Expected, "fail", hangs=EVERYWHERE)
ends = functools.partial(Expected, spoils=True)
harmless = functools.partial(Expected, "pass")

MATRIX = {
    "raises_before_communication": raises("rank 1 raised ValueError: not even begun"),
    "raises_in_the_middle": raises("rank 1 raised ValueError: half way"),
    "raises_after_communication": raises("rank 1 raised ValueError: almost there"),
    "raises_in_backward": raises("rank 1 raised ValueError: no way back", property="gradients"),
    "raises_keyboard_interrupt": raises("rank 1 raised KeyboardInterrupt"),
    "recurses_for_ever": raises("rank 1 raised RecursionError: maximum recursion depth exceeded"),
    "calls_sys_exit": raises("rank 1 called sys.exit(3)"),
    "calls_os_exit": raises("rank 1 called os._exit(3)", "rank 1's process ended with exit code 3"),
    # The kernel ends by SIGKILL whom it picks when memory runs out, so nothing was learned.
    "kills_itself": ends("inconclusive", "ended by signal SIGKILL", "rank 1's process was ended by signal SIGKILL"),
    "aborts": ends("fail", "ended by signal SIGABRT", "rank 1's process was ended by signal SIGABRT"),
    "reads_address_zero": ends("fail", "ended by signal SIGSEGV", "rank 1's process was ended by signal SIGSEGV"),
    "sleeps_for_ever": hangs("in sleeps_for_ever", "rank 1 at faults.py"),
    "computes_for_ever": hangs("in computes_for_ever", "rank 1 at faults.py"),
    "waits_for_its_own_lock": hangs("in waits_for_its_own_lock", "rank 1 at faults.py", spoils=True),
    "skips_a_collective": waits("rank 0 waits for barrier", "; rank 1 had"),
    "joins_one_collective_too_many": waits("rank 1 waits for barrier", "rank 1 had not returned: rank 1 at faults.py"),
    "starts_a_collective_that_nobody_joins": harmless(),
    "other_collective": waits("collective mismatch", "rank 1 at faults.py"),
    "gathers_another_shape": raises("ranks bring tensors of different sizes or dtypes", "signal SIGABRT"),
    "sends_another_shape": raises("into [4] float32 (16 bytes), tag 0, but rank 1 sent [9] float32", "signal SIGABRT"),
    "sends_another_dtype": raises("out is wrong on rank 2"),
    "sends_with_another_tag": waits("rank 2 waits for a receive from rank 1, tag 0", "rank 2 at faults.py"),
    "sends_to_another_peer": waits("rank 2 waits for a receive from rank 1, tag 0", "rank 2 at faults.py"),
    "sends_to_itself": raises("rank 1 raised RuntimeError: rank 1 sends to itself", "rank 1 raised RuntimeError"),
    "sends_in_another_order": raises("out is wrong on rank 2"),
    "receives_what_nobody_sends": waits("rank 1 waits for a receive from rank 0, tag 0", "rank 1 at faults.py"),
    "sends_what_nobody_receives": harmless(),
    "destroys_the_group_first": raises("rank 1 raised ValueError: Default process group has not been initialized"),
    "destroys_the_group_afterwards": harmless(),
    "returns_another_shape": raises("rank 1 returned out of shape ("),
    "returns_another_dtype": raises("rank 1 returned out in float64: float32 is expected"),
    "leaves_a_child_behind": harmless(spoils=True),
    "leaves_a_thread_behind": harmless(spoils=True),
    "asks_for_too_much_memory": Expected("inconclusive", "this machine is out of memory: rank 1 raised RuntimeError: "),
    "raises_memory_error": Expected("inconclusive", "this machine is out of memory: rank 1 raised MemoryError"),
    "uses_memory_up": ends("inconclusive", "this machine is out of memory: rank 1 raised "),
    "opens_files_until_none_is_left": ends("inconclusive", "this machine is out of file descriptors"),
    "floods_standard_output": harmless(spoils=True),
    "closes_standard_streams": harmless(spoils=True),
    "closes_file_descriptors": harmless(spoils=True),
    "seeds_random_numbers": harmless(),
    "changes_torch_settings": harmless(spoils=True),
    "changes_the_process": harmless(spoils=True),
    "replaces_a_function_of_torch": harmless(spoils=True),
}  # fmt: skip


ALIKE = (
    "raises_before_communication", "raises_after_communication", "raises_keyboard_interrupt", "recurses_for_ever",
    "calls_sys_exit", "returns_another_dtype", "sends_with_another_tag", "sends_to_another_peer",
    "waits_for_its_own_lock", "joins_one_collective_too_many",
)  # fmt: skip
"""Faults that a process a rank meets as it meets another one of the table; a night tries them there too."""


class Kept:
    """A world that stays as it is when a check is done with it, so that the next check meets what this one left."""

    def __init__(self, world):
        self.world = world
        self.name = world.name
        self.run = world.run

    def close(self):
        """Nothing."""


@pytest.fixture(scope="module", autouse=True)
def _orphans_come_to_us():
    """As those of a rank or program that has ended."""
    with orphans_come_to_us():
        yield


@pytest.fixture(scope="module")
def worlds():
    """One world of each kind for all faults: each leaves it healthy, or is found out by the check after it."""
    opened = {name: open_world() for name, open_world in OPEN.items()}
    yield opened
    for world in opened.values():
        world.close()
    assert becomes_true(lambda: not ranks(of=os.getpid())), "ranks outlive their closed worlds"


@pytest.fixture(autouse=True)
def _as_it_was(tmp_path, monkeypatch):
    """A folder, a module path, no shrinking and no variants, which have their own tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("ringverify.check.accounting.when_it_fails", lambda *_, **__: None)
    monkeypatch.setattr("ringverify.check.finishing.shrink", lambda case, *_, **__: Shrunk(case, 0, complete=False))


def checked(world, target, *, property, deadline=PLENTY):
    """Verdict and explanation of one property on one example."""
    options = Options(
        world="gloo" if world.name == "gloo" else "simulated",
        world_sizes=(3,),
        max_examples=1,
        deadline=deadline,
        cases=Path("cases"),
    )
    subject = Subject(target, targets.load(target))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "open_world", lambda name: Kept(world))
        return verdict_of(property, subject, options)


def ranks(of):
    """Processes that a tool's worlds have started, and what those have: all in process groups of their own."""
    return [number for number, process in descendants(of).items() if process.group != os.getpgid(of)]


def orphans():
    """Processes that came to us because a rank that had started them ended, and nobody ended them."""
    us, ours = os.getpid(), os.getpgid(0)
    return [number for number, one in descendants(us).items() if one.parent == us and one.group != ours]


@pytest.mark.parametrize(
    ("fault", "world_name"),
    [
        pytest.param(fault, name, marks=[pytest.mark.nightly] * (name == "gloo" and fault in ALIKE))
        for fault in MATRIX
        for name in OPEN
    ],
)
@pytest.mark.by_day(12)
def test_every_fault_gets_its_verdict_in_every_world_and_leaves_it_healthy(fault, world_name, worlds):
    """The verdict and who is to blame; then a right implementation passes in the same world, and nobody is left."""
    expected, world = MATRIX[fault], worlds[world_name]
    if world_name == "threads" and expected.spoils:
        pytest.skip("would end or change this very process")
    deadline = SHORT if world_name in expected.hangs else PLENTY
    verdict, said = checked(world, f"{MINIATURES}/faults.py:{fault}", property=expected.property, deadline=deadline)
    says = expected.processes if world_name == "gloo" and expected.processes is not None else expected.says
    assert (verdict, says in said) == (expected.verdict, True), said
    assert checked(world, f"{MINIATURES}/right.py:attend", property=expected.property) == ("pass", "")
    assert becomes_true(lambda: not orphans())
    assert becomes_true(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")])


@pytest.mark.parametrize("world_name", ["simulated", "gloo"])
def test_a_killed_process_is_replaced_within_seconds(world_name, worlds, record_property):
    """From the verdict on what was killed to the verdict on the next; 0.2 s on quiet cores, 2 s are promised."""
    world = worlds[world_name]
    assert checked(world, f"{MINIATURES}/right.py:attend", property="gradients") == ("pass", "")
    verdict, said = checked(world, f"{MINIATURES}/faults.py:kills_itself", property="gradients")
    assert (verdict, "SIGKILL" in said) == ("inconclusive", True), said
    began = time.monotonic()
    assert checked(world, f"{MINIATURES}/right.py:attend", property="gradients") == ("pass", "")
    record_property("seconds", seconds := time.monotonic() - began)
    assert seconds < GENEROUS


@pytest.mark.parametrize(
    ("fault", "world_name"),
    [
        ("computes_for_ever", "simulated"),
        pytest.param("computes_for_ever", "gloo", marks=pytest.mark.nightly),
        pytest.param("floods_standard_output", "simulated", marks=pytest.mark.nightly),
        pytest.param("floods_standard_output", "gloo", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.nightly
def test_ctrl_c_ends_a_run_within_seconds_and_leaves_nobody(fault, world_name, record_property, request):
    """Sent as a terminal does, to the whole foreground group; 0.8 s on quiet cores, 2 s are promised."""
    forever = ("--deadline", "3600", "--suite", "nightly", "--world-sizes", "3")
    arguments = ("check", f"{MINIATURES}/faults.py:{fault}", "--world", world_name, *forever)
    tool = subprocess.Popen(
        [sys.executable, "-m", "ringverify", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    request.addfinalizer(tool.kill)
    # Ranks and their keepers are in process groups of their own; once they are there, give them time to get to work.
    assert becomes_true(lambda: len(ranks(of=tool.pid)) == (6 if world_name == "gloo" else 2), 50)
    time.sleep(0.5)
    began = time.monotonic()
    os.killpg(tool.pid, signal.SIGINT)
    _, errors = tool.communicate(timeout=30)
    record_property("seconds", seconds := time.monotonic() - began)
    assert (tool.returncode, errors) == (130, "ringverify: interrupted\n")
    assert seconds < GENEROUS
    assert becomes_true(lambda: not orphans())


INTERRUPTED_IN_AN_EXEC = """
import sys, types

def main():
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        return 130

sys.modules["ringverify.cli.main"] = types.SimpleNamespace(main=main)
"""
"""A command that ends as ours does when Ctrl-C meets a dataclass that is being made."""


def test_ctrl_c_in_an_exec_ends_with_the_exit_code_that_is_promised(tmp_path):
    """CPython ended the process by signal 2 after all was said and done, once in some hundred runs."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_IN_AN_EXEC)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run([sys.executable, "-m", "ringverify"], env=environment, timeout=60).returncode == 130


class _Raising:
    """Its end raises."""

    def __del__(self):
        raise ValueError


class _Interrupted:
    """Its end is interrupted, where Python ignores what is raised."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_python_swallows_ends_what_comes_next():
    """Hypothesis has a callback in garbage collection: a run under Ctrl-C waited for a rank until its deadline."""

    def waits():
        _Interrupted()
        time.sleep(20)

    with interrupts(), pytest.raises(KeyboardInterrupt):
        waits()


def test_what_else_python_swallows_is_told_as_ever(monkeypatch):
    """And what it did with it is as before when the run is over."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with interrupts():
        _Raising()
    _Raising()
    assert [one.exc_type for one in told] == [ValueError, ValueError]


def test_the_matrix_has_every_way_that_is_there():
    """Each one that the files of faults offer."""
    source = "".join((MINIATURES / name).read_text() for name in ("faults.py", "changed_settings.py"))
    assert source.count("\n@fault\n") == len(MATRIX)
