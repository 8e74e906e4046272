r"""Derivation of the error that is allowed in each result: the only module of the project that holds a tolerance.

**Model.** Every operation of a pipeline with unit roundoff u returns the exact result times (1 + d), |d| <= u
(Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed. 2002, eq. 2.4); n of them in a row or a sum of n
terms in any order cost at most gamma_n = n u / (1 - n u) (ibid., lemma 3.1). A product of n factors 1 + d is at most
exp(n u), also where n u exceeds 1: costs are therefore added up as exponents x and turned into errors once, as
exp(x) - 1. Inputs are exact: the oracle is given the very numbers that the implementation was given. u is that of the
declared `accumulates` if this dtype holds every number of the input dtype, else that of the input dtype. Results are
rounded once more, to the dtype in which they are returned.

**Forward.** For a query i, a key j with multiplicity m_ij > 0 and A_ij = scale * sum_d |q_id| |k_jd|:

1. *Scores.* D products and their sum, the scale, which may be a rounded factor on q, on k or on both, the softcap
   (slope at most 1), a change to base 2:  |ds_ij| <= u ((D + c_score) A_ij + c_score |s_ij|) =: delta_ij.
2. *Exponents.* p_ij = exp(log m_ij + s_ij - lse_i). Shifting before the exponential makes the error of exp relative to
   the shifted argument rather than to the score (Blanchard, Higham & Higham 2021, *Accurately computing the log-sum-exp
   and softmax functions*, IMA J. Numer. Anal. 41, section 4): u (c_exp + |s_ij - lse_i|), where |s_ij - lse_i| of the
   computed scores may be larger by 2 max_j delta_ij. Rescaling by a running maximum telescopes to the same. Each of M
   merges of partial results rounds a log-sum-exp, whose size is at most
   L_i = max_j |s_ij| + max_j delta_ij + log sum_j m_ij, and three or four factors.
   So an exponent is wrong by at most  eta_ij = kappa_ij + rho_i: the part of the key is
   kappa_ij = delta_ij + u (|s_ij - lse_i| + 2 max_j delta_ij), and the part of the row is
   rho_i = u (c_exp + (M + 1)(c_merge + 2 L_i) + K_i), where K_i is the number of keys summed.
3. *lse.* The computed sum of exponentials is the exact one times a factor between sum_j p_ij exp(-eta_ij) and
   sum_j p_ij exp(eta_ij). By Jensen's inequality lse is too small by at most the weighted mean
   lower_i = sum_j p_ij eta_ij; but it may be too large by upper_i = log sum_j exp(log p_ij + eta_ij), which is more
   than the mean: where scores are so large that their own rounding errors are large, a key of negligible weight may get
   the largest score. In bfloat16 two scores of 166,000 that are 938 apart are the same number.
4. *Weights* are therefore bounded by their logarithms, which do not underflow where the weights do:
   p_ij exp(-eta_ij - upper_i) <= p^_ij <= exp(min(log p_ij + eta_ij + lower_i, log w_i)).
   Each weight is divided by the sum of the exponentials, and a stable pipeline merges with factors of at most 1: a
   row's weights add up to at most  w_i = min(exp(2 rho_i), M + 1), multiplicities included. E_ij is the larger distance
   of the two limits from p_ij. Where eta is small both distances are p_ij (eta_ij + sum_j p_ij eta_ij), to first order.
5. *out* = sum_j p_ij v_j / (sum of weights):
   |e_id| <= sum_j (E_ij + (p_ij + E_ij) (exp(u (K_i + c_merge (M + 1))) - 1)) |v_jd|
             + (exp(u c_merge (M + 1)) - 1) max_j |v_jd|,
   where the last term is for merges written as o - w (o - b).

**Gradients.** With g_ij = dout_i . v_j, D_i = sum_j p_ij g_ij, h_ij = g_ij - D_i + dlse_i: ds_ij = p_ij h_ij slope_ij.
The backward may compute the weights again, from lse and from scores that are rounded anew: then they are at most
w_i exp(2 kappa_ij), and E'_ij bounds their error. D_i is computed from out or from the weights of the forward, so its
error is at most sum_j E_ij G_ij, G_ij = sum_d |dout_id| |v_jd|, and that of the rounding of out as it was returned,
sum_d |dout_id| (u_out |out_id| + tiny); tiny, because below the smallest normal number, which float16 soon reaches,
rounding errors are not relative any more.
g_ij, D_i and dlse_i may cancel, and pipelines differ in how they group them, so their roundings are relative to
W_ij = G_ij + the weighted mean of G_ij over j + |dlse_i|. So the error of ds_ij is E'_ij |h_ij| slope_ij, plus
p_ij + E'_ij times the errors of h_ij and of the slope. dq, dk and dv are sums of such terms.

**A learned sink** is one more key of every row: its score is given, its value is 0, and no softcap bends it. So it adds
to K_i, to L_i and to the sums of weights like a key whose A_ij is 0, and it is one more partial result that is merged.
Its gradient is the sum of its ds_ij, in float32 like the sinks themselves: over all queries that is a column of dk for
queries of 1, to which P ranks' parts, each rounded, add P + 1 roundings (lemma 3.1, as below).
What merges the sink with a weight w of the keys, such as sigmoid(lse - sink), may compute the weight of the sink as
1 - w, whose error is relative to 1 however small it is: times sum_d |dout_id| |out_id| + |dlse_i| for each row.

**Range.** The model ends where a number overflows. Where a score, a recomputed weight or a running sum may exceed the
largest number of the dtype of the declared sums, or a number that is rounded to the input dtype may exceed the largest
of that dtype, the bound of the row is infinite: any result is allowed. float32 sums never come near their largest
number; float16 sums do with scores of 65504, of either sign.

**Probabilities in the input dtype** (`probabilities="input"`) add u_input to every weight and to every ds. Pipelines
that do so may also sum the rounded weights, which adds as much to lse and to the divisor of out. Fused kernels return
the partial result of a block in the input dtype, which adds u_input times the sum of its terms' absolute values.

**Sums over ranks in the input dtype** (`reduces="input"`), such as a reduce-scatter of gradients in that dtype. Each of
P ranks rounds its part x_r of dk or dv, and P - 1 additions round what has been summed so far; no such sum is larger
than X = sum_r |x_r|, which is at most the sum of all terms' absolute values. By lemma 3.1 this costs
(exp(P u_input) - 1) X, and one rounding more where key heads are shared and the parts of their query heads are added in
the same way.

**Merge** of P partials that are given, by themselves (`ringref.merge`), in M = P - 1 merges of two or one of all. As in
2 above with numbers in place of scores: a partial takes part in at most M merges, each with three or four factors. Each
rounds log-sum-exps, theirs or the merged one, whose sizes are at most L = max_i |lse_i| + log P over the partials that
are not empty, and differences of two: lse_a - log sigmoid(lse_a - lse_b), which is as right, rounds at the size of
lse_a though lse_b alone may count. That is 4 u L, a change of the base and back to it 4 u L more, and the result is
stored in the dtype of lse:  eta = M (u (c_exp + c_merge + (4 or 8) L) + u_lse L). With w_i = exp(lse_i - lse),
|error of out_d| <= sum_i w_i (exp(eta) - 1) |o_id| + ((exp(u c_merge M) - 1) + (M - 1) u_out) max_i |o_id|, where the
last terms are for o - w (o - b) and for intermediate results; |error of lse| <= eta.
The gradient of o_i is w_i dout, and that of lse_i is w_i h_i, where h_i sums D products and cancels: with
G_i = sum_d |dout_d| |o_id| its error is at most (w_i (exp(eta + u D) - 1) + exp(u (c_merge M + D)) - 1 + 2 u_out)
times  G_i + max_j G_j + |dlse|, since 1 - w is computed from w, and maxima and sums may be differentiated too. Where
all partials are empty, any weights are right: gradients have to be finite.

The bounds hold for every order of summation, so they never reject a pipeline that does what it declares. Random errors
reach only a small part of them, since they grow like sqrt(n) u (Higham & Mary 2019, *A new approach to probabilistic
rounding error analysis*, SIAM J. Sci. Comput. 41); hence margins of about 0.1 and less in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringref.attention import Answer, Intermediates, per_key_head, per_query_head
from ringref.merge import Merged

if TYPE_CHECKING:
    from ringref.problem import DtypeName, Problem

Array = NDArray[np.float64]
Size = TypeVar("Size", float, Array)

UNIT_ROUNDOFF: dict[DtypeName, float] = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
"""Half the distance from 1 to the next number, which bounds the relative error of rounding to nearest."""


def unit_in_words(dtype: DtypeName) -> str:
    """Say what `u` is, for a message about a result in `dtype`."""
    exponent = int(np.log2(UNIT_ROUNDOFF[dtype]))
    return f"u = 2^{exponent}, half the distance from 1 to the next {dtype}"


UNDERFLOW: dict[DtypeName, float] = {
    "float64": 2.0**-1022,
    "float32": 2.0**-126,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-126,
}
"""The size below which a number may become 0: the smallest normal number, since hardware may flush subnormals; for
float16, whose subnormals all hardware keeps, the smallest subnormal."""

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
"""For each dtype, those that hold every number of it. bfloat16 has more range than float16, and float16 more digits."""

SCORE_ROUNDINGS = 8
"""c_score: a factor on q, one on k, their representation, the division, tanh and product of a softcap, log2(e), 1."""

EXP_ROUNDINGS = 4
"""c_exp: a vectorised exp or exp2 is within 2 ulp of the result (4 u), the shift included."""

MERGE_ROUNDINGS = 8
"""c_merge: two weights within 2 ulp each, two products, a sum, a normalisation."""

PARTIALS_PER_BLOCK = 2
"""Partial results that a rank may form of one KV block and merge: of its tiles, or of the halves of a zigzag block."""

TANH_SLOPE_CHANGE = 0.77
"""max |d/dx (1 - tanh(x)^2)| = 4 / (3 sqrt 3) = 0.7698…, rounded up."""

LARGEST_EXPONENT = 88.0
"""Bounds on weights are capped at exp(88), about the largest float32: so large a bound says nothing in any dtype."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The arithmetic that an implementation declares.

    Attributes:
        dtype: dtype of q, k, v, out and their gradients.
        accumulates: dtype of scores and running sums, for inputs no wider than it.
        probabilities: "input" if weights are rounded to `dtype` before they are multiplied with the values.
        lse_dtype: dtype of the returned log-sum-exp.
        blocks: number of KV blocks whose partial results are merged: the world size.
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
        """u of the running sums, plus that of float64 for the oracle's own error."""
        return UNIT_ROUNDOFF[self.sums] + UNIT_ROUNDOFF["float64"]


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The absolute error allowed in each element of each result; gradients are `None` where there are none.

    Shapes are those of the results. 0 means that the element has to be exact, inf that it may be anything. The error
    allowed in what some queries add to the gradient of sinks is the sum of those of `dsinks (Hq, Nq)`.
    """

    out: Array
    lse: Array
    dq: Array | None
    dk: Array | None
    dv: Array | None
    dsinks: Array | None = None


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
    """Compute the bounds of this module's derivation, for one problem on given inputs.

    Args:
        problem: what was computed.
        answer: the oracle's answer on the same inputs, with its intermediates.
        q: queries `(B, Nq, Hq, D)`, float64 values of the numbers that the implementation was given.
        k: keys `(B, Nk, Hk, D)`.
        v: values `(B, Nk, Hk, Dv)`.
        dout: cotangent of out `(B, Nq, Hq, Dv)`, or `None` for no gradients.
        dlse: cotangent of lse `(B, Hq, Nq)`, or `None` for zero.
        pipeline: the arithmetic that the implementation declares.
    """
    u, u_out = pipeline.unit, UNIT_ROUNDOFF[pipeline.dtype]
    u_weight = u_out if pipeline.probabilities == "input" else 0.0
    most, tiny = LARGEST[pipeline.sums], UNDERFLOW[pipeline.sums]
    inner, scale, group = _with_sinks(answer.intermediates), abs(problem.scale_value), problem.group_size
    p, attended, keys = inner.probabilities, inner.m > 0, inner.m.sum(axis=3, keepdims=True)  # K_i
    some = keys > 0
    reached: NDArray[Any] = answer.intermediates.m.sum(axis=3, keepdims=True) > 0  # a sink is no key
    branches = 1 if problem.dilation is None else len(problem.dilation.branches)
    merges = PARTIALS_PER_BLOCK * pipeline.blocks * branches + (inner.sinks is not None)

    def by_key(x: Array) -> Array:
        """Return a tensor of keys for each query head, with the zeros of a sink."""
        whole = per_query_head(x, group)
        return whole if inner.sinks is None else np.pad(whole, ((0, 0), (0, 0), (0, 1), (0, 0)))

    # Keys and values that no query attends may be NaN and have no effect: they count as 0.
    columns = attended.max(axis=2, initial=False)[..., None]
    q_size, k_size = np.abs(per_query_head(q)), np.where(columns, np.abs(by_key(k)), 0.0)
    v_BHKD = np.where(columns, by_key(v), 0.0)
    v_size = np.abs(v_BHKD)
    weights = _weight_errors(problem, inner, q_size @ k_size.swapaxes(2, 3), merges, pipeline)

    merge_cost = MERGE_ROUNDINGS * (merges + 1)
    summing = u * (keys + merge_cost) + u_weight  # u_weight: a partial result is rounded too
    # A weight, the factor of a merge, or a product that is summed may become 0 below the smallest normal number of the
    # running sums. Weights, gradients of scores and partial results that are rounded to the input dtype may become 0
    # below the threshold of that dtype.
    narrow = UNDERFLOW[pipeline.dtype] if pipeline.probabilities == "input" else 0.0
    vanishing = (2 * tiny + narrow) * attended
    lost = (tiny * (keys + merges) + narrow * merges) * some
    # A convex combination o - w (o - b) of two partial results has an error relative to their size, for any weight w.
    every_size = np.broadcast_to(v_size[:, :, None], (*attended.shape, v_size.shape[3]))  # a view: a copy is gigabytes
    largest_value = np.max(every_size, axis=3, where=attended[..., None], initial=0.0)
    combining = np.expm1(u * merge_cost) * largest_value

    out_error = weights.forward + (p + weights.forward) * np.expm1(summing + 2 * u_weight) + vanishing
    out_error = out_error @ v_size + combining + lost
    # An accumulator that is divided at the end holds up to K_i times the largest value.
    overflowing = weights.scores_overflow | (keys * largest_value > most)
    out_allowed = _returned(out_error, answer.out, reached, overflowing, pipeline.dtype)
    lse_size, rows = np.where(some[..., 0], np.abs(answer.lse), 0.0), weights.scores_overflow[..., 0]
    lse_error = weights.lse + u_weight + 2 * u * weights.largest
    lse_error = lse_error[..., 0] + UNIT_ROUNDOFF[pipeline.lse_dtype] * lse_size
    lse_allowed = np.where(some[..., 0], np.where(rows, np.inf, lse_error), 0.0)
    if dout is None or answer.dq is None or answer.dk is None or answer.dv is None:
        return Allowed(out_allowed, lse_allowed, None, None, None)

    dout_BHQD, out_size = per_query_head(dout), np.abs(per_query_head(answer.out))
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
        if inner.sinks is not None:
            slope[..., -1], slope_error[..., -1] = 1.0, 0.0
    ds_error = p_error * h * slope + p_size * (h_error * slope + (w + h_error) * slope_error)
    ds_error = ds_error + vanishing * w + (narrow + tiny) * attended
    ds_size = p_size * w * slope + ds_error

    # Rows in whose backward a number of the declared pipeline may overflow: the bound of their gradients is infinite.
    unsaid = weights.backward_overflow | ((w > most) | (ds_size > most)).any(axis=3, keepdims=True)
    if pipeline.probabilities == "input":
        unsaid = unsaid | (p * h * slope + ds_error > LARGEST[pipeline.dtype]).any(axis=3, keepdims=True)
    # A NaN in a row makes all its weights NaN, also those of keys that are not attended: 0 / NaN is NaN.
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
        # Rounded to the input dtype: every rank's part, each sum of two, and the sum over heads that share a key head.
        added = float(np.expm1(u_out * (pipeline.blocks + (group > 1))))
        vanished = UNDERFLOW[pipeline.dtype] * pipeline.blocks * columns
        dk_error, dv_error = (
            (1 + added) * dk_error + added * scale * dk_size + vanished,
            (1 + added) * dv_error + added * dv_size + vanished,
        )
        dk_unsaid = dk_unsaid | (group * scale * dk_size > LARGEST[pipeline.dtype])
        dv_unsaid = dv_unsaid | (group * dv_size > LARGEST[pipeline.dtype])
    dsinks = None
    if inner.sinks is not None:
        parts = (
            u * (problem.batch * problem.nq + merge_cost) + u_weight + UNIT_ROUNDOFF["float32"] * (pipeline.blocks + 1)
        )
        beside = np.expm1(u * merge_cost) * ((dout_size * out_size).sum(axis=3) + np.abs(change[..., 0]))
        sink_error = ds_error[..., -1] + beside + np.expm1(parts) * ds_size[..., -1] + tiny + UNDERFLOW["float32"]
        sink_error = np.where(attended[..., -1], np.where(unsaid[..., 0], np.inf, sink_error), 0.0)
        dsinks = sink_error.sum(axis=0)
        columns, dk_error, dv_error = columns[:, :, :-1], dk_error[:, :, :-1], dv_error[:, :, :-1]
        dk_unsaid, dv_unsaid = dk_unsaid[:, :, :-1], dv_unsaid[:, :, :-1]
    return Allowed(
        out_allowed,
        lse_allowed,
        _returned(dq_error, answer.dq, reached, dq_unsaid, pipeline.dtype),
        _returned(dk_error, answer.dk, columns, dk_unsaid, pipeline.dtype, group),
        _returned(dv_error, answer.dv, columns, dv_unsaid, pipeline.dtype, group),
        dsinks,
    )


def _with_sinks(known: Intermediates) -> Intermediates:
    """Return intermediates in which the sink of a head is the last key of every row, unless there are no sinks."""
    if known.sinks is None or known.sink_weights is None:
        return known
    finite = np.isfinite(known.sinks)[:, None]
    score = np.broadcast_to(np.where(finite, known.sinks[:, None], 0.0), known.lse.shape)

    def joined(of_keys: Array, of_sink: Array) -> Array:
        return np.concatenate([of_keys, of_sink[..., None]], axis=3)

    m = joined(known.m, np.broadcast_to(finite, known.lse.shape).astype(np.int64))
    raw, scores = joined(known.raw_scores, score), joined(known.scores, score)
    return dataclasses.replace(
        known, m=m, raw_scores=raw, scores=scores, probabilities=joined(known.probabilities, known.sink_weights)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _WeightErrors:
    """Bounds on the absolute errors of weights, (B, Hq, Nq, Nk), and of rows, (B, Hq, Nq, 1).

    Attributes:
        scores: delta_ij, error of each score.
        forward: E_ij, error of each weight that is multiplied with the values.
        backward: E'_ij, error of each weight that the backward computes again from lse.
        lse: upper_i, error of each row's log-sum-exp without its last rounding.
        largest: L_i of each row.
        scores_overflow: rows in which a score may exceed the largest number of the running sums.
        backward_overflow: rows in which a score, or a weight that is computed again, may do so.
    """

    scores: Array
    forward: Array
    backward: Array
    lse: Array
    largest: Array
    scores_overflow: NDArray[np.bool_]
    backward_overflow: NDArray[np.bool_]


def _weight_errors(
    problem: Problem, inner: Intermediates, products: Array, merges: int, pipeline: Pipeline
) -> _WeightErrors:
    """Compute steps 1 to 4 of the derivation; `products` is sum_d |q_id| |k_jd|."""
    u = pipeline.unit
    p, attended, keys = inner.probabilities, inner.m > 0, inner.m.sum(axis=3, keepdims=True)
    some, scale = keys > 0, abs(problem.scale_value)
    magnitude = scale * products  # A_ij
    score = np.where(attended, np.abs(inner.scores), 0.0)
    delta = np.expm1(u * (problem.head_dim + SCORE_ROUNDINGS)) * magnitude + np.expm1(u * SCORE_ROUNDINGS) * score
    delta = np.where(attended, delta, 0.0)
    largest_delta = delta.max(axis=3, initial=0.0, keepdims=True)
    largest = score.max(axis=3, initial=0.0, keepdims=True) + largest_delta + np.log(np.maximum(keys, 1))  # L_i
    row = u * (EXP_ROUNDINGS + (merges + 1) * (MERGE_ROUNDINGS + 2 * largest) + keys)
    above = np.where(attended, inner.scores, 0.0) - np.where(some, inner.lse[..., None], 0.0)  # s_ij - lse_i
    kappa = delta + u * (np.abs(above) + 2 * largest_delta)
    eta = np.where(attended, kappa + row, 0.0)
    log_p = np.where(attended, above + np.log(np.maximum(inner.m, 1)), -np.inf)

    lower = (p * eta).sum(axis=3, keepdims=True)
    raised = log_p + eta
    top = np.where(some, raised.max(axis=3, initial=-np.inf, keepdims=True), 0.0)
    farther = top + np.log(np.where(some, np.exp(raised - top).sum(axis=3, keepdims=True), 1.0))
    # The same value, computed without cancellation where all errors are small.
    nearby = np.log1p((p * np.expm1(np.minimum(eta, 1.0))).sum(axis=3, keepdims=True))
    upper = np.where(eta.max(axis=3, initial=0.0, keepdims=True) < 1, nearby, farther)
    upper = np.maximum(upper, lower)  # which our own rounding could undo
    less = -p * np.expm1(-(eta + upper))
    log_whole = np.minimum(2 * row, np.log(merges + 1))

    def apart(log_most: Array) -> Array:
        """Largest distance of a weight from p, where no weight is above exp(`log_most`)."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class MergeAllowed:
    """The absolute error allowed in each element of a merge of partials; gradients are `None` where there are none.

    Shapes are those of `ringref.merge.Merged`. Where all partials are empty, out and lse have to be exact, and
    gradients, whose bound is inf there, finite.
    """

    out: Array
    lse: Array
    dout: Array | None
    dlse: Array | None


def merge_allowed(
    out: Array,
    lse: Array,
    exact: Merged,
    pipeline: Pipeline,
    *,
    natural: bool = True,
    cotangent: Array | None = None,
    lse_cotangent: Array | None = None,
) -> MergeAllowed:
    """Compute the bounds of this module's derivation for a merge.

    Args:
        out: outs of the partials `(P, B, S, H, D)`, float64 values of the numbers that the merge was given.
        lse: their log-sum-exps `(P, B, H, S)`, in base e.
        exact: the right answer on them.
        pipeline: the arithmetic that the merge declares.
        natural: whether its lse is in base e too, so that none is converted.
        cotangent: cotangent of the merged out, or `None` for no gradients.
        lse_cotangent: cotangent of the merged lse.
    """
    u, u_out, u_lse = pipeline.unit, UNIT_ROUNDOFF[pipeline.dtype], UNIT_ROUNDOFF[pipeline.lse_dtype]
    merges, full = max(1, len(lse) - 1), np.isfinite(lse)
    some = np.isfinite(exact.lse)
    size = np.where(full, np.abs(lse), 0.0).max(axis=0) + np.log(len(lse))  # L
    eta = merges * (u * (EXP_ROUNDINGS + MERGE_ROUNDINGS + (4 if natural else 8) * size) + u_lse * size)
    w = exact.weights
    off = w * np.expm1(np.minimum(eta, LARGEST_EXPONENT)) + UNDERFLOW[pipeline.sums] * full

    def by_query(of_rows: Array) -> Array:
        return of_rows.swapaxes(-1, -2)[..., None]

    combining = float(np.expm1(u * MERGE_ROUNDINGS * merges))
    sizes = np.where(by_query(full), np.abs(out), 0.0)
    error = (by_query(off) * sizes).sum(axis=0) + (combining + (merges - 1) * u_out) * sizes.max(axis=0)
    rounded = error + u_out * (np.abs(exact.out) + error) + UNDERFLOW[pipeline.dtype]
    out_allowed = np.where(by_query(some), rounded, 0.0)
    lse_allowed = np.where(some, eta, 0.0)
    if cotangent is None:
        return MergeAllowed(out_allowed, lse_allowed, None, None)
    dims = u * out.shape[-1]
    relative = by_query(off + 2 * u_out * w) + combining
    vanishing = UNDERFLOW[pipeline.dtype]
    dout_allowed = np.where(by_query(full), relative * np.abs(cotangent) + vanishing, 0.0)
    products = (sizes * np.abs(cotangent)).sum(axis=-1).swapaxes(-1, -2)  # G_i
    scale = products + products.max(axis=0) + (0.0 if lse_cotangent is None else np.abs(lse_cotangent))
    relative = off + w * np.expm1(dims) + float(np.expm1(u * MERGE_ROUNDINGS * merges + dims)) + 2 * u_out
    dlse_allowed = np.where(full, (relative + u_lse) * scale + vanishing, 0.0)
    dout_allowed, dlse_allowed = np.where(by_query(some), dout_allowed, np.inf), np.where(some, dlse_allowed, np.inf)
    return MergeAllowed(out_allowed, lse_allowed, dout_allowed, dlse_allowed)


def allowed_by_a_cause(allowed: Array, exact: Array, numbers: Array) -> Array:
    """Return the error allowed between results that come from a fault and the numbers that this fault gives.

    Rounding errors are in proportion to the numbers, and those of a fault may be larger than the right ones.
    """
    sizes = [float(np.abs(one[np.isfinite(one)]).max(initial=0.0)) for one in (numbers, exact)]
    grown: Array = allowed * max(1.0, sizes[0] / sizes[1] if sizes[1] else 1.0)
    return np.where(np.isfinite(exact), grown, float(allowed[np.isfinite(allowed)].max(initial=0.0)))


def rounding_of_wrong(error: Size, pipeline: Pipeline) -> Size:
    """Return how far a result that is wrong by `error` may round, besides what a right one may.

    No bound is known, for what was computed is not: a sum over keys that a mask should have excluded has terms of its
    own. Its rounding is in proportion to its size, and more than the share of it that shows for certain is no rounding.
    """
    return (visible_share(pipeline.sums) + 2 * UNIT_ROUNDOFF[pipeline.dtype]) * error


def witness_bound(dtype: DtypeName, terms: int) -> float:
    """Relative difference allowed between two computations of `terms` roundings each: 2 gamma_terms.

    Raises:
        ValueError: `terms` times u is 1 or more, so there is no bound.
    """
    nu = terms * UNIT_ROUNDOFF[dtype]
    if nu >= 1:
        raise ValueError(
            f"terms={terms} in {dtype}: terms * u is 1 or more, so no bound can be given; use fewer terms or a wider "
            "dtype"
        )
    return 2 * nu / (1 - nu)


def scaled_bound(error: float, measured: DtypeName, dtype: DtypeName) -> float:
    """Relative difference allowed between two runs of one program in `dtype`, given its error in the dtype `measured`.

    For programs too long to be bounded step by step, such as a training step. To first order their error is linear in u
    (this module's model). So the error in `dtype` is the error of a run in a coarser dtype, measured against a run in a
    far finer one, times the ratio of the unit roundoffs; two runs differ by the sum of their errors. Two runs that
    round differently are two draws of one random quantity, which FLUCTUATION allows for.

    Args:
        error: relative error of the run in the coarser dtype, a norm over many elements.
        measured: that coarser dtype.
        dtype: dtype of the two runs that are compared.
    """
    return 2 * FLUCTUATION * error * UNIT_ROUNDOFF[dtype] / UNIT_ROUNDOFF[measured]


def margins(actual: Array, expected: Array, allowed: Array, dtype: DtypeName) -> Array:
    """Error of each element divided by its allowed error; more than 1.0 is a violation.

    inf for an error where none is allowed, and for a NaN. Equal infinities agree. Where the exact result plus or minus
    the allowed error exceeds the largest number of `dtype`, the infinity of that sign is right too. Where the allowed
    error is infinite, the margin is 0 for any result, NaN included.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # infinities, and errors of what they stand for
        error = np.abs(actual - expected)
        plain: Array = error / allowed
        if np.isfinite(plain.max(initial=0.0)):  # no NaN, no infinite error, and none of 0 where 0 is allowed
            return plain
        margin = np.where(error == 0, 0.0, plain)
        overflow = np.isinf(actual) & (np.sign(actual) * expected + allowed > LARGEST[dtype])
    agree = (actual == expected) | overflow | np.isposinf(allowed)
    return np.where(agree, 0.0, np.where(np.isnan(margin), np.inf, margin))


def _returned(
    error: Array, exact: Array, reached: NDArray[Any], unsaid: NDArray[Any], dtype: DtypeName, group: int = 1
) -> Array:
    """Return `error` (B, H, N, D) as (B, N, H // group, D), plus the rounding to the dtype of the returned result.

    UNDERFLOW is added because a smaller result may become 0. Elements that are not `reached`, such as those of an empty
    row, have to be exact: their bound is 0. Where `unsaid` is true the bound is infinite.
    """
    whole = (np.broadcast_to(x, error.shape) for x in (error, reached, unsaid))
    error_BNHD, reached, unsaid = (per_key_head(x, group) for x in whole)
    rounded = error_BNHD + UNIT_ROUNDOFF[dtype] * (np.abs(exact) + error_BNHD) + UNDERFLOW[dtype]
    return np.where(unsaid > 0, np.inf, np.where(reached > 0, rounded, 0.0))


CANCELLED = 4.0
"""A row whose bound, relative to its answer, is more than this many times the median row's suffers from cancellation.
A single such row would dominate a mean of relative errors, and says more about the inputs than about the pipeline."""


def rms_error(actual: Array, exact: Array, dtype: DtypeName, allowed: Array | None = None) -> tuple[float, int]:
    """Return rho = sqrt(mean over rows of |e|^2 / |exact|^2) / u, and the number of rows averaged.

    A row is the last axis; rows whose exact value is 0 are left out. Rounding once to nearest gives about 0.4. Unlike a
    maximum, the mean is not dominated by the few large rows at the start of a causal sequence.

    Args:
        actual: what a pipeline returned.
        exact: the exact result.
        dtype: dtype whose u is the unit of rho.
        allowed: bounds on the error of each element; if given, rows that suffer from cancellation are left out
            (`CANCELLED`).
    """
    kept = rows_of_rms(exact, allowed)
    if not kept.any():
        return 0.0, 0
    relative = ((actual - exact) ** 2).sum(axis=-1)[kept] / (exact**2).sum(axis=-1)[kept]
    return float(np.sqrt(relative.mean()) / UNIT_ROUNDOFF[dtype]), int(kept.sum())


def rows_of_rms(exact: Array, allowed: Array | None = None) -> NDArray[np.bool_]:
    """Return a mask of the rows that `rms_error` averages, shaped like `exact` without its last axis."""
    size = (exact**2).sum(axis=-1)
    kept: NDArray[np.bool_] = size > 0
    if allowed is not None and kept.any():
        relative_bound = np.sqrt((allowed**2).sum(axis=-1) / np.where(kept, size, 1.0))
        kept &= relative_bound <= CANCELLED * np.median(relative_bound[kept])
    return kept


ROUNDING_VARIANCE = 1 / (8 * np.log(2))
"""Mean square, in units of u^2, of the relative error of rounding a number m 2^e to nearest: the error is uniform over
2 u 2^e, so that is u^2 / (3 m^2), and the mean of 1 / m^2 over m = 1 .. 2 is 3 / (8 log 2) where log m is uniform."""


def declared_rms(rounded_once: float, more: float) -> float:
    """Return rho of a declared pipeline from that of exact results, rounded once, and the mean of all other variances.

    Args:
        rounded_once: rho of the exact results, rounded to the dtype.
        more: mean over rows of `ringref.sampled_variance`, relative to the squares of the results.
    """
    return float(np.sqrt(rounded_once**2 + ROUNDING_VARIANCE * more))


FLUCTUATION = 6.0
"""Standard deviations by which a mean of squared rounding errors may deviate: rounding errors are spread over an
interval, so a square has a relative standard deviation of about 1, and a mean of n squares one of 1 / sqrt(n)."""


def precision_allowed(
    emulated: float, rows: int, probabilities: Literal["accumulates", "input"], cancelled: float = 0.0
) -> float:
    """Return the largest rho allowed to a pipeline whose emulation has rho `emulated`, averaged over `rows` rows.

    Two pipelines that round at the same places differ in the few elements that lie next to a tie. In one that rounds a
    result twice, the variance is twice as large: rho grows by a factor of sqrt(2). Rounding a running sum after each
    block adds less at first, since the first of two blocks holds half of the result's variance: rho grows by a factor
    of sqrt(1.5) with two blocks, and by more with each further one. Probabilities may be rounded before or after they
    are normalised, which are different roundings: the variance may be twice as large.
    Fused kernels that round them also return the partial result of a block in the input dtype. Merged by weights that
    add up to 1 (out), or added with signs that are practically random (gradients), these roundings have together at
    most the variance of one more rounding of the result: the variance of the emulated pipeline once more, so thrice in
    all. That is so unless values of one block differ from those of another by more than they differ among themselves:
    then parts cancel that are larger than the result, and their roundings are in proportion to their own squares.

    No sum over blocks is rounded on the way, which would not be in float32. torch's fused kernel does that on a CPU, in
    its backward in bfloat16: it adds to dk and dv in bfloat16 after each 256 queries of a call (after 64 in a call of
    less than 768, after 32 in one of less than 192), and to dq after each 512 keys. With k of these inner blocks such a
    sum has k/3 times the variance of one rounding if all parts have one sign, and k/2 times if signs are random. So
    what calls it with more than about eight is rounded more than is declared.

    Args:
        emulated: rho of the emulated pipeline.
        rows: how many were averaged.
        probabilities: as declared.
        cancelled: mean over rows of the sum of squares of what each block adds, relative to the square of the result,
            as far as it is more than 1.
    """
    places = 3.0 if probabilities == "input" else 1.0
    variance = places * emulated**2 + (ROUNDING_VARIANCE * cancelled if probabilities == "input" else 0.0)
    return float(np.sqrt(variance * (1 + FLUCTUATION / np.sqrt(max(rows, 1)))))


# -- at lengths whose scores nobody holds ------------------------------------------------------------------------------

LEAST_TILE = 1024
"""Keys of a partial result that is merged by its log-sum-exp, at the least, at lengths at which that is worth it."""
FALSE_ALARM = 1e-9
"""Probability that one correct run of a whole sequence exceeds a bound of `LongBounds`, in the model."""


def signed_sum_bound(squares: Array, sizes: Array) -> Array:
    """Return the error allowed in sums of numbers, each with a sign that was drawn at random.

    Errors of at most b_i, whatever they depend on but the signs, add up to at most lambda sqrt(sum b_i^2) but with
    probability 2 exp(-lambda^2 / 2) (Hoeffding's inequality); and never to more than sum b_i.

    Args:
        squares: sum b_i^2 of each sum.
        sizes: sum b_i of each sum.
    """
    bound: Array = np.minimum(sizes, np.sqrt(2 * np.log(2 * max(squares.size, 1) / FALSE_ALARM) * squares))
    return bound


FLOAT64_SHARE = 2 * UNIT_ROUNDOFF["float64"] / UNIT_ROUNDOFF["float32"]
"""How many times less is allowed in float64 than in float32 with sums in float32: a bound grows with u, or by more, and
the unit of a pipeline includes u of float64 once more for the oracle's own error."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LongBounds:
    """The errors allowed where a row has so many keys that a worst case of their number says nothing any more.

    The derivation is that of this module, row by row instead of pair by pair: weights of a row add up to 1, so a
    relative error of all weights is one of the row, and most sizes are replaced by their largest. n roundings cost
    lambda sqrt(n) u instead of n u: with probability 1 - 2 exp(-lambda^2 / 2) for roundings that are independent and of
    mean zero (Higham & Mary 2019, theorem 2.4). lambda is such that, over all elements and all their terms together,
    this fails with probability FALSE_ALARM.

    *Gradients.* An error of ds_ij is relative to p_ij times |h_ij|, W_ij or the sum of p_il G_il over l, by what it
    comes from. By the Cauchy-Schwarz inequality none of these exceeds H_ij = |dout_i| |v_j| + y_i of `ringref.classes`,
    with Euclidean norms. So the error of dq is in proportion to sum_j p_ij H_ij |k_jd|, and that of dk to
    sum_i p_ij H_ij |q_id|: the oracles sum both, and nothing is replaced by its largest. The last term of step 5 counts
    beside this: a partial result that is merged as o - w (o - b) may be larger than what it becomes part of.

    *Sums over all rows.* Rows come of different roundings. So a sum of rows whose errors are at most b_i is wrong by at
    most lambda sqrt(sum b_i^2) (Hoeffding's inequality, in the same model). What rows share is no draw: the constants
    in a score, and the functions exp and tanh, whose errors may have a sign. Their part counts for every row in full.

    *A learned sink* is one more key and one more partial result of each row. Its gradient is the sum over all rows of
    w_i t_i, with w_i = exp(sink - lse_i) and t_i = dlse_i - dout_i . out_i, whose size is at most y_i. The error of a
    term is that of ds_ij with v_j = 0, and, where 1 - w_i is computed, what merging costs in proportion to
    sum_d |dout_id| |out_id| + |dlse_i| (above). Rows' errors add up as in all sums over rows; the logarithm in lse_i
    may have a sign too. n additions and P + 1 roundings to float32 are relative to sum_i w_i y_i.

    Attributes:
        problem: what was computed.
        pipeline: the arithmetic that the implementation declares.
        magnitude: largest scale * sum_d |q_id| |k_jd|.
        score: largest size of a score, or of a finite sink.
        query_size: largest size of a query's number.
        key_size: likewise of a key's.
        value_size: likewise of a value's.
    """

    problem: Problem
    pipeline: Pipeline
    magnitude: float
    score: float
    query_size: float
    key_size: float
    value_size: float

    @property
    def _u_weight(self) -> float:
        return UNIT_ROUNDOFF[self.pipeline.dtype] if self.pipeline.probabilities == "input" else 0.0

    @functools.cached_property
    def _deviations(self) -> float:
        """lambda."""
        p = self.problem
        elements = p.batch * (p.nq + p.nk) * p.heads * 2 * max(p.head_dim, p.dv)
        return float(np.sqrt(2 * np.log(2 * elements * max(p.nq, p.nk, 1) / FALSE_ALARM)))

    def _grown(self, terms: Array) -> Array:
        """How many times one rounding's error so many of them have together."""
        grown: Array = np.minimum(terms, self._deviations * np.sqrt(terms))
        return grown

    def _merges(self, keys: Array) -> Array:
        p = self.problem
        branches = 1 if p.dilation is None else len(p.dilation.branches)
        return PARTIALS_PER_BLOCK * self.pipeline.blocks * branches + keys / LEAST_TILE + 1 + p.sinks

    def _weights(self, keys: Array) -> Array:
        """Bound the relative error of a row's exponentials, steps 1 and 2: that of its weights is twice as large."""
        u, p = self.pipeline.unit, self.problem
        keys = keys + p.sinks
        delta = np.expm1(u * (p.head_dim + SCORE_ROUNDINGS)) * self.magnitude + SCORE_ROUNDINGS * u * self.score
        largest = self.score + delta + np.log(np.maximum(keys, 1))
        kappa = delta + u * (self.score + largest + 2 * delta)
        row = u * (EXP_ROUNDINGS + self._grown(self._merges(keys)) * (MERGE_ROUNDINGS + 2 * largest))
        bound: Array = kappa + row + u * self._grown(keys)
        return bound

    def _combining(self, keys: Array) -> Array:
        """Bound the error of merged partial results relative to the largest of them, the last term of step 5."""
        bound: Array = np.expm1(self.pipeline.unit * MERGE_ROUNDINGS * self._grown(self._merges(keys)))
        return bound

    def _means(self, keys: Array) -> Array:
        """Bound the error of weighted means of a row, relative to the mean of sizes, step 5 without its last term."""
        summing = self.pipeline.unit * self._grown(keys + self.problem.sinks)
        summing = summing + self._combining(keys) + 3 * self._u_weight
        bound: Array = np.expm1(2 * self._weights(keys) + summing)
        return bound

    def _rows(self, keys: Array) -> Array:
        """Bound the error of out relative to the largest value, step 5."""
        bound: Array = self._means(keys) + self._combining(keys)
        return bound

    def _lost(self, terms: Array) -> Array:
        narrow = UNDERFLOW[self.pipeline.dtype] if self.pipeline.probabilities == "input" else 0.0
        return terms * (3 * UNDERFLOW[self.pipeline.sums] + narrow)

    def _ds(self, keys: Array, share: Array | float = 1.0) -> Array:
        """Bound the error of a row's gradients of scores, relative to p_ij H_ij, but for the last term of step 5.

        `share` is sum_d |dout_id| |out_id| / y_i, in proportion to which the rounding of the returned out counts.
        """
        u, u_out, p = self.pipeline.unit, UNIT_ROUNDOFF[self.pipeline.dtype], self.problem
        rounding = np.expm1(2 * u * p.dv + self._combining(keys) + 3 * self._u_weight)
        h = (1 + u_out) * self._means(keys) + u_out * share + rounding
        slope = 0.0
        if p.softcap is not None:
            slope = SCORE_ROUNDINGS * u + min(TANH_SLOPE_CHANGE * self._delta_by(p.softcap), 1.0)
        weights = np.expm1(2 * self._weights(keys))
        return weights + (1 + weights) * (h + slope * (1 + h)) + self._u_weight

    def _delta_by(self, softcap: float) -> float:
        u = self.pipeline.unit
        return float(np.expm1(u * (self.problem.head_dim + 2 * SCORE_ROUNDINGS)) * self.magnitude / softcap)

    def whole(self, dout: Array, dlse: Array) -> Array:
        """Return the most that W_ij of rows may be, from their cotangents `(n, E)` and `(n,)`."""
        found: Array = 2 * np.abs(dout).sum(axis=-1) * self.value_size + np.abs(dlse)
        return found

    def share(self, dout: Array, out: Array, of: Array) -> Array:
        """Return what part of sizes `of (n,)` products dout·out are, with what may become 0 in out."""
        size = np.abs(out) + UNDERFLOW[self.pipeline.dtype] / UNIT_ROUNDOFF[self.pipeline.dtype]
        found: Array = (np.abs(dout) * size).sum(axis=-1) / np.where(of == 0, 1.0, of)
        return found

    def lse(self, keys: Array, lse: Array) -> Array:
        """Return the error allowed in lse `(n,)` of rows with so many keys `(n,)`."""
        some = (keys > 0) | np.isfinite(lse)  # a row without keys has the lse of its sink
        size = np.where(some, np.abs(lse), 0.0)
        error = np.expm1(self._weights(keys)) + self._u_weight + 2 * self.pipeline.unit * (size + self.score)
        return np.where(some, error + UNIT_ROUNDOFF[self.pipeline.lse_dtype] * size, 0.0)

    def out(self, keys: Array, out: Array) -> Array:
        """Return the error allowed in out `(n, E)`."""
        error = (self._rows(keys) + self._lost(keys)) * self.value_size
        return self._rounded(error[:, None], out, keys)

    def dq(self, keys: Array, whole: Array, share: Array, size: Array, dq: Array) -> Array:
        """Return the error allowed in dq `(n, D)`.

        Args:
            keys: how many each row attends.
            whole: as this says, of each row.
            share: as this says, of y_i.
            size: sum_j p_ij H_ij |k_jd|, `(n, D)`.
            dq: the exact result.
        """
        error = (self._ds(keys, share) + self._columns(keys))[:, None] * size
        beside = 2 * self._combining(keys) * whole + self._lost(keys) * (1 + whole)
        error = error + self.key_size * beside[:, None]
        return self._rounded(abs(self.problem.scale_value) * error, dq, keys)

    def dk(self, keys: float, queries: Array, size: Array, reached: Array, dk: Array) -> Array:
        """Return the error allowed in dk `(n, D)`.

        Args:
            keys: most keys of a row.
            queries: how many queries attend each key.
            size: sum_i p_ij H_ij |q_id|, `(n, D)`.
            reached: sum_i p_ij |dout_i|, `(n, E)`.
            dk: the exact result.
        """
        most = np.asarray(keys, dtype=np.float64)
        error = (self._ds(most) + self._columns(queries))[:, None] * size
        beside = 2 * self._combining(most) * self.value_size * reached.sum(axis=-1)
        beside = beside + self._lost(queries) * (2 + self.whole(np.ones(self.problem.dv), np.ones(())))
        error = error + self.query_size * beside[:, None]
        scale = abs(self.problem.scale_value)
        return self._reduced(scale * error, scale * size, dk, queries)

    def dv(self, keys: float, queries: Array, reached: Array, dv: Array) -> Array:
        """Return the error allowed in dv `(n, E)`; arguments as for dk."""
        weights = np.expm1(2 * self._weights(np.asarray(keys, dtype=np.float64)))
        error = (weights + self._columns(queries) + 2 * self._u_weight)[:, None] * reached
        return self._reduced(error + self._lost(queries)[:, None], reached, dv, queries)

    def sink_terms(self, keys: Array, weights: Array, least: Array, dout: Array, out: Array, dlse: Array) -> Array:
        """Return the error allowed in what rows add to the gradient of their sink `(n,)`.

        Args:
            keys: how many each row attends.
            weights: `exp(sink - lse)` of each row.
            least: y_i of each row.
            dout: cotangents of out `(n, E)`.
            out: the exact result, `(n, E)`.
            dlse: cotangents of lse `(n,)`.
        """
        whole, spread = self.whole(dout, dlse), (np.abs(dout) * np.abs(out)).sum(axis=-1) + np.abs(dlse)
        error = self._ds(keys, self.share(dout, out, least)) * weights * least
        beside: Array = self._combining(keys) * (2 * weights * whole + spread) + self._lost(np.ones(())) * (1 + whole)
        return error + beside

    def sink_gradient(self, squares: Array, sizes: Array) -> Array:
        """Return the error allowed in gradients of sinks; given are sums over rows of squared errors and of w_i y_i."""
        u, p = self.pipeline.unit, self.problem
        rows = np.asarray(float(p.batch * p.nq))
        added = u * (self._grown(rows) + MERGE_ROUNDINGS * self._grown(self._merges(rows)))
        added = added + UNIT_ROUNDOFF["float32"] * (self.pipeline.blocks + 1)
        logarithm = 2 * u * (self.score + np.log(p.nk + 1))
        bound: Array = self.sums(squares, sizes) + np.expm1(added + logarithm) * sizes + UNDERFLOW["float32"]
        return bound

    def rows_in_sums(self, keys: Array, share: Array) -> tuple[Array, Array]:
        """Return errors of rows in sums over rows: of their weights and out, and of their ds relative to `whole`."""
        again = np.expm1(2 * self._weights(keys)) + 2 * self._u_weight
        return self._rows(keys) + again, self._ds(keys, share) + self._columns(keys) + 2 * self._combining(keys)

    def keys_in_sums(self, queries: Array) -> Array:
        """Return the error of keys in sums over keys, relative to the sizes of what each of them adds up."""
        blocks = self.pipeline.blocks + (self.problem.group_size > 1)
        added = UNIT_ROUNDOFF[self.pipeline.dtype] * blocks if self.pipeline.reduces == "input" else 0.0
        found: Array = self._columns(queries) + np.expm1(added)
        return found

    def returned(self, values: Array) -> Array:
        """Return the error of rounding values to the dtype in which they are returned."""
        dtype = self.pipeline.dtype
        rounded: Array = UNIT_ROUNDOFF[dtype] * np.abs(values) + UNDERFLOW[dtype]
        return rounded

    def sums(self, squares: Array, sizes: Array) -> Array:
        """Return the error allowed in sums of rows, given the sums of their errors' squares and of their sizes."""
        u, most = self.pipeline.unit, np.asarray(float(max(self.problem.nq, self.problem.nk)))
        shared = np.expm1(2 * u * (SCORE_ROUNDINGS * (self.score + 1) + EXP_ROUNDINGS)) + self._lost(most)
        bound: Array = self._deviations * np.sqrt(squares) + shared * sizes
        return bound

    def _columns(self, queries: Array) -> Array:
        u = self.pipeline.unit
        bound: Array = np.expm1(
            u * (self._grown(queries) + MERGE_ROUNDINGS * self._grown(self._merges(queries))) + self._u_weight
        )
        return bound

    def _reduced(self, error: Array, size: Array, exact: Array, queries: Array) -> Array:
        """Return the error `(n, F)`, plus that of sums over ranks in the input dtype of terms of this size `(n, F)`."""
        if self.pipeline.reduces == "input":
            u_out, blocks = UNIT_ROUNDOFF[self.pipeline.dtype], self.pipeline.blocks
            added = float(np.expm1(u_out * (blocks + (self.problem.group_size > 1))))
            error = (1 + added) * error + added * size + UNDERFLOW[self.pipeline.dtype] * blocks
        return self._rounded(error, exact, queries)

    def _rounded(self, error: Array, exact: Array, reached: Array) -> Array:
        """Return the error `(n, F)`, plus the rounding to the dtype of the returned result; 0 where none is reached."""
        dtype = self.pipeline.dtype
        rounded = error + UNIT_ROUNDOFF[dtype] * (np.abs(exact) + error) + UNDERFLOW[dtype]
        return np.where(reached[:, None] > 0, rounded, 0.0)


VISIBLE = 1024
"""How many units of roundoff the share of an input in a result has to be, for a change of it to show for certain."""


def visible_share(dtype: DtypeName) -> float:
    """Share of an input in a result above which a change of the input does not drown in the rounding of the rest."""
    return VISIBLE * UNIT_ROUNDOFF[dtype]
