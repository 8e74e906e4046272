"""The oracle: out, lse and their gradients of any problem, in closed form and in float64, vectorised.

    s   = scale · q·k                    softcap c: s ← c · tanh(s / c)
    lse = log Σ_j m · exp(s)
    p   = m · exp(s − lse)
    out = Σ_j p · v                      learned sink: lse = log(exp(sink) + Σ_j m · exp(s))

and, for cotangents dout of out and dlse of lse,

    dv = Σ_i p · dout                    dp = dout · v
    ds = p · (dp − Σ_j p · dp + dlse)    softcap: ds ← ds · sech²(s / c), s before the cap
    dq = scale · Σ_j ds · k              dk = scale · Σ_i ds · q
    dsink = Σ_i exp(sink − lse) · (dlse − Σ_j p · dp), as ds of a key whose value is 0

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
        probabilities: `m · exp(scores − lse)`; rows sum to 1, with that of a sink if there is one, or to 0 where a
            query attends nothing.
        lse: natural logarithm; −inf where a query attends nothing, and there is no sink.
        sinks: learned sinks, one a query head; `None` where the problem has none.
        sink_weights: `exp(sinks − lse)`, likewise.
    """

    m: Int64[np.ndarray, "B H N M"]
    raw_scores: Float64[np.ndarray, "B H N M"]
    scores: Float64[np.ndarray, "B H N M"]
    probabilities: Float64[np.ndarray, "B H N M"]
    lse: Float64[np.ndarray, "B H N"]
    sinks: Float64[np.ndarray, " H"] | None = None
    sink_weights: Float64[np.ndarray, "B H N"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """The oracle's answer to a problem on given inputs; gradients are `None` where no cotangent was given.

    `dsinks` holds what each query adds to the gradient of its head's sink, summed over the batch: the whole gradient is
    its sum over the last axis, and what a rank's queries add is that over their positions.
    """

    out: Float64[np.ndarray, "B N H E"]
    lse: Float64[np.ndarray, "B H N"]
    dq: Float64[np.ndarray, "B N H D"] | None
    dk: Float64[np.ndarray, "B M K D"] | None
    dv: Float64[np.ndarray, "B M K E"] | None
    intermediates: Intermediates
    dsinks: Float64[np.ndarray, "H N"] | None = None


def attention(
    problem: Problem,
    q: Float64[np.ndarray, "B N H D"],
    k: Float64[np.ndarray, "B M K D"],
    v: Float64[np.ndarray, "B M K E"],
    dout: Float64[np.ndarray, "B N H E"] | None = None,
    dlse: Float64[np.ndarray, "B H N"] | None = None,
    sinks: Float64[np.ndarray, " H"] | None = None,
) -> Answer:
    """Compute out and lse, and with `dout` dq, dk and dv too. An empty row has out 0, and lse −inf or that of its sink.

    Args:
        problem: what to compute; its dtype is ignored, the oracle is always float64.
        q: queries.
        k: keys.
        v: values.
        dout: cotangent of out; without it the answer has no gradients.
        dlse: cotangent of lse, by default zero; its values for empty rows without a sink are ignored.
        sinks: learned sinks, where the problem has them; −inf is that of a head without one.

    Raises:
        ValueError: an array is not float64, has another shape than the problem says, or dlse comes without dout; or
            sinks are given where the problem has none, or are missing, NaN or +inf.
    """
    if dout is None and dlse is not None:
        raise ValueError("dlse without dout: give a dout of zeros for the gradient of lse alone")
    if problem.sinks != (sinks is not None):
        raise ValueError(f"sinks={problem.sinks} says the problem, and {'no' if sinks is None else 'some'} are given")
    if sinks is not None:
        _check("sinks", sinks, (problem.heads,))
        if not (sinks < np.inf).all():
            raise ValueError(f"sinks={sinks.tolist()}: expected finite numbers, or -inf for a head without a sink")
    known = _intermediates(problem, q, k, sinks)
    _check("v", v, (problem.batch, problem.nk, problem.hk, problem.dv))
    with np.errstate(all="ignore"):
        out_BHNE = sum_attended(known.probabilities, per_query_head(v, problem.group_size), known.m)
    out = np.ascontiguousarray(out_BHNE.swapaxes(1, 2))
    if dout is None:
        return Answer(out, known.lse, None, None, None, known)
    return _backward(problem, q, k, v, dout, dlse, known, out)


def _backward(
    problem: Problem, q: Float, k: Float, v: Float, dout: Float, dlse: Float | None, known: Intermediates, out: Float
) -> Answer:
    """Compute the answer with gradients, from the cotangents dout of out and dlse of lse. An empty row adds nothing."""
    _check("dout", dout, (problem.batch, problem.nq, problem.heads, problem.dv))
    m, p = known.m, known.probabilities
    m_transposed, p_transposed = m.swapaxes(2, 3), p.swapaxes(2, 3)
    q_BHND, dout_BHNE = q.swapaxes(1, 2), dout.swapaxes(1, 2)
    k_BHMD, v_BHME = per_query_head(k, problem.group_size), per_query_head(v, problem.group_size)

    with np.errstate(all="ignore"):
        dv_BHME = sum_attended(p_transposed, dout_BHNE, m_transposed)

        dp = np.where(m > 0, dout_BHNE @ v_BHME.swapaxes(2, 3), 0.0)
        of_row = -(p * dp).sum(axis=-1, keepdims=True)
        if dlse is not None:
            _check("dlse", dlse, (problem.batch, problem.heads, problem.nq))
            of_row += dlse[..., None]
        towards = dp + of_row
        dsinks = None
        if known.sink_weights is not None:
            weights = known.sink_weights
            dsinks = np.where(weights == 0, 0.0, weights * of_row[..., 0]).sum(axis=0)
        ds = p * towards
        if problem.softcap is not None:
            # sech² rather than 1 − tanh², which has no correct digit left where the cap saturates.
            ds /= np.cosh(known.raw_scores / problem.softcap) ** 2
        # `towards` may be NaN in the row of a NaN cotangent; keys that this row does not attend must not become NaN.
        ds = np.where(m > 0, ds, 0.0) * problem.scale_value

        dq_BHND = sum_attended(ds, k_BHMD, m)
        dk_BHMD = sum_attended(ds.swapaxes(2, 3), q_BHND, m_transposed)
    dq = np.ascontiguousarray(dq_BHND.swapaxes(1, 2))
    dk, dv = per_key_head(dk_BHMD, problem.group_size), per_key_head(dv_BHME, problem.group_size)
    return Answer(out, known.lse, dq, dk, dv, known, dsinks)


def _intermediates(problem: Problem, q: Float, k: Float, sinks: Float | None) -> Intermediates:
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
        if sinks is not None:
            row_max = np.maximum(row_max, sinks[:, None, None])
        # Where nothing is attended the shift would be −inf, and −inf − (−inf) is NaN: any finite shift will do.
        # exp may overflow at a pair that is not attended, so such pairs are zeroed by selection, not multiplication.
        shift = np.where(row_max == -np.inf, 0.0, row_max)
        weights = np.where(attended, m * np.exp(scores - shift), 0.0)
        row_sum = weights.sum(axis=-1, keepdims=True)
        of_sink = None if sinks is None else np.exp(sinks[:, None, None] - shift)
        if of_sink is not None:
            row_sum = row_sum + of_sink
        lse = (shift + np.log(row_sum))[..., 0]
        # p = m · exp(s − lse), computed as a quotient: lse has an absolute error of u · |lse|, the quotient does not.
        # Selected again, since a row that attends a NaN has a NaN sum and 0 / NaN is NaN.
        whole = np.where(row_sum == 0.0, 1.0, row_sum)
        probabilities = np.where(attended, weights / whole, 0.0)
        sink_weights = None if of_sink is None else (of_sink / whole)[..., 0]
    return Intermediates(m, raw_scores, scores, probabilities, lse, sinks, sink_weights)


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
    if not isinstance(x, np.ndarray):
        raise ValueError(f"{name} is of type {type(x).__name__}: expected a float64 array {shape}")
    if x.dtype != np.float64:
        raise ValueError(f"{name} has dtype {x.dtype}: the oracle computes in float64; widen it first")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}: the problem says {shape}")
