"""`invariants`: identities of attention that hold for all inputs; results are compared with each other, not the oracle.

1. Linear in V: with v multiplied by -2, out is multiplied by -2, bit for bit, and lse does not change. The factor is -1
   in float16, and beside a sink, which may leave almost no weight to keys: small (subnormal) results round differently
   when they are doubled.
2. Adjoint in V: out is linear in v, so the sum of dout * out over all ranks equals the sum of dv * v.
3. Shift: a vector w added to all keys adds scale * q.w to all scores of a row. Its lse moves by that, and out does not
   change. Checked without softcap and sinks, where the shifted keys are exact in the dtype.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ringref.rounding import margins, rounding_of_wrong
from ringverify.cases.case import Case
from ringverify.cases.comparing import (
    allowed,
    allowed_between,
    allowed_on,
    answer,
    gathered,
    other_run,
    pipeline_of,
    worst,
)
from ringverify.cases.inputs import Inputs, make_inputs, round_to
from ringverify.cases.running import Observation, Runner
from ringverify.cases.strategies import Scope, cases, widest, within
from ringverify.events import TensorName
from ringverify.implementation import Capabilities
from ringverify.properties.property import Judgement, Property, Violation, all_tensors, always, failed, undefined

Array = NDArray[np.float64]


def _judge(case: Case, runner: Runner) -> Judgement:
    c = runner.capabilities
    inputs = make_inputs(case)
    plain = runner.run(case, gradients=c.gradients)
    factor = -1 if case.problem.dtype == "float16" or case.problem.sinks else -2
    # With gradients if the first run has them: bits are compared, and inference may sum in another order.
    scaled = runner.run(case, gradients=c.gradients, inputs=dataclasses.replace(inputs, v=factor * inputs.v))
    step = np.full(case.problem.head_dim, 0.5)
    moved = dataclasses.replace(inputs, k=round_to(inputs.k + step, case.problem.dtype))
    shifted = runner.run(case, gradients=False, inputs=moved)
    if (judgement := failed(plain, scaled, shifted)) is not None:
        return judgement
    violation = _not_linear(plain, scaled, factor)
    margin = 0.0
    if violation is None and c.gradients:
        margin, violation = _not_adjoint(case, runner, plain)
    # Only the scores of keys are shifted: beside a sink, out and lse change in another way.
    plain_scores = case.problem.softcap is None and not case.problem.sinks
    if violation is None and plain_scores and np.array_equal(moved.k, inputs.k + step):
        margin_of_shift, violation = _not_shifted(case, runner, plain, shifted, moved, step)
        margin = max(margin, margin_of_shift)
    if violation is not None:
        runs = ((plain, ""), (scaled, f" with {factor} v"), (shifted, " with 0.5 added to all elements of k"))
        violation = next(filter(None, (_undefined(seen, how) for seen, how in runs)), violation)
    return Judgement(margin, violation, plain.digest)


def _undefined(seen: Observation, how: str) -> Violation | None:
    """Return a violation if a result that is compared has NaN or infinities: no identity holds of those."""
    compared: tuple[TensorName, ...] = ("out", "lse", "dv")
    for name in compared:
        if told := undefined(seen, name):
            return Violation(("undefined", name), None, f"{name}{how} has {told}")
    return None


def _not_linear(plain: Observation, scaled: Observation, factor: int) -> Violation | None:
    for rank, (one, other) in enumerate(zip(plain.ranks, scaled.ranks, strict=True)):
        if not np.array_equal(other.out, factor * one.out):
            summary = f"out on rank {rank} is not linear in v: {factor} v does not give {factor} out"
            return Violation(("linear", "out"), rank, summary)
        if one.lse is not None and other.lse is not None and not np.array_equal(one.lse, other.lse):
            return Violation(("linear", "lse"), rank, f"lse on rank {rank} depends on v")
    return None


def _not_adjoint(case: Case, runner: Runner, plain: Observation) -> tuple[float, Violation | None]:
    """Compare the sum of dout * out with the sum of dv * v, within what the errors allowed in out and dv add up to."""
    c, inputs, truth = runner.capabilities, make_inputs(case), answer(case)
    pipeline = pipeline_of(case, c, plain)
    bound = allowed(case, pipeline)
    out, dv = (gathered(case, c, plain, name) for name in ("out", "dv"))
    with np.errstate(all="ignore"):  # what came back may be no number
        left, right, limit = float((inputs.dout * out).sum()), float((inputs.v * dv).sum()), 0.0
    for weight, actual, exact, errors in ((inputs.dout, out, truth.out, bound.out), (inputs.v, dv, truth.dv, bound.dv)):
        assert exact is not None
        assert errors is not None
        wrong = np.abs(actual - exact)
        finite = np.isfinite(wrong) & (wrong > errors)
        limit += float((np.abs(weight) * errors).sum())
        limit += rounding_of_wrong(float((np.abs(weight)[finite] * wrong[finite]).sum()), pipeline)
    margin = float(margins(np.array(left), np.array(right), np.array(limit), "float64"))
    if margin <= 1:
        return margin, None
    summary = f"the sum of dout * out is {left:.6g}, that of dv * v is {right:.6g}: dv is not the adjoint of out in v"
    return margin, Violation(("adjoint",), None, summary)


def _not_shifted(
    case: Case, runner: Runner, plain: Observation, shifted: Observation, moved: Inputs, step: Array
) -> tuple[float, Violation | None]:
    """Check that with keys moved by `step` out does not change and lse moves by scale * q.step."""
    c, p = runner.capabilities, case.problem
    pipeline = pipeline_of(case, c, plain)
    names = all_tensors(c, gradients=False)
    results, expected = ({name: gathered(case, c, seen, name) for name in names} for seen in (shifted, plain))
    truth, shift = answer(case), p.scale_value * (moved.q @ step).transpose(0, 2, 1)
    if c.lse:
        expected["lse"] += shift
    bound = allowed_between(allowed(case, pipeline), allowed_on(case, moved, pipeline))
    right = other_run(results, expected, dataclasses.replace(truth, lse=truth.lse + shift), bound, pipeline)
    margin, finding = worst(case, c, shifted, names, right)
    if finding is None:
        return margin, None
    should = "move by scale * 0.5 * sum(q)" if finding.tensor == "lse" else "stay the same"
    summary = f"{finding.tensor} on rank {finding.rank} does not {should} when 0.5 is added to all elements of k"
    return margin, Violation(("shift", finding.tensor), finding.rank, summary, "", finding)


def _scope(c: Capabilities) -> Scope:
    """Families of values whose scores stay in range when they are shifted."""
    return Scope(dtypes=widest(c), values=("normal", "integers", "dominating_key"))


INVARIANTS = Property(
    id="invariants",
    meaning=(
        "out is linear in v, dv is its adjoint, and a constant added to all keys moves lse by the right amount and out "
        "not at all (no oracle involved)"
    ),
    examples=60,
    cases=lambda c: cases(c, _scope(c)),
    judge=_judge,
    unsupported=always,
    applies=lambda case, c: within(case, c, _scope(c)),
)
