"""Log-sum-exps of parts that are added without a shift, in whichever order: which rows that spoils.

exp(lse) is infinite above the logarithm of the largest number, and 0 far enough below that of the smallest. What
becomes of a row then depends on the order in which parts are merged; that it is spoilt does not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from ringref.rounding import LARGEST, UNDERFLOW, UNIT_ROUNDOFF
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.pairs import Mask, pairs_of
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.undefined import Blocks
from ringverify.diagnosis.where import wrong_elements, wrong_tensors
from ringverify.faults.ring import STEPS

UNSHIFTED = "the merge overflows: log-sum-exps are added without a shift, so that exp(lse) is infinite or 0"


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains rows of out and lse that are no numbers, or 0.

    Args:
        scenes: cases, those that fail first.
    """
    if {"out", "lse"} & {*wrong_tensors(scenes[0])}:
        for alone in (True, False):
            yield Hypothesis(UNSHIFTED, STEPS, judge=functools.partial(_judged, alone))


def _judged(alone: bool, scene: Scene) -> float | None:
    """Return 0 if just those rows are spoilt whose log-sum-exp is out of range and that are merged of several blocks.

    With `alone`, a row with keys in one block is merged with parts of others that have none.

    Gradients are not looked at: those of a spoilt row are spoilt too.
    """
    if scene.replicated:
        return None
    sums, lse = scene.pipeline.sums, _of_keys(scene)
    merged = (Blocks(pairs_of(scene)).of_row > 0).sum(axis=-1) > (not alone)
    with np.errstate(invalid="ignore"):
        gone = (lse > np.log(LARGEST[sums])) | (lse < np.log(UNIT_ROUNDOFF[sums]) + np.log(UNDERFLOW[sums]))
        inexact = ~gone & (lse < np.log(UNDERFLOW[sums]))
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


def _of_keys(scene: Scene) -> Array:
    """Return the log-sum-exp of each row's keys, `(B, H, Nq)`, without that of a sink."""
    inner = scene.truth.intermediates
    top = np.max(inner.scores, axis=-1, where=inner.m > 0, initial=-np.inf)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(all="ignore"):
        total = np.where(inner.m > 0, inner.m * np.exp(inner.scores - safe[..., None]), 0.0).sum(axis=-1)
        found: Array = safe + np.log(total)
    return found
