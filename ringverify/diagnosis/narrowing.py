"""Hypotheses of precision: computed in a narrower dtype than that of the inputs, or rounded to one in the end.

Rounding cannot be predicted digit by digit, so these hypotheses have no steps but a judge. What is computed in float32
is returned as numbers that float32 holds, whatever their dtype, and is off by no more than float32 allows; a result
that is wrong for another reason is neither. The same holds for a right result that is rounded to a narrower dtype than
the one in which it is returned. Sums over ranks in the input dtype (`SUMMED`) are predicted by steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ringref.problem import DtypeName
from ringref.rounding import UNIT_ROUNDOFF, Pipeline, allowed_error, margins
from ringverify.cases.inputs import round_to
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import wrong_elements
from ringverify.events import TensorName
from ringverify.faults.causes_of_gradients import summed_in_input_dtype
from ringverify.faults.ring import STEPS

TENSORS: tuple[tuple[TensorName, ...], ...] = (("out", "lse"), ("dq", "dk", "dv"))


def _computed_in(narrow: DtypeName, tensors: tuple[TensorName, ...]) -> Callable[[Scene], float | None]:
    """Judge whether these results were computed in a narrower dtype, and the others are right."""

    def judge(scene: Scene) -> float | None:
        worst = 0.0
        dtype = narrow if UNIT_ROUNDOFF[narrow] > UNIT_ROUNDOFF[scene.problem.dtype] else scene.problem.dtype
        pipeline = Pipeline(dtype, dtype, lse_dtype="float64" if dtype == "float64" else "float32", blocks=scene.size)
        t, x = scene.truth, scene.inputs
        problem = scene.problem.replace(dtype=dtype)
        limits = allowed_error(problem, t, x.q, x.k, x.v, x.dout, x.dlse, pipeline)
        for name in scene.tensors:
            for rank in range(scene.size):
                if name not in tensors or dtype == scene.problem.dtype:
                    if wrong_elements(scene, name, rank).any():
                        return None
                    continue
                seen, true = scene.seen(name, rank), scene.true(name, rank)
                limit = scene.local(name, getattr(limits, name), rank)
                with np.errstate(all="ignore"):
                    if not (round_to(seen, dtype) == seen).all() or (margins(seen, true, limit, dtype) > 1).any():
                        return None
                    worst = max(worst, float(np.abs(np.where(seen == true, 0.0, seen - true)).max(initial=0.0)))
        return worst

    return judge


def _narrowed(narrow: DtypeName, what: str, tensors: tuple[TensorName, ...]) -> Hypothesis:
    says = f"{what} computed in {narrow}: every number that comes back is one of {narrow}, and off by its rounding"
    return Hypothesis(says, STEPS, judge=_computed_in(narrow, tensors))


def _rounded_to(narrow: DtypeName, tensor: TensorName) -> Callable[[Scene], float | None]:
    """Judge whether one result was rounded to a narrower dtype, and the others are right."""

    def judge(scene: Scene) -> float | None:
        worst = 0.0
        dtype = scene.problem.dtype
        for name in scene.tensors:
            for rank in range(scene.size):
                if name != tensor or UNIT_ROUNDOFF[narrow] <= UNIT_ROUNDOFF[dtype]:
                    if wrong_elements(scene, name, rank).any():
                        return None
                    continue
                seen, true, limit = scene.seen(name, rank), scene.true(name, rank), scene.limit(name, rank)
                limit = limit + UNIT_ROUNDOFF[narrow] * (np.abs(true) + limit)
                with np.errstate(all="ignore"):
                    if not (round_to(seen, narrow) == seen).all() or (margins(seen, true, limit, dtype) > 1).any():
                        return None
                    worst = max(worst, float(np.abs(np.where(seen == true, 0.0, seen - true)).max(initial=0.0)))
        return worst

    return judge


def _rounded(narrow: DtypeName, tensor: TensorName) -> Hypothesis:
    says = f"{tensor} is rounded to {narrow}, whatever dtype it is returned in: all its numbers are of {narrow}"
    return Hypothesis(says, STEPS, judge=_rounded_to(narrow, tensor))


def _says_summed(scene: Scene) -> str:
    return f"dk and dv are summed over ranks in {scene.problem.dtype}, as the backward of an all-gather does"


SUMMED: list[Hypothesis] = [
    Hypothesis(_says_summed, summed_in_input_dtype(step_by_step=step_by_step)) for step_by_step in (True, False)
]
NARROWED: list[Hypothesis] = [
    found
    for narrow in ("float32", "float16", "bfloat16")
    for found in (
        _narrowed(narrow, "wider inputs are", (*TENSORS[0], *TENSORS[1])),
        _narrowed(narrow, "gradients of wider inputs are", TENSORS[1]),
    )
]
NARROWED += [_rounded(narrow, tensor) for narrow in ("bfloat16", "float16") for tensor in ("out", "dq", "dk", "dv")]
