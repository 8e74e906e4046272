"""How much a declared pipeline errs in the mean, to first order, on sampled rows over any number of keys.

`ringref.emulation` runs the pipeline and so holds all scores. Here each rounding that is declared is one of a number on
its own, of mean zero and of a relative variance r²; p_ij and ds_ij are those of `ringref.attention`, without the scale:

    of out      r² (out² + Σ_j p_ij² v_j²)
    of D_i      r² Σ_d dout_id² (out_id² + Σ_j p_ij² v_jd²)                 D_i = dout_i · out_i, of the returned out
    of dq       r² dq² + scale² (r² Σ_j ds_ij² k_j² + var D_i (Σ_j p_ij k_j)²)
    of dk       r² dk² + scale² Σ_i (r² ds_ij² q_i² + var D_i p_ij² q_i²)
    of dv       r² (dv² + Σ_i p_ij² dout_i²)

The first term of each is the rounding of the result itself; sums with p_ij² alone, or ds_ij², count where the pipeline
rounds weights to the input dtype. Keys have weights of their own, so these become less the longer a row is.

Such a pipeline may also return in the input dtype what each KV block adds to out and dq. Mostly that is one more
rounding, as `ringref.rounding.precision_allowed` says; but where these parts cancel, as where values follow the place
in the sequence and all keys are attended, it is a rounding of what is larger than the result, of variance
r² Σ_b (Σ_{j in b} p_ij v_j)², and likewise for dq. Of dk and dv parts come of queries, which follow no place.

Shape letters: B batch, S sampled queries, T keys of a piece, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import NDArray

from ringref.attention import per_key_head, per_query_head
from ringref.rounding import ROUNDING_VARIANCE, UNDERFLOW, UNIT_ROUNDOFF, Pipeline
from ringref.sampled import SampledRows

Float = NDArray[np.float64]


class SampledVariance:
    """Variances beside that of rounding each result once, in units of `(r · result)²`, r² = ROUNDING_VARIANCE u².

    Two passes over the keys: `see` each piece, then `differentiate` each, with `end_block` after the last piece of each
    KV block. In between `out` and `out_of_blocks` may be summed over processes that saw other blocks, and afterwards
    `dq_of_keys`, `pulled` and `dq_of_blocks`.

    Args:
        rows: the sampled rows, of which every key was seen.
        pipeline: what is declared; its sums are wider than its dtype.

    Attributes:
        out: of out, `(B, H, S, E)`.
        dq_of_keys: `Σ_j ds_ij² k_j²`, `(B, H, S, D)`.
        pulled: `Σ_j p_ij k_j`, likewise.
        out_of_blocks: squares of what blocks add to out, shaped like `out`; 0 where weights are not rounded.
        dq_of_blocks: likewise, to dq, without the scale.
    """

    def __init__(self, rows: SampledRows, pipeline: Pipeline) -> None:
        p, dtype = rows.problem, pipeline.dtype
        self._rows, self._narrow = rows, pipeline.probabilities == "input"
        # Below the smallest normal number an error is uniform between the subnormals of float16, where they are kept.
        self._lost = UNDERFLOW[dtype] ** 2 / 12 / (UNIT_ROUNDOFF[dtype] ** 2 * ROUNDING_VARIANCE)
        shape = (p.batch, p.heads, len(rows.positions))
        self.out = np.zeros((*shape, p.dv))
        self.dq_of_keys, self.pulled = np.zeros((*shape, p.head_dim)), np.zeros((*shape, p.head_dim))
        self.out_of_blocks, self.dq_of_blocks = np.zeros_like(self.out), np.zeros_like(self.pulled)
        self._of_block = np.zeros_like(self.out), np.zeros_like(self.pulled)

    def see(
        self, positions: Int64[np.ndarray, " T"], k: Float64[np.ndarray, "B T K D"], v: Float64[np.ndarray, "B T K E"]
    ) -> None:
        """Take keys and values at some positions into `out`; each position once."""
        if self._narrow:
            weights, _ = self._rows.weights(positions, k)
            v_BHTE = per_query_head(v, self._rows.problem.group_size)
            self.out += self._squared(weights) @ v_BHTE**2
            self._of_block[0][...] += weights @ v_BHTE

    def differentiate(
        self, positions: Int64[np.ndarray, " T"], k: Float64[np.ndarray, "B T K D"], v: Float64[np.ndarray, "B T K E"]
    ) -> tuple[Float64[np.ndarray, "B T K D"], Float64[np.ndarray, "B T K E"]]:
        """Return those of dk and dv of some keys; take them into `dq_of_keys` and `pulled`."""
        rows, group = self._rows, self._rows.problem.group_size
        weights, slopes = rows.weights(positions, k)
        k_BHTD, v_BHTE = per_query_head(k, group), per_query_head(v, group)
        dout_BHSE, q_BHSD = rows.dout.swapaxes(1, 2), rows.q.swapaxes(1, 2)
        bent = weights * slopes
        ds = bent * (dout_BHSE @ v_BHTE.swapaxes(2, 3) + rows.towards[..., None])
        self.pulled += bent @ k_BHTD
        dk, dv = self._of_means()[..., None] * bent**2, np.zeros(weights.shape)
        if self._narrow:
            of_ds = self._squared(ds, weights)
            self.dq_of_keys += of_ds @ k_BHTD**2
            self._of_block[1][...] += ds @ k_BHTD
            dk, dv = dk + of_ds, self._squared(weights)
        found = dk.swapaxes(2, 3) @ q_BHSD**2, dv.swapaxes(2, 3) @ dout_BHSE**2
        return rows.problem.scale_value**2 * per_key_head(found[0], group), per_key_head(found[1], group)

    def end_block(self) -> None:
        """Take what the pieces since the last end add to out and dq as one part of each."""
        for parts, part in zip((self.out_of_blocks, self.dq_of_blocks), self._of_block, strict=True):
            parts += part**2
            part[...] = 0.0

    def dq(self) -> Float64[np.ndarray, "B S H D"]:
        """Return those of dq, once all keys were differentiated."""
        found: Float = self.dq_of_keys + self._of_means()[..., None] * self.pulled**2
        return (self._rows.problem.scale_value**2 * found).swapaxes(1, 2)

    def _of_means(self) -> Float64[np.ndarray, "B H S"]:
        """Return those of D_i."""
        rows = self._rows
        found: Float = (rows.dout.swapaxes(1, 2) ** 2 * (rows.out.swapaxes(1, 2) ** 2 + self.out)).sum(axis=-1)
        return found

    def _squared(self, x: Float, weights: Float | None = None) -> Float:
        """Return squares of what is rounded, and more where it may vanish; 0 where nothing is attended."""
        found: Float = np.where((x if weights is None else weights) > 0, x**2 + self._lost, 0.0)
        return found
