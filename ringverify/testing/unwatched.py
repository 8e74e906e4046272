"""A run that nobody watches on a terminal, but which Ctrl-C still ends. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Callable


class Unwatched:
    """Shows nothing.

    Args:
        look: called between cases; raises what was lost of an interrupt.
    """

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self._look = look

    def start(self, implementation: str, property: str, examples: int) -> None:
        """A property is about to be tried."""

    def step(self, done: int) -> None:
        """So many of its cases have been tried."""
        self._look()

    def loading(self, what: str | None) -> None:
        """A process is loading that, or no more."""

    def stop(self) -> None:
        """It is done."""
