"""Rung 2, blockwise: the scores of one block of keys at a time, so memory is no longer quadratic in the length.

New over naive: no row of scores is ever in memory as a whole. A first pass over the blocks computes the log-sum-exp of
each row, a second one sums the values with the weights that it normalises, and the backward recomputes the
probabilities of a block from that log-sum-exp.

Shape letters: B batch, N queries, M keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from ringref.ladder import tile
from ringref.problem import Problem


def forward(
    problem: Problem,
    q: Float[np.ndarray, "B N H D"],
    k: Float[np.ndarray, "B M K D"],
    v: Float[np.ndarray, "B M K E"],
    *,
    block: int = 16,
) -> tuple[Float[np.ndarray, "B N H E"], Float[np.ndarray, "B H N"]]:
    """Compute `(out, lse)`, in the dtype of the inputs.

    Raises:
        ValueError: block is below 1.
    """
    i, j = np.arange(problem.nq), np.arange(problem.nk)

    lse = np.full((problem.batch, problem.heads, problem.nq), -np.inf, dtype=q.dtype)
    for keys in tile.tiles(problem.nk, block):
        s, m = tile.scores(problem, q, k[:, keys], i, j[keys])
        top = s.max(axis=3)
        with np.errstate(divide="ignore"):
            lse = np.logaddexp(lse, tile.finite(top) + np.log(tile.weights(s, m, top).sum(axis=3)))

    out = np.zeros((problem.batch, problem.nq, problem.heads, problem.dv), dtype=q.dtype)
    for keys in tile.tiles(problem.nk, block):
        p = tile.weights(*tile.scores(problem, q, k[:, keys], i, j[keys]), lse)
        out += (p @ tile.by_query_head(problem, v[:, keys]).swapaxes(1, 2)).swapaxes(1, 2)
    return out, lse


def backward(
    problem: Problem,
    q: Float[np.ndarray, "B N H D"],
    k: Float[np.ndarray, "B M K D"],
    v: Float[np.ndarray, "B M K E"],
    out: Float[np.ndarray, "B N H E"],
    lse: Float[np.ndarray, "B H N"],
    dout: Float[np.ndarray, "B N H E"],
    dlse: Float[np.ndarray, "B H N"] | None = None,
    *,
    block: int = 16,
) -> tuple[Float[np.ndarray, "B N H D"], Float[np.ndarray, "B M K D"], Float[np.ndarray, "B M K E"]]:
    """Compute `(dq, dk, dv)`: dk and dv of a block of keys are computed at once, dq is summed over the blocks.

    Raises:
        ValueError: block is below 1.
    """
    i, j = np.arange(problem.nq), np.arange(problem.nk)
    delta = tile.delta(out, lse, dout, dlse)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for keys in tile.tiles(problem.nk, block):
        dq_part, dk[:, keys], dv[:, keys] = tile.gradients(
            problem, q, k[:, keys], v[:, keys], i, j[keys], lse, dout, delta
        )
        dq += dq_part
    return dq, dk, dv
