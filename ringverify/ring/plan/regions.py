"""Which queries of one rank meet which keys of another, as rectangles with a diagonal band.

Everything that a pattern can say is turned into geometry, from the problem and the sharding alone: documents and
segments cut runs, a dilation rate thins them, key lengths cut them by batch element, and causality and windows become a
band; see `geometry`. A sharding that does not fall into a few runs of equal steps gets one rectangle for all of a
block's keys that only some queries attend, whose mask is looked up by position, and others for those that all attend.

Short documents or segments make thousands of rectangles. They are kept as rows of a table, six numbers each, and an
object is made of one when its turn comes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, product, repeat

import numpy as np
from numpy.typing import NDArray

from ringref.problem import Problem
from ringverify.ring.plan.geometry import (
    UNBOUNDED,
    Cutting,
    Ints,
    Runs,
    band,
    branches_of,
    constrained,
    cuttings,
    gathered,
    nearby,
    piece_overlaps,
    thinning,
)
from ringverify.ring.plan.heads import head_classes, lanes
from ringverify.ring.plan.rectangles import Rectangle, joined
from ringverify.ring.plan.rows import Span
from ringverify.ring.plan.runs import MOST_RUNS, RowRun, step_of

Table = NDArray[np.int32]
"""`(n, 6)`: of each rectangle the first row and the number of its queries and of its keys, low and high or `FREE`."""
Pair = tuple[int, int]
"""A rank, whose queries attend, and an owner of keys."""
FREE = np.iinfo(np.int32).min
"""In a table, the bound that there is not."""


@dataclasses.dataclass(eq=False, slots=True)
class Alike:
    """Rectangles of the same heads and batch elements.

    Attributes:
        common: what they have in common: a rectangle of which rows and bounds say nothing.
        step: from row to row, of queries and of keys.
        table: their rows and bounds.
    """

    common: Rectangle
    step: int
    table: Table

    def __iter__(self) -> Iterator[Rectangle]:
        first, rows, keys, size, *sides = self.table.T.tolist()
        low, high = ([None if side == FREE else side for side in of] for of in sides)
        spans = (map(Span, *of, repeat(self.step)) for of in ((first, rows), (keys, size)))
        common, by_position = map(repeat, self.common[:4]), repeat(self.common.by_position)
        return map(Rectangle, *common, *spans, low, high, by_position)


class Regions:
    """The rectangles in which some queries meet some keys; no row or key of one is without a pair.

    Only a rectangle `by_position` may turn out to hold no pair at all.

    Args:
        parts: of different heads or batch elements each.
        joins: whether neighbours may be one rectangle together; they are, where one iterates.
    """

    def __init__(self, parts: Sequence[Alike] = (), *, joins: bool = False) -> None:
        self.parts, self.joins = parts, joins

    @functools.cached_property
    def masked(self) -> bool:
        """Whether any of them is not full."""
        return any(part.common.by_position or bool((part.table[:, 4:] != FREE).any()) for part in self.parts)

    @property
    def nbytes(self) -> int:
        """What the tables take; heads that run one branch share theirs."""
        return sum({id(part.table): part.table.nbytes for part in self.parts}.values())

    def key_rows(self) -> Iterator[tuple[int, slice]]:
        """The class of key heads and the rows of keys of each rectangle."""
        for part in self.parts:
            for first, size in part.table[:, 2:4].tolist():
                yield part.common.head_class, Span(first, size, part.step).slice()

    def __iter__(self) -> Iterator[Rectangle]:
        each = (region for part in self.parts for region in part)
        return iter(joined(each)) if self.joins else each

    def __len__(self) -> int:
        return sum(1 for _ in self) if self.joins else sum(len(part.table) for part in self.parts)


def regions(problem: Problem, queries: tuple[RowRun, ...], keys: Sequence[tuple[RowRun, ...]]) -> tuple[Regions, ...]:
    """The rectangles of one rank's queries and every rank's keys, by owner; none where no query attends any key."""
    return regions_of_ranks(problem, [queries], keys)[0]


def regions_of_ranks(
    problem: Problem, queries: Sequence[tuple[RowRun, ...]], keys: Sequence[tuple[RowRun, ...]]
) -> list[tuple[Regions, ...]]:
    """`regions` of several ranks' queries, by rank; where they are few, it takes little longer than that of one."""
    if not constrained(problem):
        return [tuple(_everything(problem, of, held) for held in keys) for of in queries]
    by_step: dict[int | None, list[Pair]] = {}
    for rank, owner in product(range(len(queries)), range(len(keys))):
        if queries[rank] and keys[owner]:
            step = step_of(queries[rank], keys[owner], documents=problem.documents)
            by_step.setdefault(step, []).append((rank, owner))
    found = [[Regions()] * len(keys) for _ in queries]
    for step, pairs in by_step.items():
        parts = {} if step is None else _by_pair(problem, queries, keys, pairs, step)
        for rank, owner in pairs:
            asking, held = queries[rank], keys[owner]
            if step is None:
                found[rank][owner] = _by_position(problem, asking, held)
            else:
                found[rank][owner] = Regions(parts[rank, owner], joins=len(asking) > 1 or len(held) > 1)
    return [tuple(of) for of in found]


def _everything(problem: Problem, queries: tuple[RowRun, ...], keys: tuple[RowRun, ...]) -> Regions:
    """All queries and all keys, where nothing keeps one from another."""
    rows, size = (sum(run.size for run in of) for of in (queries, keys))
    if not rows or not size:
        return Regions()
    table, nothing = np.array([[0, rows, 0, size, FREE, FREE]], dtype=np.int32), Span(0, 0)
    common = [Rectangle(of.head_class, (0, problem.batch), *of[1:3], nothing, nothing) for of in lanes(problem)]
    return Regions([Alike(one, 1, table) for one in common])


def _by_pair(
    problem: Problem,
    queries: Sequence[tuple[RowRun, ...]],
    keys: Sequence[tuple[RowRun, ...]],
    pairs: Sequence[Pair],
    step: int,
) -> dict[Pair, list[Alike]]:
    """The rectangles of some pairs of a rank and an owner, whose runs have one step."""
    found: dict[Pair, list[Alike]] = {pair: [] for pair in pairs}
    ranks, owners = map(set, zip(*pairs, strict=True))
    asking = [of if rank in ranks else () for rank, of in enumerate(queries)]
    held = [of if owner in owners else () for owner, of in enumerate(keys)]
    number = {branch: number for number, branch in enumerate(branches_of(problem))}
    rows = Span(0, 0)
    for batch, limit in _batches(problem):
        tables = {
            which: table
            for cutting in cuttings(problem)
            for which, table in _tables(problem, cutting, gathered(asking, step), gathered(held, step, limit))
        }
        for lane in lanes(problem):
            common = Rectangle(lane.head_class, batch, lane.heads, lane.key_heads, rows, rows)
            for pair, parts in found.items():
                if (which := (*pair, number[lane.branch])) in tables:
                    parts.append(Alike(common, *tables[which]))
    return found


NONE, SOME, ALL = 0, 1, 2
"""How many of some queries attend a key."""
Stretch = tuple[int, int, int]
"""Rows `[start, stop)` of keys, and how many of the queries attend each of them."""


def _by_position(problem: Problem, queries: tuple[RowRun, ...], keys: tuple[RowRun, ...]) -> Regions:
    rows, nothing = sum(run.size for run in queries), Span(0, 0)
    tables: dict[int, list[list[int]]] = {}
    for start, stop, how in _stretches(problem, queries, keys):
        tables.setdefault(how, []).append([0, rows, start, stop - start, FREE, FREE])
    parts = []
    for number, (key_heads, _) in enumerate(head_classes(problem.dilation, problem.heads, problem.hk)):
        group = problem.group_size
        heads = Span(key_heads.start * group, key_heads.size * group, key_heads.step)
        for how, table in tables.items():
            looked_up = how == SOME
            common = Rectangle(number, (0, problem.batch), heads, key_heads, nothing, nothing, by_position=looked_up)
            parts.append(Alike(common, 1, np.array(table, dtype=np.int32)))
    return Regions(parts)


def _stretches(problem: Problem, queries: tuple[RowRun, ...], keys: tuple[RowRun, ...]) -> list[Stretch]:
    """The keys that some or all of the queries attend, as far as band and key lengths say.

    Most keys of a cache come before all queries of a chunk, and need no mask, which would be as large as the cache.
    Where there are many stretches, the longest that all attend are kept, and all between them is looked up.
    """
    low, high = band(problem)
    first, last = (
        problem.diagonal + of for of in (min(run.first for run in queries), max(run.last for run in queries))
    )
    shortest, longest = (of(problem.key_lengths or (problem.nk,)) for of in (min, max))
    begin, end = (-UNBOUNDED if low is None else one + low for one in (first, last))
    stop = min(longest, UNBOUNDED if high is None else last + high + 1)
    until = min(shortest, UNBOUNDED if high is None else first + high + 1)
    if end >= until or problem.documents is not None or problem.dilation is not None:
        end = until = max(begin, stop)  # no key is attended by all
    held, step = gathered([keys], 1), np.array([[run.step] for run in keys])
    at, size = held.first[:, None], held.size[:, None]
    cuts = np.clip(-((at - np.array([begin, end, until, max(begin, stop)])) // step), 0, size)
    rows = held.row[:, None] + np.concatenate([0 * size, cuts, size], axis=1)
    found = _joined(rows[:, :-1].ravel(), rows[:, 1:].ravel(), np.tile([NONE, SOME, ALL, SOME, NONE], len(keys)))
    attended = [one for one in found if one[2] != NONE]
    if len(attended) <= MOST_RUNS:
        return attended
    kept = sorted(sorted((one for one in attended if one[2] == ALL), key=lambda one: one[0] - one[1])[: MOST_RUNS // 2])
    edges = [attended[0][0], *(row for start, stop, _ in kept for row in (start, stop)), attended[-1][1]]
    between = [(a, b, SOME) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return sorted([*kept, *between])


def _joined(start: Ints, stop: Ints, how: Ints) -> list[Stretch]:
    """Stretches that follow one another, neighbours that are alike as one; those that are empty are left out."""
    start, stop, how = (of[start < stop] for of in (start, stop, how))
    begins = np.flatnonzero(np.diff(how, prepend=-1))
    ends = np.append(start[begins[1:]], stop[-1:])
    return list(zip(start[begins].tolist(), ends.tolist(), how[begins].tolist(), strict=True))


def _batches(problem: Problem) -> Iterator[tuple[tuple[int, int], int | None]]:
    """Neighbouring batch elements of one key length, and that length; `None` for all keys."""
    lengths: Sequence[int | None] = problem.key_lengths or (None,) * problem.batch
    stop = 0
    for length, group in groupby(lengths):
        start, stop = stop, stop + len(list(group))
        yield (start, stop), length


def _tables(
    problem: Problem, cutting: Cutting, queries: Runs, keys: Runs
) -> Iterator[tuple[tuple[int, int, int], tuple[int, Table]]]:
    """By rank, owner and number of a branch, step and table of their rectangles, if there are any."""
    by = thinning(keys.step, cutting.rate)
    kinds: list[Ints] = [np.zeros((0, 3), dtype=np.int64)]
    tables: list[Table] = [np.zeros((0, 6), dtype=np.int32)]
    overlaps = (
        (asking, held, shared)
        for pieces, asking, held in nearby(problem, cutting, queries, keys)
        for shared in piece_overlaps(problem, pieces, asking, held)
    )
    for asking, held, shared in overlaps:
        key_first, key_last = shared.attended()
        piece, run = np.nonzero((key_first <= key_last).T)
        first, last, low, high = (x[run, piece] for x in (key_first, key_last, shared.low, shared.high))
        # As a query attends keys from `low` to `high` after it, a key is attended from `high` to `low` before it.
        row = np.maximum(shared.queries[0][run, piece], shared.keys[0][piece] - high)
        rows = (np.minimum(shared.queries[1][run, piece], shared.keys[1][piece] - low) - row) // by + 1
        size = (last - first) // by + 1
        low, high = (low + row - first) // by, (high + row - first) // by
        sides = np.where(low > 1 - rows, low, FREE), np.where(high < size - 1, high, FREE)
        key_run = shared.key_run[piece]
        columns = asking.row[run] + row, rows, held.row[key_run] + first, size, *sides
        tables.append(np.stack(columns, axis=1).astype(np.int32))
        kinds.append(np.stack([asking.rank[run], held.rank[key_run], shared.pieces.branch[piece]], axis=1))
    kind, table = np.concatenate(kinds), np.concatenate(tables)
    order = np.lexsort(kind.T[::-1])
    kind = kind[order]
    begins = np.flatnonzero((kind[1:] != kind[:-1]).any(axis=1)) + 1
    for start, stop in pairwise((0, *begins.tolist(), len(order))) if len(order) else ():
        rank, owner, branch = kind[start].tolist()
        yield (rank, owner, branch), (by, table[order[start:stop]])
