"""The keeper of a rank: a process between the tool and the rank that ends everything the rank has started.

It runs no program, so no program can damage it. It ends the rank when the tool ends, however that happens. When the
rank has ended, for whatever reason, it ends all processes that the rank has started: on Linux the keeper is a
*sub-reaper* (see prctl(2)), so that an orphaned process, in a session of its own or not, becomes a child of the keeper.
It signals only its own children, and only before it has waited for them, so that no process id can have been reused.
On other systems it ends the rank's process group.
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
import traceback
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from ringverify.worlds.processes.wire import NotReady, Seat, packed

BURYING_SECONDS = 5.0
"""How long the keeper tries to end what a rank has left: a process that sleeps in the kernel ends when it wakes."""

TIDYING_SECONDS = 1.0
"""How long `multiprocessing`'s resource tracker has to remove shared memory that a rank has left."""

_LISTED = "/proc/self/stat"
"""A file that exists where the system lists all processes and their parents."""
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def keep(seat: Seat, directory: str, jobs: Connection, output: Connection, lifeline: Connection) -> NoReturn:
    """Start a rank, wait for its end or the tool's, and end as the rank did once nothing of it is left.

    Args:
        seat: which rank it is.
        directory: where ranks meet; it is made here, and removed if the tool ends without doing so.
        jobs: `requests` of `ringverify.worlds.processes.worker.serve`.
        output: `output` of the same function.
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
        try:
            if os.getppid() == keeper:  # the keeper has not ended meanwhile
                serve(seat, directory, jobs, output)
        except BaseException:  # also what a program did to the interpreter that `serve` runs in
            traceback.print_exc()
        finally:
            os._exit(1)  # at once: threads of the program may never end
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
    """Close the inherited pipes to the tool's fork server and to its resource tracker.

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
    """Wait for the rank or the tool to end; return the rank's wait status, or `None` if the tool ended."""
    while (status := _reaped(rank)[0]) is None:
        ready = wait([lifeline, woken])
        if lifeline in ready:
            return None
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 1 << 10)
    return status


def _end_all(rank: int, status: int | None) -> int | None:
    """End what is left of a rank; return the rank's wait status, or `None` if it did not end in time."""
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


def _reaped(rank: int) -> tuple[int | None, bool]:
    """Reap the children that have ended; return the rank's wait status, if among them, and whether any is left."""
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
    """Call prctl(2) on Linux, and do nothing on other systems."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def _end_as(status: int | None) -> NoReturn:
    """End as the rank did, so that whoever waits for this process learns how."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core dump is enough
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(0 if status is None else os.waitstatus_to_exitcode(status) & 0xFF)
