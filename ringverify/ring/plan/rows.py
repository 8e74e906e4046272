"""Sets of rows of one rank's block: evenly spaced where possible, else a sorted list.

A dense problem needs whole blocks, a window their ends, a dilated branch every r-th row of some segments, and a head
that runs several branches the union of theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Span(NamedTuple):
    """Evenly spaced rows or heads: `range(start, start + step * count, step)`."""

    start: int
    size: int
    step: int = 1

    def bounds(self) -> tuple[int, int, int]:
        """Arguments of the `range`."""
        return self.start, self.start + self.step * self.size, self.step

    def slice(self, start: int = 0, stop: int | None = None) -> slice:
        """Entries `[start, stop)` of this span, as a slice of what it indexes."""
        stop = self.size if stop is None else stop
        return slice(self.start + self.step * start, self.start + self.step * (stop - 1) + 1, self.step)


Rows = Span | NDArray[np.int64]
"""Rows in ascending order without repetition, never empty."""


def as_array(rows: Rows) -> NDArray[np.int64]:
    """As a sorted list."""
    if isinstance(rows, Span):
        return rows.start + rows.step * np.arange(rows.size)
    return rows


def evenly(rows: NDArray[np.int64]) -> Rows:
    """A list as a span if it is sorted and evenly spaced."""
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    if step > 0 and rows[-1] - rows[0] == step * (len(rows) - 1) and (rows[1:] - rows[:-1] == step).all():
        return Span(int(rows[0]), len(rows), step)
    return rows


def same(first: Rows, second: Rows) -> bool:
    """Whether both are the same rows."""
    if isinstance(first, Span) and isinstance(second, Span):
        return first == second or (first.size == second.size == 1 and first.start == second.start)
    return np.array_equal(as_array(first), as_array(second))


def locate(inner: Rows, outer: Rows) -> slice | NDArray[np.int64]:
    """Where the rows of `inner` lie within those of `outer`, which holds them all."""
    if isinstance(inner, Span) and isinstance(outer, Span):
        first, by = (inner.start - outer.start) // outer.step, inner.step // outer.step or 1
        return slice(first, first + by * (inner.size - 1) + 1, by)
    places = evenly(np.searchsorted(as_array(outer), as_array(inner)))
    return places.slice() if isinstance(places, Span) else places
