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
from ringverify.faults.causes_of_numbers import in_pattern
from ringverify.faults.ring import STEPS, Steps, Times

Deviations = dict[tuple[int, int], int]
"""How often a rank merges the block of an owner, by `(rank, owner)`, where that is not once."""


def fits(scene: Scene) -> Iterator[Hypothesis]:
    """Yield hypotheses whose scale, ranks or blocks are fitted to a case, and fitted anew to every other case."""
    with np.errstate(all="ignore"):
        yield from _scales(scene)
        yield from _on_some_ranks(scene)
        yield from _single_blocks(scene)


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

    yield Hypothesis(f"scale is {scale:.6g} where {asked:.6g} was asked for", fitted)


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


def _single_blocks(scene: Scene) -> Iterator[Hypothesis]:
    """Yield the hypothesis that each wrong rank merges one block never, or twice."""
    known: dict[object, Deviations | None] = {}

    def deviations(of: Scene) -> Deviations:
        if of.case not in known:
            known[of.case] = _deviations(of)
        return known[of.case] or {}

    def says(of: Scene) -> str:
        return _told(deviations(of))

    def merged(of: Scene) -> Steps:
        return replace(STEPS, times=_times(deviations(of)))

    if scene.size > 1 and not scene.replicated and deviations(scene):
        yield Hypothesis(says, lambda of: in_pattern(_times(deviations(of))))
        yield Hypothesis(says, merged)


def _times(deviations: Deviations) -> Times:
    return lambda here, hop, owner: deviations.get((here.rank, owner), 1)


def _deviations(scene: Scene) -> Deviations | None:
    """Return the miscounted block of each wrong rank that explains its out and lse; `None` if a rank has none."""
    found: Deviations = {}
    if scene.replicated:
        return None
    for rank in wrong_forward(scene):
        for owner, times in [(owner, times) for times in (0, 2) for owner in range(scene.size)]:
            if _explains_rank(scene, rank, owner, times):
                found[rank, owner] = times
                break
        else:
            return None
    return found


def _explains_rank(scene: Scene, rank: int, owner: int, times: int) -> bool:
    return Hypothesis("", replace(STEPS, times=_times({(rank, owner): times}))).explains_rank(scene, rank)


def _told(deviations: Deviations) -> str:
    words = {0: "never merged the block of rank {}", 2: "counted the block of rank {} twice"}
    return "; ".join(f"rank {rank} " + words[times].format(owner) for (rank, owner), times in deviations.items())
