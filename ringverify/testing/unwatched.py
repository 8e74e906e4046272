"""The progress of a run that is not shown, but that Ctrl-C ends. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Callable


class Unwatched:
    """A `Progress` that shows nothing.

    Args:
        look: called between cases; raises `KeyboardInterrupt` if Python has lost one.
    """

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self._look = look

    def start(self, implementation: str, property: str, examples: int) -> None:
        """A property is about to be tried."""

    def step(self, done: int) -> None:
        """So many of the property's cases have been tried."""
        self._look()

    def loading(self, what: str | None) -> None:
        """A process is loading `what`; `None` means that the loading is over."""

    def stop(self) -> None:
        """The property has been tried."""
