"""Positions of a rank as arithmetic progressions, so that a plan is made of a few integers and not of positions.

A named sharding gives a rank at most two runs (zigzag; contiguous and striped: one), `zigzag_documents` about two of
every document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from ringref.sharding import Sharding, by_documents, key_positions

MOST_RUNS = 8
"""Runs of one rank in one document; with more of them, a mask costs less than the many rectangles."""


class RowRun(NamedTuple):
    """Consecutive rows of one rank, evenly spaced in position.

    Attributes:
        first: position of the first.
        step: from one position to the next, at least 1.
        size: how many, at least 1.
        row: row of the first among the rows of its rank.
    """

    first: int
    step: int
    size: int
    row: int

    @property
    def last(self) -> int:
        """Position of the last."""
        return self.first + self.step * (self.size - 1)


def runs_of_ranks(
    sharding: Sharding, length: int, world_size: int, documents: Sequence[int] | None = None
) -> tuple[tuple[RowRun, ...], ...]:
    """The `runs` of every rank, by rank."""
    if not by_documents(sharding):
        return tuple(runs(sharding, length, world_size, rank) for rank in range(world_size))
    return tuple(tuple(_consecutive(held)) for held in key_positions(sharding, length, world_size, documents))


def runs(sharding: Sharding, length: int, world_size: int, rank: int) -> tuple[RowRun, ...]:
    """The keys (and, but for `replicated_query`, the queries) of a rank, in the order of its rows.

    The sharding is one by length alone.
    """
    match sharding:
        case "contiguous" | "replicated_query":
            found = [_piece(length, world_size, rank, 0)]
        case "zigzag":
            early = _piece(length, 2 * world_size, rank, 0)
            found = [early, _piece(length, 2 * world_size, 2 * world_size - 1 - rank, early.size)]
            if early.last + 1 == found[1].first:
                found = [early._replace(size=early.size + found[1].size)]
        case "striped":
            found = [RowRun(rank, world_size, len(range(rank, length, world_size)), 0)]
        case _:
            return tuple(progressions(key_positions(sharding, length, world_size)[rank]))
    return tuple(run for run in found if run.size)


def _piece(length: int, pieces: int, number: int, row: int) -> RowRun:
    """One of `length` positions' consecutive pieces, the larger ones first; it may be empty."""
    size, larger = divmod(length, pieces)
    return RowRun(number * size + min(number, larger), 1, size + (number < larger), row)


def progressions(positions: np.ndarray) -> Iterator[RowRun]:
    """Any positions as runs, greedily."""
    steps = np.diff(positions)
    changes = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    row, count = 0, len(positions)
    while row < count:
        if row == count - 1 or steps[row] < 1:
            yield RowRun(int(positions[row]), 1, 1, row)
            row += 1
            continue
        after = int(np.searchsorted(changes, row, side="right"))
        last = int(changes[after]) if after < len(changes) else count - 1
        yield RowRun(int(positions[row]), int(steps[row]), last - row + 1, row)
        row = last + 1


def _consecutive(positions: np.ndarray) -> Iterator[RowRun]:
    """Any positions as runs of step 1: where documents follow one another, no other step would last."""
    begins = np.flatnonzero(np.diff(positions, prepend=positions[:1] - 2) != 1)
    sizes = np.diff(begins, append=len(positions))
    return map(RowRun, positions[begins].tolist(), repeat(1), sizes.tolist(), begins.tolist())


def step_of(*held: tuple[RowRun, ...], documents: Sequence[int] | None = None) -> int | None:
    """The step of all runs of some ranks; `None` if there are several or a rank has too many runs in a document."""
    steps = {run.step for of in held for run in of if run.size > 1}
    if len(steps) > 1 or any(_most_in_one(of, documents) > MOST_RUNS for of in held if len(of) > MOST_RUNS):
        return None
    return next(iter(steps), 1)


def _most_in_one(held: tuple[RowRun, ...], documents: Sequence[int] | None) -> int:
    """How many runs begin in the document in which most do."""
    return int(np.bincount(np.searchsorted(documents or (), [run.first for run in held], side="right")).max())
