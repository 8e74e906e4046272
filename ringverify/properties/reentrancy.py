"""`reentrancy`: calls that overlap in training do not influence each other.

1. Two layers share one implementation: both forwards run before the first backward. Their masks may differ.
2. A graph that is retained is differentiated twice.

In each of these a call returns what it returns alone, and later calls do not overwrite its output.

A second backward may be refused, since some backwards free what was saved and training rarely needs a second one. But
the refusal has to be a `RuntimeError` that speaks of a second backward, as autograd's own does. Wrong gradients, or any
other exception, break the property.

After a call has returned, none of its threads communicates, since its messages could be taken for those of the next
call; and calls do not each leave a further process group behind. A group that is made once and kept is fine, and so
are threads that wait for work.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from ringverify.cases.case import Case
from ringverify.cases.reentering import Reentered, Step, next_of, reenter
from ringverify.cases.running import Observation, Runner
from ringverify.cases.strategies import Scope, cases, widest, within
from ringverify.implementation import Capabilities
from ringverify.properties.property import (
    Judgement,
    Property,
    Violation,
    always,
    failed,
    judge_everything,
    judged_where,
)

_WHEN: dict[Step, str] = {
    "first": "a second call came between its forward and its backward",
    "second": "its forward runs before the backward of the previous call",
    "again": "the backward runs a second time (retain_graph=True)",
}
"""The unusual condition of each step, for messages; in the order in which the steps are judged."""

_TOLD: dict[Step, tuple[str, str]] = {
    "first": (
        "what a forward keeps for its backward is replaced by the forward of a second call",
        "another call between its forward and its backward",
    ),
    "second": (
        "what a backward reads is that of the call before it: as its forward left it, or its backward",
        "its forward before the backward of an earlier call",
    ),
    "again": (
        "the backward changes what the forward kept for it: the second time it computes with something else",
        "a second backward through the same graph",
    ),
}
"""What is done wrongly where gradients alone are wrong in a step, and what it takes."""

MASKS = ("documents", "key_lengths", "window")
"""What the mask of a second call may differ in."""


def _judge(case: Case, runner: Runner) -> Judgement:
    c = runner.capabilities
    steps, ended, seen = reenter(runner, case, gradients=c.gradients)
    if (judgement := failed(ended)) is not None:
        return dataclasses.replace(judgement, violation=_told_apart(case, judgement.violation, runner))
    largest = 0.0
    if (violation := _goes_on(seen)) is not None:
        return Judgement(0.0, violation, ended.digest)
    for step, when in _WHEN.items():
        if step in steps:
            of = case if step in ("first", "again") else next_of(case)
            judgement = judged_where(of, runner, steps[step], when=when)
            if (violation := judgement.violation) is not None:
                return dataclasses.replace(judgement, violation=_told(case, of, step, violation, runner))
            largest = max(largest, judgement.margin)
    violation = _overwritten(steps["first"], steps["first_later"]) or _leaks(seen)
    return Judgement(largest, violation, ended.digest)


def _told_apart(case: Case, violation: Violation | None, runner: Runner) -> Violation | None:
    """Return how calls fail, with the cause that they disturb each other if each of them alone is right."""
    if violation is None or any(judge_everything(one, runner).violation is not None for one in (case, next_of(case))):
        return violation
    return dataclasses.replace(
        violation,
        cause=(
            "what a call keeps or has returned is used up, or written to, by the next call or backward: alone, each of "
            "them is right"
        ),
        needs="a second call before the backward of the first, or a second backward",
    )


def _told(case: Case, of: Case, step: Step, violation: Violation, runner: Runner) -> Violation:
    """Return a violation of a call among others with its cause, and perhaps what it takes, if alone it is right.

    Plans and masks are kept by shapes and group; batches differ in their documents, and layers in their window.
    """
    if violation.finding is None or not _right_alone(of, runner):
        return violation
    if not {"out", "lse"} & set(violation.finding.tensors):
        cause, needs = _TOLD[step]
        return dataclasses.replace(violation, cause=cause, needs=needs)
    other = next((name for name in MASKS if getattr(case.problem, name) != getattr(of.problem, name)), None)
    if other is None:
        return violation
    return dataclasses.replace(
        violation,
        cause=f"what an earlier call keeps is used again by one with other {other}",
        needs=f"an earlier call on the same group with other {other}",
    )


def _right_alone(case: Case, runner: Runner) -> bool:
    """Return whether a call is right in this process, or else in a fresh one, without what earlier ones have left."""
    if judge_everything(case, runner).violation is None:
        return True
    runner.world.close()
    return judge_everything(case, runner).violation is None


def _goes_on(seen: Sequence[Reentered]) -> Violation | None:
    """Return a violation if a thread communicates after its call has returned."""
    late = [rank for rank, one in enumerate(seen) if one.late]
    if not late:
        return None
    return Violation(("late",), late[0], f"a thread of rank {late[0]} communicates after its call has returned")


def _leaks(seen: Sequence[Reentered]) -> Violation | None:
    """Return a violation if every call, the first and each that follows, leaves a process group behind."""
    for rank, one in enumerate(seen):
        grown = [later - earlier for earlier, later in itertools.pairwise(one.groups)]
        if min(grown) > 0:
            summary = f"each call on rank {rank} leaves a process group behind: {sum(grown)} after {len(grown)} calls"
            return Violation(("leaked", "groups"), rank, summary)
    return None


def _overwritten(first: Observation, later: Observation) -> Violation | None:
    """Return a violation if what the first call returned has other bits after the calls that followed."""
    for rank, (was, now) in enumerate(zip(first.ranks, later.ranks, strict=True)):
        for name in ("out",) if was.lse is None else ("out", "lse"):
            if not np.array_equal(getattr(was, name), getattr(now, name), equal_nan=True):
                summary = f"{name} of the first call on rank {rank} is overwritten by calls that follow it"
                return Violation(("overwritten", name), rank, summary)
    return None


def _scope(c: Capabilities) -> Scope:
    return Scope(
        dtypes=widest(c),
        world_sizes=(1, 2, 3, 4),
        values=("normal", "integers"),
        cotangents=("out", "both", "lse") if c.lse_gradient else ("out",),
        longest=12,
    )


REENTRANCY = Property(
    id="reentrancy",
    meaning="overlapping calls and a second backward give the results of a single call",
    examples=50,
    cases=lambda c: cases(c, _scope(c)),
    judge=_judge,
    unsupported=always,
    applies=lambda case, c: within(case, c, _scope(c)),
    compared=lambda case, _: [case, next_of(case)],
)
