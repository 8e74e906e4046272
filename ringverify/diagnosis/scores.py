"""Suspicions of scores: the scale, the softcap, which key head a query head reads, multiplicities."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringref.problem import Problem
from ringverify.diagnosis.masks import WHENS
from ringverify.diagnosis.model import STEPS, Steps, partial, probabilities
from ringverify.diagnosis.scene import Array, Scene, Visit
from ringverify.diagnosis.suspicion import Suspicion


def _throughout(says: str | Callable[[Scene], str], steps: Steps) -> list[Suspicion]:
    return [Suspicion(says, steps, when) for when in WHENS]


SCALES: dict[str, Callable[[Problem], float]] = {
    "scale is 1/sqrt(D + 1)": lambda p: (p.head_dim + 1) ** -0.5,
    "scale ignored: 1/sqrt(D) is used whatever was asked for": lambda p: p.head_dim**-0.5,
    "scale applied twice": lambda p: p.scale_value**2,
    "scale not applied": lambda p: 1.0,
    "sign of the scale lost": lambda p: abs(p.scale_value),
    "scale is 1/sqrt(Dv)": lambda p: p.dv**-0.5,
    "scale is 1/8, that of D = 64": lambda p: 0.125 if p.scale is None else p.scale,
    "scale is 1/8, that of D = 64, whatever was asked for": lambda p: 0.125,
    "scale is that of D rounded up to a multiple of 8": lambda p: (
        (-(-p.head_dim // 8) * 8) ** -0.5 if p.scale is None else p.scale
    ),
    "scale is that of D rounded up to a multiple of 16": lambda p: (
        (-(-p.head_dim // 16) * 16) ** -0.5 if p.scale is None else p.scale
    ),
    "scale is that of D rounded up to a power of 2": lambda p: (
        2.0 ** (-math.ceil(math.log2(p.head_dim)) / 2) if p.scale is None else p.scale
    ),
    "scale is 1/D": lambda p: 1 / p.head_dim if p.scale is None else p.scale,
    "scale is sqrt(D)": lambda p: p.head_dim**0.5 if p.scale is None else p.scale,
    "scale is 1/sqrt(D - 1)": lambda p: max(1, p.head_dim - 1) ** -0.5 if p.scale is None else p.scale,
    "scale is 1/sqrt(D + 1) where the default is wanted": lambda p: (
        (p.head_dim + 1) ** -0.5 if p.scale is None else p.scale
    ),
    "scale is 1/sqrt(H · D), that of all heads together": lambda p: (
        (p.heads * p.head_dim) ** -0.5 if p.scale is None else p.scale
    ),
    "scale lacks the factor log2(e)": lambda p: p.scale_value * math.log(2),
    "scale has a factor log2(e) too many": lambda p: p.scale_value / math.log(2),
}


def _scaled(of: Callable[[Problem], float]) -> Steps:
    return replace(STEPS, scale=lambda at: of(at.problem))


SCALE: list[Suspicion] = [found for says, of in SCALES.items() for found in _throughout(says, _scaled(of))]


def fitted_scale(scene: Scene) -> float | None:
    """The one scale that turns the right lse into the one that was seen, by Newton's method; `None` if it finds none.

    Its derivative is Σ_j p · s / scale, so rows that attend one key say it at once.
    """
    if "lse" not in scene.tensors or scene.problem.softcap is not None:
        return None
    inner, p = scene.truth.intermediates, scene.problem
    seen = np.concatenate([scene.seen("lse", rank) for rank in range(scene.size)], axis=2)
    rows = np.concatenate(scene.shards[0])
    m = inner.m[:, :, rows]
    x = scene.inputs
    heads = np.arange(p.heads) // p.group_size
    products = (x.q.swapaxes(1, 2) @ x.k.swapaxes(1, 2)[:, heads].swapaxes(2, 3))[:, :, rows]
    there = (m > 0).any(axis=3) & np.isfinite(seen)
    if not there.any() or not np.isfinite(products).all():
        return None
    scale = p.scale_value
    for _ in range(20):
        s = np.where(m > 0, products * scale, -np.inf)
        top = np.where(there, s.max(axis=3), 0.0)[..., None]
        w = np.where(m > 0, m * np.exp(s - top), 0.0)
        total = np.where(there, w.sum(axis=3), 1.0)
        lse = top[..., 0] + np.log(total)
        slope = (w * products).sum(axis=3) / total
        error, slope = (seen - lse)[there], slope[there]
        if not float(slope @ slope) or not np.isfinite(scale):
            return None
        scale += float(error @ slope) / float(slope @ slope)
    return scale if np.isfinite(scale) else None


def _no_slope(s: Array, c: float) -> Array:
    return np.ones_like(s)


def _plus_slope(s: Array, c: float) -> Array:
    slope: Array = 1 + (s / c) ** 2
    return slope


def _clipped_slope(s: Array, c: float) -> Array:
    slope: Array = (np.abs(s) < c).astype(np.float64)
    return slope


def _slope_without_factor(s: Array, c: float) -> Array:
    slope: Array = (1 - s**2) / c
    return slope


CAP: list[Suspicion] = [
    *_throughout("softcap ignored", replace(STEPS, cap=lambda s, c: s, cap_slope=_no_slope)),
    Suspicion("softcap ignored in the forward, its derivative is there", replace(STEPS, cap=lambda s, c: s)),
    Suspicion("derivative of the softcap missing", replace(STEPS, cap_slope=_no_slope)),
    Suspicion(
        "derivative of the softcap is 1 + tanh² instead of 1 - tanh²",
        replace(STEPS, cap_slope=_plus_slope),
    ),
    Suspicion(
        "derivative of the softcap is taken of the capped score",
        replace(STEPS, cap_slope=lambda s, c: 1 - np.tanh(s / c) ** 2),
    ),
    Suspicion("softcap by clipping instead of tanh", replace(STEPS, cap=lambda s, c: np.clip(s, -c, c))),
    Suspicion(
        "softcap by clipping instead of tanh",
        replace(STEPS, cap=lambda s, c: np.clip(s, -c, c), cap_slope=_clipped_slope),
    ),
    *_throughout(
        "softcap is tanh(s / c), without its factor c",
        replace(STEPS, cap=lambda s, c: np.tanh(s / c), cap_slope=_slope_without_factor),
    ),
]


def _summed_by(heads: Callable[[Visit], NDArray[Any]]) -> Callable[[Visit, Array], Array]:
    """The transpose of reading those heads."""

    def summed(at: Visit, x: Array) -> Array:
        found = np.zeros((x.shape[0], at.problem.hk, *x.shape[2:]))
        for head, read in enumerate(heads(at)):
            found[:, int(read)] += x[:, head]
        return found

    return summed


def _read(heads: Callable[[Visit], NDArray[Any]]) -> Steps:
    return replace(STEPS, heads=lambda at: heads(at).astype(np.int64), per_key_head=_summed_by(heads))


HEADS: list[Suspicion] = [
    *_throughout(
        "grouped heads: query head h reads key head h % Hk",
        _read(lambda at: np.arange(at.problem.heads) % at.problem.hk),
    ),
    *_throughout("grouped heads: every query head reads key head 0", _read(lambda at: np.zeros(at.problem.heads))),
    Suspicion(
        "grouped heads: dk and dv are means over the query heads of a group",
        replace(STEPS, per_key_head=lambda at, x: STEPS.per_key_head(at, x) / at.problem.group_size),
    ),
    Suspicion(
        "grouped heads: dk and dv come from the first query head of a group alone",
        replace(STEPS, per_key_head=lambda at, x: x[:, :: at.problem.group_size]),
    ),
    Suspicion(
        "grouped heads: dk and dv come from the last query head of a group alone",
        replace(STEPS, per_key_head=lambda at, x: x[:, at.problem.group_size - 1 :: at.problem.group_size]),
    ),
    Suspicion(
        "grouped heads: dk and dv of a key head hold those of the key heads before it too",
        replace(
            STEPS,
            per_key_head=lambda at, x: (
                STEPS.per_key_head(at, x).cumsum(axis=1) if at.problem.group_size > 1 else STEPS.per_key_head(at, x)
            ),
        ),
    ),
    Suspicion(
        "dk and dv of a key head are summed over h % Hk instead of its group",
        replace(STEPS, per_key_head=_summed_by(lambda at: np.arange(at.problem.heads) % at.problem.hk)),
    ),
]
MULTIPLICITY: list[Suspicion] = [
    *_throughout(
        "multiplicities counted once: a pair that several branches let through counts as one",
        replace(STEPS, pattern=lambda at: STEPS.pattern(at).clip(max=1)),
    ),
    Suspicion(
        "multiplicities counted once: a pair that several branches let through counts as one",
        replace(STEPS, partial=lambda at, s, m, v: partial(at, s, m.clip(max=1), v)),
    ),
    Suspicion(
        "multiplicities counted once in the probabilities of the backward",
        replace(STEPS, probabilities=lambda at, s, m, lse: probabilities(at, s, m.clip(max=1), lse)),
    ),
]
