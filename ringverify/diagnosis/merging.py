"""Suspicions of merging: weights, log-sum-exps, blocks that are left out or counted twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ringref.problem import DtypeName
from ringref.rounding import LARGEST
from ringverify.cases.inputs import round_to
from ringverify.diagnosis.masks import WHENS
from ringverify.diagnosis.model import STEPS, Steps, merge, partial, share, sum_of, weighted_sum
from ringverify.diagnosis.scene import Array, Counts, Partial, Scene, Visit
from ringverify.diagnosis.suspicion import Suspicion

Lse = Callable[[Scene, Array, Array], Array]


def merging(
    *,
    first: float = 1.0,
    second: float = 1.0,
    lse: Lse = lambda scene, a, b: np.logaddexp(a, b),
    crossed: bool = False,
    weights_from_lse: bool = False,
) -> Steps:
    """A merge with its terms multiplied, with another lse, or with its weights exchanged."""

    def changed(scene: Scene, a: Partial, b: Partial) -> Partial:
        found = lse(scene, a.lse, b.lse)
        right = found if weights_from_lse else np.logaddexp(a.lse, b.lse)
        of_a, of_b = first * share(a.lse, right), second * share(b.lse, right)
        if crossed:
            of_a, of_b = of_b, of_a
        return Partial(of_a * a.out + of_b * b.out, found)

    return replace(STEPS, merge=changed)


def _exp(scene: Scene, x: Array) -> Array:
    """exp in the dtype of the sums: infinite and 0 sooner than in float64."""
    return _rounded(scene, np.exp(_rounded(scene, x)))


def _rounded(scene: Scene, x: Array) -> Array:
    """As the dtype of the sums holds it."""
    return x.astype(np.float32).astype(np.float64) if scene.pipeline.sums == "float32" else x


def _coarse(scene: Scene, a: Partial, b: Partial) -> Partial:
    """A merge whose lse has the digits of the dtype of the sums: beside a sentinel few are left of anything else."""
    lse = _rounded(scene, np.logaddexp(a.lse, b.lse))
    return Partial(share(a.lse, lse) * a.out + share(b.lse, lse) * b.out, lse)


def _in_input_dtype(scene: Scene, a: Partial, b: Partial) -> Partial:
    """A merge by the sigmoid of a difference, each step of it rounded to the dtype of the inputs; out is kept wide."""

    def rounded(x: Array) -> Array:
        return round_to(x, scene.problem.dtype)

    weight = rounded(_logistic(rounded(b.lse - a.lse)))
    out = a.out - weight[..., None] * (a.out - b.out)
    lse = rounded(a.lse - rounded(np.log(_logistic(rounded(a.lse - b.lse)))))
    none = b.lse == -np.inf
    first = (a.lse == -np.inf) & ~none
    out = np.where(none[..., None], a.out, np.where(first[..., None], b.out, out))
    return Partial(out, np.where(none, a.lse, np.where(first, b.lse, lse)))


def _logistic(x: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-x))
    return found


def _log1p(scene: Scene, a: Array, b: Array) -> Array:
    found = a + np.log1p(_exp(scene, b - a))
    return np.where(a == -np.inf, b, found)


def _unguarded_log1p(scene: Scene, a: Array, b: Array) -> Array:
    return a + np.log1p(_exp(scene, b - a))


def _unshifted(scene: Scene, a: Array, b: Array) -> Array:
    return np.log(_exp(scene, a) + _exp(scene, b))


def _plain_weights(scene: Scene, a: Partial, b: Partial) -> Partial:
    of_a, of_b = _exp(scene, a.lse)[..., None], _exp(scene, b.lse)[..., None]
    total = of_a + of_b
    out = (of_a * a.out + of_b * b.out) / np.where(total == 0, 1.0, total)
    return Partial(out, np.logaddexp(a.lse, b.lse))


def _sigmoid(scene: Scene, a: Partial, b: Partial) -> Partial:
    """The sigmoid merge as it is published: -inf - (-inf) wherever the earlier part is empty, or both are."""
    of_b = 1 / (1 + np.exp(a.lse - b.lse))[..., None]
    lse = np.where(a.lse == -np.inf, np.nan, np.logaddexp(a.lse, b.lse))
    return Partial(a.out - of_b * (a.out - b.out), lse)


def _unguarded(scene: Scene, a: Partial, b: Partial) -> Partial:
    """Shifted by the larger lse, which is -inf where both are."""
    empty = (a.lse == -np.inf) & (b.lse == -np.inf)
    whole = merge(scene, a, b)
    return Partial(np.where(empty[..., None], np.nan, whole.out), np.where(empty, np.nan, whole.lse))


def _unguarded_out(scene: Scene, a: Partial, b: Partial) -> Partial:
    return Partial(_unguarded(scene, a, b).out, np.logaddexp(a.lse, b.lse))


def _added(scene: Scene, a: Partial, b: Partial) -> Partial:
    return Partial(a.out + b.out, np.logaddexp(a.lse, b.lse))


def _averaged(scene: Scene, rank: int, found: list[Partial]) -> list[Partial]:
    out = sum_of([part.out for part in found]) / len(found)
    lse = found[0].lse
    for part in found[1:]:
        lse = np.logaddexp(lse, part.lse)
    return [Partial(out, lse)]


def _halved(scene: Scene, a: Partial, b: Partial) -> Partial:
    return Partial((a.out + b.out) / 2, np.logaddexp(a.lse, b.lse))


def _turned(scene: Scene, a: Partial, b: Partial) -> Partial:
    whole = merge(scene, a, b)
    if a.lse.shape[1] != a.lse.shape[2]:
        return whole
    turned = merge(scene, *(part._replace(lse=part.lse.swapaxes(1, 2)) for part in (a, b)))
    return Partial(turned.out, whole.lse)


def _partial(change: Callable[[Visit, Array, Counts, Array, Partial], Partial]) -> Steps:
    """A block's result changed."""
    return replace(STEPS, partial=lambda at, s, m, v: change(at, s, m, v, partial(at, s, m, v)))


def _lse_of_block(change: Callable[[Visit, Array, Counts, Array], Array]) -> Steps:
    return _partial(lambda at, s, m, v, found: found._replace(lse=change(at, s, m, found.lse)))


def _top(s: Array, m: Counts) -> Array:
    top: Array = np.max(s, axis=-1, where=m > 0, initial=-np.inf)
    return top


def _filled(at: Visit, s: Array, m: Counts, v: Array, found: Partial) -> Partial:
    """The largest negative number stands for −inf: a row without keys becomes the average of the block."""
    if not (m > 0).any():
        return found  # a block that nobody attends is skipped
    dtype: DtypeName = "float64" if at.scene.pipeline.sums == "float64" else "float32"
    s = np.where(m > 0, s, -LARGEST[dtype])
    top = s.max(axis=-1, keepdims=True)
    w = np.where(m > 0, m, 1) * np.exp(s - top)
    total = w.sum(axis=-1, keepdims=True)
    return Partial(w @ v / total, (top + np.log(total))[..., 0])


def _filled_always(at: Visit, s: Array, m: Counts, v: Array, found: Partial) -> Partial:
    return _filled(at, s, np.where(m > 0, m, 0), v, found) if (m > 0).any() or not s.size else _average(s, v)


def _average(s: Array, v: Array) -> Partial:
    mean = np.broadcast_to(v.mean(axis=2, keepdims=True), (*s.shape[:3], v.shape[3]))
    return Partial(mean, np.full(s.shape[:3], -LARGEST["float32"]))


def _stabilised_by_all(at: Visit, s: Array, m: Counts, v: Array, found: Partial) -> Partial:
    """Shifted by the maximum over keys that are not attended too."""
    if not (m > 0).any():
        return found
    top = s.max(axis=-1, keepdims=True)
    w = np.where(m > 0, m * _exp(at.scene, s - top), 0.0)
    total = w.sum(axis=-1, keepdims=True)
    out = weighted_sum(w, v, m) / np.where(total == 0, 1.0, total)
    return Partial(out, (top + np.log(total))[..., 0])


def _unstabilised(at: Visit, s: Array, m: Counts, v: Array, found: Partial) -> Partial:
    w = np.where(m > 0, m * _exp(at.scene, s), 0.0)
    total = w.sum(axis=-1, keepdims=True)
    return Partial(weighted_sum(w, v, m) / np.where(total == 0, 1.0, total), np.log(total)[..., 0])


def _over_queries(at: Visit, s: Array, m: Counts, lse: Array) -> Array:
    if s.shape[2] != s.shape[3]:
        return lse
    return partial(at, s.swapaxes(2, 3), m.swapaxes(2, 3), np.zeros((*s.shape[:3], 1))).lse


def _stale(scene: Scene, rank: int, found: list[Partial]) -> list[Partial]:
    written: list[Partial] = []
    for part in found:
        written.append(written[-1] if written and bool((part.lse == -np.inf).all()) else part)
    return written


def _replaced_lse(where: float, value: float) -> Steps:
    """One value of a block's lse taken for another."""
    return _lse_of_block(lambda at, s, m, lse: np.where(lse == where, value, lse))


SENTINELS = (-np.inf, -1e8, -1e9, -1e10, -1e30, -LARGEST["float32"])
"""What has been used for minus infinity."""

MERGE: list[Suspicion] = [
    Suspicion("out is the sum of the blocks' own softmaxes, without log-sum-exp weights", replace(STEPS, merge=_added)),
    Suspicion("out is the plain average over blocks", replace(STEPS, arrived=_averaged)),
    Suspicion("each merge is the plain average of both parts", replace(STEPS, merge=_halved)),
    Suspicion("the merge drops what came before: its out is the new block's term alone", merging(first=0.0)),
    Suspicion("the merge drops the new block's term of out", merging(second=0.0)),
    Suspicion("the merge subtracts the new block's term of out", merging(second=-1.0)),
    Suspicion("the weights of the merge are exchanged", merging(crossed=True)),
    Suspicion("the merged lse is the larger of both", merging(lse=lambda scene, a, b: np.maximum(a, b))),
    Suspicion(
        "the merged lse is the larger of both, and the weights come from it",
        merging(lse=lambda scene, a, b: np.maximum(a, b), weights_from_lse=True),
    ),
    Suspicion("the merged lse is the new block's", merging(lse=lambda scene, a, b: b)),
    Suspicion("the merged lse is the earlier one: it is never updated", merging(lse=lambda scene, a, b: a)),
    Suspicion("the merged lse is the mean of both", merging(lse=lambda scene, a, b: (a + b) / 2)),
    Suspicion("the merged lse is the sum of both", merging(lse=lambda scene, a, b: a + b)),
    Suspicion(
        "the merge's weights are transposed: lse (tokens, heads) taken for (heads, tokens)",
        replace(STEPS, merge=_turned),
    ),
    Suspicion("the merge of two empty parts is NaN: -inf - (-inf)", replace(STEPS, merge=_sigmoid)),
    Suspicion("the merge of two empty parts is NaN: -inf - (-inf)", replace(STEPS, merge=_unguarded)),
    Suspicion("the merge of two empty parts is NaN: -inf - (-inf)", replace(STEPS, merge=_unguarded_out)),
    Suspicion(
        "the merge overflows: log(1 + exp(difference)) is infinite and the row becomes 0",
        merging(lse=_log1p, weights_from_lse=True),
    ),
    Suspicion(
        "the merge overflows: log(1 + exp(difference)) is infinite or no number",
        merging(lse=_unguarded_log1p, weights_from_lse=True),
    ),
    Suspicion(
        "the merge overflows: log-sum-exps are added without a shift", merging(lse=_unshifted, weights_from_lse=True)
    ),
    Suspicion("the merge overflows: its weights are exp(lse), without a shift", replace(STEPS, merge=_plain_weights)),
    Suspicion(
        "a block in which nothing is visible leaves the block before it to be merged again",
        replace(STEPS, arrived=_stale),
    ),
]
LSE_OF_BLOCKS: list[Suspicion] = [
    Suspicion(
        "log-sum-exps of blocks are rounded to the dtype of the inputs, and merged in it",
        replace(
            _lse_of_block(lambda at, s, m, lse: round_to(lse, at.problem.dtype)),
            merge=_in_input_dtype,
        ),
    ),
    Suspicion(
        "base-2 log-sum-exps of blocks are merged as natural ones",
        replace(
            _lse_of_block(lambda at, s, m, lse: lse / math.log(2)),
            whole=lambda scene, rank, whole: whole._replace(lse=whole.lse * math.log(2)),
        ),
    ),
    Suspicion(
        "base-2 log-sum-exps of blocks are merged as natural ones, and returned",
        _lse_of_block(lambda at, s, m, lse: lse / math.log(2)),
    ),
    Suspicion(
        "natural log-sum-exps of blocks are merged as base-2 ones",
        replace(
            _lse_of_block(lambda at, s, m, lse: lse * math.log(2)),
            whole=lambda scene, rank, whole: whole._replace(lse=whole.lse / math.log(2)),
        ),
    ),
    Suspicion(
        "a block's lse lacks its maximum",
        _lse_of_block(lambda at, s, m, lse: lse - np.where(m.any(axis=3), _top(s, m), 0.0)),
    ),
    Suspicion(
        "a block's lse is its maximum: the logarithm of the sum is missing",
        _lse_of_block(lambda at, s, m, lse: _top(s, m)),
    ),
    *[
        Suspicion(
            "an lse of exactly 0 is taken for one that was not computed",
            replace(_replaced_lse(0.0, value), merge=_coarse),
        )
        for value in SENTINELS
    ],
    *[
        Suspicion(
            f"a block without visible keys has lse {value:.3g} instead of -inf",
            replace(_replaced_lse(-np.inf, value), merge=_coarse),
        )
        for value in SENTINELS
        if np.isfinite(value)
    ],
    Suspicion(
        "the lse of every block is 0: blocks are merged with equal weights, whatever they attend",
        _lse_of_block(lambda at, s, m, lse: np.where(lse == -np.inf, lse, 0.0)),
    ),
    Suspicion(
        "the lse of a block of one key is not written: it is 0",
        _lse_of_block(lambda at, s, m, lse: np.zeros_like(lse) if s.shape[3] == 1 and (m > 0).any() else lse),
    ),
    Suspicion(
        "a block without visible keys has lse 0",
        _lse_of_block(lambda at, s, m, lse: np.where(lse == -np.inf, 0.0, lse)),
    ),
    Suspicion(
        "a block without visible keys has lse 0, unless it is skipped whole",
        _lse_of_block(lambda at, s, m, lse: np.where((lse == -np.inf) & (m > 0).any(), 0.0, lse)),
    ),
    Suspicion(
        "a block without visible keys has lse +inf",
        _lse_of_block(lambda at, s, m, lse: np.where(lse == -np.inf, np.inf, lse)),
    ),
    Suspicion(
        "a block without visible keys has lse +inf, unless it is skipped whole",
        _lse_of_block(lambda at, s, m, lse: np.where((lse == -np.inf) & (m > 0).any(), np.inf, lse)),
    ),
    Suspicion(
        "a finite number stands for -inf: a row without keys in a block becomes the block's average", _partial(_filled)
    ),
    Suspicion(
        "a finite number stands for -inf: a row without keys becomes the average of all", _partial(_filled_always)
    ),
    Suspicion("the stabiliser is taken over masked keys too: the row vanishes", _partial(_stabilised_by_all)),
    Suspicion("scores are not stabilised: exp overflows", _partial(_unstabilised)),
    Suspicion("lse sums over queries instead of keys", _lse_of_block(_over_queries)),
]


def _blocks(says: str, of: Callable[[Visit], int]) -> list[Suspicion]:
    """A block that is merged so many times: in the forward only, or as a pattern that the backward shares."""
    both = replace(STEPS, pattern=lambda at: STEPS.pattern(at) * of(at))
    return [
        *[Suspicion(says, both, when) for when in WHENS],
        Suspicion(says, replace(STEPS, times=of)),
    ]


def _several(at: Visit) -> bool:
    return at.scene.size > 1


BLOCKS: list[Suspicion] = [
    *_blocks("each rank attends its own block only: keys and values never rotate", lambda at: int(at.hop == 0)),
    *_blocks("the block of the last hop is never merged", lambda at: int(not at.last)),
    *_blocks(
        "every rank leaves its own block out", lambda at: int(at.hop > 0 or not _several(at) or at.scene.replicated)
    ),
    *_blocks("every rank's own block is counted twice", lambda at: 2 if at.hop == 0 and _several(at) else 1),
    *_blocks("the block of the last hop is counted twice", lambda at: 2 if at.last else 1),
    *_blocks("the block of hop 1 is never merged", lambda at: int(at.hop != 1)),
    *_blocks("the block of hop 2 is never merged", lambda at: int(at.hop != 2)),
    *_blocks("the block of hop 1 is counted twice", lambda at: 2 if at.hop == 1 else 1),
    *_blocks("the block of hop 2 is counted twice", lambda at: 2 if at.hop == 2 else 1),
    *_blocks(
        "the block of rank 0 is counted twice on every other rank", lambda at: 2 if at.owner == 0 and at.rank else 1
    ),
    *_blocks("the block of rank 0 is never merged on other ranks", lambda at: int(at.owner > 0 or at.rank == 0)),
    *_blocks(
        "the block of the last rank is never merged on other ranks",
        lambda at: int(at.owner < at.scene.size - 1 or at.rank == at.owner),
    ),
    Suspicion(
        "replicated queries: partial results are never merged, each rank returns its own block's",
        replace(STEPS, everyone=lambda scene, rank, found: [found[rank]]),
    ),
    Suspicion(
        "replicated queries: the partial result of rank 0 is left out",
        replace(STEPS, everyone=lambda scene, rank, found: found[1:] if len(found) > 1 else found),
    ),
    Suspicion(
        "replicated queries: the partial result of the last rank is left out",
        replace(STEPS, everyone=lambda scene, rank, found: found[:-1] if len(found) > 1 else found),
    ),
]
