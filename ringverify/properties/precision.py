"""`precision`: in low precision, no more rounding than the implementation declares.

A bound that holds for every input has to leave room that a bfloat16 accumulator fits in. A statistic over many elements
does not: rounding once more than declared makes the mean squared error half as large again.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ringref.emulation import emulate
from ringref.problem import DtypeName, Problem
from ringref.rounding import Pipeline, precision_allowed, rms_error
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
FEWEST = 100
"""Rows below which a mean says too little."""


def _judge(case: Case, runner: Runner) -> Judgement:
    c = runner.capabilities
    observation = runner.run(case, gradients=c.gradients)
    if observation.failure is not None:
        return Judgement(0.0, violation_of(observation), observation.digest)
    truth, pipeline = answer(case), pipeline_of(case, c, observation)
    bounds, limits = allowed(case, pipeline), rms_limits(case, pipeline, gradients=c.gradients)
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
                    f"{rho:.3g} u, where the declared pipeline's is at most {limit:.3g} u"
                )
                violation = Violation(("precision", name), None, summary)
    return Judgement(float(largest), violation, observation.digest, applies=bool(limits))


def rms_limits(case: Case, pipeline: Pipeline, *, gradients: bool) -> dict[TensorName, float]:
    """The largest root mean square error of each result, in u of its dtype; only where enough rows can be averaged."""
    x, truth, bounds = make_inputs(case), answer(case), allowed(case, pipeline)
    emulated = emulate(case.problem, x.q, x.k, x.v, x.dout, pipeline)
    names: tuple[TensorName, ...] = ("out", "dq", "dk", "dv") if gradients else ("out",)
    found: dict[TensorName, float] = {}
    for name in names:
        exact, bound = getattr(truth, name), getattr(bounds, name)
        declared, rows = rms_error(getattr(emulated, name), exact, case.problem.dtype, bound)
        if rows >= FEWEST:
            found[name] = precision_allowed(declared, rows, pipeline.probabilities)
    return found


def _gathered(case: Case, c: Capabilities, observation: Observation, name: TensorName) -> Array:
    queries, keys = shards(case, c)
    rows_of = keys if name in ("dk", "dv") else queries
    whole: Array = np.zeros_like(getattr(answer(case), name))
    for rank, result in enumerate(observation.ranks):
        whole[:, rows_of[rank]] = getattr(result, name)
    return whole


def _cases(c: Capabilities) -> st.SearchStrategy[Case]:
    """Long enough for a mean, on several ranks: every hop that rounds adds to it."""
    causals = {"both": [False, True], "always": [True], "never": [False]}[c.causal]
    sizes = [size for size in affordable_world_sizes(c, (2, 4, 8)) if size <= 8] or [declared_world_sizes(c, (1,))[0]]

    def build(size: int, sharding: str, dtype: DtypeName, causal: bool, dim: int, seed: int) -> Case:
        length = 2 * size * (48 // (2 * size) or 1)
        problem = Problem(batch=1, query_length=length, heads=4, head_dim=dim, dtype=dtype, causal=causal)
        case = Case(problem=problem, sharding=sharding, world_size=size, values="normal", seed=seed)
        return fitted(case, c)

    return st.builds(
        build,
        st.sampled_from(sizes),
        st.sampled_from([sharding_name(sharding) for sharding in c.shardings]),
        st.sampled_from([dtype for dtype in LOW if dtype in c.dtypes]),
        st.sampled_from(causals),
        st.sampled_from([8, 16]),
        st.integers(0, SEEDS - 1),
    )


def _full_precision_only(c: Capabilities) -> str | None:
    return None if set(LOW) & set(c.dtypes) else "neither bfloat16 nor float16 is declared"


PRECISION = Property(
    id="precision",
    meaning="in bfloat16 and float16, no more rounding than declared, over the mean of all elements",
    examples=20,
    cases=_cases,
    judge=_judge,
    unsupported=_full_precision_only,
)
