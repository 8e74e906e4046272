"""Known faults that only some of the ranks have: those on which a case is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.misunderstood import LAYOUT
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import wrong_elements
from ringverify.events import TensorName


def wrong_forward(scene: Scene) -> tuple[int, ...]:
    """Return the ranks on which out or lse is wrong."""
    return _wrong(scene, ("out", "lse"))


def wrong_backward(scene: Scene) -> tuple[int, ...]:
    """Return the ranks on which a gradient is wrong."""
    return _wrong(scene, ("dq", "dk", "dv"))


def _wrong(scene: Scene, tensors: tuple[TensorName, ...]) -> tuple[int, ...]:
    names = [name for name in tensors if name in scene.tensors]
    return tuple(rank for rank in range(scene.size) if any(wrong_elements(scene, name, rank).any() for name in names))


def on_some_ranks(scene: Scene) -> Iterator[Hypothesis]:
    """Yield hypotheses that are limited to the ranks on which a case is wrong, and anew on every other case."""
    if 0 < len(wrong_forward(scene)) < scene.size:
        for hypothesis in HYPOTHESES:
            if hypothesis.when == "always" and hypothesis.judge is None and hypothesis not in LAYOUT:
                yield dataclasses.replace(hypothesis, ranks=wrong_forward)
    if not wrong_forward(scene) and 0 < len(wrong_backward(scene)) < scene.size:
        for hypothesis in HYPOTHESES:
            if "returned_gradients" in hypothesis.steps.changed:
                yield dataclasses.replace(hypothesis, ranks=wrong_backward)
