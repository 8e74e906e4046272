"""Hypotheses of what is taken instead of something else: sinks of other heads, an lse of other scores or keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch

from ringref.attention import Intermediates, attention, per_query_head
from ringref.problem import Problem
from ringref.rounding import LARGEST
from ringverify.diagnosis.hypothesis import Hypothesis, agree_but_for, agree_with
from ringverify.diagnosis.pairs import Ints, Mask, pairs_of
from ringverify.diagnosis.reading import finite, unmasked
from ringverify.diagnosis.scene import Array, Counts, Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.merging import LSE_AS, MAXIMA, lse_as
from ringverify.faults.ring import STEPS

SINKS_OF: dict[str, Callable[[int, int, int], Ints]] = {
    "of the head with its number on its rank, where heads are dealt out to the ranks": lambda heads, group, ranks: (
        np.arange(heads) % -(-heads // ranks)
    ),
    "of every so many heads from its rank on, where ranks have runs of heads": lambda heads, group, ranks: (
        np.arange(heads).reshape(-1, ranks).T.ravel() if heads % ranks == 0 else np.arange(heads)
    ),
    "of a run of heads, where ranks have every so many from their rank on": lambda heads, group, ranks: (
        np.arange(heads).reshape(ranks, -1).T.ravel() if heads % ranks == 0 else np.arange(heads)
    ),
    "of a run of heads that starts at rank · key heads of a rank, not rank · heads": lambda heads, group, ranks: (
        np.arange(heads) - np.arange(heads) * ranks // heads * ((heads - heads // group) // ranks)
        if heads // group % ranks == 0
        else np.arange(heads)
    ),
    "of a head before it, or 0, as sinks are filled up in front, and heads at the end": lambda heads, group, ranks: (
        np.maximum(np.arange(heads) - -heads % ranks, -1)
    ),
    "of the next head": lambda heads, group, ranks: np.roll(np.arange(heads), -1),
    "in the order (head of the group, key head)": lambda heads, group, ranks: (
        np.arange(heads).reshape(group, heads // group).T.ravel()
    ),
    "in the order (key head, head of the group), where another is given": lambda heads, group, ranks: (
        np.arange(heads).reshape(heads // group, group).T.ravel()
    ),
    "of the heads in reverse": lambda heads, group, ranks: np.arange(heads)[::-1],
    "of the first head": lambda heads, group, ranks: np.zeros(heads, dtype=np.int64),
    "of the head with the number of the key head": lambda heads, group, ranks: np.arange(heads) // group,
    "of the first head of the group": lambda heads, group, ranks: np.arange(heads) // group * group,
}
"""Numbers of the heads whose sinks each head takes, -1 for a sink of 0, by the number of heads, of those that share a
key head, and of ranks."""


SINKS_AS: dict[str, Callable[[Problem, Array], tuple[Array, Array]]] = {
    "the softcap is applied to the sinks as well": lambda p, sinks: (
        _softcapped(p, sinks), np.ones_like(sinks) if p.softcap is None else 1 - np.tanh(sinks / p.softcap) ** 2
    ),
    "the sinks are multiplied by the scale": lambda p, sinks: (
        p.scale_value * sinks, np.full_like(sinks, p.scale_value)
    ),
    "the sinks are taken for powers of 2": lambda p, sinks: (np.log(2) * sinks, np.full_like(sinks, np.log(2))),
    "the sinks are divided by ln 2, where powers are of e": lambda p, sinks: (
        sinks / np.log(2), np.full_like(sinks, 1 / np.log(2))
    ),
    "sinks are left out, all of them": lambda p, sinks: (np.full_like(sinks, -np.inf), np.zeros_like(sinks)),
}  # fmt: skip
"""What stands for the sinks, and its derivative."""


def _softcapped(p: Problem, sinks: Array) -> Array:
    return sinks if p.softcap is None else p.softcap * np.tanh(sinks / p.softcap)


def _judge_sinks_as(change: Callable[[Problem, Array], tuple[Array, Array]]) -> Callable[[Scene], float | None]:
    def judge(scene: Scene) -> float | None:
        p, x = scene.problem, finite(scene.inputs)
        if x.sinks is None or ((changed := change(p, x.sinks))[0] == x.sinks).all():
            return None if wrong_tensors(scene) else 0.0
        answer = attention(p, x.q, x.k, x.v, x.dout, x.dlse, changed[0])
        if answer.dsinks is not None:
            answer = dataclasses.replace(answer, dsinks=answer.dsinks * changed[1][:, None])
        return agree_with(scene, answer, x)

    return judge


def _judge_sinks(of: Callable[[int, int, int], Ints]) -> Callable[[Scene], float | None]:
    def judge(scene: Scene) -> float | None:
        p, x = scene.problem, finite(scene.inputs)
        heads = of(p.heads, p.group_size, scene.size)
        sinks = None if x.sinks is None else np.where(heads < 0, 0.0, x.sinks[heads])
        if sinks is None or (sinks == x.sinks).all():
            return None if wrong_tensors(scene) else 0.0
        return agree_with(scene, attention(p, x.q, x.k, x.v, x.dout, x.dlse, sinks), x)

    return judge


def _summed(scene: Scene, scores: Array, counts: Counts, *, sinks: bool = True) -> Array:
    """Return log-sum-exps of scores that count so often, with sinks or without, `(B, H, Nq)`."""
    given = scene.inputs.sinks if sinks else None
    each = np.full(scene.problem.heads, -np.inf) if given is None else given
    of_sinks = np.broadcast_to(each[:, None, None], (*scores.shape[:3], 1))
    whole = np.concatenate([np.where(counts > 0, scores, -np.inf), of_sinks], axis=-1)
    top = whole.max(axis=-1, initial=-np.inf)
    safe = np.where(np.isfinite(top), top, 0.0)
    many = np.concatenate([counts, np.ones_like(of_sinks)], axis=-1)
    with np.errstate(divide="ignore"):
        found: Array = safe + np.log((many * np.exp(whole - safe[..., None])).sum(axis=-1))
    return found


def _inner(scene: Scene) -> Intermediates:
    return scene.truth.intermediates


def _behind_the_sink(scene: Scene) -> Array:
    """Return lse less what the sink exceeds the largest score by; −inf in rows without keys."""
    inner, sinks = _inner(scene), scene.inputs.sinks
    if sinks is None:
        return inner.lse
    top = _highest(scene)
    with np.errstate(invalid="ignore"):
        return np.where(top > -np.inf, inner.lse - np.maximum(0.0, sinks[:, None] - top), -np.inf)


def _highest(scene: Scene) -> Array:
    inner = _inner(scene)
    found: Array = np.where(inner.m > 0, inner.scores, -np.inf).max(axis=-1, initial=-np.inf)
    return found


def _log_of_all_keys(more: int, scene: Scene) -> Array:
    """Return lse, and in rows without keys and sinks the logarithm of how many keys there are, or one more."""
    lse, n = _inner(scene).lse, scene.problem.nk + more
    return np.where(np.isneginf(lse), np.log(n) if n else -np.inf, lse)


def _log_of_attended_keys(scene: Scene) -> Array:
    """Return lse, and in rows without keys and sinks the logarithm of how many keys the rank of a row fetches, or 0.

    These are the keys that its queries attend, and what lies between.
    """
    pairs, lse = pairs_of(scene), _inner(scene).lse
    seen = [np.flatnonzero(pairs.true[:, :, held].any(axis=(0, 1, 2))) for held in pairs.queries.shards]
    many = np.array([keys[-1] - keys[0] + 1 if len(keys) else 1 for keys in seen])
    return np.where(np.isneginf(lse), np.log(many)[pairs.queries.rank[:, 0]], lse)


def _largest_part(scene: Scene) -> Array:
    inner = _inner(scene)
    parts = [
        _summed(scene, inner.scores[..., held], inner.m[..., held], sinks=False)
        for held in scene.shards[1]
        if len(held)
    ]
    return np.max(parts, axis=0, initial=-np.inf) if parts else np.full(inner.lse.shape, -np.inf)


def _as(
    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], top: Callable[[Scene], Array]
) -> Callable[[Scene], Array]:
    return lambda scene: lse_as(of, *(torch.from_numpy(x) for x in (_inner(scene).lse, top(scene)))).numpy()


LSES: dict[str, Callable[[Scene], Array]] = {
    "is that of the scores before the softcap, and out is not": lambda scene: _summed(
        scene, _inner(scene).raw_scores, _inner(scene).m
    ),
    "is that of the scores without the scale, and out is not": lambda scene: _summed(
        scene, _inner(scene).scores / scene.problem.scale_value, _inner(scene).m
    ),
    "is that of all keys, whatever the mask, and out is not": lambda scene: _summed(
        scene, unmasked(scene)[0], np.ones_like(_inner(scene).m)
    ),
    "is log(number of keys) in rows without keys, whose scores are taken for 0": functools.partial(_log_of_all_keys, 0),
    "is log(number of keys + 1) in rows without keys, whose scores are taken for 0, and that of a sink": (
        functools.partial(_log_of_all_keys, 1)
    ),
    "is log(number of keys from the first that the rank attends to the last) in rows without keys, or 0 without any": (
        _log_of_attended_keys
    ),
    "is -inf in rows without keys, though there are sinks": lambda scene: np.where(
        (_inner(scene).m > 0).any(axis=-1), _inner(scene).lse, -np.inf
    ),
    "is computed with the maximum of the scores, where the sum is shifted by the sink, which is larger": (
        _behind_the_sink
    ),
    "is that of each key once, where the mask counts some more often": lambda scene: _summed(
        scene, _inner(scene).scores, np.minimum(_inner(scene).m, 1)
    ),
}
LSES |= {
    f"{says.format(top=top)}, and is right where the backward starts from it": _as(of, which)
    for which, top in zip((_highest, _largest_part), MAXIMA, strict=True)
    for says, of in LSE_AS.items()
}
"""What lse may be where out is right."""


def _judge_lse(of: Callable[[Scene], Array]) -> Callable[[Scene], float | None]:
    def judge(scene: Scene) -> float | None:
        if "lse" not in scene.tensors:
            return None if wrong_tensors(scene) else 0.0
        return agree_but_for(scene, {"lse": of(scene)})

    return judge


def _judge_unshifted(with_sinks: bool) -> Callable[[Scene], float | None]:
    """Return the judge of sinks that join the denominator as exp(sink), where scores have lost their maximum.

    Args:
        with_sinks: whether the maximum is that of scores and sinks.
    """

    def judge(scene: Scene) -> float | None:
        x, inner = finite(scene.inputs), _inner(scene)
        if x.sinks is None:
            return None if wrong_tensors(scene) else 0.0
        if any(name not in ("out", "lse") for name in scene.tensors):
            return None
        sinks = np.broadcast_to(x.sinks[:, None], inner.lse.shape)
        top = _highest(scene)
        top = np.maximum(top, sinks) if with_sinks else top
        lse = np.logaddexp(_summed(scene, inner.scores, inner.m, sinks=False), sinks + np.where(top > -np.inf, top, 0))
        largest = np.finfo(np.float64 if scene.problem.dtype == "float64" else np.float32).max
        lse = np.where(sinks > np.log(largest), np.inf, lse)  # exp(sink) overflows
        share = np.exp(inner.lse - lse).swapaxes(1, 2)[..., None]
        return agree_but_for(scene, {"out": scene.truth.out * share, "lse": lse})

    return judge


LACKING: dict[str, Callable[[Scene], Mask]] = {
    "of rank 0": lambda scene: _seen_on(scene, 0),
    "of the last rank": lambda scene: _seen_on(scene, scene.size - 1),
    "of the own rank": lambda scene: _seen_on_own(scene),
}
"""Whose keys a row has to attend for its sink to count, and which rows do, `(B, H, Nq)`."""


def _seen_on(scene: Scene, rank: int) -> Mask:
    found: Mask = np.any(_inner(scene).m[..., scene.shards[1][rank]] > 0, axis=-1)
    return found


def _seen_on_own(scene: Scene) -> Mask:
    """Of replicated queries all do: every rank has all rows."""
    found = np.full(_inner(scene).lse.shape, scene.replicated)
    for rank, held in enumerate(() if scene.replicated else scene.shards[0]):
        found[..., held] = _seen_on(scene, rank)[..., held]
    return found


LOST: dict[str, tuple[float, float]] = {
    dtype: (float(np.log(np.finfo(dtype).tiny)), float(np.log(np.finfo(dtype).smallest_subnormal) - 1))
    for dtype in ("float32", "float64")
}
"""Logarithms of numbers below which a dtype has fewer digits, and below which it has 0 instead."""


def _agree_where_sure(scene: Scene, out: Array, lse: Array, unsure: Mask) -> float | None:
    """Return whether results are those that are expected, `(B, Nq, H, E)` and `(B, H, Nq)`, but in unsure rows.

    Arrays are changed.
    """
    for rank, held in enumerate(scene.shards[0]):
        there = unsure[..., held]
        out[:, held] = np.where(there.swapaxes(1, 2)[..., None], scene.seen("out", rank), out[:, held])
        if "lse" in scene.tensors:
            lse[..., held] = np.where(there, scene.seen("lse", rank), lse[..., held])
    return agree_but_for(scene, {"out": out, "lse": lse})


def _judge_maximum_without_sinks(scene: Scene) -> float | None:
    """Judge a maximum of the scores alone, 0 without any, less which exp(sink) overflows, or is 0 in rows without keys.

    A sink that overflows leaves nothing of out, as it should.
    """
    top, sinks = _highest(scene), scene.inputs.sinks
    if sinks is None:
        return None if wrong_tensors(scene) else 0.0
    if any(name not in ("out", "lse") for name in scene.tensors):
        return None
    few, none = LOST[scene.pipeline.sums]
    alone = np.isneginf(top)
    above = sinks[:, None] - np.where(alone, 0.0, top)
    lse = np.where(above > np.log(LARGEST[scene.pipeline.sums]), np.inf, _inner(scene).lse)
    lse = np.where(alone & (above < none), -np.inf, lse)
    return _agree_where_sure(scene, scene.truth.out.copy(), lse, alone & (above >= none) & (above < few))


def _judge_shared_maximum(axes: tuple[int, ...], scene: Scene) -> float | None:
    """Judge a maximum that is one for all rows of a rank, along axes of `(B, H, S)`: rows far below are lost."""
    if any(name not in ("out", "lse") for name in scene.tensors):
        return None
    few, none = LOST[scene.pipeline.sums]
    top, below = _highest(scene), np.zeros(_inner(scene).lse.shape)
    for held in scene.shards[0]:
        if len(held) and not scene.replicated:
            below[..., held] = top[..., held] - top[..., held].max(axis=axes, keepdims=True)
    if scene.replicated and top.size:
        below = top - top.max(axis=axes, keepdims=True)
    lost = (below < none) & np.isfinite(top)
    out = np.where(lost.swapaxes(1, 2)[..., None], 0.0, scene.truth.out)
    lse = np.where(lost, -np.inf, _inner(scene).lse)
    return _agree_where_sure(scene, out, lse, (below >= none) & (below < few))


ROWS_OF: dict[str, tuple[int, ...]] = {
    "in each head": (-1,),
    "of all heads": (-2, -1),
    "of the whole batch": (-3, -2, -1),
}
"""Rows of a rank that may share a maximum, as axes of `(B, H, S)`."""


def _judge_sinks_of_rows(seen: Callable[[Scene], Mask]) -> Callable[[Scene], float | None]:
    """Return the judge of sinks that are lost in rows which attend no key of some rank.

    What is left of keys that were taken less than such a sink, which is far above them, is not foretold.
    """

    def judge(scene: Scene) -> float | None:
        inner = _inner(scene)
        if scene.inputs.sinks is None:
            return None if wrong_tensors(scene) else 0.0
        if any(name not in ("out", "lse") for name in scene.tensors):
            return None
        keys = _summed(scene, inner.scores, inner.m, sinks=False)
        lse = np.where(seen(scene), inner.lse, keys)
        with np.errstate(invalid="ignore"):
            share = np.where(np.isneginf(lse), 0.0, np.exp(inner.lse - lse)).swapaxes(1, 2)[..., None]
        below = keys - scene.inputs.sinks[:, None]
        unsure = (lse != inner.lse) & (below < LOST[scene.pipeline.sums][0]) & (keys > -np.inf)
        return _agree_where_sure(scene, scene.truth.out * share, lse, unsure)

    return judge


PARTIAL: dict[str, tuple[bool, bool]] = {
    "the sums of exponentials": (True, False),
    "the weighted values": (False, True),
    "the sums of exponentials and the weighted values": (True, True),
}
"""What of each rank's partial softmax may be added up as it is, with the rank's own maximum: sums, values."""


def _judge_unscaled(sums: bool, values: bool) -> Callable[[Scene], float | None]:
    """Return the judge of partial results of ranks that are added up without being rescaled to the common maximum."""

    def judge(scene: Scene) -> float | None:
        p, x, inner = scene.problem, finite(scene.inputs), _inner(scene)
        if any(name not in ("out", "lse") for name in scene.tensors):
            return None
        scores = np.where(inner.m > 0, inner.scores, -np.inf)
        top = scores.max(axis=-1, initial=-np.inf)
        safe = np.where(np.isfinite(top), top, 0.0)
        total, weighted = np.zeros(top.shape), np.zeros((*top.shape, p.dv))
        v = per_query_head(x.v, p.group_size)
        for held in scene.shards[1]:
            own = scores[..., held].max(axis=-1, initial=-np.inf)
            own = np.where(np.isfinite(own), own, safe)
            each = inner.m[..., held] * np.exp(scores[..., held] - own[..., None])
            back = np.exp(own - safe)
            total += each.sum(axis=-1) * (np.ones_like(back) if sums else back)
            weighted += (each @ v[:, :, held]) * (np.ones_like(back) if values else back)[..., None]
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.where(total[..., None] > 0, weighted / total[..., None], 0.0).swapaxes(1, 2)
            lse = np.where(total > 0, safe + np.log(total), -np.inf)
        return agree_but_for(scene, {"out": out, "lse": lse})

    return judge


def _judge_other_key_heads(keys: bool, values: bool) -> Callable[[Scene], float | None]:
    """Return the judge of query heads that read the keys, or the values, of key head h mod key heads."""

    def judge(scene: Scene) -> float | None:
        p, x = scene.problem, finite(scene.inputs)
        right, turn = np.arange(p.heads) // p.group_size, np.arange(p.heads) % p.hk
        if (right == turn).all():
            return None if wrong_tensors(scene) else 0.0
        of_k, of_v = turn if keys else right, turn if values else right
        k, v = x.k[:, :, of_k], x.v[:, :, of_v]
        answer = attention(p.replace(key_heads=None), x.q, k, v, x.dout, x.dlse, x.sinks)
        dk, dv = np.zeros_like(x.k), np.zeros_like(x.v)
        for whole, of, each in ((dk, of_k, answer.dk), (dv, of_v, answer.dv)):
            if each is not None:
                np.add.at(whole.swapaxes(0, 2), of, each.swapaxes(0, 2))
        return agree_with(scene, dataclasses.replace(answer, dk=dk, dv=dv), x)

    return judge


SUBSTITUTED: list[Hypothesis] = [
    *(
        Hypothesis(
            f"grouped heads: query head h reads the {what} of key head h mod key heads, and the {others} of its own",
            STEPS,
            judge=_judge_other_key_heads(*which),
        )
        for what, others, which in (("values", "keys", (False, True)), ("keys", "values", (True, False)))
    ),
    *(
        Hypothesis(
            f"{what} of the ranks' partial results are added up without being rescaled to the common maximum",
            STEPS,
            judge=_judge_unscaled(*which),
        )
        for what, which in PARTIAL.items()
    ),
    *(Hypothesis(f"each head takes the sink {text}", STEPS, judge=_judge_sinks(of)) for text, of in SINKS_OF.items()),
    *(Hypothesis(text, STEPS, judge=_judge_sinks_as(change)) for text, change in SINKS_AS.items()),
    *(
        Hypothesis(
            f"sinks are not shifted by the maximum {text}: they join the denominator as exp(sink)",
            STEPS,
            judge=_judge_unshifted(with_sinks),
        )
        for with_sinks, text in ((False, "of the scores, as these are"), (True, "of scores and sinks, as these are"))
    ),
    *(Hypothesis(f"lse {text}", STEPS, judge=_judge_lse(of)) for text, of in LSES.items()),
    Hypothesis(
        "the maximum that is subtracted leaves sinks out: lse is infinite where exp(sink - largest score) overflows",
        STEPS,
        judge=_judge_maximum_without_sinks,
    ),
    *(
        Hypothesis(
            f"the maximum that is subtracted is one for all rows of a rank, {text}: rows far below it are lost",
            STEPS,
            judge=functools.partial(_judge_shared_maximum, axes),
        )
        for text, axes in ROWS_OF.items()
    ),
    *(
        Hypothesis(f"the sink is lost in rows without a key {text}", STEPS, judge=_judge_sinks_of_rows(seen))
        for text, seen in LACKING.items()
    ),
]
