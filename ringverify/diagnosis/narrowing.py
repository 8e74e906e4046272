"""Suspicions of precision: all is computed in a narrower dtype than that of the inputs.

Rounding cannot be predicted digit by digit. But whoever computes in float32 returns numbers of float32, in whatever
dtype, and off by no more than float32 allows; neither happens to a result that is wrong for another reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ringref.problem import DtypeName
from ringref.rounding import UNIT_ROUNDOFF, Pipeline, allowed_error, margins
from ringverify.cases.comparing import TensorName
from ringverify.cases.inputs import round_to
from ringverify.diagnosis.model import STEPS
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.suspicion import Suspicion
from ringverify.diagnosis.where import wrong_elements

TENSORS: tuple[tuple[TensorName, ...], ...] = (("out", "lse"), ("dq", "dk", "dv"))


def _computed_in(narrow: DtypeName, tensors: tuple[TensorName, ...]) -> Callable[[Scene], float | None]:
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


def _narrowed(narrow: DtypeName, what: str, tensors: tuple[TensorName, ...]) -> Suspicion:
    says = f"{what} computed in {narrow}: every number that comes back is one of {narrow}, and off by its rounding"
    return Suspicion(says, dataclasses.replace(STEPS), judge=_computed_in(narrow, tensors))


NARROWED: list[Suspicion] = [
    found
    for narrow in ("float32", "float16", "bfloat16")
    for found in (
        _narrowed(narrow, "wider inputs are", (*TENSORS[0], *TENSORS[1])),
        _narrowed(narrow, "gradients of wider inputs are", TENSORS[1]),
    )
]
