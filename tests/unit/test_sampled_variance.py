"""The mean error of a declared pipeline by its variances is that of its emulation, which rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawing import normal_inputs

from ringref.attention import attention
from ringref.emulation import emulate
from ringref.problem import DtypeName, Problem
from ringref.rounding import ROUNDING_VARIANCE, Pipeline, allowed_error, declared_rms, rms_error, rows_of_rms
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_number_is_rounded_by_as_much_in_the_mean(dtype: str) -> None:
    """Numbers whose logarithms are uniform; a number of float32 has no errors of its own beside it."""
    x = torch.from_numpy(2.0 ** np.random.default_rng(1).uniform(-8, 8, 100_000))
    relative = (x.to(getattr(torch, dtype)).double() - x) / x
    u = torch.finfo(getattr(torch, dtype)).eps / 2
    assert 0.99 < float((relative**2).mean()) / u**2 / ROUNDING_VARIANCE < 1.01
