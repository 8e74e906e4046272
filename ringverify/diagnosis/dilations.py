"""Suspicions of dilation: rates, offsets, segments, and which head runs which branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ringref.pattern import branch_of_head, multiplicity
from ringref.problem import Dilation, Problem
from ringverify.diagnosis.masks import WHENS
from ringverify.diagnosis.model import STEPS
from ringverify.diagnosis.scene import Counts, Visit
from ringverify.diagnosis.suspicion import Suspicion

Branch = tuple[int, int, int]
"""Segment length w, dilation rate r, offset."""

NOTHING: Branch = (1, 2, 1)
"""Covers no position."""


def runs(problem: Problem, dilation: Dilation) -> list[list[Branch]]:
    """For each head, the branches that it runs."""
    count, heads = len(dilation.branches), problem.heads
    if dilation.heads == "split":
        of = [branch_of_head(head, heads=heads, branches=count) for head in range(heads)]
        return [[(*dilation.branches[b], b % dilation.branches[b][1])] for b in of]
    block = dilation.head_offset == "block"
    return [
        [(w, r, head // -(-heads // r) if block else head % r) for w, r in dilation.branches] for head in range(heads)
    ]


Runs = Callable[[Problem, Dilation], list[list[Branch]]]
Covers = Callable[[Any, int, int, int], Any]


def dilated(
    says: str,
    *,
    of: Runs = runs,
    covers: Covers = lambda p, w, r, offset: p % w % r == offset,
    segment: Callable[[Any, int], Any] = lambda p, w: p // w,
) -> list[Suspicion]:
    """Another reading of what a branch lets through."""

    def counts(at: Visit) -> Counts:
        problem, dilation = at.problem, at.problem.dilation
        if dilation is None:
            return STEPS.pattern(at)
        rest = multiplicity(problem.replace(dilation=None), at.i, at.j)
        found = np.zeros((problem.heads, len(at.i), len(at.j)), dtype=np.int64)
        i, j = at.i[:, None], at.j[None, :]
        for head, branches in enumerate(of(problem, dilation)):
            for w, r, offset in branches:
                both = covers(i, w, r, offset) & covers(j, w, r, offset)
                found[head] += both & (segment(i, w) == segment(j, w))
        return rest * found

    return [Suspicion(says, replace(STEPS, pattern=counts), when) for when in WHENS]


def _each(change: Callable[[Problem, Dilation, int, Branch], Branch]) -> Runs:
    def changed(problem: Problem, dilation: Dilation) -> list[list[Branch]]:
        of_heads = runs(problem, dilation)
        return [[change(problem, dilation, head, branch) for branch in run] for head, run in enumerate(of_heads)]

    return changed


def _offset(of: Callable[[Problem, Dilation, int, Branch], int]) -> Runs:
    return _each(lambda problem, dilation, head, branch: (*branch[:2], of(problem, dilation, head, branch)))


def _overlapping(problem: Problem, dilation: Dilation) -> list[list[Branch]]:
    """Groups of unequal size, each cut at its number times its own size: some overlap, and the last heads get none."""
    if dilation.heads != "split":
        return runs(problem, dilation)
    size, larger = divmod(problem.heads, len(dilation.branches))
    found: list[list[Branch]] = [[NOTHING] for _ in range(problem.heads)]
    for number, (w, r) in enumerate(dilation.branches):
        group = size + (number < larger)
        for head in range(number * group, min((number + 1) * group, problem.heads)):
            found[head] = [(w, r, number % r)]
    return found


def _of_head(heads: str) -> Runs:
    """Offset from the head in one mode."""
    return _offset(lambda problem, dilation, head, branch: head % branch[1] if dilation.heads == heads else branch[2])


def _split(by: Callable[[int, int, int], int]) -> Runs:
    """Branch of a head by `(head, heads, branches)`."""

    def changed(problem: Problem, dilation: Dilation) -> list[list[Branch]]:
        if dilation.heads != "split":
            return runs(problem, dilation)
        of = [by(head, problem.heads, len(dilation.branches)) for head in range(problem.heads)]
        return [[(*dilation.branches[b], b % dilation.branches[b][1])] for b in of]

    return changed


def _first_branch(problem: Problem, dilation: Dilation) -> list[list[Branch]]:
    return [run[:1] for run in runs(problem, dilation)]


def _block_down(problem: Problem, dilation: Dilation, head: int, branch: Branch) -> int:
    return head // max(1, problem.heads // branch[1]) if dilation.head_offset == "block" else branch[2]


DILATION: list[Suspicion] = [
    *dilated("dilation rate ignored", of=_each(lambda problem, dilation, head, branch: (branch[0], 1, 0))),
    *dilated("segments ignored", segment=lambda p, w: p * 0),
    *dilated("dilation offset ignored: every head starts at 0", of=_offset(lambda problem, dilation, head, branch: 0)),
    *dilated(
        "dilation offset one too large", of=_offset(lambda problem, dilation, head, branch: (branch[2] + 1) % branch[1])
    ),
    *dilated(
        "split heads: dilation offset taken from the head instead of the branch",
        of=_of_head("split"),
    ),
    *dilated(
        "shared heads: block offset taken for cyclic",
        of=_of_head("shared"),
    ),
    *dilated("shared heads: block offset h // floor(H / r) instead of h // ceil(H / r)", of=_offset(_block_down)),
    *dilated(
        "dilation offset depends on the segment: (offset + segment) % r",
        covers=lambda p, w, r, offset: p % w % r == (offset + p // w) % r,
    ),
    *dilated(
        "place counted from the start of the sequence instead of the segment",
        covers=lambda p, w, r, offset: p % r == offset % r,
    ),
    *dilated(
        "dilation rate one too small",
        of=_each(lambda problem, dilation, head, branch: (branch[0], max(1, branch[1] - 1), branch[2])),
    ),
    *dilated(
        "dilation rate one too large",
        of=_each(lambda problem, dilation, head, branch: (branch[0], branch[1] + 1, branch[2])),
    ),
    *dilated(
        "segments one token too long",
        of=_each(lambda problem, dilation, head, branch: (branch[0] + 1, *branch[1:])),
    ),
    *dilated(
        "segments one token too short",
        of=_each(lambda problem, dilation, head, branch: (max(1, branch[0] - 1), *branch[1:])),
    ),
    *dilated("segments begin one token late", segment=lambda p, w: (p + 1) // w),
    *dilated("split heads: unequal head groups cut at i times their own size", of=_overlapping),
    *dilated(
        "split heads: groups cut in proportion, h · G // H", of=_split(lambda head, heads, count: head * count // heads)
    ),
    *dilated("split heads: branches dealt out in turn, h % G", of=_split(lambda head, heads, count: head % count)),
    *dilated("only the first branch is run", of=_first_branch),
]


def _alone(at: Visit) -> Counts:
    """The rate ignored in a group, and kept on one rank."""
    return _UNDILATED(at) if at.scene.size > 1 else STEPS.pattern(at)


def _own_left_out(at: Visit) -> Counts:
    """Causal segments that reach beyond a shard do not see the own one."""
    m, dilation = STEPS.pattern(at), at.problem.dilation
    if dilation is None or not at.problem.causal or at.owner != at.rank or at.scene.size == 1:
        return m
    return m * (max(w for w, _ in dilation.branches) <= len(at.j))


_UNDILATED = DILATION[0].steps.pattern
DILATION += [
    Suspicion("dilation is off on several ranks: its rate is ignored", replace(STEPS, pattern=_alone)),
    Suspicion(
        "causal segments longer than a shard leave the rank's own keys out", replace(STEPS, pattern=_own_left_out)
    ),
]
