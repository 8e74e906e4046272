"""End a run at once on Ctrl-C, even where Python would swallow the `KeyboardInterrupt`."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console

from ringverify.reports.terminal import ProgressBar


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """Within, Ctrl-C raises `KeyboardInterrupt`; yields a function that raises it again if it was swallowed.

    Python ignores exceptions raised in callbacks of its garbage collector, and Hypothesis registers one.
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
        if not (came and unraisable.exc_type is KeyboardInterrupt):  # `look` will raise that one again
            tell(unraisable)

    before, tell = signal.signal(signal.SIGINT, interrupt), sys.unraisablehook
    sys.unraisablehook = lost
    try:
        yield look
    finally:
        sys.unraisablehook = tell
        signal.signal(signal.SIGINT, before)


class InterruptibleBar(ProgressBar):
    """A progress bar that raises a swallowed interrupt again at its next step."""

    def __init__(self, console: Console, look: Callable[[], None]) -> None:
        super().__init__(console)
        self._look = look

    def step(self, done: int) -> None:
        """Raise a swallowed interrupt again, or show that `done` cases have been tried."""
        self._look()
        super().step(done)


def hidden_bar(look: Callable[[], None] = lambda: None) -> InterruptibleBar:
    """Return a progress bar that is never drawn: all it does is raise a swallowed interrupt again."""
    return InterruptibleBar(Console(file=io.StringIO(), force_terminal=False), look)
