"""Which queries of one rank meet which keys of another, as rectangles with a diagonal band.

Everything that a pattern can say is turned into geometry here, from the problem and the sharding alone: documents and
segments cut runs, a dilation rate thins them, key lengths cut them by batch element, and causality and windows become
a band on the difference of two indices. Two runs of one step s that begin at a and b attend within
`low <= b + j·s - (a + i·s + diagonal) <= high`, which is a band on `j - i`; for striped shards it is causality shifted
by one where the key's rank comes after the query's.

Segments and documents that both ranks have the same part of make one region, with as many copies. A sharding that does
not fall into a few runs of equal steps gets a region for all of a block; its mask, if any, is looked up by position.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

from ringref.problem import Dilation, Problem
from ringverify.ring.plan.cuts import Branch, alike, cuts
from ringverify.ring.plan.runs import RowRun

MOST_RUNS = 8
"""Runs of one rank; with more of them, a mask costs less than the many rectangles."""


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


class Rectangle(NamedTuple):
    """A rectangle of queries and keys that attend each other within a band, or several equal ones.

    Attributes:
        head_class: number of the class that the key heads belong to; see `head_classes`.
        batch: `[start, stop)` of the batch.
        heads: query heads.
        key_heads: the key heads they read, equally many queries heads each.
        queries: rows of the query's rank; of several copies those of the first one, and so everything else here.
        keys: rows of the key's rank.
        low: a pair attends only if `j - i >= low`, indices within the spans; `None` is unbounded.
        high: only if `j - i <= high`.
        by_position: the mask has to be looked up by position instead.
        copies: how many equal rectangles there are; no two of them have a row in common.
        query_stride: rows from one copy's first query to that of the next.
        key_stride: rows from one copy's first key to that of the next.
    """

    head_class: int
    batch: tuple[int, int]
    heads: Span
    key_heads: Span
    queries: Span
    keys: Span
    low: int | None = None
    high: int | None = None
    by_position: bool = False
    copies: int = 1
    query_stride: int = 0
    key_stride: int = 0

    def apart(self) -> Iterator[Rectangle]:
        """Every copy as a region of its own."""
        if self.copies == 1:
            yield self
            return
        for number in range(self.copies):
            yield self._replace(
                queries=self.queries._replace(start=self.queries.start + number * self.query_stride),
                keys=self.keys._replace(start=self.keys.start + number * self.key_stride),
                copies=1,
                query_stride=0,
                key_stride=0,
            )


class Lane(NamedTuple):
    """Heads of one class that run the same branch with the same offset; `None` for all positions."""

    head_class: int
    heads: Span
    key_heads: Span
    branch: Branch | None


def band(problem: Problem) -> tuple[int | None, int | None]:
    """Bounds on `j - (i + Nk - Nq)`, both inclusive; `None` is unbounded."""
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0  # a window's right side is never negative, so causality is the narrower of the two
    return None if left is None else -left, right


def constrained(problem: Problem) -> bool:
    """Whether anything may keep a query from a key, or have it count several times."""
    others = problem.key_lengths, problem.documents, problem.dilation
    return band(problem) != (None, None) or any(one is not None for one in others)


def regions(problem: Problem, queries: tuple[RowRun, ...], keys: tuple[RowRun, ...]) -> Iterator[Rectangle]:
    """The regions of one rank's queries and one rank's keys; none if no query there attends any key here.

    Only a region with `by_position` may turn out to hold no pair at all.
    """
    return _regions(problem, queries, keys, lanes(problem))


def _regions(
    problem: Problem, queries: tuple[RowRun, ...], keys: tuple[RowRun, ...], of: tuple[Lane, ...]
) -> Iterator[Rectangle]:
    if not queries or not keys:
        return
    step = step_of(queries, keys)
    if step is None:
        looked_up = constrained(problem)
        rows, columns = (Span(0, sum(run.size for run in runs)) for runs in (queries, keys))
        for number, (key_heads, _) in enumerate(head_classes(problem.dilation, problem.heads, problem.hk)):
            group = problem.group_size
            heads = Span(key_heads.start * group, key_heads.size * group, key_heads.step)
            yield Rectangle(number, (0, problem.batch), heads, key_heads, rows, columns, by_position=looked_up)
        return
    for batch, limit in _batches(problem):
        for key_run in keys:
            cut = key_run.within(0, limit)
            if cut is None:
                continue
            for query_run in queries:
                yield from _between(problem, batch, query_run, cut, step, of)


def step_of(*held: tuple[RowRun, ...]) -> int | None:
    """The step of all runs of some ranks; `None` if there are several or a rank has too many runs."""
    steps = {run.step for of in held for run in of if run.size > 1}
    if len(steps) > 1 or any(len(of) > MOST_RUNS for of in held):
        return None
    return next(iter(steps), 1)


def attends(problem: Problem, queries: tuple[RowRun, ...], keys: tuple[RowRun, ...]) -> bool:
    """Whether any of these queries attends any of these keys: whether there are regions, without asking every head."""
    if problem.dilation is None:
        return next(regions(problem, queries, keys), None) is not None
    distinct = {branch: Lane(0, heads, heads, branch) for branch, heads in branches(problem.dilation, problem.heads)}
    return next(_regions(problem, queries, keys, tuple(distinct.values())), None) is not None


def _between(
    problem: Problem, batch: tuple[int, int], queries: RowRun, keys: RowRun, step: int, of: tuple[Lane, ...]
) -> Iterator[Rectangle]:
    for lane in of:
        for pieces in _together(problem, lane, queries, keys, step):
            region = _banded(problem, batch, lane, pieces, step)
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


class HeadClass(NamedTuple):
    """Key heads whose query heads run the same branches, and those branches with the query heads that run them."""

    key_heads: Span
    lanes: tuple[tuple[Branch | None, Span], ...]


@functools.lru_cache(maxsize=64)
def head_classes(dilation: Dilation | None, heads: int, key_heads: int) -> tuple[HeadClass, ...]:
    """The classes of key heads, a partition; without dilation a single one."""
    if dilation is None:
        return (HeadClass(Span(0, key_heads), ((None, Span(0, heads)),)),)
    group = heads // key_heads
    of_heads = list(branches(dilation, heads))
    runs_in: dict[tuple[tuple[Branch, tuple[int, ...]], ...], list[int]] = {}
    for key_head in range(key_heads):
        queries = range(key_head * group, (key_head + 1) * group)
        members = [
            (branch, tuple(head - queries.start for head in queries if head in range(*span.bounds())))
            for branch, span in of_heads
        ]
        runs_in.setdefault(tuple((branch, mine) for branch, mine in members if mine), []).append(key_head)
    found = []
    for lanes_of, members_of in runs_in.items():
        whole = all(len(mine) == group for _, mine in lanes_of)
        for span in _spans(members_of, together=group == 1 or whole, neighbours=group > 1):
            lanes = []
            for branch, mine in lanes_of:
                step = mine[1] - mine[0] if len(mine) > 1 else 1
                one = span.size == 1
                size, step = (len(mine), step) if one else (span.size * group, span.step if group == 1 else 1)
                lanes.append((branch, Span(span.start * group + mine[0], size, step)))
            found.append(HeadClass(span, tuple(lanes)))
    return tuple(found)


def _spans(members: list[int], *, together: bool, neighbours: bool) -> Iterator[Span]:
    """Ascending numbers as one span if they may be together and are evenly spaced, else one by one."""
    step = members[1] - members[0] if len(members) > 1 else 1
    even = all(after - before == step for before, after in pairwise(members))
    if together and even and (step == 1 or not neighbours):
        yield Span(members[0], len(members), step)
    else:
        yield from (Span(member, 1) for member in members)


def lanes(problem: Problem) -> tuple[Lane, ...]:
    """The branches of every class of heads."""
    classes = enumerate(head_classes(problem.dilation, problem.heads, problem.hk))
    return tuple(Lane(number, heads, key_heads, branch) for number, (key_heads, of) in classes for branch, heads in of)


def branches(dilation: Dilation, heads: int) -> Iterator[tuple[Branch, Span]]:
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


class Pieces(NamedTuple):
    """What two runs share of a document or a segment, and as many more times, so many rows further each time."""

    queries: RowRun
    keys: RowRun
    copies: int = 1
    query_stride: int = 0
    key_stride: int = 0


def _together(problem: Problem, lane: Lane, queries: RowRun, keys: RowRun, step: int) -> Iterator[Pieces]:
    """Both runs cut to each document or segment that they share."""
    if problem.documents is None and lane.branch is None:
        yield Pieces(queries, keys)
        return
    if lane.branch is not None:
        segment, rate, offset = lane.branch
        if segment % rate == 0 and (queries.thinned(rate, offset) is None or keys.thinned(rate, offset) is None):
            return  # the same places in every segment, and none of them here
    first, last = max(queries.first, keys.first), min(queries.last, keys.last)
    for one in cuts(problem, lane.branch, first, last):
        for piece in alike(one, first, last, ((queries.first, queries.last), (keys.first, keys.last)), step):
            rows, columns = (run.within(piece.low, piece.high) for run in (queries, keys))
            if rows is not None and columns is not None:
                rows, columns = (run.thinned(one.rate, piece.low + one.offset) for run in (rows, columns))
                if rows is not None and columns is not None:
                    entries = piece.distance // step
                    yield Pieces(rows, columns, piece.copies, entries * queries.stride, entries * keys.stride)


def _banded(problem: Problem, batch: tuple[int, int], lane: Lane, pieces: Pieces, step: int) -> Rectangle | None:
    """The region of two runs, cut to the rows and keys that have a pair; a side that cannot bind is left out."""
    queries, keys = pieces.queries, pieces.keys
    # Thinning multiplies both steps alike; a run of one entry has no step of its own.
    spacing = queries.step if queries.size > 1 else keys.step if keys.size > 1 else step
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
    return Rectangle(
        lane.head_class,
        batch,
        lane.heads,
        lane.key_heads,
        Span(queries.row + queries.stride * row, rows, queries.stride),
        Span(keys.row + keys.stride * column, columns, keys.stride),
        low,
        high,
        copies=pieces.copies,
        query_stride=pieces.query_stride,
        key_stride=pieces.key_stride,
    )
