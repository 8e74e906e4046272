"""Where documents and segments cut runs, and which of the pieces look alike.

A striped rank holds a few positions of every segment, and a million positions have hundreds of segments. But a piece
that lies within a run is cut from it as every other one is, only further along: exactly so if the distance between the
two is a multiple of the run's step. So whatever is done with pieces is done once for all that are alike.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from ringref.problem import Problem

Branch = tuple[int, int, int]
"""Segment length, dilation rate and offset."""


class Cuts(NamedTuple):
    """Pieces of one length, one after another, of which the places t with `t % rate == offset` count."""

    start: int
    length: int
    pieces: int
    rate: int = 1
    offset: int = 0


class Alike(NamedTuple):
    """Pieces that any run has the same part of: `[low + n * distance, high + n * distance)` for n below `copies`."""

    low: int
    high: int
    copies: int = 1
    distance: int = 0


def cuts(problem: Problem, branch: Branch | None, first: int, last: int) -> Sequence[Cuts]:
    """What cuts the positions from first to last, both included: documents, the segments of a branch, or nothing."""
    if problem.documents is not None:
        found = _documents(problem.documents)
        return found[max(bisect_right(found, first, key=_start) - 1, 0) : bisect_left(found, last + 1, key=_start)]
    length = max(problem.nq, problem.nk, 1)
    if branch is None:
        return (Cuts(0, length, 1),)
    segment, rate, offset = branch
    return (Cuts(0, segment, -(-length // segment), rate, offset),)


def _start(one: Cuts) -> int:
    return one.start


@functools.lru_cache(maxsize=16)
def _documents(offsets: tuple[int, ...]) -> tuple[Cuts, ...]:
    """Documents, those of one length that follow each other together; of length zero there is nothing to cut."""
    lengths = [(after - before, before) for before, after in pairwise(offsets) if after > before]
    return tuple(
        Cuts(same[0][1], length, len(same))
        for length, group in groupby(lengths, key=lambda one: one[0])
        for same in [list(group)]
    )


def alike(one: Cuts, first: int, last: int, runs: Iterable[tuple[int, int]], step: int) -> Iterator[Alike]:
    """The pieces from that of one position to that of another, those that are alike together.

    Args:
        one: the pieces.
        first: a position.
        last: a position; if its piece is an earlier one, there is none to yield.
        runs: first and last position of the runs that are to be cut.
        step: of these runs.
    """
    start, length = one.start, one.length
    at, end = max((first - start) // length, 0), min((last - start) // length, one.pieces - 1) + 1
    if at + 1 == end:
        yield Alike(start + at * length, start + end * length)
        return
    period = step // math.gcd(step, length)
    # Where a run begins, another stretch does; a piece that it begins within is unlike the next one. So for its end.
    breaks = {at, end}
    for begin, stop in runs:
        breaks |= {(begin - start) // length, (begin - step - start) // length + 1}
        breaks |= {(stop - start) // length + 1, (stop + step - start) // length}
    for low, high in pairwise(sorted(mark for mark in breaks if at <= mark <= end)):
        for number in range(low, min(low + period, high)):
            place = start + number * length
            yield Alike(place, place + length, (high - 1 - number) // period + 1, period * length)
