"""Rung 3, online softmax: one pass, with a running maximum, sum and output for a tile of queries.

New over blockwise: the log-sum-exp need not be known before the sum begins. What has been summed is rescaled whenever a
larger score appears (Milakov & Gimelshein 2018, arXiv:1805.02867; FlashAttention, arXiv:2205.14135).

Queries and keys may be at any positions of the problem, as the next rung needs: then `(out, lse)` is the partial result
over these keys.

Shape letters: B batch, n queries, m keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int64

from ringref.ladder import tile
from ringref.problem import Problem


def forward(
    problem: Problem,
    q: Float[np.ndarray, "B n H D"],
    k: Float[np.ndarray, "B m K D"],
    v: Float[np.ndarray, "B m K E"],
    *,
    query_positions: Int64[np.ndarray, " n"] | None = None,
    key_positions: Int64[np.ndarray, " m"] | None = None,
    query_tile: int = 8,
    key_tile: int = 8,
) -> tuple[Float[np.ndarray, "B n H E"], Float[np.ndarray, "B H n"]]:
    """Compute `(out, lse)` over the given keys, in the dtype of the inputs.

    Raises:
        ValueError: a tile size is below 1.
    """
    i = np.arange(problem.nq) if query_positions is None else query_positions
    j = np.arange(problem.nk) if key_positions is None else key_positions
    out = np.zeros((problem.batch, len(i), problem.heads, problem.dv), dtype=q.dtype)
    lse = np.full((problem.batch, problem.heads, len(i)), -np.inf, dtype=q.dtype)
    for rows in tile.tiles(len(i), query_tile):
        top = lse[:, :, rows]
        total = np.zeros_like(top)
        acc = np.zeros((*top.shape, problem.dv), dtype=q.dtype)
        for keys in tile.tiles(len(j), key_tile):
            s, m = tile.scores(problem, q[:, rows], k[:, keys], i[rows], j[keys])
            new_top = np.maximum(top, s.max(axis=3))
            w = tile.weights(s, m, new_top)
            rescale = np.exp(top - tile.finite(new_top))
            total = total * rescale + w.sum(axis=3)
            acc = acc * rescale[..., None] + w @ tile.by_query_head(problem, v[:, keys]).swapaxes(1, 2)
            top = new_top
        out[:, rows] = (acc / np.where(total > 0, total, 1)[..., None]).swapaxes(1, 2)
        with np.errstate(divide="ignore"):
            lse[:, :, rows] = top + np.log(total)
    return out, lse


def backward(
    problem: Problem,
    q: Float[np.ndarray, "B n H D"],
    k: Float[np.ndarray, "B m K D"],
    v: Float[np.ndarray, "B m K E"],
    out: Float[np.ndarray, "B n H E"],
    lse: Float[np.ndarray, "B H n"],
    dout: Float[np.ndarray, "B n H E"],
    dlse: Float[np.ndarray, "B H n"] | None = None,
    *,
    query_positions: Int64[np.ndarray, " n"] | None = None,
    key_positions: Int64[np.ndarray, " m"] | None = None,
    query_tile: int = 8,
    key_tile: int = 8,
) -> tuple[Float[np.ndarray, "B n H D"], Float[np.ndarray, "B m K D"], Float[np.ndarray, "B m K E"]]:
    """Compute `(dq, dk, dv)` over the given keys; out and lse are those over all keys, also if only some are given.

    Raises:
        ValueError: a tile size is below 1.
    """
    i = np.arange(problem.nq) if query_positions is None else query_positions
    j = np.arange(problem.nk) if key_positions is None else key_positions
    delta = tile.delta(out, lse, dout, dlse)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for keys in tile.tiles(len(j), key_tile):
        for rows in tile.tiles(len(i), query_tile):
            dq_part, dk_part, dv_part = tile.gradients(
                problem,
                q[:, rows],
                k[:, keys],
                v[:, keys],
                i[rows],
                j[keys],
                lse[:, :, rows],
                dout[:, rows],
                delta[:, :, rows],
            )
            dq[:, rows] += dq_part
            dk[:, keys] += dk_part
            dv[:, keys] += dv_part
    return dq, dk, dv
