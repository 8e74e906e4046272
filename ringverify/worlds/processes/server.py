"""Imported by the fork server alone, and first: what a tool that is killed leaves of it goes with the server.

The server ends when the tool does, however that ends, but `multiprocessing` has the tool remove the directory of the
server's socket, which a killed one does not.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import sys
import tempfile
from types import TracebackType

SOCKETS = "RINGVERIFY_FORK_SERVER_SOCKETS"
"""The variable that names the tool's process and its directories, a line each, for as long as the server starts."""

CACHE = os.path.join(tempfile.gettempdir(), f"ringverify-hypothesis-{secrets.token_hex(8)}")
"""In the tool: where a library may keep what it likes to keep; made by the library."""


def _remove(folders: list[str], server: int, tool: int) -> None:
    """Remove the directories if this is the server, and the tool has ended; as long as that lives, it may need them."""
    if os.getpid() == server and os.getppid() != tool:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The server ends where it cannot fork, or where a tool has no descriptors left to send: the tool says why."""
    if os.getpid() != _SERVER or not issubclass(kind, (EOFError, BlockingIOError)):
        sys.__excepthook__(kind, error, trace)


if (_named := os.environ.pop(SOCKETS, None)) is not None:
    _tool, *_folders = _named.split("\n")
    _SERVER = os.getpid()
    sys.excepthook = _end_quietly
    atexit.register(_remove, _folders, _SERVER, int(_tool))  # who may have ended by now
    for _number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)  # sent to all of a group, they end the tool, and that the server
