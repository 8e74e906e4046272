"""Let a process that the tool's fork server has started use that server itself.

`multiprocessing` documents this, but in such a process it starts another server, which imports torch again.
"""

from __future__ import annotations

import os
from multiprocessing import forkserver
from typing import Any

_NAMES = ("_forkserver_address", "_forkserver_authkey")  # the second since Python 3.14

_server: Any = forkserver._forkserver


def shared_server() -> dict[str, Any]:
    """Return, in the tool's process, what `use_server` needs."""
    return {name: getattr(_server, name) for name in _NAMES if hasattr(_server, name)}


def use_server(shared: dict[str, Any]) -> None:
    """Use, in a process that the server has started, that server for as long as it runs, and a new one afterwards."""
    server, start_another = os.getppid(), _server.ensure_running
    vars(_server).update(shared)

    def ensure_running() -> None:
        if os.getppid() == server:
            return
        if _server.ensure_running is ensure_running:
            vars(_server).update(dict.fromkeys(("_forkserver_address", "_forkserver_alive_fd")))
            _server.ensure_running = forkserver.ensure_running = start_another
        start_another()

    _server.ensure_running = forkserver.ensure_running = ensure_running
