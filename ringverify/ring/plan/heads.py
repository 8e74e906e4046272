"""Which heads run which branches of a dilation, and which key heads travel together because of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ringref.problem import Dilation, Problem
from ringverify.ring.plan.rows import Span, evenly

Branch = tuple[int, int, int]
"""Segment length, dilation rate and offset."""


class Lane(NamedTuple):
    """Heads of one class that run the same branch with the same offset; `None` for all positions."""

    head_class: int
    heads: Span
    key_heads: Span
    branch: Branch | None


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
                heads_of = evenly(
                    np.array([key_head * group + head for key_head in range(*span.bounds()) for head in mine])
                )
                assert isinstance(heads_of, Span)
                lanes.append((branch, heads_of))
            found.append(HeadClass(span, tuple(lanes)))
    return tuple(found)


def _spans(members: list[int], *, together: bool, neighbours: bool) -> Iterator[Span]:
    """Ascending numbers as one span if they may be together and are evenly spaced, else one by one."""
    span = evenly(np.array(members))
    if together and isinstance(span, Span) and (span.step == 1 or not neighbours):
        yield span
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
