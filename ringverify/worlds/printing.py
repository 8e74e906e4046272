"""What ranks print, where they are threads of one process: kept by rank, and shown with the rank before each line.

`print`, `logging` and whatever else writes to `sys.stdout` or `sys.stderr` is seen here. What C code writes to the file
descriptors is the process's, and belongs to no rank.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, Literal

Show = Literal["plain", "labelled", "kept"]
"""What becomes of a rank's output: it goes where it always goes, unseen; there with its rank and kept; or kept only."""

LETTERS = 4000
"""How much of a rank's output is kept: the last letters of it."""


class Labelled:
    """Writes what ranks print, each line with its rank; a line that another rank breaks into is ended first."""

    def __init__(self) -> None:
        self._open: int | None = None  # the rank whose line on the screen has not ended

    def write(self, rank: int, text: str, stream: Any) -> None:
        """Write a part of what a rank prints."""
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
    """What the ranks of one run print.

    Args:
        world_size: how many ranks.
        show: what becomes of it.
    """

    def __init__(self, world_size: int, show: Show) -> None:
        self._show = show
        self._kept = [""] * world_size
        self._labelled = Labelled()

    def add(self, rank: int, text: str, stream: Any) -> None:
        """Take what a rank writes to a stream."""
        self._kept[rank] = (self._kept[rank] + text)[-LETTERS:]
        if self._show == "labelled":
            self._labelled.write(rank, text, stream)

    def printed(self) -> tuple[tuple[int | None, str], ...]:
        """What each rank printed that printed anything."""
        return tuple((rank, text) for rank, text in enumerate(self._kept) if text)


_OF_THREAD = threading.local()


class _Stream:
    """Stands in for a stream: a rank's thread writes to its run's `RankOutput`, every other thread to the stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Take a text."""
        if (mine := getattr(_OF_THREAD, "mine", None)) is None:
            self.stream.write(text)
        else:
            output, rank = mine
            output.add(rank, text, self.stream)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Take several."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def listening(show: Show) -> Iterator[None]:
    """Have `sys.stdout` and `sys.stderr` know ranks' threads; what is kept of them by others goes on to work."""
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
    """Take what the calling thread prints for a rank's."""
    _OF_THREAD.mine = output, rank
    try:
        yield
    finally:
        del _OF_THREAD.mine
