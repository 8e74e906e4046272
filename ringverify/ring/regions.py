"""Which queries of one rank meet which keys of another, as rectangles with a diagonal band.

Everything that a pattern can say is turned into geometry here, from the problem and the sharding alone: documents and
segments cut runs, a dilation rate thins them, key lengths cut them by batch element, and causality and windows become
a band on the difference of two indices. Two runs of one step s that begin at a and b attend within
`low <= b + j·s - (a + i·s + diagonal) <= high`, which is a band on `j - i`; for striped shards it is causality shifted
by one where the key's rank comes after the query's.

A sharding that does not fall into a few runs of equal steps gets a single region whose mask is looked up by position.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from ringref.problem import Dilation, Problem
from ringverify.ring.runs import Run

MOST_RUNS = 8
"""Runs of one rank; with more of them, a mask costs less than the many rectangles."""


class Span(NamedTuple):
    """Evenly spaced rows or heads: `range(start, start + step * count, step)`."""

    start: int
    size: int
    step: int = 1

    def slice(self, start: int = 0, stop: int | None = None) -> slice:
        """Entries `[start, stop)` of this span, as a slice of what it indexes."""
        stop = self.size if stop is None else stop
        return slice(self.start + self.step * start, self.start + self.step * (stop - 1) + 1, self.step)


class Region(NamedTuple):
    """A rectangle of queries and keys that attend each other within a band.

    Attributes:
        batch: `[start, stop)` of the batch.
        heads: query heads.
        key_heads: the key heads they read, equally many queries heads each.
        queries: rows of the query's rank.
        keys: rows of the key's rank.
        low: a pair attends only if `j - i >= low`, indices within the spans; `None` is unbounded.
        high: only if `j - i <= high`.
        by_position: the mask has to be looked up by position instead.
    """

    batch: tuple[int, int]
    heads: Span
    key_heads: Span
    queries: Span
    keys: Span
    low: int | None = None
    high: int | None = None
    by_position: bool = False


class Lane(NamedTuple):
    """Heads that run the same branch with the same offset; `None` for all positions."""

    heads: Span
    key_heads: Span
    branch: tuple[int, int, int] | None


def band(problem: Problem) -> tuple[int | None, int | None]:
    """Bounds on `j - (i + Nk - Nq)`, both inclusive; `None` is unbounded."""
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0  # a window's right side is never negative, so causality is the narrower of the two
    return None if left is None else -left, right


def regions(problem: Problem, queries: tuple[Run, ...], keys: tuple[Run, ...]) -> Iterator[Region]:
    """The regions of one rank's queries and one rank's keys; none if no query there attends any key here.

    Only a region with `by_position` may turn out to hold no pair at all.
    """
    if not queries or not keys:
        return
    irregular = len(queries) > MOST_RUNS or len(keys) > MOST_RUNS
    if irregular or len({run.step for run in (*queries, *keys) if run.size > 1}) > 1:
        everything = Span(0, problem.heads), Span(0, problem.hk)
        rows, columns = (Span(0, sum(run.size for run in runs)) for runs in (queries, keys))
        yield Region((0, problem.batch), *everything, rows, columns, by_position=True)
        return
    step = max(run.step for run in (*queries, *keys))
    for batch, limit in _batches(problem):
        for key_run in keys:
            cut = key_run.within(0, limit)
            if cut is None:
                continue
            for query_run in queries:
                yield from _between(problem, batch, query_run, cut, step)


def _between(problem: Problem, batch: tuple[int, int], queries: Run, keys: Run, step: int) -> Iterator[Region]:
    for lane in lanes(problem):
        for rows, columns in _together(problem, lane, queries, keys):
            # Thinning multiplies both steps alike; a run of one entry has no step of its own.
            spacing = next((run.step for run in (rows, columns) if run.size > 1), step)
            region = _banded(problem, batch, lane, rows, columns, spacing)
            if region is not None:
                yield region


def _batches(problem: Problem) -> Iterator[tuple[tuple[int, int], int]]:
    """Neighbouring batch elements of one key length, and that length."""
    if problem.key_lengths is None:
        yield (0, problem.batch), problem.nk
        return
    for length, group in groupby(range(problem.batch), key=lambda element: problem.key_lengths[element]):  # type: ignore[index]
        elements = list(group)
        yield (elements[0], elements[-1] + 1), length


def lanes(problem: Problem) -> Iterator[Lane]:
    """The branches of every head, heads of equal branch and offset together."""
    if problem.dilation is None:
        yield Lane(Span(0, problem.heads), Span(0, problem.hk), None)
        return
    for (segment, rate, offset), heads in _branches(problem.dilation, problem.heads):
        for span, key_span in _with_key_heads(heads, problem.group_size):
            yield Lane(span, key_span, (segment, rate, offset))


def _branches(dilation: Dilation, heads: int) -> Iterator[tuple[tuple[int, int, int], Span]]:
    """Segment length, rate and offset, and the heads that run them."""
    count = len(dilation.branches)
    if dilation.heads == "split":
        size, larger = divmod(heads, count)
        start = 0
        for number, (segment, rate) in enumerate(dilation.branches):
            width = size + (number < larger)
            if width:
                yield (segment, rate, number % rate), Span(start, width)
            start += width
        return
    for segment, rate in dilation.branches:
        block = -(-heads // rate)
        for offset in range(min(rate, heads)):
            if dilation.head_offset == "cyclic":
                yield (segment, rate, offset), Span(offset, len(range(offset, heads, rate)), rate)
            elif offset * block < heads:
                yield (segment, rate, offset), Span(offset * block, min(block, heads - offset * block))


def _with_key_heads(heads: Span, group: int) -> Iterator[tuple[Span, Span]]:
    """Query heads cut so that each part reads whole key heads, or a single one, with those key heads."""
    if group == 1:
        yield heads, heads
        return
    if heads.step > 1:
        for number in range(heads.size):
            head = heads.start + heads.step * number
            yield Span(head, 1), Span(head // group, 1)
        return
    start, stop = heads.start, heads.start + heads.size
    whole = -(-start // group) * group, stop // group * group
    if whole[0] >= whole[1]:  # no key head is read by all of its queries
        for key_head in range(start // group, -(-stop // group)):
            a, b = max(start, key_head * group), min(stop, (key_head + 1) * group)
            yield Span(a, b - a), Span(key_head, 1)
        return
    if start < whole[0]:
        yield Span(start, whole[0] - start), Span(start // group, 1)
    yield Span(whole[0], whole[1] - whole[0]), Span(whole[0] // group, (whole[1] - whole[0]) // group)
    if whole[1] < stop:
        yield Span(whole[1], stop - whole[1]), Span(whole[1] // group, 1)


def _together(problem: Problem, lane: Lane, queries: Run, keys: Run) -> Iterator[tuple[Run, Run]]:
    """Both runs cut to each document or segment that they share."""
    if problem.documents is not None:
        offsets = problem.documents
        first = max(bisect_right(offsets, max(queries.first, keys.first)) - 1, 0)
        last = min(bisect_left(offsets, min(queries.last, keys.last) + 1), len(offsets) - 1)
        cuts = [(offsets[number], offsets[number + 1]) for number in range(first, last)]
        for low, high in cuts:
            rows, columns = queries.within(low, high), keys.within(low, high)
            if rows is not None and columns is not None:
                yield rows, columns
        return
    if lane.branch is None:
        yield queries, keys
        return
    segment, rate, offset = lane.branch
    first, last = max(queries.first, keys.first) // segment, min(queries.last, keys.last) // segment
    for number in range(first, last + 1):
        low = number * segment
        rows, columns = queries.within(low, low + segment), keys.within(low, low + segment)
        if rows is not None and columns is not None:
            rows, columns = rows.thinned(rate, low + offset), columns.thinned(rate, low + offset)
            if rows is not None and columns is not None:
                yield rows, columns


def _banded(
    problem: Problem, batch: tuple[int, int], lane: Lane, queries: Run, keys: Run, spacing: int
) -> Region | None:
    """The region of two runs, cut to the rows and keys that have a pair; a side that cannot bind is left out."""
    left, right = band(problem)
    ahead = queries.first + problem.diagonal - keys.first
    low = None if left is None else -((-left - ahead) // spacing)
    high = None if right is None else (right + ahead) // spacing
    if low is not None and high is not None and low > high:
        return None  # a narrow window can fall between the positions of a striped shard
    rows, columns = queries.size, keys.size
    row, column = 0, 0
    if high is not None:
        row = max(0, -high)
        columns = min(columns, rows + high)
    if low is not None:
        column = max(0, low)
        rows = min(rows, columns - low)
    if row >= rows or column >= columns:
        return None
    shift = row - column
    rows, columns = rows - row, columns - column
    low = None if low is None or low + shift <= 1 - rows else low + shift
    high = None if high is None or high + shift >= columns - 1 else high + shift
    return Region(
        batch,
        lane.heads,
        lane.key_heads,
        Span(queries.row + queries.stride * row, rows, queries.stride),
        Span(keys.row + keys.stride * column, columns, keys.stride),
        low,
        high,
    )
