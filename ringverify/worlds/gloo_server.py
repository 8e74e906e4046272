"""Imported by the fork server alone, and first: what a tool that is killed leaves of it goes with the server.

The server ends when the tool does, however that ends, but `multiprocessing` has the tool remove the directory of the
server's socket, which a killed one does not.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal

SOCKETS = "RINGVERIFY_FORK_SERVER_SOCKETS"
"""The variable that names the tool's process and that directory, for as long as the server starts."""


def _remove(folder: str, server: int, tool: int) -> None:
    """Remove the directory if this is the server, and the tool has ended; as long as that lives, it may need it."""
    if os.getpid() == server and os.getppid() != tool:
        shutil.rmtree(folder, ignore_errors=True)


if (_named := os.environ.pop(SOCKETS, None)) is not None:
    _tool, _, _folder = _named.partition(":")
    atexit.register(_remove, _folder, os.getpid(), int(_tool))  # who may have ended by now
    for _number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)  # sent to all of a group, they end the tool, and that the server
