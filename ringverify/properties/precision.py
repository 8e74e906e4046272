"""`precision`: in low precision, no more rounding than the implementation declares.

A bound on each element that holds for every input is so wide that even a bfloat16 accumulator stays within it. A mean
over many elements is not: rounding a result once more than declared doubles its mean squared error, and rounding the
running sum of two blocks raises it by half.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringref.emulation import emulate
from ringref.problem import DtypeName, Problem
from ringref.rounding import Pipeline, precision_allowed, rms_error, unit_in_words
from ringverify.cases.case import SEEDS, Case
from ringverify.cases.choices import Choices, Maker
from ringverify.cases.comparing import QKV_GRADIENTS, allowed, answer, gathered, pipeline_of
from ringverify.cases.inputs import make_inputs
from ringverify.cases.running import Observation, Runner, shards
from ringverify.cases.shapes import fitted
from ringverify.cases.strategies import affordable_world_sizes, declared_world_sizes
from ringverify.events import TensorName
from ringverify.implementation import Capabilities, sharding_name
from ringverify.properties.property import CAUSALS, Judgement, Property, Violation, failed

Array = NDArray[np.float64]

LOW: tuple[DtypeName, ...] = ("bfloat16", "float16")
DIMS = (8, 16)
FEWEST = 100
"""Smallest number of rows over which a mean is judged."""


def _judge(case: Case, runner: Runner) -> Judgement:
    c = runner.capabilities
    observation = runner.run(case, gradients=c.gradients)
    if (judgement := failed(observation)) is not None:
        return judgement
    truth, pipeline = answer(case), pipeline_of(case, c, observation)
    bounds, limits = allowed(case, pipeline), rms_limits(case, c, pipeline)
    largest, violation = 0.0, None
    for name, limit in limits.items():
        actual = gathered(case, c, observation, name)
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
    """Return the root mean square error allowed in each result, in units of u of its dtype.

    Results with fewer than `FEWEST` rows to average are left out.
    """
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
    """Return whether the mean errors of out and gradients over some cases are as small as the declared pipeline's.

    Each error is divided by the error allowed for its element: relative to a value that cancels it would say nothing.
    Calls on a cache have no gradients.
    """
    names: tuple[TensorName, ...] = ("out", "dq", "dk", "dv") if c.gradients else ("out",)
    runs = [one for _, one in seen if one.failure is None]
    for name in [name for name in names if all(getattr(one.ranks[0], name) is not None for one in runs)]:
        found: list[Array] = []
        declared: list[Array] = []
        rows = 0
        for case, observation in seen:
            if observation.failure is not None:
                return False
            x, exact, pipeline = make_inputs(case), getattr(answer(case), name), pipeline_of(case, c, observation)
            emulated = emulate(case.problem, x.q, x.k, x.v, x.dout, pipeline, shards(case, c)[0])
            bound = getattr(allowed(case, pipeline), name)
            there = bound > 0
            with np.errstate(all="ignore"):  # an infinity or a NaN is no rounding error, and fails below
                found.append(((gathered(case, c, observation, name) - exact)[there] / bound[there]) ** 2)
                declared.append(((getattr(emulated, name) - exact)[there] / bound[there]) ** 2)
            rows += int(there.any(axis=-1).sum())
        means = [float(np.sqrt(np.concatenate(errors).mean())) if rows else 0.0 for errors in (found, declared)]
        # With sums in the input dtype weights are rounded to it too, before or after they are normalised.
        if not means[0] <= precision_allowed(means[1], rows, "input"):
            return False
    return True


def _sizes(c: Capabilities) -> list[int]:
    """World sizes of several ranks where declared: every hop that rounds adds to the mean error. Else one size."""
    return [size for size in affordable_world_sizes(c, (2, 4, 8)) if size <= 8] or [declared_world_sizes(c, (1,))[0]]


def _case(c: Capabilities, size: int, sharding: str, dtype: DtypeName, causal: bool, dim: int, seed: int) -> Case:
    """Return a case of about 48 positions, long enough for a mean."""
    length = 2 * size * (48 // (2 * size) or 1)
    problem = Problem(batch=1, query_length=length, heads=4, head_dim=dim, dtype=dtype, causal=causal)
    return fitted(Case(problem=problem, sharding=sharding, world_size=size, values="normal", seed=seed), c)


def each_kind(c: Capabilities, dtype: DtypeName) -> list[Case]:
    """Return a case in `dtype` for every world size, causality and head_dim that is drawn; shardings take turns."""
    kinds = itertools.product(_sizes(c), CAUSALS[c.causal], DIMS)
    shardings = itertools.cycle([sharding_name(sharding) for sharding in c.shardings])
    return [_case(c, size, next(shardings), dtype, causal, dim, seed) for seed, (size, causal, dim) in enumerate(kinds)]


def _cases(c: Capabilities) -> Maker[Case]:
    def make(choices: Choices) -> Case:
        size, sharding = choices.among(_sizes(c)), sharding_name(choices.among(c.shardings))
        dtype = choices.among([dtype for dtype in LOW if dtype in c.dtypes])
        causal, dim = choices.among(CAUSALS[c.causal]), choices.among(DIMS)
        return _case(c, size, sharding, dtype, causal, dim, seed=choices.integer(0, SEEDS - 1))

    return make


def _in_low_precision(case: Case, c: Capabilities) -> bool:
    """Return whether `_cases` could draw this case; with fewer elements or in full precision a mean says nothing.

    One rank is never drawn where there are several, but tells whether it takes more than one.
    """
    p = case.problem
    if p.dtype not in LOW or case.world_size not in {*_sizes(c), *declared_world_sizes(c, (1,))}:
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
    results=("out", *QKV_GRADIENTS),
)
