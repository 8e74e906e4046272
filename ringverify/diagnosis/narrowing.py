"""Hypotheses of precision: computed in a narrower dtype than that of the inputs, or rounded to one in the end.

Rounding cannot be predicted digit by digit, so these hypotheses have no steps but a judge. What is computed in float32
is returned as numbers that float32 holds, whatever their dtype, and is off by no more than float32 allows; a result
that is wrong for another reason is neither. The same holds for a right result that is rounded to a narrower dtype than
the one in which it is returned. Where a coarser dtype holds the wrong numbers too, it is not this one that is named.
Sums over ranks in the input dtype (`SUMMED`) are predicted by steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ringref.problem import DtypeName
from ringref.rounding import UNIT_ROUNDOFF, Pipeline, allowed_error, margins
from ringverify.cases.inputs import round_to
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.pairs import pairs_of
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.undefined import Blocks
from ringverify.diagnosis.where import wrong_elements, wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.precision import summed_in_input_dtype
from ringverify.faults.ring import STEPS

TENSORS: tuple[tuple[TensorName, ...], ...] = (("out", "lse"), ("dq", "dk", "dv"))


COARSE = {"float32": 11, "float16": 8, "bfloat16": 4}
"""Significant bits with which the numbers of a dtype are those of a coarser one: float16, bfloat16, an 8-bit dtype."""

ENOUGH = 4
"""Different wrong numbers of which it is no chance that a coarser dtype holds them all."""


def _coarser(narrow: DtypeName, numbers: Array) -> bool:
    """Whether a coarser dtype holds wrong numbers too, so that it would be too narrow a cause to name this one."""
    some = np.unique(numbers[np.isfinite(numbers) & (numbers != 0)])
    significands = np.ldexp(np.frexp(some)[0], COARSE[narrow])
    return len(some) >= ENOUGH and bool((significands == np.rint(significands)).all())


def _judge(narrow: DtypeName, tensors: tuple[TensorName, ...], *, computed: bool) -> Callable[[Scene], float | None]:
    """Judge whether these results were computed in a narrower dtype, or only rounded to it; the others are right."""

    def limits_of(scene: Scene, name: TensorName, rank: int) -> Array:
        if not computed:
            limit = scene.limit(name, rank)
            return limit + UNIT_ROUNDOFF[narrow] * (np.abs(scene.true(name, rank)) + limit)
        lse_dtype: DtypeName = "float64" if narrow == "float64" else "float32"
        pipeline = Pipeline(narrow, narrow, lse_dtype=lse_dtype, blocks=scene.size)
        problem, t, x = scene.problem.replace(dtype=narrow), scene.truth, scene.inputs
        allowed = scene.once(narrow, lambda: allowed_error(problem, t, x.q, x.k, x.v, x.dout, x.dlse, pipeline))
        return scene.local(name, getattr(allowed, name), rank)

    def judge(scene: Scene) -> float | None:
        worst, dtype = 0.0, scene.problem.dtype
        off: list[Array] = []
        for name in scene.tensors:
            for rank in range(scene.size):
                if name not in tensors or UNIT_ROUNDOFF[narrow] <= UNIT_ROUNDOFF[dtype]:
                    if wrong_elements(scene, name, rank).any():
                        return None
                    continue
                seen, true, limit = scene.seen(name, rank), scene.true(name, rank), limits_of(scene, name, rank)
                with np.errstate(all="ignore"):
                    margin = margins(seen, true, limit, narrow if computed else dtype)
                    if not (round_to(seen, narrow) == seen).all() or (margin > 1).any():
                        return None
                    worst = max(worst, float(np.abs(np.where(seen == true, 0.0, seen - true)).max(initial=0.0)))
                    off.append(seen[wrong_elements(scene, name, rank)])
        return None if off and _coarser(narrow, np.concatenate(off)) else worst

    return judge


def _narrowed(narrow: DtypeName, what: str, tensors: tuple[TensorName, ...]) -> Hypothesis:
    says = f"{what} computed in {narrow}: every returned value is one of {narrow}, with errors of its rounding"
    return Hypothesis(says, STEPS, judge=_judge(narrow, tensors, computed=True))


def _rounded(narrow: DtypeName, tensor: TensorName) -> Hypothesis:
    says = f"{tensor} is rounded to {narrow}, whatever dtype it is returned in: all its numbers are of {narrow}"
    return Hypothesis(says, STEPS, judge=_judge(narrow, (tensor,), computed=False))


def _says_summed(scene: Scene) -> str:
    return f"dk and dv are summed over ranks in {scene.problem.dtype}, as the backward of an all-gather does"


SUMMED: list[Hypothesis] = [
    Hypothesis(_says_summed, summed_in_input_dtype(step_by_step=step_by_step)) for step_by_step in (True, False)
]
NARROWED: list[Hypothesis] = [
    found
    for narrow in ("bfloat16", "float16", "float32")
    for found in (
        _narrowed(narrow, "inputs of a wider dtype are", (*TENSORS[0], *TENSORS[1])),
        _narrowed(narrow, "gradients of inputs of a wider dtype are", TENSORS[1]),
        _narrowed(narrow, "dk and dv of inputs of a wider dtype are", ("dk", "dv")),
    )
]
NARROWED += [_rounded(narrow, tensor) for narrow in ("bfloat16", "float16") for tensor in ("out", "dq", "dk", "dv")]

NEAR = 2.0**-22
"""How near to a number of the input dtype a sum of exponentials has to be, times 1 + |maximum| + |lse|."""


def _judge_total(scene: Scene) -> float | None:
    """Judge whether sums of exponentials are numbers of the input dtype, whichever way they were added up.

    Gradients that start from them are off too; they are not looked at.
    """
    dtype, inner, sinks = scene.problem.dtype, scene.truth.intermediates, scene.inputs.sinks
    if dtype not in COARSE or dtype == "float32" or "lse" not in wrong_tensors(scene):
        return None if wrong_tensors(scene) else 0.0
    top = np.where(inner.m > 0, inner.scores, -np.inf).max(axis=-1, initial=-np.inf)
    sunk = np.full(top.shape, -np.inf) if sinks is None else np.broadcast_to(sinks[:, None], top.shape)
    top = np.maximum(top, sunk)
    tiles = UNIT_ROUNDOFF[dtype] * np.maximum(1, (inner.m > 0).sum(axis=-1))
    worst, largest = 0.0, np.abs(scene.inputs.v).max(initial=0.0, where=np.isfinite(scene.inputs.v))
    for rank in range(scene.size):
        seen, true = scene.seen("lse", rank), scene.true("lse", rank)
        most, sink, off = (scene.local("lse", x, rank) for x in (top, sunk, tiles))
        there = true > sink
        with np.errstate(all="ignore"):
            total, right, of_sink = (np.exp(x - most) for x in (seen, true, sink))
            near = NEAR * (1 + np.abs(most) + np.abs(true)) * total
            kept = total - of_sink
            as_kept = (np.abs(kept - round_to(kept, dtype)) <= near) & (
                np.abs(total - right) <= off * (right - of_sink) + near
            )
            if not np.where(there, as_kept, (seen == true) | (np.abs(total - right) <= near)).all():
                return None
            share = np.where(there, right / total, 1.0).swapaxes(1, 2)[..., None]
            out, limit = scene.true("out", rank) * share, scene.limit("out", rank)
            limit = limit + off.swapaxes(1, 2)[..., None] * largest
            if (margins(scene.seen("out", rank), out, limit, dtype) > 1).any():
                return None
            worst = max(worst, float(np.abs(np.where(there, kept - round_to(kept, dtype), 0.0)).max(initial=0.0)))
    return worst


NARROWED.append(
    Hypothesis(
        "the sum of exponentials is kept in the input dtype: exp(lse - maximum) is one of its numbers in every row",
        STEPS,
        allowed_by=("accumulates",),
        judge=_judge_total,
    )
)


def _judge_in_float32(concerned: Callable[[Scene], Array]) -> Callable[[Scene], float | None]:
    """Judge whether float64 results are off by roundings of float32, out and lse in some rows alone, `(B, H, Nq)`."""

    def judge(scene: Scene) -> float | None:
        wrong = bool(wrong_tensors(scene))
        if scene.problem.dtype != "float64" or scene.pipeline.sums != "float64":
            return None if wrong else 0.0
        rows = concerned(scene)
        wider, worst = UNIT_ROUNDOFF["float32"] / UNIT_ROUNDOFF["float64"], 0.0
        off: list[Array] = []
        for name in scene.tensors:
            for rank in range(scene.size):
                seen, true, limit = scene.seen(name, rank), scene.true(name, rank), scene.limit(name, rank)
                if (margins(seen, true, wider * limit, "float64") > 1).any():
                    return None
                there = wrong_elements(scene, name, rank)
                if name in ("out", "lse"):
                    right = scene.local("lse", rows, rank) == 0
                    if (there & (right if name == "lse" else right.swapaxes(1, 2)[..., None])).any():
                        return None
                off.append(seen[there])
                worst = max(worst, float(np.abs(np.where(there, seen - true, 0.0)).max(initial=0.0)))
        return None if wrong and bool((round_to(some := np.concatenate(off), "float32") == some).all()) else worst

    return judge


def _of_several_blocks(scene: Scene) -> Array:
    several: Array = ((Blocks(pairs_of(scene)).of_row > 0).sum(axis=-1) > 1).astype(float)
    return several


def _of_a_softcap(scene: Scene) -> Array:
    return np.full(scene.truth.lse.shape, float(scene.problem.softcap is not None))


NARROWED += [
    Hypothesis(
        "parts of blocks, or the weights with which they are merged, are computed in float32: results of one block are "
        "right, and those of several are off by its rounding",
        STEPS,
        judge=_judge_in_float32(_of_several_blocks),
    ),
    Hypothesis(
        "the softcap is computed in float32: without one results are right, and with one they are off by its rounding",
        STEPS,
        judge=_judge_in_float32(_of_a_softcap),
    ),
]
