"""The watcher of the calling thread, for context managers that a program may use in watched and unwatched runs."""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Watcher(Protocol):
    """Watches one rank."""

    def confine(self, group: Any) -> Any:
        """Report communication outside a group as a hazard (`None`: report none), and return what held before."""
        ...

    def measure(self, *, inside: bool) -> None:
        """Begin or end a part of the program whose memory counts."""
        ...

    def sent(self) -> int:
        """Bytes that the rank has put into messages and collectives so far."""
        ...


class _OfThread(threading.local):
    current: Watcher | None = None


_OF_THREAD = _OfThread()


def watcher() -> Watcher | None:
    """Return the watcher of the calling thread, or `None`."""
    return _OF_THREAD.current


def watched_by(current: Watcher | None) -> None:
    """Set the watcher of the calling thread, or remove it (`None`)."""
    _OF_THREAD.current = current
