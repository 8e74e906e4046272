"""The oracle, one number at a time: the definition in loops, to be read beside docs/semantics.md.

It is not made fast, and it shares no computation with `ringref.attention`, which must agree with it. A key that a query
does not attend is skipped, so its values have no effect; NaN and infinity in an attended key propagate as IEEE 754
defines, without warnings.

Shape letters: B batch, N queries, M keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from ringref.pattern import multiplicity_at
from ringref.problem import Problem


@np.errstate(all="ignore")
def forward(
    problem: Problem,
    q: Float64[np.ndarray, "B N H D"],
    k: Float64[np.ndarray, "B M K D"],
    v: Float64[np.ndarray, "B M K E"],
) -> tuple[Float64[np.ndarray, "B N H E"], Float64[np.ndarray, "B H N"]]:
    """Compute `(out, lse)`. An empty row has out 0 and lse −inf."""
    q_BNHD, k_BMKD, v_BMKE = q.tolist(), k.tolist(), v.tolist()
    out = np.zeros((problem.batch, problem.nq, problem.heads, problem.dv))
    lse = np.full((problem.batch, problem.heads, problem.nq), -math.inf)
    for b, h, i in np.ndindex(problem.batch, problem.heads, problem.nq):
        kh = h // (problem.heads // problem.hk)
        row = attended(problem, b, h, i)
        if not row:
            continue
        s = {j: score(problem, q_BNHD[b][i][h], k_BMKD[b][j][kh]) for j in row}
        p = probabilities(row, s)
        lse[b, h, i] = log_sum_exp(row, s)
        for e in range(problem.dv):
            out[b, i, h, e] = sum(p[j] * v_BMKE[b][j][kh][e] for j in row)
    return out, lse


@np.errstate(all="ignore")
def backward(
    problem: Problem,
    q: Float64[np.ndarray, "B N H D"],
    k: Float64[np.ndarray, "B M K D"],
    v: Float64[np.ndarray, "B M K E"],
    dout: Float64[np.ndarray, "B N H E"],
    dlse: Float64[np.ndarray, "B H N"] | None = None,
) -> tuple[Float64[np.ndarray, "B N H D"], Float64[np.ndarray, "B M K D"], Float64[np.ndarray, "B M K E"]]:
    """Compute `(dq, dk, dv)`: chain rule through `dp[j] = dout · v[j]` and `ds[j] = p[j] (dp[j] − Σ p dp + dlse)`."""
    q_BNHD, k_BMKD, v_BMKE, dout_BNHE = q.tolist(), k.tolist(), v.tolist(), dout.tolist()
    dlse_BHN = np.zeros((problem.batch, problem.heads, problem.nq)).tolist() if dlse is None else dlse.tolist()
    dq = np.zeros((problem.batch, problem.nq, problem.heads, problem.head_dim))
    dk = np.zeros((problem.batch, problem.nk, problem.hk, problem.head_dim))
    dv = np.zeros((problem.batch, problem.nk, problem.hk, problem.dv))
    for b, h, i in np.ndindex(problem.batch, problem.heads, problem.nq):
        kh = h // (problem.heads // problem.hk)
        row = attended(problem, b, h, i)
        if not row:
            continue
        q_D, dout_E, dlse_row = q_BNHD[b][i][h], dout_BNHE[b][i][h], dlse_BHN[b][h][i]
        p = probabilities(row, {j: score(problem, q_D, k_BMKD[b][j][kh]) for j in row})
        dp = {j: dot(dout_E, v_BMKE[b][j][kh]) for j in row}
        mean_dp = sum(p[j] * dp[j] for j in row)
        for j in row:
            ds = p[j] * (dp[j] - mean_dp + dlse_row)
            ds_raw = ds * softcap_slope(problem, q_D, k_BMKD[b][j][kh]) * problem.scale_value
            for d in range(problem.head_dim):
                dq[b, i, h, d] += ds_raw * k_BMKD[b][j][kh][d]
                dk[b, j, kh, d] += ds_raw * q_D[d]
            for e in range(problem.dv):
                dv[b, j, kh, e] += p[j] * dout_E[e]
    return dq, dk, dv


def attended(problem: Problem, b: int, h: int, i: int) -> dict[int, int]:
    """Return the keys that query i attends in head h, each with its multiplicity, which is at least 1."""
    every = {j: multiplicity_at(problem, b, h, i, j) for j in range(problem.nk)}
    return {j: m for j, m in every.items() if m > 0}


def score(problem: Problem, q_D: Sequence[float], k_D: Sequence[float]) -> float:
    """`scale · q·k`, softcapped."""
    s = problem.scale_value * dot(q_D, k_D)
    return s if problem.softcap is None else problem.softcap * math.tanh(s / problem.softcap)


def softcap_slope(problem: Problem, q_D: Sequence[float], k_D: Sequence[float]) -> float:
    """`d (c · tanh(s / c)) / ds = sech²(s / c)`; 1 without softcap."""
    if problem.softcap is None:
        return 1.0
    # 1 / cosh, written so that it underflows rather than overflows.
    e = math.exp(-abs(problem.scale_value * dot(q_D, k_D) / problem.softcap))
    return (2.0 * e / (1.0 + e * e)) ** 2


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """`Σ a · b`."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def log_sum_exp(row: dict[int, int], s: dict[int, float]) -> float:
    """`log Σ_j m[j] · exp(s[j])`, shifted by the largest score so that nothing overflows."""
    top = max(s.values())
    return top + math.log(sum(m * math.exp(s[j] - top) for j, m in row.items()))


def probabilities(row: dict[int, int], s: dict[int, float]) -> dict[int, float]:
    """`m[j] · exp(s[j] − lse)`, as a quotient: lse would add its own rounding, u · |lse|, to every exponent."""
    top = max(s.values())
    weights = {j: m * math.exp(s[j] - top) for j, m in row.items()}
    total = sum(weights.values())
    return {j: weight / total for j, weight in weights.items()}
