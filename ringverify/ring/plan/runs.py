"""Positions of a rank as arithmetic progressions, so that a plan is made of a few integers and not of positions.

A named sharding gives a rank at most two runs (zigzag; contiguous and striped: one), `zigzag_documents` about two of
every document, a page table one of every few pages that follow one another on a rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from ringref.sharding import (
    PageTable,
    Positions,
    QueryKeySharding,
    Sharding,
    by_documents,
    key_positions,
    replicates_queries,
)

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


def apart(sharding: Sharding) -> tuple[Sharding | None, Sharding]:
    """Shardings of queries, `None` where every rank holds them all, and of keys."""
    if not isinstance(sharding, QueryKeySharding):
        return None if replicates_queries(sharding) else sharding, sharding
    return None if sharding.queries == "replicated" else sharding.queries, sharding.keys


def runs_of_ranks(
    sharding: Sharding, length: int, world_size: int, documents: Sequence[int] | None = None, settled: int = 0
) -> tuple[tuple[RowRun, ...], ...]:
    """The `runs` of every rank, by rank.

    Args:
        sharding: of queries or of keys alone.
        length: number of positions over all ranks.
        world_size: number of ranks.
        documents: cumulative document lengths, for a sharding that depends on them.
        settled: positions below it may trade places: all queries attend all of their keys, or none. Of a page table,
            which has many runs, pages there that follow one another on a rank are one run of any such positions.

    Raises:
        ValueError: a page table is of another number of ranks, or lacks a page.
    """
    if isinstance(sharding, PageTable):
        page_counts(sharding, length, world_size)
        return tuple(tuple(_of_pages(sharding.page_size, held, length, settled)) for held in _pages(sharding)[0])
    if not by_documents(sharding):
        return tuple(runs(sharding, length, world_size, rank) for rank in range(world_size))
    return tuple(tuple(_consecutive(held)) for held in key_positions(sharding, length, world_size, documents))


def runs(sharding: Sharding, length: int, world_size: int, rank: int) -> tuple[RowRun, ...]:
    """The keys (and, but for `replicated_query`, the queries) of a rank, in the order of its rows.

    The sharding is one by length alone, and no page table.
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


def page_counts(table: PageTable, length: int, world_size: int) -> list[int]:
    """How many positions below a length each rank holds, without a look at every page.

    Raises:
        ValueError: as `PageTable.positions`.
    """
    full, rest = divmod(length, table.page_size)
    counts = []
    for held in _pages(table)[1]:
        before, with_next = np.searchsorted(held, (full, full + 1)).tolist()
        counts.append(before * table.page_size + (with_next - before) * rest)
    if len(counts) != world_size or sum(counts) != length:
        table.positions(length, world_size)
    return counts


@functools.lru_cache(maxsize=8)
def _pages(table: PageTable) -> tuple[list[Positions], list[Positions]]:
    """The pages of every rank, in the order of its rows and in ascending order."""
    held = [np.asarray(pages, dtype=np.int64) for pages in table.pages]
    return held, [np.sort(pages) for pages in held]


def _of_pages(size: int, pages: Positions, length: int, settled: int) -> Iterator[RowRun]:
    """The positions below a length in some pages, as runs; see `runs_of_ranks`."""
    pages = pages[pages * size < length]
    first, end = pages * size, np.minimum((pages + 1) * size, length)
    row, old = np.cumsum(end - first) - (end - first), end <= settled
    goes_on = (old[1:] & old[:-1]) | (~old[1:] & ~old[:-1] & (first[1:] == end[:-1]))
    begins = np.flatnonzero(np.append(True, ~goes_on))[: len(pages)]
    sizes = np.diff(row[begins], append=(end - first).sum())
    return map(RowRun, np.where(old, 0, first)[begins].tolist(), repeat(1), sizes.tolist(), row[begins].tolist())


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
