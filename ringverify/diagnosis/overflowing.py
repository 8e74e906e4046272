"""Exponentials that are taken without a shift, or less the wrong one: which rows that spoils.

exp(lse) is infinite above the logarithm of the largest number, and 0 far enough below that of the smallest. What
becomes of a row then depends on the order in which parts are merged; that it is spoilt does not.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringref.rounding import LARGEST, UNDERFLOW, UNIT_ROUNDOFF
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.pairs import Ints, Mask, pairs_of
from ringverify.diagnosis.reading import unmasked
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.undefined import Blocks
from ringverify.diagnosis.where import wrong_elements, wrong_tensors
from ringverify.faults.ring import STEPS
from ringverify.faults.scores import EMPTY_BELOW, EMPTY_FROM_0

UNSHIFTED = "the merge overflows: log-sum-exps are added without a shift, so that exp(lse) is infinite or 0"

SHIFTED = (
    "the merge overflows: log-sum-exps are shifted by that of {} instead of the largest, so that exp of the difference "
    "is infinite, or 0 where that rank's keys are hidden"
)

OF_TWO = (
    "the merge overflows: of two log-sum-exps, that of {} is the shift instead of the larger, so that exp of the "
    "difference is infinite"
)

OF_LEAST = (
    "the maximum of a row is taken of scores before the scale and multiplied by it: under a negative scale that is the "
    "least score, and exp of the difference overflows"
)

CHUNKS = (16, 32, 64, 128)
"""Numbers of queries for which one maximum may be taken."""

MERGED = {"what a rank has so far": True, "what comes to it": False}
"""Which of two parts that are merged: whether it is the earlier."""

OF: dict[str, Callable[[Scene, Array], Array]] = {
    "rank 0": lambda scene, parts: parts[..., 0],
    "the last rank": lambda scene, parts: parts[..., -1],
    "the own rank": lambda scene, parts: np.take_along_axis(parts, _ranks(scene), axis=-1)[..., 0],
}
"""The log-sum-exp of which rank's keys, `(B, H, Nq)`, of those of all `(B, H, Nq, P)`."""


def _several() -> Iterator[tuple[str, tuple[bool, bool, int | None]]]:
    """Yield the rows for which one maximum may be taken: of batch entries, heads and queries."""
    for batches, entries in ((False, ""), (True, " and all batch entries")):
        for of_rank, heads in ((False, "a head"), (True, "all heads that a rank has after an exchange")):
            for tile in (None, *CHUNKS):
                queries = "all queries" if tile is None else f"{tile} queries"
                yield f"{queries}, {heads}{entries}", (batches, of_rank, tile)


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains rows of out and lse that are no numbers, or 0.

    Args:
        scenes: cases, those that fail first.
    """
    if {"out", "lse"} & {*wrong_tensors(scenes[0])}:
        yield Hypothesis(EMPTY_FROM_0, STEPS, judge=functools.partial(_judged_of_maximum, _from_0))
        for where, empty in EMPTY.items():
            from_0 = functools.partial(_from_0_beside, empty)
            yield Hypothesis(EMPTY_FROM_0 + where, STEPS, judge=functools.partial(_judged_of_maximum, from_0))
        for text, (visited, cleared) in MASKED.items():
            of_masked = functools.partial(_of_masked, visited, cleared)
            says = EMPTY_BELOW.format(f"a row with {text}")
            yield Hypothesis(says, STEPS, judge=functools.partial(_judged_of_maximum, of_masked))
        for text, rows in _several():
            of_rows = functools.partial(_of_several, *rows)
            yield Hypothesis(EMPTY_BELOW.format(text), STEPS, judge=functools.partial(_judged_of_maximum, of_rows))
        yield Hypothesis(OF_LEAST, STEPS, judge=_judged_of_least)
        for alone in (True, False):
            yield Hypothesis(UNSHIFTED, STEPS, judge=functools.partial(_judged, None, alone))
        for text, of in OF.items():
            yield Hypothesis(SHIFTED.format(text), STEPS, judge=functools.partial(_judged, of, True))
        for text, earlier in MERGED.items():
            yield Hypothesis(OF_TWO.format(text), STEPS, judge=functools.partial(_judged_of_two, earlier))


def _from_0(scene: Scene, most: Array) -> Array:
    """What is subtracted from the scores of a row, `(B, H, Nq)`, by their maximum, which is -inf without keys."""
    return np.maximum(most, 0.0)


def _from_0_beside(empty: Callable[[Scene], Mask], scene: Scene, most: Array) -> Array:
    """Likewise, where the largest score of some rank is taken for 0 because it has none."""
    return np.where(empty(scene), np.maximum(most, 0.0), most)


def _without_keys(scene: Scene) -> Mask:
    return np.array(any(not len(held) for held in scene.shards[1]))


def _without_valid_keys(scene: Scene) -> Mask:
    longest = max(scene.problem.key_lengths or (scene.problem.nk,))
    return np.array(any(held.min(initial=longest) >= longest for held in scene.shards[1]))


def _without_attended_keys(scene: Scene) -> Mask:
    """Of which rows, `(B, H, Nq)`, some rank has no key to attend."""
    counts = scene.truth.intermediates.m
    found: Mask = np.logical_or.reduce([~(counts[..., held] > 0).any(axis=-1) for held in scene.shards[1]])
    return found


EMPTY: dict[str, Callable[[Scene], Mask]] = {
    ", where a rank holds no keys": _without_keys,
    ", where a rank holds no keys below the longest key length": _without_valid_keys,
    ", where a rank has no key for the row": _without_attended_keys,
}
"""Where a rank may take 0 for its largest score, in words, and whether that is so of a case or a row."""


MASKED: dict[str, tuple[bool, bool]] = {
    "the keys that a mask hides from it, in blocks of which its rank attends any": (True, False),
    "the keys that a mask hides from it, in blocks of which its rank attends any and where padding is 0": (True, True),
    "all keys, those included that a mask hides from it": (False, False),
    "all keys, those included that a mask hides from it, and where padding is 0": (False, True),
}
"""Of which hidden keys a maximum may be taken, in words: whether of some blocks only, and whether padding is 0."""


def _of_masked(of_visited: bool, cleared: bool, scene: Scene, most: Array) -> Array:
    """Likewise, where the maximum is that of keys too that a mask hides."""
    pairs, (scores, _) = pairs_of(scene), unmasked(scene)
    scores = np.where(pairs.padding, 0.0, scores) if cleared else scores
    blocks = Blocks(pairs)
    there: Mask = np.any(blocks.visited > 0, axis=(0, 1))[:, pairs.keys.rank[0]] if of_visited else np.array(True)
    found: Array = np.max(scores, axis=-1, where=there, initial=-np.inf)
    return np.maximum(found, most)


def _of_several(batches: bool, rank_heads: bool, tile: int | None, scene: Scene, most: Array) -> Array:
    """Likewise, where the maximum is one of several rows."""
    shift = np.empty_like(most)
    heads, queries = most.shape[1:]
    of_rank = -(-heads // scene.size) if rank_heads else 1
    rows = tile or max(1, queries)
    for head, row in itertools.product(range(0, heads, of_rank), range(0, queries, rows)):
        here = np.s_[:, head : head + of_rank, row : row + rows]
        shift[here] = most[here].max(axis=(0, 1, 2) if batches else (1, 2), keepdims=True)
    return shift


def _judged_of_maximum(of: Callable[[Scene, Array], Array], scene: Scene) -> float | None:
    """Return 0 if just those rows are spoilt whose scores lie so far below what is subtracted that nothing is left.

    What becomes of a row with a sink, or of one that keeps few digits, is not foretold.
    """
    sums, inner = scene.pipeline.sums, scene.truth.intermediates
    most = np.max(inner.scores, axis=-1, where=inner.m > 0, initial=-np.inf)
    lse = _of_keys(scene, range(scene.problem.nk))
    with np.errstate(invalid="ignore"):
        left = np.where(np.isneginf(most), 0.0, lse - of(scene, most))
    gone = left < np.log(UNIT_ROUNDOFF[sums]) + np.log(UNDERFLOW[sums])
    nearly = left < np.log(UNDERFLOW[sums]) + _nearly(scene)
    if (sinks := scene.inputs.sinks) is not None:
        sunk = np.broadcast_to(sinks[:, None], lse.shape)
        gone, nearly = gone & (sunk < lse), nearly | (sunk < np.log(UNDERFLOW[sums]))
    return _spoilt_as_foretold(scene, gone, nearly, left < np.log(UNIT_ROUNDOFF[sums]))


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
    return _spoilt_as_foretold(scene, gone, (possibly | alone) & (scene.size > 1))


def _judged_of_least(scene: Scene) -> float | None:
    """Return 0 if just those rows are spoilt that overflow where the shift is the largest of the blocks' least scores.

    A row may be spoilt too by a block that comes before the one with the largest of them: the order of blocks decides.
    Under a scale above 0 nothing is wrong.
    """
    if scene.replicated or scene.problem.scale_value >= 0:
        return None if wrong_tensors(scene) else 0.0
    blocks = [(inner.scores[..., held], inner.m[..., held] > 0)
              for inner in [scene.truth.intermediates] for held in scene.shards[1]]  # fmt: skip
    most = np.stack([np.max(scores, axis=-1, where=there, initial=-np.inf) for scores, there in blocks], axis=-1)
    least = np.stack([np.min(scores, axis=-1, where=there, initial=np.inf) for scores, there in blocks], axis=-1)
    shift = np.where(np.isinf(least), -np.inf, least).max(axis=-1)
    if (sinks := scene.inputs.sinks) is not None:
        shift = np.maximum(shift, sinks[:, None])
    limit = np.log(LARGEST[scene.pipeline.sums])
    with np.errstate(invalid="ignore"):
        gone, nearly = most.max(axis=-1) - shift > limit, limit - _nearly(scene) - math.log(max(1, scene.problem.nk))
        possibly = (most - least > nearly).any(axis=-1)
    return _spoilt_as_foretold(scene, gone, possibly)


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
    if scene.size == 1:
        return None if wrong_tensors(scene) else 0.0  # nothing is merged
    return _spoilt_as_foretold(scene, gone, (unsaid | nearly | gone) & ~np.isneginf(lse))


def _spoilt_as_foretold(scene: Scene, gone: Mask, possibly: Mask, inexact: Mask | None = None) -> float | None:
    """Return 0 if all rows are spoilt that are gone, and others only if they possibly are; `None` otherwise.

    Of rows that are inexact, lse may have lost some digits.

    Gradients are not looked at: those of a spoilt row are spoilt too.
    """
    possibly = possibly | gone
    inexact = np.zeros_like(gone) if inexact is None else inexact
    spoilt = np.zeros_like(gone)
    for rank in range(scene.size):
        here, seen = scene.shards[0][rank], scene.seen("out", rank).swapaxes(1, 2)
        off = wrong_elements(scene, "out", rank).swapaxes(1, 2)
        unsure = (possibly & ~gone)[:, :, here, None]
        if (off & np.isfinite(seen) & (seen != 0) & ~unsure).any():
            return None
        wrong: Mask = np.any(off, axis=-1)
        spoilt[:, :, here] = wrong | _lse_is_off(scene, rank, inexact[:, :, here]) if "lse" in scene.tensors else wrong
    if (spoilt & ~possibly).any() or (gone & ~spoilt).any():
        return None
    return None if wrong_tensors(scene) and not (spoilt | inexact).any() else 0.0


def _lse_is_off(scene: Scene, rank: int, inexact: Mask) -> Mask:
    """Where lse is wrong, but for rows whose shift takes its last digits: there half of them may do."""
    seen, true = scene.seen("lse", rank), scene.true("lse", rank)
    with np.errstate(invalid="ignore"):
        near = np.abs(seen - true) <= np.sqrt(UNIT_ROUNDOFF[scene.pipeline.lse_dtype]) * np.maximum(1.0, np.abs(true))
    found: Mask = wrong_elements(scene, "lse", rank) & ~(near & inexact)
    return found


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
