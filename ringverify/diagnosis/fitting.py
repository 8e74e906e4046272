"""Hypotheses fitted to a case: a scale, the ranks that are wrong, or blocks that are missing or counted twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.misunderstood import LAYOUT
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import wrong_elements
from ringverify.events import TensorName
from ringverify.faults.ring import STEPS, Steps


def fits(scene: Scene) -> Iterator[Hypothesis]:
    """Yield hypotheses whose scale, ranks or blocks are fitted to a case, and fitted anew to every other case."""
    with np.errstate(all="ignore"):
        yield from _scales(scene)
        yield from _on_some_ranks(scene)


def fitted_scale(scene: Scene) -> float | None:
    """Return the scale that best gives the lse that was seen, by Newton's method; `None` if it finds none.

    The derivative of lse by the scale is Σ_j p · s / scale, a constant where a row attends one key: one step is enough.
    """
    if "lse" not in scene.tensors or scene.problem.softcap is not None:
        return None
    inner, p = scene.truth.intermediates, scene.problem
    seen = np.concatenate([scene.seen("lse", rank) for rank in range(scene.size)], axis=2)
    rows = np.concatenate(scene.shards[0])
    m = inner.m[:, :, rows]
    x = scene.inputs
    heads = np.arange(p.heads) // p.group_size
    products = (x.q.swapaxes(1, 2) @ x.k.swapaxes(1, 2)[:, heads].swapaxes(2, 3))[:, :, rows]
    there = (m > 0).any(axis=3) & np.isfinite(seen)
    if not there.any() or not np.isfinite(products).all():
        return None
    scale = p.scale_value
    for _ in range(20):
        s = np.where(m > 0, products * scale, -np.inf)
        top = np.where(there, s.max(axis=3), 0.0)[..., None]
        w = np.where(m > 0, m * np.exp(s - top), 0.0)
        total = np.where(there, w.sum(axis=3), 1.0)
        lse = top[..., 0] + np.log(total)
        slope = (w * products).sum(axis=3) / total
        error, slope = (seen - lse)[there], slope[there]
        if not float(slope @ slope) or not np.isfinite(scale):
            return None
        scale += float(error @ slope) / float(slope @ slope)
    return scale if np.isfinite(scale) else None


def _scales(scene: Scene) -> Iterator[Hypothesis]:
    """Yield the hypothesis that the scale is a number of no known formula, fitted to the lse."""
    if (scale := fitted_scale(scene)) is None:
        return
    asked = scene.problem.scale_value

    def fitted(of: Scene) -> Steps:
        found = scale if of is scene else fitted_scale(of)
        return STEPS if found is None else replace(STEPS, scale=lambda here: found)

    yield Hypothesis(f"scores are scaled by {scale:.6g} instead of {asked:.6g}, which is call.scale", fitted)


def wrong_forward(scene: Scene) -> tuple[int, ...]:
    """Return the ranks on which out or lse is wrong."""
    return _wrong(scene, ("out", "lse"))


def wrong_backward(scene: Scene) -> tuple[int, ...]:
    """Return the ranks on which a gradient is wrong."""
    return _wrong(scene, ("dq", "dk", "dv"))


def _wrong(scene: Scene, tensors: tuple[TensorName, ...]) -> tuple[int, ...]:
    names = [name for name in tensors if name in scene.tensors]
    return tuple(rank for rank in range(scene.size) if any(wrong_elements(scene, name, rank).any() for name in names))


def _on_some_ranks(scene: Scene) -> Iterator[Hypothesis]:
    """Yield known hypotheses, limited to the ranks on which the case is wrong."""
    if 0 < len(wrong_forward(scene)) < scene.size:
        for hypothesis in HYPOTHESES:
            if hypothesis.when == "always" and hypothesis.judge is None and hypothesis not in LAYOUT:
                yield dataclasses.replace(hypothesis, ranks=wrong_forward)
    if not wrong_forward(scene) and 0 < len(wrong_backward(scene)) < scene.size:
        for hypothesis in HYPOTHESES:
            if (
                isinstance(hypothesis.steps, Steps)
                and hypothesis.steps.returned_gradients is not STEPS.returned_gradients
            ):
                yield dataclasses.replace(hypothesis, ranks=wrong_backward)
