"""The keeper of a rank: a process between the tool and the rank's, which sees to it that nothing of the rank stays.

It runs no program, so none can spoil it. It ends the rank when the tool ends, however that ends, and when the rank has
ended, for whatever reason, it ends all that the rank has started: on Linux the keeper is a *sub-reaper* (see prctl(2)),
so that a process whose parents have gone, in a session of its own or not, becomes a child of the keeper and of nobody
else. It signals its own children only, and before it has waited for them: their numbers cannot be another's by then.
Elsewhere a rank's process group is what is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys
import time
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from ringverify.worlds.processes.wire import NotReady, Seat, packed

BURYING_SECONDS = 5.0
"""How long the keeper tries to end what a rank has left: what sleeps in the kernel ends when it wakes."""

TIDYING_SECONDS = 1.0
"""How long a tracker of shared memory has for removing what a rank has left."""

_LISTED = "/proc/self/stat"
"""Is there where the system lists all processes and their parents."""
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def keep(seat: Seat, directory: str, jobs: Connection, output: Connection, lifeline: Connection) -> NoReturn:
    """Start a rank, wait for its end or the tool's, and end as the rank did once nothing of it is left.

    Args:
        seat: who the rank is.
        directory: where ranks meet; it is made, and removed if the tool ends without doing so.
        jobs: as `ringverify.worlds.processes.worker.serve` has it.
        output: the same.
        lifeline: closes when the tool ends, however it ends.
    """
    from ringverify.worlds.processes.worker import serve  # imports torch, which the fork server has done

    os.setpgid(0, 0)  # Ctrl-C is the tool's to handle
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    with contextlib.suppress(OSError):  # another keeper has made it; if none could, the rank says why
        os.mkdir(directory, 0o700)
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    keeper = os.getpid()
    try:
        rank = os.fork()
    except OSError as error:
        jobs.send_bytes(packed(NotReady.of(error)))
        os._exit(1)
    if rank == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for end in (woken, wakes):
            os.close(end)
        lifeline.close()
        _forget_helpers()
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:  # and has not ended before that
            serve(seat, directory, jobs, output)
        os._exit(0)
    signal.signal(signal.SIGUSR1, lambda *_: _signal(rank, signal.SIGUSR1))  # the tool asks where the rank is
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the keeper ends with the tool, and not before the rank
    for connection in (jobs, output):
        connection.close()  # or the tool would take the keeper's ends for the rank's
    status = _until_either_ends(rank, lifeline, woken)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    status = _end_all(rank, status)
    if lifeline in wait([lifeline], 0):
        shutil.rmtree(directory, ignore_errors=True)
    _end_as(status)


def _forget_helpers() -> None:
    """Leave the tool's fork server and its tracker of shared memory alone, which a child inherits the pipes of.

    A program that writes to every descriptor would end the one and confuse the other. A rank that needs one of them
    starts its own, which ends with it.
    """
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    for pipe in (server._forkserver_alive_fd, tracker._fd):
        if pipe is not None:
            os.close(pipe)
    server._forkserver_alive_fd = server._forkserver_address = server._forkserver_pid = None
    tracker._fd = tracker._pid = None


def _until_either_ends(rank: int, lifeline: Connection, woken: int) -> int | None:
    """How the rank ended, or `None` if the tool did."""
    while (status := _reaped(rank)[0]) is None:
        ready = wait([lifeline, woken])
        if lifeline in ready:
            return None
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 1 << 10)
    return status


def _end_all(rank: int, status: int | None) -> int | None:
    """End what is left of a rank; how the rank ended."""
    if status is None:
        _signal(rank, signal.SIGKILL)
    if not os.path.exists(_LISTED):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank, signal.SIGKILL)
    began = time.monotonic()
    while time.monotonic() < began + BURYING_SECONDS:
        ended, are_more = _reaped(rank)
        status = status if ended is None else ended
        if not are_more:
            break
        for child in _children() if status is not None else []:
            if time.monotonic() > began + TIDYING_SECONDS or not _tidies_up(child):
                _signal(child, signal.SIGKILL)
        time.sleep(0.001)  # what their own children are given to come here
    return status


def _children() -> list[int]:
    """This process's children, where the system lists them."""
    found, keeper = [], str(os.getpid())
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            # After the command's name, which may hold spaces: state, parent.
            if stat.read_text(errors="replace").rpartition(")")[2].split()[1] == keeper:
                found.append(int(stat.parent.name))
    return found


def _tidies_up(child: int) -> bool:
    """Whether a process is a tracker of shared memory, which removes what is left of it and ends."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{child}/cmdline").read_bytes()
    return False


def _reaped(rank: int) -> tuple[int | None, bool]:
    """Wait for every child that has ended: how the rank did, if it is among them, and whether there are others."""
    found = None
    try:
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return found, True
            if child == rank:
                found = status
    except ChildProcessError:
        return found, False


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _prctl(option: int, argument: int) -> None:
    """Ask Linux for something that other systems do not have."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def _end_as(status: int | None) -> NoReturn:
    """End as the rank did, so that whoever waits for this process learns how."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core is enough
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(0 if status is None else os.waitstatus_to_exitcode(status) & 0xFF)
