"""Computation of one tile, shared by the rungs above naive: some queries against some keys, at any positions.

Shape letters: B batch, n queries and m keys of the tile, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int64
from numpy.typing import NDArray

from ringref.pattern import multiplicity
from ringref.problem import Problem

Array = NDArray[np.floating]


def tiles(length: int, size: int) -> Iterator[slice]:
    """Cut `range(length)` into consecutive slices of `size`, the last one perhaps shorter; none for length 0.

    Raises:
        ValueError: size is below 1.
    """
    if size < 1:
        raise ValueError(f"tile size={size}: expected at least 1")
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def scores(
    problem: Problem,
    q: Float[np.ndarray, "B n H D"],
    k: Float[np.ndarray, "B m K D"],
    query_positions: Int64[np.ndarray, " n"],
    key_positions: Int64[np.ndarray, " m"],
) -> tuple[Float[np.ndarray, "B H n m"], Float[np.ndarray, "B H n m"]]:
    """Compute `(s, m)`: scores after softcap, −inf where not attended, and multiplicities, both in the dtype of q."""
    problem.without_sinks("the ladder")
    m = multiplicity(problem, query_positions, key_positions)
    s = np.matmul(q.swapaxes(1, 2), by_query_head(problem, k).transpose(0, 2, 3, 1)) * problem.scale_value
    if problem.softcap is not None:
        s = problem.softcap * np.tanh(s / problem.softcap)
    return np.where(m > 0, s, -np.inf).astype(q.dtype), m.astype(q.dtype)


def weights(s: Array, m: Array, shift: Float[np.ndarray, "B H n"]) -> Float[np.ndarray, "B H n m"]:
    """`m · exp(s − shift)`, 0 where a shift is −inf: nothing is attended there, and −inf − (−inf) would be NaN."""
    weight: Array = m * np.exp(s - finite(shift)[..., None])
    return weight


def finite(shift: Float[np.ndarray, "B H n"]) -> Float[np.ndarray, "B H n"]:
    """The shift, with 0 for the −inf of an empty row."""
    return np.where(np.isneginf(shift), np.zeros_like(shift), shift)


def delta(
    out: Float[np.ndarray, "B n H E"],
    lse: Float[np.ndarray, "B H n"],
    dout: Float[np.ndarray, "B n H E"],
    dlse: Float[np.ndarray, "B H n"] | None,
) -> Float[np.ndarray, "B H n"]:
    """`Σ_e dout · out − dlse`, all that a tile needs to know of the rest of its rows; 0 in an empty row.

    From FlashAttention-2 (Dao 2023, arXiv:2307.08691, algorithm 2), to which the cotangent of lse is added.
    """
    row = (dout * out).sum(axis=3).swapaxes(1, 2)
    if dlse is not None:
        row = row - dlse
    return np.where(np.isneginf(lse), np.zeros_like(lse), row)


def gradients(
    problem: Problem,
    q: Float[np.ndarray, "B n H D"],
    k: Float[np.ndarray, "B m K D"],
    v: Float[np.ndarray, "B m K E"],
    query_positions: Int64[np.ndarray, " n"],
    key_positions: Int64[np.ndarray, " m"],
    lse: Float[np.ndarray, "B H n"],
    dout: Float[np.ndarray, "B n H E"],
    delta: Float[np.ndarray, "B H n"],
) -> tuple[Float[np.ndarray, "B n H D"], Float[np.ndarray, "B m K D"], Float[np.ndarray, "B m K E"]]:
    """Compute what this tile adds to dq, dk and dv; probabilities are recomputed from the lse of the whole row."""
    s, m = scores(problem, q, k, query_positions, key_positions)
    p = weights(s, m, lse)
    dout_BHnE = dout.swapaxes(1, 2)
    dp = dout_BHnE @ by_query_head(problem, v).transpose(0, 2, 3, 1)
    ds = p * (dp - delta[..., None]) * problem.scale_value
    if problem.softcap is not None:
        ds = ds * np.where(m > 0, 1 - (s / problem.softcap) ** 2, 0).astype(q.dtype)
    dq = (ds @ by_query_head(problem, k).swapaxes(1, 2)).swapaxes(1, 2)
    dk = (ds.swapaxes(2, 3) @ q.swapaxes(1, 2)).swapaxes(1, 2)
    dv = (p.swapaxes(2, 3) @ dout_BHnE).swapaxes(1, 2)
    return dq, _by_key_head(problem, dk), _by_key_head(problem, dv)


def by_query_head(problem: Problem, x: Float[np.ndarray, "B m K D"]) -> Float[np.ndarray, "B m H D"]:
    """Repeat each key head once for every query head that reads it."""
    return np.repeat(x, problem.group_size, axis=2)


def _by_key_head(problem: Problem, dx: Array) -> Array:
    batch, length, _, width = dx.shape
    summed: Array = dx.reshape(batch, length, problem.hk, problem.group_size, width).sum(axis=3)
    return summed
