"""The oracle of a few rows over any number of keys, which come piece by piece: what a sample of queries gets and gives.

Out, lse and dq of a query depend on that query and all keys. So s queries are answered in O(s M D) with nothing of a
size between queries and keys but s times a piece. If the cotangents of all other queries are zero, dk and dv are sums
over these s queries too: every element of them is exact. Two passes over the keys, in any order and any pieces:

    see each piece:           lse, out        merged as blocks of keys are, by their log-sum-exps
    differentiate each piece: dk, dv of it    and its part of dq

A learned sink joins once, before or after any of the keys were seen, and before differentiating.

With both come the sums of sizes that `ringref.classes` has, for `ringref.rounding.LongBounds`.

Formulas and what happens to NaN are those of `ringref.attention`, on pieces.

Shape letters: B batch, S sampled queries, T keys of a piece, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import NDArray

from ringref.attention import per_key_head, per_query_head, sum_attended
from ringref.pattern import multiplicity
from ringref.problem import Problem

Float = NDArray[np.float64]


@dataclasses.dataclass(eq=False)
class SampledRows:
    """The answer for some queries of a problem, complete once every key was seen, and dq once all were differentiated.

    Attributes:
        problem: what to compute; its dtype is ignored.
        positions: which queries these are.
        q: the queries.
        dout: cotangent of out; those of all other queries are zero.
        dlse: cotangent of lse, likewise.
        out: of what was seen so far; 0 where nothing is attended.
        lse: natural logarithm, likewise; −inf there.
        dq: of what was differentiated so far.
        values: mean size of the values seen so far, `Σ_j p_ij |v_j|`.
        dq_size: `Σ_j p_ij H_ij |k_j|` of what was differentiated so far, H_ij as in `ringref.classes`.
    """

    problem: Problem
    positions: Int64[np.ndarray, " S"]
    q: Float64[np.ndarray, "B S H D"]
    dout: Float64[np.ndarray, "B S H E"]
    dlse: Float64[np.ndarray, "B H S"]
    out: Float64[np.ndarray, "B S H E"] = dataclasses.field(init=False)
    lse: Float64[np.ndarray, "B H S"] = dataclasses.field(init=False)
    dq: Float64[np.ndarray, "B S H D"] = dataclasses.field(init=False)
    values: Float64[np.ndarray, "B H S"] = dataclasses.field(init=False)
    dq_size: Float64[np.ndarray, "B S H D"] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.out = np.zeros_like(self.dout)
        self.lse = np.full_like(self.dlse, -np.inf)
        self.values = np.zeros_like(self.dlse)
        self.dq, self.dq_size = np.zeros_like(self.q), np.zeros_like(self.q)

    @property
    def sizes(self) -> Float64[np.ndarray, "B H S"]:
        """y_i of `ringref.classes`, of what was seen so far."""
        found: Float = np.linalg.norm(self.dout, axis=-1).swapaxes(1, 2) * self.values + np.abs(self.dlse)
        return found

    def see(
        self, positions: Int64[np.ndarray, " T"], k: Float64[np.ndarray, "B T K D"], v: Float64[np.ndarray, "B T K E"]
    ) -> None:
        """Take keys and values at some positions into out and lse; each position once."""
        m, _, scores = self._scores(positions, k)
        with np.errstate(all="ignore"):
            top = np.maximum(self.lse, np.max(scores, axis=-1, where=m > 0, initial=-np.inf))
            shift = np.where(top == -np.inf, 0.0, top)
            weights = np.where(m > 0, m * np.exp(scores - shift[..., None]), 0.0)
            so_far = np.exp(self.lse - shift)
            total = so_far + weights.sum(axis=-1)
            share = np.where(total == 0.0, 1.0, total)[..., None]
            sized = np.concatenate([v, np.linalg.norm(v, axis=-1, keepdims=True)], axis=-1)
            here = sum_attended(weights / share, per_query_head(sized, self.problem.group_size), m)
            kept = (
                so_far[..., None] / share * np.concatenate([self.out.swapaxes(1, 2), self.values[..., None]], axis=-1)
            )
            both = np.where(so_far[..., None] == 0.0, here, kept + here)
            self.out, self.values = both[..., :-1].swapaxes(1, 2), both[..., -1]
            self.lse = np.where(total == 0.0, -np.inf, shift + np.log(total))

    def join(self, sinks: Float64[np.ndarray, " H"]) -> None:
        """Let learned sinks into the denominators, once; −inf is that of a head without one."""
        lse = np.logaddexp(self.lse, sinks[:, None])
        with np.errstate(invalid="ignore"):
            kept = np.where(self.lse == -np.inf, 0.0, np.exp(self.lse - lse))
        self.out *= kept.swapaxes(1, 2)[..., None]
        self.values *= kept
        self.lse = lse

    def gradient_of_sinks(self, sinks: Float64[np.ndarray, " H"]) -> Float64[np.ndarray, "B H S"]:
        """Return what each row adds to the gradient of sinks that have joined, once every key was seen."""
        with np.errstate(all="ignore"):
            weights = np.where(sinks[:, None] == -np.inf, 0.0, np.exp(sinks[:, None] - self.lse))
            return np.where(weights == 0, 0.0, weights * self.towards)

    @property
    def towards(self) -> Float64[np.ndarray, "B H S"]:
        """`dlse − dout·out` of the rows, of what was seen so far."""
        found: Float = self.dlse - (self.dout * self.out).sum(axis=-1).swapaxes(1, 2)
        return found

    def differentiate(
        self, positions: Int64[np.ndarray, " T"], k: Float64[np.ndarray, "B T K D"], v: Float64[np.ndarray, "B T K E"]
    ) -> tuple[Float64[np.ndarray, "B T K D"], Float64[np.ndarray, "B T K E"], Float64[np.ndarray, "B T K D"]]:
        """Return dk and dv of keys that were seen, and `Σ_i p_ij H_ij |q_i|`; add their part to dq and its size.

        After all keys were seen.
        """
        m, raw_scores, scores = self._scores(positions, k)
        group = self.problem.group_size
        with np.errstate(all="ignore"):
            p = np.where(m > 0, m * np.exp(scores - self.lse[..., None]), 0.0)
            dout, transposed = self.dout.swapaxes(1, 2), m.swapaxes(2, 3)
            dv = sum_attended(p.swapaxes(2, 3), dout, transposed)
            dp = np.where(m > 0, dout @ per_query_head(v, group).swapaxes(2, 3), 0.0)
            ds = np.where(m > 0, p * (dp + self.towards[..., None]), 0.0) * self.problem.scale_value
            if self.problem.softcap is not None:
                ds /= np.cosh(raw_scores / self.problem.softcap) ** 2
            self.dq += sum_attended(ds, per_query_head(k, group), m).swapaxes(1, 2)
            dk = sum_attended(ds.swapaxes(2, 3), self.q.swapaxes(1, 2), transposed)
            norms = np.linalg.norm(dout, axis=-1)[..., None], np.linalg.norm(per_query_head(v, group), axis=-1)
            sizes = np.where(m > 0, p * (norms[0] * norms[1][:, :, None] + self.sizes[..., None]), 0.0)
            self.dq_size += sum_attended(sizes, np.abs(per_query_head(k, group)), m).swapaxes(1, 2)
            dk_size = sum_attended(sizes.swapaxes(2, 3), np.abs(self.q.swapaxes(1, 2)), transposed)
        return per_key_head(dk, group), per_key_head(dv, group), per_key_head(dk_size, group)

    def weights(
        self, positions: Int64[np.ndarray, " T"], k: Float64[np.ndarray, "B T K D"]
    ) -> tuple[Float64[np.ndarray, "B H S T"], Float64[np.ndarray, "B H S T"]]:
        """Return the weights of keys in the rows, once every key was seen, and the slopes of the softcap, 1 without."""
        m, raw_scores, scores = self._scores(positions, k)
        with np.errstate(all="ignore"):
            weights = np.where(m > 0, m * np.exp(scores - self.lse[..., None]), 0.0)
        cap = self.problem.softcap
        return weights, np.ones_like(weights) if cap is None else 1 / np.cosh(raw_scores / cap) ** 2

    def _scores(self, positions: NDArray[np.int64], k: Float) -> tuple[NDArray[np.int64], Float, Float]:
        """Return multiplicities and scores before and after softcap, `(B, H, S, T)`; 0 where nothing is attended."""
        m = multiplicity(self.problem, self.positions, positions)
        with np.errstate(all="ignore"):
            products = self.q.swapaxes(1, 2) @ per_query_head(k, self.problem.group_size).swapaxes(2, 3)
            raw_scores: Float = np.where(m > 0, products * self.problem.scale_value, 0.0)
        cap = self.problem.softcap
        return m, raw_scores, raw_scores if cap is None else cap * np.tanh(raw_scores / cap)


def merged(out: Float, lse: Float, counted: Float) -> tuple[Float, Float]:
    """Merge partial results `(P, …, H, E)` and `(P, …)` by their log-sum-exps, each as often as `counted` `(P,)`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = lse + np.log(counted).reshape(-1, *[1] * (lse.ndim - 1))
        top = logs.max(axis=0)
        weights = np.exp(logs - np.where(top == -np.inf, 0.0, top))
        total = weights.sum(axis=0)
        weights = weights / np.where(total == 0, 1.0, total)
        shaped = weights.swapaxes(-1, -2)[..., None] if lse.ndim == 4 else weights[..., None]
        return (shaped * out).sum(axis=0), np.where(total == 0, -np.inf, top + np.log(total))
