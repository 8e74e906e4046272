"""Suspicions of the backward: its formula, and what of the forward it uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ringverify.diagnosis.model import STEPS, Steps, partial, probabilities
from ringverify.diagnosis.scene import Array, Counts, Partial, Results, Scene, Visit
from ringverify.diagnosis.suspicion import Suspicion


def _own_lse(at: Visit, s: Array, m: Counts, lse: Array) -> Array:
    return probabilities(at, s, m, partial(at, s, m, np.zeros((*s.shape[:2], s.shape[3], 1))).lse)


def _normalised_otherwise(of: Callable[[Array], Array]) -> Steps:
    return replace(STEPS, probabilities=lambda at, s, m, lse: probabilities(at, s, m, of(lse)))


def _cotangent_of_lse(factor: float) -> Steps:
    return replace(STEPS, dlse=lambda scene, rank: factor * STEPS.dlse(scene, rank))


def _cotangent_of_out(factor: float) -> Steps:
    return replace(STEPS, dout=lambda scene, rank: factor * STEPS.dout(scene, rank))


def _factors(of_q: Callable[[float], float], of_k: Callable[[float], float]) -> Steps:
    return replace(STEPS, factors=lambda at, scale: (of_q(scale), of_k(scale)))


def _over_heads(dout: Array, out: Array, dlse: Array) -> Array:
    """`(B, H, S)` summed over heads where it should be over dimensions, if there are as many."""
    if out.shape[1] != out.shape[3]:
        return STEPS.delta(dout, out, dlse)
    turned: Array = (dout * out).sum(axis=1).swapaxes(1, 2) - dlse
    return turned


def _half_lse(at: Visit, whole: Partial, block: Partial) -> Partial:
    """Zigzag: the half of the queries that attends a later rank's block gets the log-sum-exps of the other half."""
    count = whole.lse.shape[2]
    causal_zigzag = at.scene.case.sharding == "zigzag" and at.problem.causal
    if not causal_zigzag or at.owner <= at.rank or count < 2:
        return whole
    half = (count + 1) // 2
    return whole._replace(lse=np.concatenate([whole.lse[:, :, :half], whole.lse[:, :, : count - half]], axis=2))


def _own_out_and_lse(steps: Steps) -> Steps:
    return replace(steps, own=lambda at, whole, block: block)


def _turned(p: Array) -> Array:
    return p if p.shape[2] == p.shape[3] else p.swapaxes(2, 3)


FORMULA: list[Suspicion] = [
    Suspicion("gradients use the block's own lse instead of the merged one", replace(STEPS, probabilities=_own_lse)),
    Suspicion("gradients use the block's own out and lse instead of the merged ones", _own_out_and_lse(STEPS)),
    Suspicion(
        "gradients use the block's own out and lse, and ignore the cotangent of lse",
        _own_out_and_lse(_cotangent_of_lse(0)),
    ),
    Suspicion(
        "gradients use the block's own out", replace(STEPS, own=lambda at, whole, block: Partial(block.out, whole.lse))
    ),
    Suspicion("the gradient of lse is ignored: its cotangent counts as 0", _cotangent_of_lse(0)),
    Suspicion("the cotangent of lse is negated", _cotangent_of_lse(-1)),
    Suspicion("the cotangent of lse is counted twice", _cotangent_of_lse(2)),
    Suspicion(
        "the softmax is taken for constant: ds = p · dp, its correction delta is missing",
        replace(STEPS, ds=lambda p, dp, delta: p * dp),
    ),
    Suspicion(
        "delta is missing from ds, the cotangent of lse is there", replace(STEPS, delta=lambda dout, out, dlse: -dlse)
    ),
    Suspicion(
        "delta is added instead of subtracted: ds = p · (dp + delta)",
        replace(STEPS, ds=lambda p, dp, delta: p * (dp + delta)),
    ),
    Suspicion("delta is summed over heads instead of dimensions", replace(STEPS, delta=_over_heads)),
    Suspicion("ds lacks the factor p", replace(STEPS, ds=lambda p, dp, delta: dp - delta)),
    Suspicion("dv is made of p not transposed", replace(STEPS, dv_weights=_turned)),
    Suspicion(
        "the backward takes the natural lse for one in base 2", _normalised_otherwise(lambda lse: lse * math.log(2))
    ),
    Suspicion(
        "the backward takes an lse in base 2 for a natural one", _normalised_otherwise(lambda lse: lse / math.log(2))
    ),
    Suspicion("the backward has no lse: it counts as 0", _normalised_otherwise(np.zeros_like)),
    Suspicion(
        "the backward of a rank with one query has no lse: it counts as 0",
        replace(STEPS, saved=lambda scene, lse: np.zeros_like(lse) if lse.shape[2] == 1 else lse),
    ),
    Suspicion(
        "the half block of zigzag gets the log-sum-exps of the other half of the queries", replace(STEPS, own=_half_lse)
    ),
    Suspicion("scale is missing from dq", _factors(lambda scale: 1.0, lambda scale: scale)),
    Suspicion("scale is missing from dk", _factors(lambda scale: scale, lambda scale: 1.0)),
    Suspicion("scale is missing from dq and dk", _factors(lambda scale: 1.0, lambda scale: 1.0)),
    Suspicion("scale is applied twice in dq", _factors(lambda scale: scale**2, lambda scale: scale)),
    Suspicion("scale is applied twice in dk", _factors(lambda scale: scale, lambda scale: scale**2)),
    Suspicion("scale is applied twice in dq and dk", _factors(lambda scale: scale**2, lambda scale: scale**2)),
    Suspicion("the cotangent of out is ignored", _cotangent_of_out(0)),
    Suspicion("the cotangent of out is negated", _cotangent_of_out(-1)),
    Suspicion("the cotangent of out counts twice", _cotangent_of_out(2)),
    Suspicion(
        "the cotangent of out is taken to be 1 everywhere",
        replace(STEPS, dout=lambda scene, rank: np.ones_like(STEPS.dout(scene, rank))),
    ),
]


def _home(change: Callable[[Scene, Results], Results]) -> Steps:
    return replace(STEPS, home=lambda scene, rank, results: {**results, **change(scene, results)})


def _alike(r: Results) -> bool:
    return r["dk"].shape == r["dv"].shape


def _like(flat: Array, like: Array) -> Array:
    """The first numbers of a flat array in the shape of another, zeros where there are not enough."""
    room = np.zeros(like.size)
    count = min(like.size, flat.size)
    room[:count] = flat[:count]
    return room.reshape(like.shape)


def _packed_by_rows(scene: Scene, r: Results) -> Results:
    """dk | dv packed along the last axis and split as if all of dk came first."""
    packed = np.concatenate([r["dk"].swapaxes(1, 2), r["dv"].swapaxes(1, 2)], axis=-1).swapaxes(1, 2).reshape(-1)
    return {"dk": _like(packed, r["dk"]), "dv": _like(packed[r["dk"].size :], r["dv"])}


def _packed_as_equal(scene: Scene, r: Results) -> Results:
    """dk and dv in one buffer, dv looked for where it would begin if both had the width of values."""
    packed = np.concatenate([r["dk"].reshape(-1), r["dv"].reshape(-1)])
    start = r["dk"].size // scene.problem.head_dim * scene.problem.dv
    return {"dv": _like(packed[start:], r["dv"])}


def _rolled(by: int) -> Steps:
    return _home(lambda scene, r: {"dk": np.roll(r["dk"], by, axis=1), "dv": np.roll(r["dv"], by, axis=1)})


def _heads_for_tokens(x: Array) -> Array:
    b, s, h, d = x.shape
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(b, s, h, d)


HOME: list[Suspicion] = [
    Suspicion("dk and dv swapped", _home(lambda scene, r: {"dk": r["dv"], "dv": r["dk"]} if _alike(r) else {})),
    Suspicion(
        "the returned dk holds the sum of the right dk and the right dv",
        _home(lambda scene, r: {"dk": r["dk"] + r["dv"]} if _alike(r) else {}),
    ),
    Suspicion(
        "the returned dv holds the sum of the right dk and the right dv",
        _home(lambda scene, r: {"dv": r["dk"] + r["dv"]} if _alike(r) else {}),
    ),
    Suspicion("the returned dk is the right dv", _home(lambda scene, r: {"dk": r["dv"]} if _alike(r) else {})),
    Suspicion("the returned dv is the right dk", _home(lambda scene, r: {"dv": r["dk"]} if _alike(r) else {})),
    Suspicion("the rows of dk and dv are shifted by one", _rolled(1)),
    Suspicion("the rows of dk and dv are shifted by one backwards", _rolled(-1)),
    Suspicion("packed dk | dv is split by rows instead of columns", _home(_packed_by_rows)),
    Suspicion("packed dk | dv is split as if value_dim were head_dim", _home(_packed_as_equal)),
    Suspicion(
        "dq's elements are permuted: heads and tokens are exchanged by a reshape",
        _home(lambda scene, r: {"dq": _heads_for_tokens(r["dq"])}),
    ),
    Suspicion(
        "dk's and dv's elements are permuted: heads and tokens are exchanged by a reshape",
        _home(lambda scene, r: {"dk": _heads_for_tokens(r["dk"]), "dv": _heads_for_tokens(r["dv"])}),
    ),
]

FACTORS: dict[str, Callable[[Scene], float]] = {
    "is 0": lambda scene: 0.0,
    "has the wrong sign": lambda scene: -1.0,
    "is twice what it should be": lambda scene: 2.0,
    "is half of what it should be": lambda scene: 0.5,
    "is as many times too large as there are ranks": lambda scene: scene.size,
    "is divided by the number of ranks": lambda scene: 1 / scene.size,
    "is divided by the number of query heads of a group": lambda scene: 1 / scene.problem.group_size,
    "is as many times too large as a group has query heads": lambda scene: scene.problem.group_size,
    "is divided by the number of queries": lambda scene: 1 / max(1, scene.problem.nq),
    "is divided by log(2)": lambda scene: 1 / math.log(2),
    "is multiplied by log(2)": lambda scene: math.log(2),
}
TOGETHER: dict[str, tuple[str, ...]] = {
    "dq": ("dq",),
    "dk": ("dk",),
    "dv": ("dv",),
    "each of dk and dv": ("dk", "dv"),
    "each of dq and dk": ("dq", "dk"),
    "each of dq, dk and dv": ("dq", "dk", "dv"),
}


def _multiplied(names: tuple[str, ...], by: Callable[[Scene], float], *, replicated: bool) -> Steps:
    def changed(scene: Scene, results: Results) -> Results:
        if replicated and not scene.replicated:
            return {}
        return {name: by(scene) * x for name, x in results.items() if name in names}

    return _home(changed)


FACTOR: list[Suspicion] = [
    Suspicion(f"{prefix}{which} {what}", _multiplied(names, by, replicated=replicated))
    for what, by in FACTORS.items()
    for which, names in TOGETHER.items()
    for prefix, replicated in (("", False), ("replicated queries: ", True))
]
