"""The keeper of a rank: a process between the tool and the rank that ends everything the rank has started.

It runs no program, so no program can damage it. It ends the rank when the tool ends, however that happens. When the
rank has ended, for whatever reason, it ends all processes that the rank has started; see `ringverify.worlds.keeping`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import traceback
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from ringverify.worlds.keeping import become_keeper, end_as, outlive, send, start
from ringverify.worlds.processes.wire import NotReady, Seat, packed


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

    def body() -> None:
        lifeline.close()
        _forget_helpers()
        try:
            serve(seat, directory, jobs, output)
        except BaseException:  # also what a program did to the interpreter that `serve` runs in
            traceback.print_exc()

    wakes = become_keeper()
    with contextlib.suppress(OSError):  # another keeper has made it; if none could, the rank says why
        os.mkdir(directory, 0o700)
    try:
        rank = start(wakes, body)
    except OSError as error:
        jobs.send_bytes(packed(NotReady.of(error)))
        os._exit(1)
    signal.signal(signal.SIGUSR1, lambda *_: send(rank, signal.SIGUSR1))  # the tool asks where the rank is
    for connection in (jobs, output):
        connection.close()  # or the tool would take the keeper's ends for the rank's
    status = outlive(rank, lifeline, wakes[0])
    if lifeline in wait([lifeline], 0):
        shutil.rmtree(directory, ignore_errors=True)
    end_as(status)


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
