"""The oracle: out, lse and their gradients of any problem, in closed form and in float64, vectorised.

    s   = scale · q·k                    softcap c: s ← c · tanh(s / c)
    lse = log Σ_j m · exp(s)
    p   = m · exp(s − lse)
    out = Σ_j p · v

and, for cotangents dout of out and dlse of lse,

    dv = Σ_i p · dout                    dp = dout · v
    ds = p · (dp − Σ_j p · dp + dlse)    softcap: ds ← ds · sech²(s / c), s before the cap
    dq = scale · Σ_j ds · k              dk = scale · Σ_i ds · q

`ringref.attention_loops` computes the same one number at a time; the two must agree.

What the pattern excludes has no effect. NaN and infinity in a key, a value or a cotangent spread along attended
pairs only, although `0 · NaN` is NaN: a sum over something that is not finite runs over attended pairs only.

Shape letters: B batch, N queries, M keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import NDArray

from ringref.pattern import multiplicity
from ringref.problem import Problem

Float = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class Intermediates:
    """Intermediate results of the forward pass. A pair that is not attended has scores 0 and probability 0.

    Attributes:
        m: multiplicity, int64.
        raw_scores: `scale · q·k`, before softcap.
        scores: after softcap; the same array where there is no softcap.
        probabilities: `m · exp(scores − lse)`; rows sum to 1, or to 0 where a query attends nothing.
        lse: natural logarithm; −inf where a query attends nothing.
    """

    m: Int64[np.ndarray, "B H N M"]
    raw_scores: Float64[np.ndarray, "B H N M"]
    scores: Float64[np.ndarray, "B H N M"]
    probabilities: Float64[np.ndarray, "B H N M"]
    lse: Float64[np.ndarray, "B H N"]


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """The oracle's answer to a problem on given inputs; gradients are `None` where no cotangent was given."""

    out: Float64[np.ndarray, "B N H E"]
    lse: Float64[np.ndarray, "B H N"]
    dq: Float64[np.ndarray, "B N H D"] | None
    dk: Float64[np.ndarray, "B M K D"] | None
    dv: Float64[np.ndarray, "B M K E"] | None
    intermediates: Intermediates


def attention(
    problem: Problem,
    q: Float64[np.ndarray, "B N H D"],
    k: Float64[np.ndarray, "B M K D"],
    v: Float64[np.ndarray, "B M K E"],
    dout: Float64[np.ndarray, "B N H E"] | None = None,
    dlse: Float64[np.ndarray, "B H N"] | None = None,
) -> Answer:
    """Compute out and lse, and with `dout` dq, dk and dv too. An empty row has out 0 and lse −inf.

    Args:
        problem: what to compute; its dtype is ignored, the oracle is always float64.
        q: queries.
        k: keys.
        v: values.
        dout: cotangent of out; without it the answer has no gradients.
        dlse: cotangent of lse, by default zero; its values for empty rows are ignored.

    Raises:
        ValueError: an array is not float64, has another shape than the problem says, or dlse comes without dout.
    """
    if dout is None and dlse is not None:
        raise ValueError("dlse without dout: give a dout of zeros for the gradient of lse alone")
    known = _intermediates(problem, q, k)
    _check("v", v, (problem.batch, problem.nk, problem.hk, problem.dv))
    with np.errstate(all="ignore"):
        out_BHNE = sum_attended(known.probabilities, per_query_head(v, problem.group_size), known.m)
    out = np.ascontiguousarray(out_BHNE.swapaxes(1, 2))
    if dout is None:
        return Answer(out, known.lse, None, None, None, known)
    return Answer(out, known.lse, *_backward(problem, q, k, v, dout, dlse, known), known)


def _backward(
    problem: Problem, q: Float, k: Float, v: Float, dout: Float, dlse: Float | None, known: Intermediates
) -> tuple[Float, Float, Float]:
    """Compute `(dq, dk, dv)` from the cotangents dout of out and dlse of lse. An empty row contributes nothing."""
    _check("dout", dout, (problem.batch, problem.nq, problem.heads, problem.dv))
    m, p = known.m, known.probabilities
    m_transposed, p_transposed = m.swapaxes(2, 3), p.swapaxes(2, 3)
    q_BHND, dout_BHNE = q.swapaxes(1, 2), dout.swapaxes(1, 2)
    k_BHMD, v_BHME = per_query_head(k, problem.group_size), per_query_head(v, problem.group_size)

    with np.errstate(all="ignore"):
        dv_BHME = sum_attended(p_transposed, dout_BHNE, m_transposed)

        dp = np.where(m > 0, dout_BHNE @ v_BHME.swapaxes(2, 3), 0.0)
        towards = dp - (p * dp).sum(axis=-1, keepdims=True)
        if dlse is not None:
            _check("dlse", dlse, (problem.batch, problem.heads, problem.nq))
            towards += dlse[..., None]
        ds = p * towards
        if problem.softcap is not None:
            # sech² rather than 1 − tanh², which has no correct digit left where the cap saturates.
            ds /= np.cosh(known.raw_scores / problem.softcap) ** 2
        # `towards` may be NaN in the row of a NaN cotangent; keys that this row does not attend must not become NaN.
        ds = np.where(m > 0, ds, 0.0) * problem.scale_value

        dq_BHND = sum_attended(ds, k_BHMD, m)
        dk_BHMD = sum_attended(ds.swapaxes(2, 3), q_BHND, m_transposed)
    return (
        np.ascontiguousarray(dq_BHND.swapaxes(1, 2)),
        per_key_head(dk_BHMD, problem.group_size),
        per_key_head(dv_BHME, problem.group_size),
    )


def _intermediates(problem: Problem, q: Float, k: Float) -> Intermediates:
    """Compute multiplicities, scores, probabilities and lse."""
    _check("q", q, (problem.batch, problem.nq, problem.heads, problem.head_dim))
    _check("k", k, (problem.batch, problem.nk, problem.hk, problem.head_dim))
    m = multiplicity(problem)
    attended = m > 0
    with np.errstate(all="ignore"):
        products = q.swapaxes(1, 2) @ per_query_head(k, problem.group_size).swapaxes(2, 3)
        raw_scores = np.where(attended, products * problem.scale_value, 0.0)
        scores = raw_scores
        if problem.softcap is not None:
            scores = problem.softcap * np.tanh(raw_scores / problem.softcap)

        row_max = np.max(scores, axis=-1, keepdims=True, where=attended, initial=-np.inf)
        # Where nothing is attended the shift would be −inf, and −inf − (−inf) is NaN: any finite shift will do.
        # exp may overflow at a pair that is not attended, so such pairs are zeroed by selection, not multiplication.
        shift = np.where(row_max == -np.inf, 0.0, row_max)
        weights = np.where(attended, m * np.exp(scores - shift), 0.0)
        row_sum = weights.sum(axis=-1, keepdims=True)
        lse = (shift + np.log(row_sum))[..., 0]
        # p = m · exp(s − lse), computed as a quotient: lse has an absolute error of u · |lse|, the quotient does not.
        # Selected again, since a row that attends a NaN has a NaN sum and 0 / NaN is NaN.
        probabilities = np.where(attended, weights / np.where(row_sum == 0.0, 1.0, row_sum), 0.0)
    return Intermediates(m, raw_scores, scores, probabilities, lse)


def sum_attended(weights: Float, values: Float, m: NDArray[np.int64]) -> Float:
    """`Σ_c weights[..., a, c] · values[..., c, e]` over the pairs with `m[..., a, c] > 0`; weights are 0 elsewhere."""
    if np.isfinite(values).all():
        product: Float = weights @ values
        return product
    terms: Float = weights[..., :, :, None] * values[..., None, :, :]
    total: Float = np.where((m > 0)[..., None], terms, 0.0).sum(axis=-2)
    return total


def per_query_head(x: Float, group_size: int = 1) -> Float:
    """`(B, M, K, D)` to `(B, H, M, D)`: query head h reads key head h // `group_size`."""
    by_head = x.swapaxes(1, 2)
    return by_head if group_size == 1 else np.repeat(by_head, group_size, axis=1)


def per_key_head(dx: NDArray[Any], group_size: int = 1) -> NDArray[Any]:
    """The transpose of `per_query_head`: `(B, H, M, D)` to `(B, M, K, D)`, summed over each group of query heads."""
    batch, heads, length, width = dx.shape
    by_group = dx.reshape(batch, heads // group_size, group_size, length, width)
    return np.ascontiguousarray(by_group.sum(axis=2).swapaxes(1, 2))


def _check(name: str, x: NDArray[np.generic], shape: tuple[int, ...]) -> None:
    if x.dtype != np.float64:
        raise ValueError(f"{name} has dtype {x.dtype}: the oracle computes in float64; widen it first")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}: the problem says {shape}")
