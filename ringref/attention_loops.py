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
    sinks: Float64[np.ndarray, " H"] | None = None,
) -> tuple[Float64[np.ndarray, "B N H E"], Float64[np.ndarray, "B H N"]]:
    """Compute `(out, lse)`. An empty row has out 0 and lse −inf, or its sink."""
    q_BNHD, k_BMKD, v_BMKE = q.tolist(), k.tolist(), v.tolist()
    out = np.zeros((problem.batch, problem.nq, problem.heads, problem.dv))
    lse = np.full((problem.batch, problem.heads, problem.nq), -math.inf)
    for b, h, i in np.ndindex(problem.batch, problem.heads, problem.nq):
        kh = h // (problem.heads // problem.hk)
        row, sink = attended(problem, b, h, i), -math.inf if sinks is None else float(sinks[h])
        s = {j: score(problem, q_BNHD[b][i][h], k_BMKD[b][j][kh]) for j in row}
        p = probabilities(row, s, sink)
        lse[b, h, i] = log_sum_exp(row, s, sink)
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
    sinks: Float64[np.ndarray, " H"] | None = None,
) -> tuple[Float64[np.ndarray, "B N H D"], Float64[np.ndarray, "B M K D"], Float64[np.ndarray, "B M K E"]]:
    """Compute `(dq, dk, dv)`: chain rule through `dp[j] = dout · v[j]` and `ds[j] = p[j] (dp[j] − Σ p dp + dlse)`."""
    q_BNHD, k_BMKD, v_BMKE, dout_BNHE = q.tolist(), k.tolist(), v.tolist(), dout.tolist()
    dlse_BHN = np.zeros((problem.batch, problem.heads, problem.nq)).tolist() if dlse is None else dlse.tolist()
    dq = np.zeros((problem.batch, problem.nq, problem.heads, problem.head_dim))
    dk = np.zeros((problem.batch, problem.nk, problem.hk, problem.head_dim))
    dv = np.zeros((problem.batch, problem.nk, problem.hk, problem.dv))
    for b, h, i in np.ndindex(problem.batch, problem.heads, problem.nq):
        kh = h // (problem.heads // problem.hk)
        row, sink = attended(problem, b, h, i), -math.inf if sinks is None else float(sinks[h])
        q_D, dout_E, dlse_row = q_BNHD[b][i][h], dout_BNHE[b][i][h], dlse_BHN[b][h][i]
        p = probabilities(row, {j: score(problem, q_D, k_BMKD[b][j][kh]) for j in row}, sink)
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


@np.errstate(all="ignore")
def sink_gradient(
    out: Float64[np.ndarray, "B N H E"],
    lse: Float64[np.ndarray, "B H N"],
    dout: Float64[np.ndarray, "B N H E"],
    dlse: Float64[np.ndarray, "B H N"],
    sinks: Float64[np.ndarray, " H"],
) -> Float64[np.ndarray, " H"]:
    """Compute the gradient of sinks from `forward`'s results: `d lse / d sink = w`, `d out / d sink = −w · out`."""
    gradient = np.zeros(len(sinks))
    for b, h, i in np.ndindex(*lse.shape):
        if (sink := float(sinks[h])) > -math.inf:
            weight = math.exp(sink - float(lse[b, h, i]))
            gradient[h] += weight * (dlse[b, h, i] - dot(dout[b, i, h].tolist(), out[b, i, h].tolist()))
    return gradient


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


def log_sum_exp(row: dict[int, int], s: dict[int, float], sink: float) -> float:
    """`log(exp(sink) + Σ_j m[j] · exp(s[j]))`, shifted by the largest so that nothing overflows; −inf over nothing."""
    top = max([sink, *s.values()])
    if top == -math.inf and not row:
        return top
    return top + math.log(math.exp(sink - top) + sum(m * math.exp(s[j] - top) for j, m in row.items()))


def probabilities(row: dict[int, int], s: dict[int, float], sink: float) -> dict[int, float]:
    """`m[j] · exp(s[j] − lse)`, as a quotient: lse would add its own rounding, u · |lse|, to every exponent."""
    top = max([sink, *s.values()])
    weights = {j: m * math.exp(s[j] - top) for j, m in row.items()}
    total = math.exp(sink - top) + sum(weights.values()) if row else 0.0
    return {j: weight / total for j, weight in weights.items()}
