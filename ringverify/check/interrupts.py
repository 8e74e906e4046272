"""Ctrl-C during a run: it ends the run at once, even where Python would lose it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console

from ringverify.reports.terminal import ProgressBar


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """Ctrl-C raises `KeyboardInterrupt`, and what this gives raises it once more, should it have been lost.

    Python ignores what is raised while it collects garbage, and Hypothesis has it call a function then.
    """
    came: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def look() -> None:
        if came:
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield look
        return

    def lost(unraisable: sys.UnraisableHookArgs) -> None:
        if not (came and unraisable.exc_type is KeyboardInterrupt):  # that one is not lost: `look` finds it
            tell(unraisable)

    before, tell = signal.signal(signal.SIGINT, interrupt), sys.unraisablehook
    sys.unraisablehook = lost
    try:
        yield look
    finally:
        sys.unraisablehook = tell
        signal.signal(signal.SIGINT, before)


class InterruptibleBar(ProgressBar):
    """The bar, which also is where a lost interrupt is found."""

    def __init__(self, console: Console, look: Callable[[], None]) -> None:
        super().__init__(console)
        self._look = look

    def step(self, done: int) -> None:
        """So many cases have been tried."""
        self._look()
        super().step(done)
