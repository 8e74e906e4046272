"""The interface through which long work reports how far it has come."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives how far long work has come."""

    def start(self, implementation: str, property: str, examples: int) -> None:
        """A property of an implementation begins, or a benchmark of a contender."""
        ...

    def step(self, done: int) -> None:
        """So many of its cases, or rounds, are done."""
        ...

    def loading(self, what: str | None) -> None:
        """A process is loading `what`; `None` means that the loading is over."""
        ...

    def found(self, violation: str) -> None:
        """A violation was found, and is now shrunk and explained."""
        ...

    def stop(self) -> None:
        """The property or benchmark that was begun is done."""
        ...


class Hidden:
    """Progress that nobody is shown."""

    def start(self, implementation: str, property: str, examples: int) -> None:
        """Show nothing."""

    def step(self, done: int) -> None:
        """Show nothing."""

    def loading(self, what: str | None) -> None:
        """Show nothing."""

    def found(self, violation: str) -> None:
        """Show nothing."""

    def stop(self) -> None:
        """Show nothing."""


HIDDEN = Hidden()
