"""Log-sum-exps of parts that are added without a shift, or with that of one part: which rows that spoils.

exp(lse) is infinite above the logarithm of the largest number, and 0 far enough below that of the smallest. What
becomes of a row then depends on the order in which parts are merged; that it is spoilt does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringref.rounding import LARGEST, UNDERFLOW, UNIT_ROUNDOFF
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.pairs import Ints, Mask, pairs_of
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.undefined import Blocks
from ringverify.diagnosis.where import wrong_elements, wrong_tensors
from ringverify.faults.ring import STEPS

UNSHIFTED = "the merge overflows: log-sum-exps are added without a shift, so that exp(lse) is infinite or 0"

SHIFTED = (
    "the merge overflows: log-sum-exps are shifted by that of {} instead of the largest, so that exp of the difference "
    "is infinite, or 0 where that rank's keys are hidden"
)

OF_TWO = (
    "the merge overflows: of two log-sum-exps, that of {} is the shift instead of the larger, so that exp of the "
    "difference is infinite"
)

MERGED = {"what a rank has so far": True, "what comes to it": False}
"""Which of two parts that are merged: whether it is the earlier."""

OF: dict[str, Callable[[Scene, Array], Array]] = {
    "rank 0": lambda scene, parts: parts[..., 0],
    "the last rank": lambda scene, parts: parts[..., -1],
    "the own rank": lambda scene, parts: np.take_along_axis(parts, _ranks(scene), axis=-1)[..., 0],
}
"""The log-sum-exp of which rank's keys, `(B, H, Nq)`, of those of all `(B, H, Nq, P)`."""


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains rows of out and lse that are no numbers, or 0.

    Args:
        scenes: cases, those that fail first.
    """
    if {"out", "lse"} & {*wrong_tensors(scenes[0])}:
        for alone in (True, False):
            yield Hypothesis(UNSHIFTED, STEPS, judge=functools.partial(_judged, None, alone))
        for text, of in OF.items():
            yield Hypothesis(SHIFTED.format(text), STEPS, judge=functools.partial(_judged, of, True))
        for text, earlier in MERGED.items():
            yield Hypothesis(OF_TWO.format(text), STEPS, judge=functools.partial(_judged_of_two, earlier))


def _judged_of_two(earlier: bool, scene: Scene) -> float | None:
    """Return 0 if just those rows are spoilt of which one rank's keys lie far above another's that are the shift.

    On two ranks it is the own part that a rank has at first; on more, in which order parts are merged decides.

    Args:
        earlier: whether the shift is what a rank has so far, or what comes to it.
        scene: the case.
    """
    if scene.replicated:
        return None
    parts = _of_ranks(scene)
    own = np.take_along_axis(parts, _ranks(scene), axis=-1)[..., 0]
    there, limit = np.isfinite(parts), np.log(LARGEST[scene.pipeline.sums])
    most, low = parts.max(axis=-1), np.where(there, parts, np.inf).min(axis=-1)
    with np.errstate(invalid="ignore"):
        gone = (scene.size == 2) & (most - low > limit) & (own == (low if earlier else most))
        possibly = most - low > limit - math.log(scene.size) - _nearly(scene)
    alone = ~there.all(axis=-1) & ((most > limit - _nearly(scene)) | (low < np.log(UNDERFLOW[scene.pipeline.sums])))
    return _spoilt_as_foretold(scene, gone, possibly | alone)


def _judged(of: Callable[[Scene, Array], Array] | None, alone: bool, scene: Scene) -> float | None:
    """Return 0 if just those rows are spoilt whose log-sum-exp is out of range and that are merged of several blocks.

    That is what is left of it less the shift; a part that has no keys shifts by 0.

    With `alone`, a row with keys in one block is merged with parts of others that have none.
    """
    if scene.replicated:
        return None
    sums, lse = scene.pipeline.sums, _of_keys(scene, range(scene.problem.nk))
    unsaid = np.zeros_like(lse, dtype=bool)
    if of is not None:
        shift = of(scene, _of_ranks(scene))
        unsaid = np.isneginf(shift) & (lse < 0)  # a small number that guards the division may be larger than the sum
        lse = lse - np.where(np.isfinite(shift), shift, 0.0)
    merged = (Blocks(pairs_of(scene)).of_row > 0).sum(axis=-1) > (not alone)
    with np.errstate(invalid="ignore"):
        gone = (lse > np.log(LARGEST[sums])) | (lse < np.log(UNIT_ROUNDOFF[sums]) + np.log(UNDERFLOW[sums]))
        nearly = (lse < np.log(UNDERFLOW[sums])) | (lse > np.log(LARGEST[sums]) - _nearly(scene))
        gone &= ~unsaid & ~np.isneginf(lse) & merged
    return _spoilt_as_foretold(scene, gone, (unsaid | nearly | gone) & ~np.isneginf(lse))


def _spoilt_as_foretold(scene: Scene, gone: Mask, possibly: Mask) -> float | None:
    """Return 0 if all rows are spoilt that are gone, and others only if they possibly are; `None` otherwise.

    Gradients are not looked at: those of a spoilt row are spoilt too.
    """
    gone, possibly = (rows & (scene.size > 1) for rows in (gone, possibly | gone))
    spoilt = np.zeros_like(gone)
    for rank in range(scene.size):
        here, seen = scene.shards[0][rank], scene.seen("out", rank).swapaxes(1, 2)
        off = wrong_elements(scene, "out", rank).swapaxes(1, 2)
        inexact = (possibly & ~gone)[:, :, here, None]
        if (off & np.isfinite(seen) & (seen != 0) & ~inexact).any():
            return None
        wrong: Mask = np.any(off, axis=-1)
        spoilt[:, :, here] = wrong | wrong_elements(scene, "lse", rank) if "lse" in scene.tensors else wrong
    if (spoilt & ~possibly).any() or (gone & ~spoilt).any():
        return None
    return None if wrong_tensors(scene) and not spoilt.any() else 0.0


def _nearly(scene: Scene) -> float:
    """Return how much earlier than a sum what is multiplied with a value overflows, before it is divided."""
    v = scene.inputs.v
    return float(np.log1p(np.abs(v).max(initial=0.0, where=np.isfinite(v))))


def _ranks(scene: Scene) -> Ints:
    return pairs_of(scene).queries.rank[None, None]


def _of_ranks(scene: Scene) -> Array:
    """Return the log-sum-exp of each row over the keys of each rank, `(B, H, Nq, P)`."""
    return np.stack([_of_keys(scene, held) for held in scene.shards[1]], axis=-1)


def _of_keys(scene: Scene, held: Sequence[int] | Ints) -> Array:
    """Return the log-sum-exp of each row over some keys, `(B, H, Nq)`, without that of a sink."""
    inner = scene.truth.intermediates
    m, scores = inner.m[..., held], inner.scores[..., held]
    top = np.max(scores, axis=-1, where=m > 0, initial=-np.inf)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(all="ignore"):
        total = np.where(m > 0, m * np.exp(scores - safe[..., None]), 0.0).sum(axis=-1)
        found: Array = safe + np.log(total)
    return found
