"""Rung 1, naive: the formula with every score in memory at once.

It is the definition, and adds no idea to it.

Shape letters: B batch, N queries, M keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from ringref.pattern import multiplicity
from ringref.problem import Problem


def forward(
    problem: Problem,
    q: Float[np.ndarray, "B N H D"],
    k: Float[np.ndarray, "B M K D"],
    v: Float[np.ndarray, "B M K E"],
) -> tuple[Float[np.ndarray, "B N H E"], Float[np.ndarray, "B H N"]]:
    """Compute `(out, lse)`, in the dtype of the inputs."""
    s, m = _scores(problem, q, k), multiplicity(problem)
    masked = np.where(m > 0, s, -np.inf)
    top = masked.max(axis=3, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.where(m > 0, m * np.exp(masked - top[..., None]), 0).astype(q.dtype)
    total = weights.sum(axis=3)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    weights /= np.where(total > 0, total, 1)[..., None]
    return np.einsum("bhij,bjhe->bihe", weights, v[:, :, _key_head(problem)]), lse


def backward(
    problem: Problem,
    q: Float[np.ndarray, "B N H D"],
    k: Float[np.ndarray, "B M K D"],
    v: Float[np.ndarray, "B M K E"],
    out: Float[np.ndarray, "B N H E"],
    lse: Float[np.ndarray, "B H N"],
    dout: Float[np.ndarray, "B N H E"],
    dlse: Float[np.ndarray, "B H N"] | None = None,
) -> tuple[Float[np.ndarray, "B N H D"], Float[np.ndarray, "B M K D"], Float[np.ndarray, "B M K E"]]:
    """Compute `(dq, dk, dv)` through the Jacobian of the softmax, written out.

    `d out_i / d s_ij = p_ij (v_j − out_i)` and `d lse_i / d s_ij = p_ij`.
    """
    heads = _key_head(problem)
    s, m = _scores(problem, q, k), multiplicity(problem)
    lse = np.where(np.isfinite(lse), lse, 0)[..., None]
    p = (m * np.exp(np.where(m > 0, s - lse, -np.inf))).astype(q.dtype)

    relative_v = v[:, None][:, :, :, heads] - out[:, :, None]
    ds = p * np.einsum("bihe,bijhe->bhij", dout, relative_v)
    if dlse is not None:
        ds += p * dlse[..., None]
    if problem.softcap is not None:
        ds *= 1 - (s / problem.softcap) ** 2
    ds *= problem.scale_value

    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for head, key_head in enumerate(heads):
        dk[:, :, key_head] += np.einsum("bij,bid->bjd", ds[:, head], q[:, :, head])
        dv[:, :, key_head] += np.einsum("bij,bie->bje", p[:, head], dout[:, :, head])
    return np.einsum("bhij,bjhd->bihd", ds, k[:, :, heads]), dk, dv


def _scores(
    problem: Problem, q: Float[np.ndarray, "B N H D"], k: Float[np.ndarray, "B M K D"]
) -> Float[np.ndarray, "B H N M"]:
    problem.without_sinks("the ladder")
    s: NDArray[np.floating] = problem.scale_value * np.einsum("bihd,bjhd->bhij", q, k[:, :, _key_head(problem)])
    return s if problem.softcap is None else problem.softcap * np.tanh(s / problem.softcap)


def _key_head(problem: Problem) -> NDArray[np.int64]:
    """The key head that each query head reads."""
    return np.arange(problem.heads, dtype=np.int64) // problem.group_size
