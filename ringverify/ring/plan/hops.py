"""How far every row of a block travels: the hops to the nearest and to the furthest rank that attends it.

With these two numbers, what crosses a boundary on the way out or home is a comparison. They are found for the runs of
all ranks at once: documents or segments cut the block into pieces, a branch thins them, and of each the queries of
another rank attend an interval. Of pieces that are alike one stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringref.problem import Problem
from ringverify.ring.plan.cuts import Alike, Branch, alike, cuts
from ringverify.ring.plan.many import Ints, Many, many, met
from ringverify.ring.plan.regions import head_classes, regions, step_of
from ringverify.ring.plan.runs import RowRun

Counts = NDArray[np.int32]


class Hops(NamedTuple):
    """How far the rows of one block travel.

    Attributes:
        world_size: ranks of the ring.
        shape: classes of heads, and rows.
        away: hops from the owner to the rank of each run of queries, `(runs,)`.
        strips: keys that are attended, and by which runs.
        classes: for each of `strips`, the classes of heads whose keys these are.
    """

    world_size: int
    shape: tuple[int, int]
    away: Counts
    strips: tuple[Strips, ...]
    classes: tuple[tuple[int, ...], ...]

    def furthest(self) -> Counts:
        """By class and row the hops to the last rank, going round the ring, that attends it; 0 if none does."""
        return self._largest(self.away)

    def nearest(self) -> Counts:
        """By class and row the hops to the first rank after the owner that attends it; 0 if none does."""
        rest = self._largest(self.world_size - self.away)
        return np.where(rest > 0, self.world_size - rest, 0)

    def _largest(self, weight: Counts) -> Counts:
        """By class and row the largest weight of a run that attends it."""
        found = np.zeros(self.shape, dtype=np.int32)
        for strips, classes in zip(self.strips, self.classes, strict=True):
            of = strips.largest(weight, self.shape[1])
            for number in classes:
                np.maximum(found[number], of, out=found[number])
        return found


def hops(
    problem: Problem, queries: Sequence[tuple[RowRun, ...]], keys: Sequence[tuple[RowRun, ...]], owner: int
) -> Hops:
    """How far the rows of one rank's keys travel.

    Args:
        problem: what all ranks compute.
        queries: of every rank.
        keys: of every rank.
        owner: the rank.
    """
    world_size = len(queries)
    shape = len(head_classes(problem.dilation, problem.heads, problem.hk)), sum(run.size for run in keys[owner])
    step = step_of(*queries, *keys)
    if step is None:
        away, parts, classes = _by_regions(problem, queries, keys, owner)
    else:
        ranks, asking = many(queries, step)
        away = ((ranks - owner) % world_size).astype(np.int32)
        asking, away = asking.at(away > 0), away[away > 0]
        running = _classes_by_branch(problem)
        parts, classes = _strips(problem, list(running), keys[owner], asking, step), tuple(running.values())
    some = [number for number, strips in enumerate(parts) if strips.row.size]
    return Hops(world_size, shape, away, tuple(parts[x] for x in some), tuple(classes[x] for x in some))


def _classes_by_branch(problem: Problem) -> dict[Branch | None, tuple[int, ...]]:
    """Every branch, with the classes of heads that run it."""
    found: dict[Branch | None, tuple[int, ...]] = {}
    for number, (_, lanes) in enumerate(head_classes(problem.dilation, problem.heads, problem.hk)):
        for branch, _ in lanes:
            found[branch] = (*found.get(branch, ()), number)
    return found


def _by_regions(
    problem: Problem, queries: Sequence[tuple[RowRun, ...]], keys: Sequence[tuple[RowRun, ...]], owner: int
) -> tuple[Counts, list[Strips], tuple[tuple[int, ...], ...]]:
    """What `Hops` is made of, rank by rank and region by region: for runs of any steps, however many."""
    world_size = len(queries)
    parts, classes = [], []
    for hop in range(1, world_size):
        for region in regions(problem, queries[(owner + hop) % world_size], keys[owner]):
            span = region.keys
            row, stride, size, copies, distance = np.array(
                [[span.start], [span.step], [span.size], [region.copies], [region.key_stride]]
            )
            last = np.where(np.arange(1, world_size) == hop, span.size - 1, -1)[None]
            parts.append(Strips(row, stride, size, copies, distance, np.zeros_like(last), last))
            classes.append((region.head_class,))
    return np.arange(1, world_size, dtype=np.int32), parts, tuple(classes)


class Strips(NamedTuple):
    """Keys of a block that lie in one piece, `(strips,)`, and what of them each run of queries attends.

    Attributes:
        row: of the first key.
        stride: from one key's row to the next.
        size: how many keys.
        copies: how many strips like this there are.
        distance: from one copy's first row to the next one's.
        first: index of the first key that a run attends, `(strips, runs)`.
        last: of the last one; before the first if it attends none.
    """

    row: Ints
    stride: Ints
    size: Ints
    copies: Ints
    distance: Ints
    first: Ints
    last: Ints

    def largest(self, weight: Counts, rows: int) -> Counts:
        """For every row of the block the largest weight `(runs,)` of those that attend it; 0 if none does."""
        copied = np.repeat(np.arange(len(self.row)), self.copies)
        copy = np.arange(len(copied)) - np.repeat(np.cumsum(self.copies) - self.copies, self.copies)
        begin = self.row[copied] + self.distance[copied] * copy
        number, key = np.nonzero(np.arange(self.size.max()) < self.size[copied, None])
        strip = copied[number]
        found = np.zeros(rows, dtype=np.int32)
        found[begin[number] + self.stride[strip] * key] = self._by_key(weight)[strip, key]
        return found

    def _by_key(self, weight: Counts) -> Counts:
        """For every key the largest weight of those that attend it, `(strips, keys)`."""
        strip, run = np.nonzero(self.first <= self.last)
        first, last, weight = self.first[strip, run], self.last[strip, run], weight[run]
        found = np.zeros((len(self.size), self.size.max()), dtype=np.int32)
        # Nearly all intervals begin with the strip or end with it, and so hold what is before their end or after it.
        early, late = first == 0, last == self.size[strip] - 1
        np.maximum.at(found, (strip[early], last[early]), weight[early])
        found = np.maximum.accumulate(found[:, ::-1], axis=1)[:, ::-1]
        late &= ~early
        if late.any():
            behind = np.zeros_like(found)
            np.maximum.at(behind, (strip[late], first[late]), weight[late])
            found = np.maximum(found, np.maximum.accumulate(behind, axis=1))
        for number in np.flatnonzero(~(early | late)):
            part = found[strip[number], first[number] : last[number] + 1]
            np.maximum(part, weight[number], out=part)
        return found


def _strips(
    problem: Problem, branches: Sequence[Branch | None], keys: Sequence[RowRun], asking: Many, step: int
) -> list[Strips]:
    """By branch, the strips of a block that anybody attends, and what of them who does."""
    limit = problem.nk if problem.key_lengths is None else max(problem.key_lengths)
    valid = [run for run in (run.within(0, limit) for run in keys) if run is not None]
    pieces = [row for run in valid for row in _pieces(problem, branches, run, asking, step)]
    table = np.array(pieces, dtype=np.int64).reshape(-1, 11)
    branch, low, high, rate, residue, first, size, row, stride, copies, entries = table.T[..., None]
    held = Many(first, size, step).within(low, high).thinned(rate, residue)
    attended = met(problem, asking.at((None,)).within(low, high).thinned(rate, residue), held)
    some = (attended[0] <= attended[1]).any(axis=1)
    begin, between = row + (held.first - first) // step * stride, stride * (held.step // step)
    columns = [x[:, 0] for x in (begin, between, held.size, copies, entries * stride)]
    by_branch = [some & (branch[:, 0] == number) for number in range(len(branches))]
    return [Strips(*(x[of] for x in (*columns, *attended))) for of in by_branch]


def _pieces(
    problem: Problem, branches: Sequence[Branch | None], run: RowRun, asking: Many, step: int
) -> Iterator[tuple[int, ...]]:
    """Of a run, the pieces that documents or the segments of each branch cut out; `_strips` names the columns."""
    known: dict[tuple[int, int], list[Alike]] = {}  # branches may differ in rate and offset alone
    for number, branch in enumerate(branches):
        for one in cuts(problem, branch, run.first, run.last):
            key = one.start, one.length
            if one.pieces == 1:
                known[key] = [Alike(one.start, one.start + one.length)]
            elif key not in known:
                near = (asking.last >= run.first - one.length) & (asking.first <= run.last + one.length)
                ends = zip(asking.first[near].tolist(), asking.last[near].tolist(), strict=True)
                known[key] = list(alike(one, run.first, run.last, [(run.first, run.last), *ends], step))
            for low, high, copies, distance in known[key]:
                thinning = one.rate, low + one.offset
                yield number, low, high, *thinning, run.first, run.size, run.row, run.stride, copies, distance // step
