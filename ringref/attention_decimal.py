"""The oracle in decimal arithmetic: sixty digits, rounded once to float64, so the same bits on every machine.

The last bits of what `ringref.attention` returns depend on the order in which a matrix product is summed and on the
library whose exponential is called. Here every operation is one of Python's `decimal`, whose results are defined digit
by digit (General Decimal Arithmetic, Cowlishaw 2009, correctly rounded exp and ln included), in a fixed order. Each
number returned is the float64 nearest to the exact answer, unless that lies within 1e-40 of half way between two.

Formulas add no cancellation to that of the inputs: `dp_j − Σ_l p_l dp_l` is summed as `Σ_l p_l (dp_j − dp_l)`, which
keeps its digits where one key has all the weight. A sum of at most 1e-40 times the size of its terms is taken as 0: so
little is left only by rounding, where the exact sum is 0.

Shape letters: B batch, N queries, M keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

from ringref.pattern import multiplicity_at
from ringref.problem import Problem

DIGITS = 60
CONTEXT = decimal.Context(
    prec=DIGITS,
    rounding=decimal.ROUND_HALF_EVEN,
    Emin=decimal.MIN_EMIN,
    Emax=decimal.MAX_EMAX,
    traps=[decimal.InvalidOperation],
)
NOTHING_LEFT = Decimal(10) ** -40
"""A sum of at most this times the sum of its terms' absolute values is taken as exactly 0."""

NOT_FINITE = "a query, an attended key or value, a cotangent or a result is not finite"
ZERO, ONE = Decimal(0), Decimal(1)


def attention(
    problem: Problem,
    q: Float64[np.ndarray, "B N H D"],
    k: Float64[np.ndarray, "B M K D"],
    v: Float64[np.ndarray, "B M K E"],
    dout: Float64[np.ndarray, "B N H E"],
    dlse: Float64[np.ndarray, "B H N"],
    sinks: Float64[np.ndarray, " H"] | None = None,
) -> tuple[NDArray[np.float64], ...]:
    """Compute `(out, lse, dq, dk, dv)`, and with sinks `dsinks (H,)` too, shaped as those of `ringref.attention`.

    An empty row has out 0 and lse −inf, and its cotangents are ignored; with a sink lse is that.

    Args:
        problem: what to compute; its dtype is ignored.
        q: queries.
        k: keys; one that no query attends may be NaN, and so may its value.
        v: values.
        dout: cotangent of out.
        dlse: cotangent of lse.
        sinks: learned sinks, where the problem has them.

    Raises:
        ValueError: a query, an attended key or value, a cotangent or a result is not finite.
    """
    with decimal.localcontext(CONTEXT):
        try:
            found = _attention(problem, q, k, v, dout, dlse, sinks)
            return found if problem.sinks else found[:-1]
        except decimal.InvalidOperation:
            raise ValueError(NOT_FINITE) from None


def _attention(
    problem: Problem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray,
    sinks: np.ndarray | None,
) -> tuple[np.ndarray, ...]:
    if problem.sinks != (sinks is not None):
        raise ValueError(f"sinks={problem.sinks} says the problem, and {'no' if sinks is None else 'some'} are given")
    q_BNHD, k_BMKD, v_BMKE, dout_BNHE, dlse_BHN = (_exact(x.tolist()) for x in (q, k, v, dout, dlse))
    scale = ONE / Decimal(problem.head_dim).sqrt() if problem.scale is None else Decimal(problem.scale)
    out = np.zeros((problem.batch, problem.nq, problem.heads, problem.dv))
    lse = np.full((problem.batch, problem.heads, problem.nq), -math.inf)
    dq = np.zeros((problem.batch, problem.nq, problem.heads, problem.head_dim))
    dk_terms: dict[tuple[int, ...], list[Decimal]] = {}
    dv_terms: dict[tuple[int, ...], list[Decimal]] = {}
    dsink_terms: dict[tuple[int, ...], list[Decimal]] = {}
    for b, h, i in np.ndindex(problem.batch, problem.heads, problem.nq):
        kh = h // (problem.heads // problem.hk)
        row = [(j, m) for j in range(problem.nk) if (m := multiplicity_at(problem, b, h, i, j)) > 0]
        sink = None if sinks is None or sinks[h] == -math.inf else Decimal(float(sinks[h]))
        if not row and sink is None:
            continue
        q_D, dout_E = q_BNHD[b][i][h], dout_BNHE[b][i][h]
        keys = [k_BMKD[b][j][kh] for j, _ in row]
        values = [v_BMKE[b][j][kh] for j, _ in row]
        raw = [scale * _dot(q_D, key) for key in keys]
        slopes = [ONE] * len(raw)
        scores = raw
        if problem.softcap is not None:
            capped = [_tanh(s / Decimal(problem.softcap)) for s in raw]
            scores = [Decimal(problem.softcap) * tanh for tanh, _ in capped]
            slopes = [slope for _, slope in capped]
        top = max(scores if sink is None else [sink, *scores])
        weights = [m * (s - top).exp() for (_, m), s in zip(row, scores, strict=True)]
        of_sink = ZERO if sink is None else (sink - top).exp()
        total = sum(weights, of_sink)
        p = [weight / total for weight in weights]
        lse[b, h, i] = _rounded((top, total.ln()))
        out[b, i, h] = [_rounded(p_j * x[e] for p_j, x in zip(p, values, strict=True)) for e in range(problem.dv)]

        dp = [_dot(dout_E, value) for value in values]
        through_lse = dlse_BHN[b][h][i]
        spread = [(of_sink / total, ZERO), *zip(p, dp, strict=True)]  # the weight of a sink, whose value is 0
        if sink is not None:
            dsink_terms.setdefault((h,), []).append(spread[0][0] * _towards(ZERO, spread, through_lse))
        ds = [
            scale * slope * p_j * _towards(dp_j, spread, through_lse)
            for slope, p_j, dp_j in zip(slopes, p, dp, strict=True)
        ]
        dq[b, i, h] = [_rounded(x * key[d] for x, key in zip(ds, keys, strict=True)) for d in range(problem.head_dim)]
        for (j, _), ds_j, p_j in zip(row, ds, p, strict=True):
            for d in range(problem.head_dim):
                dk_terms.setdefault((b, j, kh, d), []).append(ds_j * q_D[d])
            for e in range(problem.dv):
                dv_terms.setdefault((b, j, kh, e), []).append(p_j * dout_E[e])
    dk, dv, dsinks = np.zeros(k.shape), np.zeros(v.shape), np.zeros(problem.heads)
    for gradient, terms in ((dk, dk_terms), (dv, dv_terms), (dsinks, dsink_terms)):
        for index, summed in terms.items():
            gradient[index] = _rounded(summed)
    return out, lse, dq, dk, dv, dsinks


def _exact(numbers: list[object]) -> list:  # type: ignore[type-arg]
    """Convert nested lists of floats to nested lists of `Decimal`, exactly."""
    return [_exact(inner) if isinstance(inner, list) else Decimal(inner) for inner in numbers]  # type: ignore[arg-type]


def _dot(a: Sequence[Decimal], b: Sequence[Decimal]) -> Decimal:
    return _sum([x * y for x, y in zip(a, b, strict=True)])


def _towards(dp_j: Decimal, spread: Sequence[tuple[Decimal, Decimal]], through_lse: Decimal) -> Decimal:
    """`Σ_l p_l (dp_j − dp_l) + dlse`, from the pairs p_l and dp_l."""
    return _sum([through_lse, *(p_l * (dp_j - dp_l) for p_l, dp_l in spread)])


def _sum(terms: Sequence[Decimal]) -> Decimal:
    total = sum(terms, ZERO)
    size = sum(map(abs, terms), ZERO)
    if not size.is_finite():
        raise ValueError(NOT_FINITE)
    return ZERO if abs(total) <= NOTHING_LEFT * size else total


def _rounded(terms: Iterable[Decimal]) -> float:
    """Return the sum of the terms as the nearest float64; a sum of zero is +0.0."""
    rounded = float(_sum(list(terms))) + 0.0
    if not math.isfinite(rounded):
        raise ValueError(NOT_FINITE)
    return rounded


def _tanh(x: Decimal) -> tuple[Decimal, Decimal]:
    """Return tanh(x) and its slope 1 / cosh(x)²."""
    e = (-2 * abs(x)).exp()
    tanh = (ONE - e) / (ONE + e)
    return tanh.copy_sign(x), 4 * e / (ONE + e) ** 2
