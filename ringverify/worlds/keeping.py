"""What a keeper does, whatever it keeps: end all processes that the one it keeps has started, and end as that one did.

On Linux a keeper is a *sub-reaper* (see prctl(2)), so that an orphaned process, in a session of its own or not, becomes
a child of the keeper. It signals only its own children, and only before it has waited for them, so that no process id
can have been reused. On other systems it ends the process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

BURYING_SECONDS = 5.0
"""How long a keeper tries to end what is left: a process that sleeps in the kernel ends when it wakes."""

TIDYING_SECONDS = 1.0
"""How long `multiprocessing`'s resource tracker has to remove shared memory that the kept process has left."""

_LISTED = "/proc/self/stat"
"""A file that exists where the system lists all processes and their parents."""
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def become_keeper() -> tuple[int, int]:
    """Make this process a keeper; return the ends of a pipe that wakes it whenever a child ends, the one to read first.

    `start` is then called, once.
    """
    os.setpgid(0, 0)  # Ctrl-C is the tool's to handle
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    return woken, wakes


def start(wakes: tuple[int, int], body: Callable[[], None]) -> int:
    """Fork the process to keep, which runs `body` and never returns; return its id.

    Raises:
        OSError: it cannot be forked.
    """
    keeper = os.getpid()
    kept = os.fork()
    if kept == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for end in wakes:
            os.close(end)
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        try:
            if os.getppid() == keeper:  # the keeper has not ended meanwhile
                body()
        finally:
            os._exit(1)  # at once: threads of the program may never end
    return kept


def outlive(kept: int, lifeline: Connection | int, woken: int) -> int | None:
    """Wait until the kept process or the tool ends, and end all that is left of the former.

    Args:
        kept: the process that `start` returned.
        lifeline: closes when the tool ends, however it ends.
        woken: as returned by `become_keeper`.

    Returns:
        the wait status of the kept process; `None` if it did not end in time.
    """
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the keeper ends with the tool, and not before what it keeps
    status = _until_either_ends(kept, lifeline, woken)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return _end_all(kept, status)


def end_as(status: int | None) -> NoReturn:
    """End as the kept process did, so that whoever waits for this process learns how."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core dump is enough
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(0 if status is None else os.waitstatus_to_exitcode(status) & 0xFF)


def send(process: int, number: int) -> None:
    """Send a signal to a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _until_either_ends(kept: int, lifeline: Connection | int, woken: int) -> int | None:
    """Wait for the kept process or the tool to end; return the former's wait status, or `None` if the tool ended."""
    while (status := _reaped(kept)[0]) is None:
        ready = wait([lifeline, woken])
        if lifeline in ready:
            return None
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 1 << 10)
    return status


def _end_all(kept: int, status: int | None) -> int | None:
    """End what is left of the kept process; return its wait status, or `None` if it did not end in time."""
    if status is None:
        send(kept, signal.SIGKILL)
    if not os.path.exists(_LISTED):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(kept, signal.SIGKILL)
    began = time.monotonic()
    while time.monotonic() < began + BURYING_SECONDS:
        ended, are_more = _reaped(kept)
        status = status if ended is None else ended
        if not are_more:
            break
        for child in _children() if status is not None else []:
            if time.monotonic() > began + TIDYING_SECONDS or not _tidies_up(child):
                send(child, signal.SIGKILL)
        time.sleep(0.001)  # time for their own children to become the keeper's
    return status


def _children() -> list[int]:
    """Return this process's children; none where the system does not list them."""
    found, keeper = [], str(os.getpid())
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            # After the command's name, which may hold spaces: state, parent.
            if stat.read_text(errors="replace").rpartition(")")[2].split()[1] == keeper:
                found.append(int(stat.parent.name))
    return found


def _tidies_up(child: int) -> bool:
    """Whether a process is `multiprocessing`'s resource tracker, which removes leftover shared memory and ends."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{child}/cmdline").read_bytes()
    return False


def _reaped(kept: int) -> tuple[int | None, bool]:
    """Reap the children that have ended; return the kept one's wait status, if among them, and whether any is left."""
    found = None
    try:
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return found, True
            if child == kept:
                found = status
    except ChildProcessError:
        return found, False


def _prctl(option: int, argument: int) -> None:
    """Call prctl(2) on Linux, and do nothing on other systems."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)
