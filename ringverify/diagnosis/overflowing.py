"""Log-sum-exps of parts that are added without a shift, or with that of one part: which rows that spoils.

exp(lse) is infinite above the logarithm of the largest number, and 0 far enough below that of the smallest. What
becomes of a row then depends on the order in which parts are merged; that it is spoilt does not.
"""

from __future__ import annotations

import functools
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


def _judged(of: Callable[[Scene, Array], Array] | None, alone: bool, scene: Scene) -> float | None:
    """Return 0 if just those rows are spoilt whose log-sum-exp is out of range and that are merged of several blocks.

    That is what is left of it less the shift; a part that has no keys shifts by 0.

    With `alone`, a row with keys in one block is merged with parts of others that have none.

    Gradients are not looked at: those of a spoilt row are spoilt too.
    """
    if scene.replicated:
        return None
    sums, lse = scene.pipeline.sums, _of_keys(scene, range(scene.problem.nk))
    unsaid = np.zeros_like(lse, dtype=bool)
    if of is not None:
        shift = of(scene, np.stack([_of_keys(scene, held) for held in scene.shards[1]], axis=-1))
        unsaid = np.isneginf(shift) & (lse < 0)  # a small number that guards the division may be larger than the sum
        lse = lse - np.where(np.isfinite(shift), shift, 0.0)
    merged = (Blocks(pairs_of(scene)).of_row > 0).sum(axis=-1) > (not alone)
    # What is multiplied with a value, before it is divided, overflows a little earlier than the sum.
    nearly = np.log1p(np.abs(scene.inputs.v).max(initial=0.0, where=np.isfinite(scene.inputs.v)))
    with np.errstate(invalid="ignore"):
        gone = (lse > np.log(LARGEST[sums])) | (lse < np.log(UNIT_ROUNDOFF[sums]) + np.log(UNDERFLOW[sums]))
        inexact = unsaid | (~gone & ((lse < np.log(UNDERFLOW[sums])) | (lse > np.log(LARGEST[sums]) - nearly)))
        gone &= ~unsaid
    right = ~(gone | inexact) | np.isneginf(lse) | (scene.size == 1)
    spoilt = np.zeros_like(merged)
    for rank in range(scene.size):
        here, seen = scene.shards[0][rank], scene.seen("out", rank).swapaxes(1, 2)
        off = wrong_elements(scene, "out", rank).swapaxes(1, 2)
        if (off & np.isfinite(seen) & (seen != 0) & ~inexact[:, :, here, None]).any():
            return None
        wrong: Mask = np.any(off, axis=-1)
        spoilt[:, :, here] = wrong | wrong_elements(scene, "lse", rank) if "lse" in scene.tensors else wrong
    if (spoilt & right).any() or (gone & merged & ~right & ~spoilt).any():
        return None
    return None if wrong_tensors(scene) and not spoilt.any() else 0.0


def _ranks(scene: Scene) -> Ints:
    return pairs_of(scene).queries.rank[None, None]


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
