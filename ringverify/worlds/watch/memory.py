"""The most memory that a rank had allocated at once, and what it consisted of."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from ringverify.worlds.watch.watcher import watcher


@dataclasses.dataclass(frozen=True)
class PeakShare:
    """Tensors of one shape and dtype that one line allocated and that were alive at the peak.

    Attributes:
        place: the user's line, `file:line in function`.
        shape: of the tensor when it was allocated.
        dtype: without "torch.".
        count: how many there were.
        nbytes: bytes of all of them together.
    """

    place: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """The most that a rank had allocated at once.

    Attributes:
        rank: global rank.
        peak_bytes: live bytes of tensors at the peak.
        parts: what the peak consisted of, largest first.
    """

    rank: int
    peak_bytes: int
    parts: tuple[PeakShare, ...]

    def describe(self) -> list[str]:
        """Return a line for the peak, and one for each part of it."""
        lines = [f"rank {self.rank}: {self.peak_bytes} bytes at the peak"]
        for part in self.parts:
            times = "" if part.count == 1 else f"{part.count} × "
            lines.append(f"  {part.nbytes} bytes: {times}{list(part.shape)} {part.dtype}, at {part.place}")
        return lines


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """Count only the memory that is allocated inside the block.

    A program that never uses it is counted from beginning to end. In an unwatched run this does nothing.
    """
    current = watcher()
    if current is None:
        yield
        return
    current.measure(inside=True)
    try:
        yield
    finally:
        current.measure(inside=False)
