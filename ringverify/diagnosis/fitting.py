"""Suspicions made to measure: a scale, ranks, or blocks that the numbers themselves point at."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ringverify.cases.comparing import TensorName
from ringverify.diagnosis.catalogue import SUSPICIONS
from ringverify.diagnosis.misunderstood import LAYOUT
from ringverify.diagnosis.model import STEPS
from ringverify.diagnosis.scene import Scene, Visit
from ringverify.diagnosis.scores import fitted_scale
from ringverify.diagnosis.suspicion import Suspicion
from ringverify.diagnosis.where import wrong_elements

Deviations = dict[tuple[int, int], int]
"""How often a rank merges an owner's block, where that is not once."""


def fits(scene: Scene) -> Iterator[Suspicion]:
    """Suspicions that the numbers of a case point at; they are fitted anew to every case that they have to explain."""
    with np.errstate(all="ignore"):
        yield from _scales(scene)
        yield from _on_some_ranks(scene)
        yield from _single_blocks(scene)


def _scales(scene: Scene) -> Iterator[Suspicion]:
    """One scale that explains everything, and follows no known expression."""
    if (scale := fitted_scale(scene)) is None:
        return
    asked = scene.problem.scale_value
    of_case = {scene.case: scale}

    def fitted(at: Visit) -> float:
        if at.scene.case not in of_case:
            found = fitted_scale(at.scene)
            of_case[at.scene.case] = at.problem.scale_value if found is None else found
        return of_case[at.scene.case]

    says = f"scale is {scale:.6g} where {asked:.6g} was asked for"
    yield Suspicion(says, replace(STEPS, scale=fitted))


def wrong_forward(scene: Scene) -> tuple[int, ...]:
    """The ranks on which out or lse is wrong."""
    return _wrong(scene, ("out", "lse"))


def wrong_backward(scene: Scene) -> tuple[int, ...]:
    """The ranks on which a gradient is wrong."""
    return _wrong(scene, ("dq", "dk", "dv"))


def _wrong(scene: Scene, tensors: tuple[TensorName, ...]) -> tuple[int, ...]:
    names = [name for name in tensors if name in scene.tensors]
    return tuple(rank for rank in range(scene.size) if any(wrong_elements(scene, name, rank).any() for name in names))


def _on_some_ranks(scene: Scene) -> Iterator[Suspicion]:
    """What would explain everything if it were wrong on those ranks only which are wrong."""
    if 0 < len(wrong_forward(scene)) < scene.size:
        for suspicion in SUSPICIONS:
            if suspicion.when == "always" and suspicion.judge is None and suspicion not in LAYOUT:
                yield dataclasses.replace(suspicion, ranks=wrong_forward)
    if not wrong_forward(scene) and 0 < len(wrong_backward(scene)) < scene.size:
        for suspicion in SUSPICIONS:
            if suspicion.steps.home is not STEPS.home:
                yield dataclasses.replace(suspicion, ranks=wrong_backward)


def _single_blocks(scene: Scene) -> Iterator[Suspicion]:
    """On each wrong rank, one block that was never merged, or twice."""
    known: dict[object, Deviations | None] = {}

    def deviations(of: Scene) -> Deviations:
        if of.case not in known:
            known[of.case] = _deviations(of)
        return known[of.case] or {}

    def times(at: Visit) -> int:
        return deviations(at.scene).get((at.rank, at.owner), 1)

    if scene.size > 1 and not scene.replicated and deviations(scene):
        pattern = replace(STEPS, pattern=lambda at: STEPS.pattern(at) * times(at))
        yield Suspicion(lambda of: _told(deviations(of)), pattern)
        yield Suspicion(lambda of: _told(deviations(of)), replace(STEPS, times=times))


def _deviations(scene: Scene) -> Deviations | None:
    """For each wrong rank the one deviation that explains its out and lse; `None` if one has none."""
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
    def only(at: Visit) -> int:
        return times if (at.rank, at.owner) == (rank, owner) else 1

    return Suspicion("", replace(STEPS, times=only)).explains_rank(scene, rank)


def _told(deviations: Deviations) -> str:
    words = {0: "never merged the block of rank {}", 2: "counted the block of rank {} twice"}
    return "; ".join(f"rank {rank} " + words[times].format(owner) for (rank, owner), times in deviations.items())
