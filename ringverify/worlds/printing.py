"""Output of ranks that are threads of one process: kept per rank, and shown with the rank before each line.

`print`, `logging` and all else that writes to `sys.stdout` or `sys.stderr` is captured here. What C code writes to the
file descriptors belongs to the process and to no rank.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, Literal

from ringverify.words import PRINTED

Show = Literal["plain", "labelled", "kept"]
"""What becomes of a rank's output. "plain": it is written as usual and not kept; "labelled": it is written with its
rank before each line, and kept; "kept": it is only kept."""


class Labelled:
    """Writes ranks' output, each line with its rank. A line that another rank interrupts is ended first."""

    def __init__(self) -> None:
        self._open: int | None = None  # the rank whose line on the screen has not ended

    def write(self, rank: int, text: str, stream: Any) -> None:
        """Write a piece of a rank's output."""
        if self._open not in (None, rank):
            self.end(stream)
        for line in text.splitlines(keepends=True):
            stream.write(line if self._open == rank else f"[rank {rank}] {line}")
            self._open = None if line.endswith("\n") else rank

    def end(self, stream: Any) -> None:
        """End the line that is open, if one is."""
        if self._open is not None:
            stream.write("\n")
            self._open = None


class RankOutput:
    """The output of the ranks of one run.

    Args:
        world_size: number of ranks.
        show: what becomes of it, see `Show`.
    """

    def __init__(self, world_size: int, show: Show) -> None:
        self._show = show
        self._kept = [""] * world_size
        self._labelled = Labelled()

    def add(self, rank: int, text: str, stream: Any) -> None:
        """Keep what a rank writes to a stream, and show it there if that is asked for."""
        self._kept[rank] = (self._kept[rank] + text)[-PRINTED:]
        if self._show == "labelled":
            self._labelled.write(rank, text, stream)

    def printed(self) -> tuple[tuple[int | None, str], ...]:
        """Return the kept output of each rank that printed anything."""
        return tuple((rank, text) for rank, text in enumerate(self._kept) if text)


_OF_THREAD = threading.local()


class _Stream:
    """Stands in for a stream: a rank's thread writes to its run's `RankOutput`, every other thread to the stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text."""
        if (mine := getattr(_OF_THREAD, "mine", None)) is None:
            self.stream.write(text)
        else:
            output, rank = mine
            output.add(rank, text, self.stream)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def listening(show: Show) -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` by streams that tell ranks' threads apart.

    Code that keeps a reference to such a stream beyond the block can go on writing to it.
    """
    if show == "plain":
        yield
        return
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Stream(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def as_rank(rank: int, output: RankOutput) -> Iterator[None]:
    """Attribute what the calling thread prints to a rank."""
    _OF_THREAD.mine = output, rank
    try:
        yield
    finally:
        del _OF_THREAD.mine
