"""Set-up of the fork server, which imports this module first, so that it removes what a killed tool leaves behind.

The server ends when the tool does, however that happens. `multiprocessing` leaves it to the tool to remove the
directory of the server's socket, which a killed tool does not do.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
from types import TracebackType

SOCKETS = "RINGVERIFY_FORK_SERVER_SOCKETS"
"""Environment variable with the tool's process id and its directories, a line each; set while the server starts."""


def _remove(folders: list[str], server: int, tool: int) -> None:
    """Remove the directories if this is the server and the tool has ended; a tool that still runs may need them."""
    if os.getpid() == server and os.getppid() != tool:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback when the server cannot fork, or the tool can send no descriptors: the tool says why."""
    if os.getpid() != _SERVER or not issubclass(kind, (EOFError, BlockingIOError)):
        sys.__excepthook__(kind, error, trace)


if (_named := os.environ.pop(SOCKETS, None)) is not None:
    _tool, *_folders = _named.split("\n")
    _SERVER = os.getpid()
    sys.excepthook = _end_quietly
    atexit.register(_remove, _folders, _SERVER, int(_tool))  # the tool may have ended by now
    for _number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)  # where these end the tool, the server then ends with it
