r"""What error is allowed, derived. The only place of the project that holds a tolerance.

**Model.** Every operation of a pipeline with unit roundoff u returns the exact result times (1 + d), |d| <= u
(Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed. 2002, eq. 2.4); n of them in a row or a sum of n
terms in any order cost at most gamma_n = n u / (1 - n u) (ibid., lemma 3.1). n factors 1 + d are at most exp(n u), also
where n u passes 1: costs are added as exponents and become errors once, as exp(x) - 1. Inputs are exact: the oracle is
given the very numbers that the implementation was given. u is that of the declared `accumulates` where it holds every
number of the input dtype, else that of the input dtype; results are rounded once more, to the dtype in which they are
returned.

**Forward.** For a query i, a key j with multiplicity m_ij > 0 and A_ij = scale * sum_d |q_id| |k_jd|:

1. *Scores.* D products and their sum, the scale, which may be a rounded factor on q, on k or on both, the softcap
   (slope at most 1), a change to base 2:  |ds_ij| <= u ((D + c_score) A_ij + c_score |s_ij|) =: delta_ij.
2. *Exponents.* p_ij = exp(log m_ij + s_ij - lse_i). Shifting before the exponential makes the error of exp relative to
   the shifted argument rather than to the score (Blanchard, Higham & Higham 2021, *Accurately computing the log-sum-exp
   and softmax functions*, IMA J. Numer. Anal. 41, section 4): u (c_exp + |s_ij - lse_i|), of scores as computed, so
   2 max_j delta_ij more. Rescaling by a running max telescopes to the same. Each of M merges of partial results rounds
   a log-sum-exp, whose size is at most L_i = max_j |s_ij| + max_j delta_ij + log sum_j m_ij, and three or four factors.
   So an exponent is wrong by at most  eta_ij = kappa_ij + rho_i, of which
   kappa_ij = delta_ij + u (|s_ij - lse_i| + 2 max_j delta_ij) is the key's and
   rho_i = u (c_exp + (M + 1)(c_merge + 2 L_i) + K_i) the row's, K_i keys summed.
3. *lse.* The sum is between sum_j p_ij exp(-eta_ij) and sum_j p_ij exp(eta_ij) of the right one. By Jensen's inequality
   lse is too small by at most the weighted mean  lower_i = sum_j p_ij eta_ij; but it may be too large by
   upper_i = log sum_j exp(log p_ij + eta_ij), which is more than the mean: where scores are so large that their own
   rounding is, keys of no weight at all may win. Two scores of 166,000 that are 938 apart are one number in bfloat16.
4. *Weights* are therefore bounded by their logarithms, which do not underflow where the weights do:
   p_ij exp(-eta_ij - upper_i) <= p^_ij <= exp(min(log p_ij + eta_ij + lower_i, log w_i)).
   A sum of exponentials divides each of them, and a stable pipeline merges with factors of at most 1: a row's weights
   add up to at most  w_i = min(exp(2 rho_i), M + 1), multiplicities included. E_ij is the larger distance from p_ij.
   Where eta is small both are p_ij (eta_ij + sum_j p_ij eta_ij), to first order.
5. *out* = sum_j p_ij v_j / (sum of weights):
   |e_id| <= sum_j (E_ij + (p_ij + E_ij) (exp(u (K_i + c_merge (M + 1))) - 1)) |v_jd|
             + (exp(u c_merge (M + 1)) - 1) max_j |v_jd|,
   the last term for merges written as o - w (o - b).

**Gradients.** With g_ij = dout_i . v_j, D_i = sum_j p_ij g_ij, h_ij = g_ij - D_i + dlse_i: ds_ij = p_ij h_ij slope_ij.
Weights may be computed again, from scores that are rounded anew and from lse: then they are at most
w_i exp(2 kappa_ij), and E'_ij bounds their error. D_i comes from out or from weights as they were, so it errs by
sum_j E_ij G_ij, G_ij = sum_d |dout_id| |v_jd|, and out as returned is rounded: sum_d |dout_id| (u_out |out_id| + tiny),
tiny because rounding is not relative any more below the smallest normal number, which float16 is soon.
g_ij, D_i and dlse_i may cancel, and pipelines differ in how they group them, so roundings are relative to
W_ij = G_ij + its weighted mean over j + |dlse_i|. So ds_ij errs by E'_ij |h_ij| slope_ij and by p_ij + E'_ij times the
errors of h_ij and of the slope. dq, dk and dv are sums of such terms.

**Range.** The model ends where a number overflows. Where a score, a recomputed weight or a running sum may pass the
largest number of the declared sums, or what is rounded to the input dtype that of the input dtype, nothing is said of
the row: the bound is infinite. float32 sums never come near; float16 ones do with scores of 65504, in either sign.

**Probabilities in the input dtype** (`probabilities="input"`) add u_input to every weight and to every ds. Pipelines
that do so may also sum the rounded weights, which adds as much to lse and to the divisor of out, and fused kernels
return the partial result of a block in the input dtype: once more u_input times the sum of the sizes of its terms.

**Sums over ranks in the input dtype** (`reduces="input"`), as by a reduce-scatter of gradients in it. Each of P ranks
rounds its part x_r of dk or dv, and P - 1 additions round what has been summed so far; no such sum is larger than
X = sum_r |x_r|, which is at most the sum of the sizes of all terms. By lemma 3.1 this costs (exp(P u_input) - 1) X, one
rounding more where key heads are shared and the parts of their query heads are added in the same way.

The bounds hold for every order of summation, so they never reject a pipeline that does what it declares. Random errors
reach a small part of them (Higham & Mary 2019, *A new approach to probabilistic rounding error analysis*, SIAM J. Sci.
Comput. 41: about sqrt(n) u), which is what a margin of 0.1 means.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ringref.attention import Answer
    from ringref.problem import DtypeName, Problem

Array = NDArray[np.float64]

UNIT_ROUNDOFF: dict[DtypeName, float] = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
"""Half the distance from 1 to the next number, which bounds the relative error of rounding to nearest."""


def unit_in_words(dtype: DtypeName) -> str:
    """What `u` is in a message about a result in `dtype`."""
    exponent = int(np.log2(UNIT_ROUNDOFF[dtype]))
    return f"u = 2^{exponent}, half the distance from 1 to the next {dtype}"


UNDERFLOW: dict[DtypeName, float] = {
    "float64": 2.0**-1022,
    "float32": 2.0**-126,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-126,
}
"""The absolute error below which a result may vanish: the smallest normal number, since units may flush subnormals;
for float16, whose subnormals every unit keeps, the smallest of these."""

LARGEST: dict[DtypeName, float] = {
    "float64": float(np.finfo(np.float64).max),
    "float32": float(np.finfo(np.float32).max),
    "float16": 65504.0,
    "bfloat16": float(np.finfo(np.float32).max) * (1 - 2.0**-8) / (1 - 2.0**-24),
}

HOLDING: dict[DtypeName, tuple[DtypeName, ...]] = {
    "float64": ("float64",),
    "float32": ("float64", "float32"),
    "float16": ("float64", "float32", "float16"),
    "bfloat16": ("float64", "float32", "bfloat16"),
}
"""Which dtypes hold every number of a dtype. Of bfloat16 and float16, one has the range and the other the digits."""

SCORE_ROUNDINGS = 8
"""c_score: a factor on q, one on k, their representation, the division, tanh and product of a softcap, log2(e), 1."""

EXP_ROUNDINGS = 4
"""c_exp: a vectorised exp or exp2 is within 2 ulp of the result (4 u), the shift included."""

MERGE_ROUNDINGS = 8
"""c_merge: two weights within 2 ulp each, two products, a sum, a normalisation."""

PARTIALS_PER_BLOCK = 2
"""Partial results that a rank may form of one block and merge: its tiles, or the halves of a zigzag block."""

TANH_SLOPE_CHANGE = 0.77
"""max |d/dx (1 - tanh(x)^2)| = 4 / (3 sqrt 3) = 0.7698…, rounded up."""

LARGEST_EXPONENT = 88.0
"""Weights of more than exp(88) are past the largest float32: a bound that large says nothing, whatever the dtype."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How an implementation says it computes.

    Attributes:
        dtype: of q, k, v, out and their gradients.
        accumulates: of scores and running sums, for inputs no wider than it.
        probabilities: "input" if weights are rounded to `dtype` before they meet the values.
        lse_dtype: of the returned log-sum-exp.
        blocks: blocks of keys whose partial results are merged: the world size.
        reduces: "input" if each rank's part of dk and dv is rounded to `dtype` and these are summed in it.
    """

    dtype: DtypeName
    accumulates: DtypeName = "float32"
    probabilities: Literal["accumulates", "input"] = "accumulates"
    lse_dtype: DtypeName = "float32"
    blocks: int = 1
    reduces: Literal["accumulates", "input"] = "accumulates"

    @property
    def sums(self) -> DtypeName:
        """dtype of the running sums: `accumulates` if it holds every number of `dtype`, else `dtype`."""
        return self.accumulates if self.accumulates in HOLDING[self.dtype] else self.dtype

    @property
    def unit(self) -> float:
        """u of the running sums, the oracle's own error in float64 included."""
        return UNIT_ROUNDOFF[self.sums] + UNIT_ROUNDOFF["float64"]


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The largest componentwise error of each result, shaped like it; gradients are `None` where there are none."""

    out: Array
    lse: Array
    dq: Array | None
    dk: Array | None
    dv: Array | None


def allowed_error(
    problem: Problem,
    answer: Answer,
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None,
    dlse: Array | None,
    pipeline: Pipeline,
) -> Allowed:
    """The bound of this module's derivation, for one problem on given inputs.

    Args:
        problem: what was computed.
        answer: the oracle's answer on the same inputs, with its intermediates.
        q: queries `(B, Nq, Hq, D)`, float64 values of the numbers that the implementation was given.
        k: keys `(B, Nk, Hk, D)`.
        v: values `(B, Nk, Hk, Dv)`.
        dout: cotangent of out `(B, Nq, Hq, Dv)`, or `None` for no gradients.
        dlse: cotangent of lse `(B, Hq, Nq)`, or `None` for zero.
        pipeline: how the implementation says it computes.
    """
    u, u_out = pipeline.unit, UNIT_ROUNDOFF[pipeline.dtype]
    u_weight = u_out if pipeline.probabilities == "input" else 0.0
    most, tiny = LARGEST[pipeline.sums], UNDERFLOW[pipeline.sums]
    inner, scale, group = answer.intermediates, abs(problem.scale_value), problem.group_size
    p, attended, keys = inner.probabilities, inner.m > 0, inner.m.sum(axis=3, keepdims=True)  # K_i
    some = keys > 0
    branches = 1 if problem.dilation is None else len(problem.dilation.branches)
    merges = PARTIALS_PER_BLOCK * pipeline.blocks * branches

    # What no query attends may be NaN, and does not matter.
    columns = attended.max(axis=2, initial=False)[..., None]
    q_size, k_size = np.abs(_by_head(q)), np.where(columns, np.abs(_by_head(k, group)), 0.0)
    v_BHKD = np.where(columns, _by_head(v, group), 0.0)
    v_size = np.abs(v_BHKD)
    weights = _weight_errors(problem, answer, q_size @ k_size.swapaxes(2, 3), merges, pipeline)

    merge_cost = MERGE_ROUNDINGS * (merges + 1)
    summing = u * (keys + merge_cost) + u_weight  # and a partial result's rounding
    # A weight, or the factor of a merge, may vanish below the smallest normal number of the running sums, and so may
    # each product that is summed. Rounded to the input dtype, weights, gradients of scores and partial results vanish
    # where that does.
    narrow = UNDERFLOW[pipeline.dtype] if pipeline.probabilities == "input" else 0.0
    vanishing = (2 * tiny + narrow) * attended
    lost = (tiny * (keys + merges) + narrow * merges) * some
    # A convex combination o - w (o - b) of two partial results errs by their size, whatever the weight.
    largest_value = np.where(attended[..., None], v_size[:, :, None], 0.0).max(axis=3, initial=0.0)
    combining = np.expm1(u * merge_cost) * largest_value

    out_error = weights.forward + (p + weights.forward) * np.expm1(summing + 2 * u_weight) + vanishing
    out_error = out_error @ v_size + combining + lost
    # An accumulator that is divided at the end holds up to K_i times the largest value.
    overflowing = weights.scores_overflow | (keys * largest_value > most)
    out_allowed = _returned(out_error, answer.out, some, overflowing, pipeline.dtype)
    lse_size, rows = np.where(some[..., 0], np.abs(answer.lse), 0.0), weights.scores_overflow[..., 0]
    lse_error = weights.lse + u_weight + 2 * u * weights.largest
    lse_error = lse_error[..., 0] + UNIT_ROUNDOFF[pipeline.lse_dtype] * lse_size
    lse_allowed = np.where(some[..., 0], np.where(rows, np.inf, lse_error), 0.0)
    if dout is None or answer.dq is None or answer.dk is None or answer.dv is None:
        return Allowed(out_allowed, lse_allowed, None, None, None)

    dout_BHQD, out_size = _by_head(dout), np.abs(_by_head(answer.out))
    dout_size = np.abs(dout_BHQD)
    g, product = dout_BHQD @ v_BHKD.swapaxes(2, 3), dout_size @ v_size.swapaxes(2, 3)
    change = np.where(some, 0.0 if dlse is None else dlse[..., None], 0.0)
    h = np.abs(g - (p * g).sum(axis=3, keepdims=True) + change)
    w = product + (p * product).sum(axis=3, keepdims=True) + np.abs(change)  # W_ij
    p_error = weights.backward + vanishing
    p_size = p + p_error
    d_error = weights.forward + (p + weights.forward) * np.expm1(summing) + vanishing
    d_error = (d_error * product).sum(axis=3, keepdims=True) + (dout_size * combining).sum(axis=3, keepdims=True)
    returned = u_out * out_size + UNDERFLOW[pipeline.dtype]
    d_error = (1 + u_out) * d_error + (dout_size * returned).sum(axis=3, keepdims=True)
    h_error = d_error + np.expm1(u * (2 * problem.dv + merge_cost) + 3 * u_weight) * w + problem.dv * tiny
    slope: Any = 1.0
    slope_error: Any = 0.0
    if problem.softcap is not None:
        slope = np.where(attended, 1 - (inner.scores / problem.softcap) ** 2, 0.0)
        slope_error = SCORE_ROUNDINGS * u + np.minimum(TANH_SLOPE_CHANGE * weights.scores / problem.softcap, 1.0)
    ds_error = p_error * h * slope + p_size * (h_error * slope + (w + h_error) * slope_error)
    ds_error = ds_error + vanishing * w + (narrow + tiny) * attended
    ds_size = p_size * w * slope + ds_error

    # Rows in whose backward a number of the declared pipeline may overflow; of their gradients nothing is said.
    unsaid = weights.backward_overflow | ((w > most) | (ds_size > most)).any(axis=3, keepdims=True)
    if pipeline.probabilities == "input":
        unsaid = unsaid | (p * h * slope + ds_error > LARGEST[pipeline.dtype]).any(axis=3, keepdims=True)
    # A NaN in a row is one in all its weights, those of keys that nothing attends included: 0 / NaN is NaN.
    unsaid = unsaid & some
    columns_unsaid = unsaid.any(axis=2, keepdims=True)

    ds_error_T, ds_size_T, p_error_T, p_size_T = (x.swapaxes(2, 3) for x in (ds_error, ds_size, p_error, p_size))
    queries = problem.nq * group
    row_cost, column_cost = np.expm1(summing), float(np.expm1(u * (queries + merge_cost) + u_weight))
    lost_T, larger = (tiny * queries + narrow * merges) * columns, max(scale, 1.0)
    dq_size, dk_size, dv_size = ds_size @ k_size, ds_size_T @ q_size, p_size_T @ dout_size
    dq_error = scale * ((ds_error + row_cost * ds_size) @ k_size) + larger * lost
    dk_error = scale * (ds_error_T @ q_size + column_cost * dk_size) + larger * lost_T
    dv_error = p_error_T @ dout_size + (column_cost + 2 * u_weight) * dv_size + lost_T
    dq_unsaid, dk_unsaid = unsaid | (larger * dq_size > most), columns_unsaid | (larger * dk_size > most)
    dv_unsaid = columns_unsaid | (dv_size > most)
    if pipeline.reduces == "input":
        # Rounded in the input dtype: every rank's part, the sums of two, and a sum over the heads that share a key.
        added = float(np.expm1(u_out * (pipeline.blocks + (group > 1))))
        vanished = UNDERFLOW[pipeline.dtype] * pipeline.blocks * columns
        dk_error, dv_error = (
            (1 + added) * dk_error + added * scale * dk_size + vanished,
            (1 + added) * dv_error + added * dv_size + vanished,
        )
        dk_unsaid = dk_unsaid | (group * scale * dk_size > LARGEST[pipeline.dtype])
        dv_unsaid = dv_unsaid | (group * dv_size > LARGEST[pipeline.dtype])
    return Allowed(
        out_allowed,
        lse_allowed,
        _returned(dq_error, answer.dq, some, dq_unsaid, pipeline.dtype),
        _returned(dk_error, answer.dk, columns, dk_unsaid, pipeline.dtype, group),
        _returned(dv_error, answer.dv, columns, dv_unsaid, pipeline.dtype, group),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _WeightErrors:
    """What may be wrong with the weights, by head, query and key, or by head and query with one key.

    Attributes:
        scores: delta_ij, absolute.
        forward: of the weights that meet the values, absolute.
        backward: of the weights that the backward computes again from the lse, absolute.
        lse: of the log-sum-exp, its last rounding aside.
        largest: L_i.
        scores_overflow: rows in which a score may pass the largest number of the running sums.
        backward_overflow: rows in which a score, or a weight that is computed again, may.
    """

    scores: Array
    forward: Array
    backward: Array
    lse: Array
    largest: Array
    scores_overflow: NDArray[np.bool_]
    backward_overflow: NDArray[np.bool_]


def _weight_errors(problem: Problem, answer: Answer, products: Array, merges: int, pipeline: Pipeline) -> _WeightErrors:
    """Steps 1 to 4 of the derivation, for `products` sum_d |q_id| |k_jd|."""
    u, inner = pipeline.unit, answer.intermediates
    p, attended, keys = inner.probabilities, inner.m > 0, inner.m.sum(axis=3, keepdims=True)
    some, scale = keys > 0, abs(problem.scale_value)
    magnitude = scale * products  # A_ij
    score = np.where(attended, np.abs(inner.scores), 0.0)
    delta = np.expm1(u * (problem.head_dim + SCORE_ROUNDINGS)) * magnitude + np.expm1(u * SCORE_ROUNDINGS) * score
    delta = np.where(attended, delta, 0.0)
    largest_delta = delta.max(axis=3, initial=0.0, keepdims=True)
    largest = score.max(axis=3, initial=0.0, keepdims=True) + largest_delta + np.log(np.maximum(keys, 1))  # L_i
    row = u * (EXP_ROUNDINGS + (merges + 1) * (MERGE_ROUNDINGS + 2 * largest) + keys)
    above = np.where(attended, inner.scores, 0.0) - np.where(some, answer.lse[..., None], 0.0)  # s_ij - lse_i
    kappa = delta + u * (np.abs(above) + 2 * largest_delta)
    eta = np.where(attended, kappa + row, 0.0)
    log_p = np.where(attended, above + np.log(np.maximum(inner.m, 1)), -np.inf)

    lower = (p * eta).sum(axis=3, keepdims=True)
    raised = log_p + eta
    top = np.where(some, raised.max(axis=3, initial=-np.inf, keepdims=True), 0.0)
    farther = top + np.log(np.where(some, np.exp(raised - top).sum(axis=3, keepdims=True), 1.0))
    # Where all errors are small, the same without taking nearly equal numbers from each other.
    nearby = np.log1p((p * np.expm1(np.minimum(eta, 1.0))).sum(axis=3, keepdims=True))
    upper = np.where(eta.max(axis=3, initial=0.0, keepdims=True) < 1, nearby, farther)
    upper = np.maximum(upper, lower)  # and not less by a rounding of our own
    less = -p * np.expm1(-(eta + upper))
    log_whole = np.minimum(2 * row, np.log(merges + 1))

    def apart(log_most: Array) -> Array:
        """How far weights may lie from p, none above exp(`log_most`)."""
        rise = np.minimum(eta + lower, log_most - log_p)
        risen = np.exp(np.minimum(log_p + rise, LARGEST_EXPONENT)) - p
        more = np.where(rise < 1, p * np.expm1(np.minimum(rise, 1.0)), np.maximum(risen, 0.0))
        worst: Array = np.maximum(more, less)
        return worst

    raw = products.max(axis=3, initial=0.0, keepdims=True)
    factor = 2 * max(1.0, scale, 0.0 if problem.softcap is None else scale / problem.softcap)  # log2(e), and roundings
    scores_overflow = some & (factor * raw > LARGEST[pipeline.sums])
    log_again = log_whole + 2 * kappa
    overflow = min(np.log(LARGEST[pipeline.sums]), LARGEST_EXPONENT)
    weights_overflow = np.minimum(log_p + eta + lower, log_again) > overflow
    backward_overflow = scores_overflow | weights_overflow.any(axis=3, keepdims=True)
    return _WeightErrors(
        scores=delta,
        forward=apart(log_whole),
        backward=apart(log_again),
        lse=upper,
        largest=largest,
        scores_overflow=scores_overflow,
        backward_overflow=backward_overflow,
    )


def witness_bound(dtype: DtypeName, terms: int) -> float:
    """Relative difference allowed between two computations of `terms` roundings each: 2 gamma_terms.

    Raises:
        ValueError: so many terms that nothing could be said.
    """
    nu = terms * UNIT_ROUNDOFF[dtype]
    if nu >= 1:
        raise ValueError(f"{terms} roundings in {dtype} leave no digit to compare")
    return 2 * nu / (1 - nu)


def scaled_bound(error: float, measured: DtypeName, dtype: DtypeName) -> float:
    """Relative difference allowed between two computations of one program in `dtype`, from one's error in `measured`.

    For programs too long to be bounded step by step, a training step say. Their error is linear in u to first order
    (this module's model), so what one computation in a coarser dtype is off by, against the same in a far finer one, a
    computation in `dtype` is off by times the ratio of the units; two of them differ by the sum of theirs. Where they
    round differently these are two draws of one random quantity, which FLUCTUATION allows for.

    Args:
        error: relative error of the computation in the coarser dtype, a norm over many elements.
        measured: that coarser dtype.
        dtype: in which the two are compared.
    """
    return 2 * FLUCTUATION * error * UNIT_ROUNDOFF[dtype] / UNIT_ROUNDOFF[measured]


def margins(actual: Array, expected: Array, allowed: Array, dtype: DtypeName) -> Array:
    """Error over allowed error of each component; 1.0 is the line, inf where no error is allowed or a NaN came back.

    Equal infinities agree. Where the exact result, give or take the allowed error, passes the largest number of
    `dtype`, the infinity of that sign is right too. An allowed error of infinity says nothing: whatever came back,
    a NaN too, has margin 0.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # infinities, and errors of what they stand for
        error = np.abs(actual - expected)
        margin = np.where(error == 0, 0.0, error / allowed)
        overflow = np.isinf(actual) & (np.sign(actual) * expected + allowed > LARGEST[dtype])
    agree = (actual == expected) | overflow | np.isposinf(allowed)
    return np.where(agree, 0.0, np.where(np.isnan(margin), np.inf, margin))


def _returned(
    error: Array, exact: Array, reached: NDArray[Any], unsaid: NDArray[Any], dtype: DtypeName, group: int = 1
) -> Array:
    """`error` by position rather than by head, and one more rounding to the dtype in which the result is returned.

    A result below the smallest normal number may vanish, and so may its error here; what is not `reached`, an empty row
    say, stays exact. Of what is `unsaid` nothing is said.
    """
    error_BNHD, reached, unsaid = (_from_head(np.broadcast_to(x, error.shape), group) for x in (error, reached, unsaid))
    rounded = error_BNHD + UNIT_ROUNDOFF[dtype] * (np.abs(exact) + error_BNHD) + UNDERFLOW[dtype]
    return np.where(unsaid > 0, np.inf, np.where(reached > 0, rounded, 0.0))


def _by_head(tensor_BNHD: Array, group_size: int = 1) -> Array:
    """(B, N, H, D) to (B, H * group_size, N, D): each key head once for every query head that reads it."""
    tensor: Array = tensor_BNHD.transpose(0, 2, 1, 3)
    return tensor if group_size == 1 else np.repeat(tensor, group_size, axis=1)


def _from_head(tensor_BHND: NDArray[Any], group_size: int = 1) -> NDArray[Any]:
    """The adjoint of `_by_head`: back to (B, N, H, D), summed over the query heads that read a key head."""
    if group_size > 1:
        b, h, n, d = tensor_BHND.shape
        tensor_BHND = tensor_BHND.reshape(b, h // group_size, group_size, n, d).sum(axis=2)
    return tensor_BHND.transpose(0, 2, 1, 3)


CANCELLED = 4.0
"""A row whose bound is so many times larger, relative to its answer, than the median row's is left by cancellation:
single such rows would rule a mean of relative errors, and they say more about the inputs than about the pipeline."""


def rms_error(actual: Array, exact: Array, dtype: DtypeName, allowed: Array | None = None) -> tuple[float, int]:
    """rho = sqrt(mean over rows of |e|^2 / |exact|^2) / u, and the number of rows it is a mean of.

    A row is the last axis; rows whose exact value is 0 are left out. Rounding once to nearest gives about 0.4. Unlike a
    maximum, the mean is not ruled by the few large rows at the start of a causal sequence.

    Args:
        actual: what a pipeline returned.
        exact: what is right.
        dtype: in units of whose u.
        allowed: bounds on the error of each element; if given, rows left by cancellation are left out.
    """
    kept = rows_of_rms(exact, allowed)
    if not kept.any():
        return 0.0, 0
    relative = ((actual - exact) ** 2).sum(axis=-1)[kept] / (exact**2).sum(axis=-1)[kept]
    return float(np.sqrt(relative.mean()) / UNIT_ROUNDOFF[dtype]), int(kept.sum())


def rows_of_rms(exact: Array, allowed: Array | None = None) -> NDArray[np.bool_]:
    """The rows that `rms_error` is a mean of: one axis less than `exact`."""
    size = (exact**2).sum(axis=-1)
    kept: NDArray[np.bool_] = size > 0
    if allowed is not None and kept.any():
        relative_bound = np.sqrt((allowed**2).sum(axis=-1) / np.where(kept, size, 1.0))
        kept &= relative_bound <= CANCELLED * np.median(relative_bound[kept])
    return kept


FLUCTUATION = 6.0
"""Standard deviations that a mean of squared rounding errors may lie off: the error of rounding is spread over an
interval, so its square has a relative standard deviation of about 1, and a mean of n of them one of 1 / sqrt(n)."""


def precision_allowed(emulated: float, rows: int, probabilities: Literal["accumulates", "input"]) -> float:
    """The largest rho of a pipeline whose emulation has `emulated`, over so many rows.

    Two pipelines that round at the same places differ in the few elements that lie next to a tie; one that rounds once
    more, a running sum say, is larger by a factor of sqrt(2) from the first time on. Where probabilities are rounded,
    pipelines do it before or after they are normalised, which are different roundings: their variance may be twice.
    Fused kernels that do so also return the partial result of a block in the input dtype. Merged by weights that add up
    to 1 (out), or added with signs that are as good as random (gradients), these roundings have together at most the
    variance of one more rounding of the result, so of the emulated pipeline once more.
    """
    places = 3.0 if probabilities == "input" else 1.0
    return emulated * float(np.sqrt(places * (1 + FLUCTUATION / np.sqrt(max(rows, 1)))))
