"""`precision`: in low precision, no more rounding than the implementation declares.

A bound that holds for every input has to leave room that a bfloat16 accumulator fits in. A statistic over many elements
does not: rounding once more than declared makes the mean squared error half as large again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ringref.emulation import emulate
from ringref.problem import DtypeName, Problem
from ringref.rounding import Pipeline, precision_allowed, rms_error, unit_in_words
from ringverify.cases.case import SEEDS, Case
from ringverify.cases.comparing import TensorName, allowed, answer, pipeline_of
from ringverify.cases.inputs import make_inputs
from ringverify.cases.running import Observation, Runner, shards
from ringverify.cases.shapes import fitted
from ringverify.cases.strategies import affordable_world_sizes, declared_world_sizes
from ringverify.implementation import Capabilities, sharding_name
from ringverify.properties.property import Judgement, Property, Violation, violation_of

Array = NDArray[np.float64]

LOW: tuple[DtypeName, ...] = ("bfloat16", "float16")
DIMS = (8, 16)
FEWEST = 100
"""Rows below which a mean says too little."""


def _judge(case: Case, runner: Runner) -> Judgement:
    c = runner.capabilities
    observation = runner.run(case, gradients=c.gradients)
    if observation.failure is not None:
        return Judgement(0.0, violation_of(observation), observation.digest)
    truth, pipeline = answer(case), pipeline_of(case, c, observation)
    bounds, limits = allowed(case, pipeline), rms_limits(case, c, pipeline)
    largest, violation = 0.0, None
    for name, limit in limits.items():
        actual = _gathered(case, c, observation, name)
        rho, _ = rms_error(actual, getattr(truth, name), case.problem.dtype, getattr(bounds, name))
        margin = rho / limit if np.isfinite(rho) else np.inf
        if margin > largest:
            largest = margin
            if margin > 1:
                summary = (
                    f"{name} in {case.problem.dtype} is rounded more than declared: root mean square error "
                    f"{rho:.3g} u, where the declared pipeline's is at most {limit:.3g} u "
                    f"({unit_in_words(case.problem.dtype)})"
                )
                violation = Violation(("precision", name), None, summary)
    return Judgement(float(largest), violation, observation.digest, applies=bool(limits))


def rms_limits(case: Case, c: Capabilities, pipeline: Pipeline) -> dict[TensorName, float]:
    """The largest root mean square error of each result, in u of its dtype; only where enough rows can be averaged."""
    x, truth, bounds = make_inputs(case), answer(case), allowed(case, pipeline)
    queries, _ = shards(case, c)
    emulated = emulate(case.problem, x.q, x.k, x.v, x.dout, pipeline, queries)
    names: tuple[TensorName, ...] = ("out", "dq", "dk", "dv") if c.gradients else ("out",)
    found: dict[TensorName, float] = {}
    for name in names:
        exact, bound = getattr(truth, name), getattr(bounds, name)
        declared, rows = rms_error(getattr(emulated, name), exact, case.problem.dtype, bound)
        if rows >= FEWEST:
            found[name] = precision_allowed(declared, rows, pipeline.probabilities)
    return found


def errs_as_declared(seen: Sequence[tuple[Case, Observation]], c: Capabilities) -> bool:
    """Whether out and gradients are off, in the mean over some cases, by no more than the declared pipeline's.

    However few their rows are: a mean of few may lie further off, which is allowed for.
    """
    names: tuple[TensorName, ...] = ("out", "dq", "dk", "dv") if c.gradients else ("out",)
    squares = {(name, whose): 0.0 for name in names for whose in ("seen", "declared")}
    rows, probabilities = dict.fromkeys(names, 0), c.probabilities
    for case, observation in seen:
        if observation.failure is not None:
            return False
        x, truth, pipeline = make_inputs(case), answer(case), pipeline_of(case, c, observation)
        emulated = emulate(case.problem, x.q, x.k, x.v, x.dout, pipeline, shards(case, c)[0])
        for name in names:
            exact, bound = getattr(truth, name), getattr(allowed(case, pipeline), name)
            whole = {"seen": _gathered(case, c, observation, name), "declared": getattr(emulated, name)}
            for whose, values in whole.items():
                rho, count = rms_error(values, exact, case.problem.dtype, bound)
                squares[name, whose] += count * rho**2
            rows[name] += count
    there = [name for name in names if rows[name]]
    means = {key: float(np.sqrt(total / rows[key[0]])) for key, total in squares.items() if key[0] in there}
    return all(
        means[name, "seen"] <= precision_allowed(means[name, "declared"], rows[name], probabilities) for name in there
    )


def _gathered(case: Case, c: Capabilities, observation: Observation, name: TensorName) -> Array:
    queries, keys = shards(case, c)
    rows_of = keys if name in ("dk", "dv") else queries
    whole: Array = np.zeros_like(getattr(answer(case), name))
    for rank, result in enumerate(observation.ranks):
        whole[:, rows_of[rank]] = getattr(result, name)
    return whole


def _sizes(c: Capabilities) -> list[int]:
    """Several ranks, where they are declared: every hop that rounds adds to the mean."""
    return [size for size in affordable_world_sizes(c, (2, 4, 8)) if size <= 8] or [declared_world_sizes(c, (1,))[0]]


def _case(c: Capabilities, size: int, sharding: str, dtype: DtypeName, causal: bool, dim: int, seed: int) -> Case:
    """A case long enough for a mean."""
    length = 2 * size * (48 // (2 * size) or 1)
    problem = Problem(batch=1, query_length=length, heads=4, head_dim=dim, dtype=dtype, causal=causal)
    return fitted(Case(problem=problem, sharding=sharding, world_size=size, values="normal", seed=seed), c)


def _cases(c: Capabilities) -> st.SearchStrategy[Case]:
    causals = {"both": [False, True], "always": [True], "never": [False]}[c.causal]
    return st.builds(
        _case,
        st.just(c),
        st.sampled_from(_sizes(c)),
        st.sampled_from([sharding_name(sharding) for sharding in c.shardings]),
        st.sampled_from([dtype for dtype in LOW if dtype in c.dtypes]),
        st.sampled_from(causals),
        st.sampled_from(DIMS),
        st.integers(0, SEEDS - 1),
    )


def _in_low_precision(case: Case, c: Capabilities) -> bool:
    """Whether it is one of the cases drawn above: of fewer elements, or in full precision, a mean says nothing."""
    p = case.problem
    if p.dtype not in LOW or case.world_size not in _sizes(c):
        return False
    return any(case == _case(c, case.world_size, case.sharding, p.dtype, p.causal, dim, case.seed) for dim in DIMS)


def _full_precision_only(c: Capabilities) -> str | None:
    return None if set(LOW) & set(c.dtypes) else "neither bfloat16 nor float16 is declared"


PRECISION = Property(
    id="precision",
    meaning="in bfloat16 and float16, no more rounding than declared, over the mean of all elements",
    examples=20,
    cases=_cases,
    judge=_judge,
    unsupported=_full_precision_only,
    applies=_in_low_precision,
)
