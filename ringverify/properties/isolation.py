"""`isolation`: keys and values that a mask excludes do not influence the results.

1. Padding is NaN: beyond the key lengths and outside all documents memory holds whatever was there before, and 0 times
   NaN is NaN.
2. Under a causal mask the keys and values after a position are replaced by other, larger numbers: results up to that
   position may move by rounding only.

Keys that every query skips under a window or a dilation are ordinary numbers, and an implementation may multiply them
by 0. They are NaN only for one that declares `poison_safe`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ringverify.cases.case import POISONED, Case, Values
from ringverify.cases.comparing import Right, allowed, gathered, pipeline_of, worst
from ringverify.cases.inputs import Inputs, make_inputs, round_to
from ringverify.cases.running import Runner
from ringverify.cases.strategies import Scope, cases, widest, within
from ringverify.implementation import Capabilities
from ringverify.properties.property import Judgement, Property, Violation, all_tensors, failed, judge_everything

Array = NDArray[np.float64]


def _judge(case: Case, runner: Runner) -> Judgement:
    return judge_everything(case, runner) if case.values in POISONED else _judge_past(case, runner)


def _scope(c: Capabilities) -> Scope:
    return Scope(dtypes=widest(c), values=_values(c), want_empty_rows=True)


def _excludes(case: Case, c: Capabilities) -> bool:
    """Return whether a case has something that could leak: a NaN key, or keys after the middle under a causal mask."""
    p = case.problem
    if not within(case, c, _scope(c)):
        return False
    if case.values in POISONED:
        return bool(np.isnan(make_inputs(case).k).any())
    return p.causal and p.nq == p.nk and p.nq >= 2


def _judge_past(case: Case, runner: Runner) -> Judgement:
    """Check that out and lse at positions up to the middle do not move when keys and values after it change."""
    p, c = case.problem, runner.capabilities
    last = (p.nq - 1) // 2
    before = runner.run(case, gradients=False)
    after = runner.run(case, gradients=False, inputs=_with_another_future(case, last))
    if (judgement := failed(before, after)) is not None:
        return judgement
    bound = allowed(case, pipeline_of(case, c, before))
    later = np.where(np.arange(p.nq) > last, np.inf, 0.0)  # may be anything
    limit = dataclasses.replace(bound, out=2 * bound.out + later[:, None, None], lse=2 * bound.lse + later)
    names = all_tensors(c, gradients=False)
    right = Right(limit, **{name: gathered(case, c, before, name) for name in names})
    margin, finding = worst(case, c, after, names, right)
    if finding is None:
        return Judgement(margin, None, after.digest)
    summary = f"{finding.tensor} at position {finding.position} moves when only positions after {last} change"
    violation = Violation(("moves", finding.tensor), finding.rank, summary, "", finding)
    return Judgement(margin, violation, after.digest)


def _with_another_future(case: Case, last: int) -> Inputs:
    """Return the inputs with each key and value x after position `last` replaced by -3 x + 1."""
    inputs = make_inputs(case)

    def changed(values: Array) -> Array:
        moved = values.copy()
        moved[:, last + 1 :] = -3 * values[:, last + 1 :] + 1
        return round_to(moved, case.problem.dtype)

    return dataclasses.replace(inputs, k=changed(inputs.k), v=changed(inputs.v))


def _nothing_excluded(c: Capabilities) -> str | None:
    skips = c.poison_safe and (c.dilation or c.window)
    if c.causal != "never" or c.documents or c.key_lengths or skips:
        return None
    return (
        "needs a declared mask that excludes keys: causal, documents or key_lengths, or dilation or window with "
        "poison_safe=True"
    )


def _values(c: Capabilities) -> tuple[Values, ...]:
    """Families of values: finite ones to test causality; for half of the cases, where declared, one with NaN keys.

    "poisoned" has NaN in padding, "poisoned_skips" in every key that no query attends.
    """
    if c.poison_safe:
        return "normal", "dominating_key", "poisoned_skips", "poisoned_skips"
    if c.documents or c.key_lengths:
        return "normal", "dominating_key", "poisoned", "poisoned"
    return "normal", "dominating_key"


ISOLATION = Property(
    id="isolation",
    meaning="padding may hold NaN, and under a causal mask later keys and values do not change earlier results",
    examples=100,
    cases=lambda c: cases(c, _scope(c)),
    judge=_judge,
    unsupported=_nothing_excluded,
    applies=_excludes,
)
