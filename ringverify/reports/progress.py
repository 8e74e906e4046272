"""What a person is shown while long work is under way."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Is told how far long work has come."""

    def start(self, implementation: str, property: str, examples: int) -> None:
        """A piece of it begins: a property of an implementation, or a benchmark of a side."""
        ...

    def step(self, done: int) -> None:
        """So many of its cases have been tried."""
        ...

    def loading(self, what: str | None) -> None:
        """A process is loading that; `None`: it is no more."""
        ...

    def stop(self) -> None:
        """The piece is done."""
        ...
