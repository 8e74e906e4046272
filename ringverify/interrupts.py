"""End a run at once on Ctrl-C, even where Python swallows the `KeyboardInterrupt`."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

AGAIN = 0.2
"""Seconds after which an interrupt that was swallowed is sent again: by then, whatever swallowed it has returned."""


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Within, an interrupt that Python swallows is sent again, until it ends what the main thread does.

    Python ignores exceptions raised in callbacks of its garbage collector, and Hypothesis registers one. What the main
    thread does next may be to wait for an hour, and only a signal ends that.
    """
    main, tell = threading.current_thread(), sys.unraisablehook
    if main is not threading.main_thread():
        yield
        return

    def send_again(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            tell(unraisable)
            return
        assert main.ident is not None
        timer = threading.Timer(AGAIN, signal.pthread_kill, (main.ident, signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = tell
