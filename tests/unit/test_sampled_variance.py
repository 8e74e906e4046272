"""The mean error of a declared pipeline by its variances is that of its emulation, which rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawing import normal_inputs

from ringref.attention import attention, per_query_head
from ringref.emulation import emulate
from ringref.problem import DtypeName, Problem
from ringref.rounding import (
    ROUNDING_VARIANCE,
    Pipeline,
    allowed_error,
    declared_rms,
    rms_error,
    rows_of_rms,
    witness_bound,
)
from ringref.sampled import SampledRows
from ringref.sampled_variance import SampledVariance

N = 96
PROBLEMS = {
    "causal": Problem(query_length=N, heads=4, head_dim=16, causal=True),
    "gqa": Problem(query_length=N, heads=4, key_heads=2, head_dim=16, value_dim=8),
    "softcap": Problem(query_length=N, heads=4, head_dim=16, softcap=3.0, window=(30, 5)),
}
CLOSE = (0.85, 1.15)
"""Squares of rounding errors vary from row to row, and the emulation is one draw of some thousand."""


@pytest.mark.parametrize("probabilities", ["accumulates", "input"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_it_is_that_of_the_emulation(name: str, dtype: DtypeName, probabilities: str) -> None:
    """Of every result, whichever pieces the keys come in."""
    problem, rng = PROBLEMS[name], np.random.default_rng(3)
    drawn = normal_inputs(problem, seed=5)
    q, k, v, dout = (torch.from_numpy(x).to(getattr(torch, dtype)).double().numpy() for x in drawn.arrays()[:4])
    pipeline = Pipeline(dtype, probabilities=probabilities)
    exact = attention(problem, q, k, v, dout)
    bounds = allowed_error(problem, exact, q, k, v, dout, None, pipeline)
    emulated = emulate(problem, q, k, v, dout, pipeline)
    rows = SampledRows(problem, np.arange(N), q, dout, np.zeros_like(drawn.dlse))
    pieces = np.array_split(rng.permutation(N), 3)
    for piece in pieces:
        rows.see(piece, k[:, piece], v[:, piece])
    variance = SampledVariance(rows, pipeline)
    for piece in pieces:
        variance.see(piece, k[:, piece], v[:, piece])
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for piece in pieces:
        dk[:, piece], dv[:, piece] = variance.differentiate(piece, k[:, piece], v[:, piece])
    for result, more in (("out", variance.out.swapaxes(1, 2)), ("dq", variance.dq()), ("dk", dk), ("dv", dv)):
        right, limit = getattr(exact, result), getattr(bounds, result)
        kept = rows_of_rms(right, limit)
        mean = float((more[kept].sum(axis=-1) / (right[kept] ** 2).sum(axis=-1)).mean())
        once = torch.from_numpy(right).to(getattr(torch, dtype)).double().numpy()
        expected = declared_rms(rms_error(once, right, dtype, limit)[0], mean)
        found, _ = rms_error(getattr(emulated, result), right, dtype, limit)
        assert CLOSE[0] < found / expected < CLOSE[1], (result, found, expected)


def test_parts_of_blocks_are_squared_one_by_one() -> None:
    """What each block of keys adds to out and dq, however many pieces it comes in; nothing where weights are wide."""
    problem = PROBLEMS["gqa"]
    x = normal_inputs(problem, seed=5)
    rows = SampledRows(problem, np.arange(N), x.q, x.dout, np.zeros_like(x.dlse))
    blocks = [np.array_split(np.arange(*ends), 2) for ends in ((0, 30), (30, N))]
    for piece in (piece for block in blocks for piece in block):
        rows.see(piece, x.k[:, piece], x.v[:, piece])
    found = {kind: SampledVariance(rows, Pipeline("bfloat16", probabilities=kind)) for kind in ("input", "accumulates")}
    parts = []
    for block in blocks:
        of_dq = rows.dq.copy()
        for variance in found.values():
            for piece in block:
                variance.see(piece, x.k[:, piece], x.v[:, piece])
                variance.differentiate(piece, x.k[:, piece], x.v[:, piece])
            variance.end_block()
        for piece in block:
            rows.differentiate(piece, x.k[:, piece], x.v[:, piece])
        weights, _ = rows.weights(whole := np.concatenate(block), x.k[:, whole])
        parts.append((weights @ per_query_head(x.v[:, whole], problem.group_size), (rows.dq - of_dq).swapaxes(1, 2)))
    out, dq = (sum(part[which] ** 2 for part in parts) for which in (0, 1))
    close = witness_bound("float64", 2 * N * N)
    np.testing.assert_allclose(found["input"].out_of_blocks, out, rtol=close)
    np.testing.assert_allclose(found["input"].dq_of_blocks * problem.scale_value**2, dq, rtol=close)
    assert not found["accumulates"].out_of_blocks.any()
    assert not found["accumulates"].dq_of_blocks.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_number_is_rounded_by_as_much_in_the_mean(dtype: str) -> None:
    """Numbers whose logarithms are uniform; a number of float32 has no errors of its own beside it."""
    x = torch.from_numpy(2.0 ** np.random.default_rng(1).uniform(-8, 8, 100_000))
    relative = (x.to(getattr(torch, dtype)).double() - x) / x
    u = torch.finfo(getattr(torch, dtype)).eps / 2
    assert 0.99 < float((relative**2).mean()) / u**2 / ROUNDING_VARIANCE < 1.01
