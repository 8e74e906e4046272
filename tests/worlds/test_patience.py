"""A deadline counts what the ranks take, not how long the machine lets them stand in line."""

import os
import subprocess
import sys
import time

import pytest

from ringverify.worlds import patience
from ringverify.worlds.patience import LEAST_COUNTED, SLOWEST, Patience, WorkLimit, queued, slowness, worked
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.simulated import SimulatedWorld


class Machine:
    """A clock and the time for which each process has waited for a processor."""

    def __init__(self):
        self.now, self.waited = 0.0, {1: 0.0, 2: 0.0}

    def patience(self, seconds):
        """What is left of a deadline on this machine."""
        return Patience(seconds, self.waited, queued=self.waited.__getitem__, clock=lambda: self.now)


@pytest.fixture
def machine():
    """One on which nothing has happened yet."""
    return Machine()


def test_on_a_free_machine_every_second_counts(machine):
    """Nobody stood in line."""
    patience = machine.patience(10.0)
    machine.now = 4.0
    assert patience.left() == 6.0


def test_seconds_in_line_for_a_processor_do_not_count(machine):
    """Of several processes that of the longest wait, at each time another one."""
    patience = machine.patience(10.0)
    machine.now, machine.waited[1], machine.waited[2] = 4.0, 3.0, 1.0
    assert patience.left() == 9.0
    machine.now, machine.waited[2] = 8.0, 4.0
    assert patience.left() == 8.0


def test_what_never_ends_is_ended_on_the_busiest_machine(machine):
    """A part of each second counts whatever the machine does."""
    patience = machine.patience(1.0)
    while patience.left() > 0:
        machine.now += 1.0
        machine.waited[1] += 5.0  # several threads in line at the same time
    assert machine.now <= 1.0 / LEAST_COUNTED + 1.0


def test_a_wait_is_sliced_and_ends_at_zero(machine):
    """So that it is noticed what did not count."""
    patience = machine.patience(0.75)
    assert patience.slice() == 0.5
    machine.now = 0.5
    assert patience.slice() == 0.25
    machine.now = 5.0
    assert patience.slice() == 0.0


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this system does not count it")
@pytest.mark.timeout(30)
def test_a_process_that_shares_its_processor_waits_for_it():
    """Two that compute for ever, on one processor."""
    spin = f"import os\nos.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-S", "-c", spin], start_new_session=True) for _ in range(2)]
    try:
        before = time.monotonic()
        while sum(queued(process.pid) for process in both) < 0.2:
            assert time.monotonic() < before + 20
            time.sleep(0.05)
    finally:
        for process in both:
            process.kill()
            process.wait()


def test_of_a_process_that_is_gone_nothing_is_known():
    """It may end at any moment."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert queued(process.pid) == 0.0


def test_a_slow_processor_has_more_time_for_the_same_work(monkeypatch):
    """As many times as it is slower; the wall clock ends it all the same."""
    monkeypatch.setattr(patience, "slowness", lambda: 2.0)
    limit, begun = WorkLimit(10.0), time.process_time()
    while time.process_time() < begun + 0.4:
        pass
    assert 9.7 < limit.left() <= 9.8
    assert WorkLimit(10.0, wall=0.0).left() <= 0
    assert 1 <= slowness() <= SLOWEST


def test_a_limit_of_work_is_of_all_who_work(monkeypatch):
    """This process, and another with threads that have ended; a wait is ended by the wall clock."""
    monkeypatch.setattr(patience, "slowness", lambda: 1.0)
    spin = "import threading, time\ndef spin():\n    while time.process_time() < 0.5: pass\n"
    spin += "one = threading.Thread(target=spin)\none.start()\none.join()\nprint(flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-S", "-c", spin], **pipes) as other:
        limit = WorkLimit(10.0, lambda: [other.pid])
        alone = WorkLimit(10.0)
        other.stdout.readline()
        if os.path.exists("/proc/self/stat"):
            assert worked(other.pid) >= 0.4
            assert limit.left() < 9.7 < alone.left()
        other.communicate(b"\n")
    assert worked(other.pid) == 0.0
    assert WorkLimit(10.0, wall=0.0).left() <= 0


def compute(processor):
    """A program of a rank: computes for a while, on a processor that it shares."""
    os.sched_setaffinity(0, {processor})
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        pass
    return "done"


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this system does not count it")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("world", [SimulatedWorld, GlooWorld])
@pytest.mark.by_day(1)
def test_a_rank_on_a_busy_machine_is_not_late(world):
    """It computes for a third of its deadline, and takes more than twice as long as the deadline."""
    processor = min(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"
    here = world()
    here.run(compute, processor, world_size=1, seed=0, deadline=60.0)  # what has to be imported is
    others = [subprocess.Popen([sys.executable, "-S", "-c", spin], start_new_session=True) for _ in range(5)]
    try:
        time.sleep(0.2)  # until they do
        run = here.run(compute, processor, world_size=1, seed=0, deadline=1.0)
    finally:
        here.close()
        for process in others:
            process.kill()
            process.wait()
    assert run.failure is None
    assert run.results == ("done",)
    assert run.seconds > 1.0
