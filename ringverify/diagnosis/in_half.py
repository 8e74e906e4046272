"""Hypotheses of what is computed in the 16-bit dtype of the inputs, where no way to write it gives its digits.

An error is then as large as the roundings allow, and only where they are: out and lse in rows that are merged, or
gradients of a right forward. An error in delta alone is one number a row, which dq and dk show alike.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from ringref.attention import per_key_head
from ringref.rounding import UNIT_ROUNDOFF, allowed_error, margins
from ringverify.diagnosis.gradients.terms import Terms, off, terms_of
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.narrowing import TENSORS
from ringverify.diagnosis.pairs import pairs_of
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.undefined import Blocks
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.ring import STEPS


def _with_keys_elsewhere(scene: Scene) -> Array:
    """Whether rows have keys on another rank than their own; where every rank has all queries, than the first."""
    blocks = Blocks(pairs_of(scene))
    elsewhere = np.arange(blocks.size) != blocks.rank
    found: Array = ((blocks.of_row > 0) & elsewhere).any(axis=-1).astype(float)
    return found


def _judge_merged(scene: Scene) -> float | None:
    """Judge whether out and lse are off by roundings of a 16-bit dtype in rows with keys on other ranks alone.

    A sum over P ranks of terms that are rounded to unit roundoff u, and rounded itself, is off by no more than
    (P + 1) u of the sum of their sizes. Gradients that start from it are not looked at.
    """
    dtype, wrong = scene.problem.dtype, wrong_tensors(scene)
    if dtype not in ("bfloat16", "float16") or scene.pipeline.sums != "float32" or not {"out", "lse"} & set(wrong):
        return None if set(wrong) & {"out", "lse"} or (wrong and dtype == "float32") else 0.0
    u = (scene.size + 1) * UNIT_ROUNDOFF[dtype]
    elsewhere, lse = _with_keys_elsewhere(scene), scene.truth.lse
    parts = np.abs(np.where(np.isfinite(lse), lse, 0.0)) + np.abs(scene.truth.intermediates.scores).max(
        axis=-1, initial=0.0, where=scene.truth.intermediates.m > 0
    )
    of_lse = elsewhere * u * (1 + parts)
    of_out = 2 * of_lse * np.abs(scene.inputs.v).max(initial=0.0, where=np.isfinite(scene.inputs.v))
    worst = 0.0
    for rank in range(scene.size):
        for name, more in (("lse", of_lse), ("out", of_out.swapaxes(1, 2)[..., None])):
            if name in scene.tensors:
                seen, true = scene.seen(name, rank), scene.true(name, rank)
                limit = scene.limit(name, rank) + scene.local(
                    name, np.broadcast_to(more, getattr(scene.truth, name).shape), rank
                )
                if (margins(seen, true, limit, scene.dtype_of(name)) > 1).any():
                    return None
                worst = max(worst, float(np.abs(np.where(seen == true, 0.0, seen - true)).max(initial=0.0)))
    return worst


MERGED = Hypothesis(
    "partial results of ranks are sent or merged in the dtype of the inputs: out and lse are off by its roundings in "
    "rows with keys on other ranks",
    STEPS,
    allowed_by=("accumulates", "probabilities"),
    judge=_judge_merged,
)
"""What is said of a merge whose digits no way to write it explains."""


def in_half(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield that what is wrong of 16-bit cases is computed in that dtype, where no way to write it gives its digits."""
    wrong = {name for scene in scenes for name in wrong_tensors(scene)}
    if wrong & {"out", "lse"}:
        yield MERGED
    if "out" in wrong and wrong <= {"out", "dq", "dk"}:
        yield Hypothesis(
            "weighted values are summed in the dtype of the inputs, or with weights of it: out is off by its "
            "roundings, right in rows of one key, and so is lse in all",
            STEPS,
            allowed_by=("accumulates", "probabilities"),
            judge=functools.partial(_judge_in_half, ("out",)),
        )
    elif wrong and not wrong & {"out", "lse"}:
        names: tuple[TensorName, ...] = tuple(name for name in TENSORS[1] if name in wrong)
        yield Hypothesis(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} computed in the dtype of the inputs, with "
            "sums, weights or delta that are rounded to it: off by its roundings, and out and lse are right",
            STEPS,
            allowed_by=("accumulates", "probabilities", "reduces"),
            judge=functools.partial(_judge_in_half, names),
        )


def _judge_in_half(names: tuple[TensorName, ...], scene: Scene) -> float | None:
    """Judge whether these are off by what sums and weights of a 16-bit dtype may be, and all before is right."""
    dtype, wrong = scene.problem.dtype, set(wrong_tensors(scene))
    if not wrong:
        return 0.0
    if dtype not in ("bfloat16", "float16") or not wrong <= {*names, *(TENSORS[1] if "out" in names else ())} - {"lse"}:
        return None
    pipeline = dataclasses.replace(scene.pipeline, accumulates=dtype, probabilities="input", reduces="input")
    t, x = scene.truth, scene.inputs
    allowed = scene.once(
        ("in half", dtype), lambda: allowed_error(scene.problem, t, x.q, x.k, x.v, x.dout, x.dlse, pipeline)
    )
    worst, single = 0.0, (t.intermediates.m.sum(axis=-1) == 1).swapaxes(1, 2)[..., None]
    for name in set(names) & set(scene.tensors):
        for rank in range(scene.size):
            seen, true = scene.seen(name, rank), scene.true(name, rank)
            limit = scene.local(name, getattr(allowed, name), rank)
            if name == "out":
                alone = scene.local("out", np.broadcast_to(single, t.out.shape), rank)
                limit = np.where(alone, scene.limit(name, rank), limit)
            if (margins(seen, true, limit, dtype) > 1).any():
                return None
            worst = max(worst, float(np.abs(np.where(seen == true, 0.0, seen - true)).max(initial=0.0)))
    return worst


MOST_UNKNOWN = 400
"""Rows of all heads, at most, whose delta is sought."""


def _judge_delta(scene: Scene) -> float | None:
    """Judge whether dq and dk are off by a number a row in delta, no larger than roundings of the dtype make it."""
    dtype, wrong = scene.problem.dtype, set(wrong_tensors(scene))
    if not wrong:
        return 0.0
    if dtype not in ("bfloat16", "float16") or not wrong <= {"dq", "dk"} or not {"dq", "dk"} <= set(scene.tensors):
        return None
    terms, limits = terms_of(scene), scene.allowed
    each = _of_delta(terms)
    if each is None:
        return None
    seen = np.concatenate([off(terms)[name].ravel() for name in ("dq", "dk")])
    limit = np.concatenate([getattr(limits, name).ravel() for name in ("dq", "dk")])
    weight = 1 / np.maximum(limit, np.finfo(float).tiny)
    terms_of_delta = np.abs(terms.dout * scene.truth.out.swapaxes(1, 2)).sum(axis=-1) + np.abs(terms.dlse[..., 0])
    roundings = 2 * UNIT_ROUNDOFF[dtype] * (scene.problem.dv + 2) * terms_of_delta.ravel()
    fitted = np.linalg.lstsq(each * weight[:, None], seen * weight, rcond=None)[0]
    off_by = np.clip(fitted, -roundings, roundings)  # of a row that changes little, any number may fit best
    if (np.abs(seen - each @ off_by) > limit).any():
        return None
    return float(np.abs(off_by).max(initial=0.0))


def _of_delta(terms: Terms) -> Array | None:
    """Return what a unit more in the delta of each row changes in dq and dk, `(elements, rows)`."""
    rows = terms.delta[..., 0]
    if rows.size > MOST_UNKNOWN:
        return None
    found = []
    for place in np.ndindex(rows.shape):
        one = np.zeros_like(terms.factor)
        one[place] = -terms.factor[place]
        dk = per_key_head(one.swapaxes(2, 3) @ terms.q, terms.scene.problem.group_size)
        found.append(np.concatenate([(one @ terms.k).swapaxes(1, 2).ravel(), dk.ravel()]))
    return np.stack(found, axis=-1)


DELTA = Hypothesis(
    "delta, the sum of out times its cotangent, is computed or kept in the dtype of the inputs: dq and dk are off by "
    "its roundings, by one number for each row, and dv, out and lse are right",
    STEPS,
    judge=_judge_delta,
)
