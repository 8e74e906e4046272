"""Who watches the calling rank, for the context managers that a program may use whether it is watched or not."""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Watcher(Protocol):
    """Watches one rank."""

    def confine(self, group: Any) -> Any:
        """Call communication outside a group (`None`: outside none) a hazard, and return what held before."""
        ...

    def measure(self, *, inside: bool) -> None:
        """Begin or end a part of the program whose memory counts."""
        ...


class _OfThread(threading.local):
    current: Watcher | None = None


_OF_THREAD = _OfThread()


def watcher() -> Watcher | None:
    """Whoever watches the calling thread."""
    return _OF_THREAD.current


def watched_by(current: Watcher | None) -> None:
    """Have the calling thread watched, or no longer."""
    _OF_THREAD.current = current
