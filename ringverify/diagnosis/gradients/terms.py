"""What every pair of a case adds to its gradients, and hypotheses that these are the right ones and a change."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from ringref.attention import per_key_head, per_query_head
from ringref.rounding import LARGEST, rounding_of_wrong
from ringverify.cases.comparing import QKV_GRADIENTS
from ringverify.diagnosis.hypothesis import Hypothesis, agree_but_for
from ringverify.diagnosis.pairs import Mask, pairs_of
from ringverify.diagnosis.scaling import FITTED, LEFT, with_most_digits
from ringverify.diagnosis.scene import Array, Scene, slope_of_cap
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.ring import STEPS

Gradients = dict[TensorName, Array]


class Terms:
    """What every pair of a case adds to its gradients, after a right forward."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.pairs = scene, pairs_of(scene)
        p, x = scene.problem, scene.inputs
        inner = scene.truth.intermediates
        self.k, self.v = (per_query_head(np.where(np.isfinite(y), y, 0.0), p.group_size) for y in (x.k, x.v))
        self.q, self.dout = x.q.swapaxes(1, 2), x.dout.swapaxes(1, 2)
        self.p, self.dp = inner.probabilities, self.dout @ self.v.swapaxes(2, 3)
        slope = slope_of_cap(p, inner.raw_scores)
        self.flat = self.p * p.scale_value
        self.factor = self.flat * slope
        self.has_keys, self.given_dlse = np.isfinite(inner.lse)[..., None], x.dlse[..., None]
        self.dlse = np.where(self.has_keys, self.given_dlse, 0.0)
        self.delta = (self.p * self.dp).sum(axis=-1, keepdims=True)
        self.ds = self.factor * (self.dp - self.delta + self.dlse)

    def sums(self, names: Sequence[TensorName], ds: Array, p: Array, dout: Array | None = None) -> Gradients:
        """Return gradients of these ds and p `(B, H, Nq, Nk)`, of all positions; of another cotangent than given."""
        group, found = self.scene.problem.group_size, Gradients()
        for name in names:
            match name:
                case "dq":
                    found[name] = (ds @ self.k).swapaxes(1, 2)
                case "dk":
                    found[name] = per_key_head(ds.swapaxes(2, 3) @ self.q, group)
                case _:
                    found[name] = per_key_head(p.swapaxes(2, 3) @ (self.dout if dout is None else dout), group)
        return found

    def sums_over(self, names: Sequence[TensorName], here: Mask) -> Gradients:
        """Return what some pairs add to gradients of all positions."""
        return self.sums(names, self.ds * here, self.p * here)

    @functools.cached_property
    def blocks(self) -> Array:
        """What the keys of each rank add to delta, `(B, H, Nq, P)`."""
        return self._of_ranks(self.p * self.dp)

    @functools.cached_property
    def shares(self) -> Array:
        """What the keys of each rank have of all weights, `(B, H, Nq, P)`."""
        return self._of_ranks(self.p)

    def _of_ranks(self, each: Array) -> Array:
        return np.stack([each[..., held].sum(axis=-1) for held in self.scene.shards[1]], axis=-1)


def fitted(scenes: Sequence[Scene], most: int = FITTED) -> list[Terms]:
    """Return the terms of the largest cases of which only gradients are wrong, for a first fit; `[]` without any."""
    failing = [scene for scene in scenes if (names := wrong_tensors(scene)) and not {"out", "lse"} & set(names)]
    if not failing or "dq" not in failing[0].tensors:
        return []
    failing = [one for one in failing if all(np.isfinite(seen(one, name)).all() for name in QKV_GRADIENTS)]
    return [terms_of(one) for one in with_most_digits(failing)[:most]] if failing else []


def terms_of(scene: Scene) -> Terms:
    """Return the terms of a case, which are made once."""
    return scene.once("terms", lambda: Terms(scene))


def seen(scene: Scene, name: TensorName) -> Array:
    """Return a gradient as it was seen, of all positions."""
    found: Array = np.zeros_like(getattr(scene.truth, name))
    for rank in range(scene.size):
        found[:, scene.shards[name != "dq"][rank]] = scene.seen(name, rank)
    return found


def off(terms: Terms) -> Gradients:
    """Return what was seen of gradients less what is right."""
    scene = terms.scene
    return scene.once("off", lambda: {name: seen(scene, name) - getattr(scene.truth, name) for name in QKV_GRADIENTS})


def size(x: Gradients) -> float:
    """Return the sum of squares of all elements."""
    return float(sum((y**2).sum() for y in x.values()))


def fits(terms: Terms, change: Gradients) -> bool:
    """Return whether a change of gradients is that which was seen, nearly."""
    wrong = off(terms)
    left = {name: y - change[name] if name in change else y for name, y in wrong.items()}
    return size(left) <= LEFT**2 * size(wrong)


def _spoilt(scene: Scene, whole: Gradients) -> bool:
    """Whether a factor of results overflows: what becomes of sums with an infinite weight, their order decides."""
    large = not all((np.abs(x) <= LARGEST[scene.dtype_of(name)] ** 0.5).all() for name, x in whole.items())
    return large and not all(np.isfinite(seen(scene, name)).all() for name in QKV_GRADIENTS)


def measured(
    text: str, change: Callable[[Terms], Gradients], sizes: Callable[[Terms], Gradients] = lambda terms: {}
) -> Hypothesis:
    """Return the hypothesis that a case's results are the right ones and this change.

    Args:
        text: what is wrong.
        change: returns what changes.
        sizes: how large the terms are of which those results are then sums, if they are larger than the change.
    """

    def changed(scene: Scene) -> tuple[Gradients, Gradients]:
        changes = change(terms_of(scene))
        return changes, {name: getattr(scene.truth, name) + y for name, y in changes.items()}

    def judge(scene: Scene) -> float | None:
        changes, whole = changed(scene)
        if not set(changes) <= set(scene.tensors):
            return None if wrong_tensors(scene) else 0.0
        if _spoilt(scene, whole):
            return 0.0
        # A row takes its rounding errors to where it is moved. What is wrong has errors of its own, and a weight the
        # relative error of its score, as many times as that is large.
        scores = scene.truth.intermediates.scores
        large = 1 + np.abs(scores).max(where=np.isfinite(scores), initial=0.0)
        terms = sizes(terms_of(scene))
        wide = {
            name: getattr(scene.allowed, name).max(initial=0.0)
            + rounding_of_wrong(large * np.maximum(np.abs(y), terms.get(name, 0.0)), scene.pipeline)
            for name, y in changes.items()
        }
        return agree_but_for(scene, whole, lambda: dataclasses.replace(scene.allowed, **wide))

    return Hypothesis(text, STEPS, judge=judge, measured=True, whole=lambda scene: changed(scene)[1])
