"""Processes as the kernel has them, in /proc."""

import contextlib
import ctypes
import os
import time
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """What the kernel says of a process that is no zombie."""

    parent: int
    group: int
    session: int


def processes():
    """All of them, by number."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # After the command's name, which may hold spaces: state, parent, process group, session.
            state, *numbers = stat.read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                found[int(stat.parent.name)] = Process(*map(int, numbers))
    return found


def session(number):
    """The processes of a session."""
    return [one for one, process in processes().items() if process.session == number]


def descendants(ancestor):
    """The processes that descend from one, by number."""
    found = processes()
    family, size = {ancestor}, 0
    while len(family) > size:
        size = len(family)
        family |= {number for number, process in found.items() if process.parent in family}
    return {number: found[number] for number in sorted(family - {ancestor}) if number in found}


def has_ended(process):
    """Whether a process has; one that its parent has not asked after counts.

    It holds its pipes until its last thread has ended, which may be a moment after its first.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        ended = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return ended and len(os.listdir(f"/proc/{process}/task")) <= 1
    return True


def becomes_true(condition, seconds=20.0):
    """Whether a condition holds within some seconds."""
    until = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(0.01)
    return bool(holds)


def assert_nobody_is_left(process):
    """A process was started in a session of its own; what it started ends within seconds of it."""
    assert becomes_true(lambda: not session(process.pid)), session(process.pid)


@contextlib.contextmanager
def orphans_come_to_us():
    """Processes whose parent ends before them become children of this one, where they are counted."""
    set_child_subreaper = 36
    prctl = ctypes.CDLL(None).prctl
    prctl(set_child_subreaper, 1, 0, 0, 0)
    yield
    prctl(set_child_subreaper, 0, 0, 0, 0)
