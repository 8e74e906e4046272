"""The keeper of a worker: a process between the tool and the program; see `ringverify.worlds.keeping`.

It is started by name, in an interpreter of its own, and hands its standard streams on to the program.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from multiprocessing.connection import wait
from typing import NoReturn

from ringverify.worlds.keeping import become_keeper, end_as, outlive, start

NOT_EXECUTED = 126
"""Exit code of a worker that the system could not execute, as in shells."""


def keep(lifeline: int, folder: str, *command: str) -> NoReturn:
    """Run a command, wait for its end or the tool's, and end as it did once nothing of it is left.

    Args:
        lifeline: a file descriptor that ends when the tool ends, however it ends.
        folder: removed if the tool ends without doing so.
        command: the program and its arguments.
    """

    def body() -> None:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        os.close(lifeline)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a program would inherit that
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]} cannot be executed: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(NOT_EXECUTED)

    wakes = become_keeper()
    status = outlive(start(wakes, body), lifeline, wakes[0])
    if lifeline in wait([lifeline], 0):
        shutil.rmtree(folder, ignore_errors=True)
    end_as(status)


if __name__ == "__main__":
    keep(int(sys.argv[1]), *sys.argv[2:])
