"""Suspicions of what is returned: out and lse are right until the last moment."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ringverify.diagnosis.model import STEPS, Steps
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.suspicion import Suspicion


def _lse(change: Callable[[Scene, Array], Array]) -> Steps:
    return replace(STEPS, returned=lambda scene, rank, out, lse: (out, change(scene, lse)))


def _out(change: Callable[[Scene, Array, Array], Array]) -> Steps:
    return replace(STEPS, returned=lambda scene, rank, out, lse: (change(scene, out, lse), lse))


def _dead(scene: Scene, out: Array, lse: Array) -> Array:
    return np.full_like(out, np.nan) if lse.size and bool((lse == -np.inf).all()) else out


def _nan_rows(scene: Scene, out: Array, lse: Array) -> Array:
    return np.where((lse == -np.inf).swapaxes(1, 2)[..., None], np.nan, out)


def _over_positions(scene: Scene, out: Array, lse: Array) -> Array:
    return out / out.sum(axis=1, keepdims=True) if scene.problem.dilation is not None else out


RETURNED: list[Suspicion] = [
    Suspicion("lse is in base 2", _lse(lambda scene, lse: lse / math.log(2))),
    Suspicion("lse is 0 on rows without keys", _lse(lambda scene, lse: np.where(lse == -np.inf, 0.0, lse))),
    Suspicion("lse is +inf on rows without keys", _lse(lambda scene, lse: np.where(lse == -np.inf, np.inf, lse))),
    Suspicion("lse is -1e8 on rows without keys", _lse(lambda scene, lse: np.where(lse == -np.inf, -1e8, lse))),
    Suspicion("lse is NaN on rows without keys", _lse(lambda scene, lse: np.where(lse == -np.inf, np.nan, lse))),
    Suspicion(
        "lse of a rank with one query is not written: it is 0",
        _lse(lambda scene, lse: np.zeros_like(lse) if lse.shape[-1] == 1 else lse),
    ),
    Suspicion("lse is not written: it is 0", _lse(lambda scene, lse: np.zeros_like(lse))),
    Suspicion("lse has the wrong sign", _lse(lambda scene, lse: -lse)),
    Suspicion(
        "lse is returned as (tokens, heads)",
        _lse(lambda scene, lse: lse.swapaxes(1, 2) if lse.shape[1] == lse.shape[2] else lse),
    ),
    Suspicion(
        "out is NaN where there are no keys at all",
        _out(lambda scene, out, lse: np.full_like(out, np.nan) if scene.problem.nk == 0 else out),
    ),
    Suspicion("out is NaN on a rank on which no query attends a key", _out(_dead)),
    Suspicion("out is NaN on rows without keys", _out(_nan_rows)),
    Suspicion(
        "out is NaN on rows without keys, and so is lse",
        replace(
            STEPS,
            returned=lambda scene, rank, out, lse: (_nan_rows(scene, out, lse), np.where(lse == -np.inf, np.nan, lse)),
        ),
    ),
    Suspicion("out is divided by its sum over positions (dilation)", _out(_over_positions)),
    Suspicion("out is 0", _out(lambda scene, out, lse: np.zeros_like(out))),
]
