"""The oracle in linear time agrees with rows that are computed one by one, at lengths that the dense one cannot do."""

from __future__ import annotations

import numpy as np
import pytest

from ringref.classes import Coded, class_attention
from ringref.problem import Dilation, Problem
from ringref.rounding import witness_bound
from ringref.sampled import SampledRows

N = 65_536
BRANCHES = ((4096, 1), (16_384, 8), (65_536, 32))
PROBLEMS = {
    "causal": Problem(query_length=N, head_dim=4, causal=True),
    "window": Problem(query_length=N, head_dim=4, causal=True, window=(4095, 0), softcap=3.0),
    "documents": Problem(query_length=N, head_dim=4, causal=True, documents=(5, 5, 40_000, 40_001, N - 3)),
    "lengths": Problem(query_length=N, head_dim=4, batch=2, key_lengths=(0, 50_000)),
    "gqa": Problem(query_length=N, heads=2, key_heads=1, head_dim=4, value_dim=3, causal=True),
    "cross": Problem(query_length=20_000, key_length=N, head_dim=4, causal=True, scale=-0.7),
    "shared": Problem(query_length=N, head_dim=4, causal=True, dilation=Dilation(BRANCHES, "shared")),
    "split": Problem(query_length=N, heads=3, head_dim=4, dilation=Dilation(BRANCHES, "split")),
}
QUICK = ("causal", "window", "shared")


@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.nightly) for one in PROBLEMS]
)
def test_agrees_with_rows_one_by_one(name: str) -> None:
    """Out, lse and dq of some rows, and dk and dv of all keys, which these rows alone give any."""
    p, rng = PROBLEMS[name], np.random.default_rng(3)
    rows = np.unique([0, 1, p.nq - 1, 4095, 4096, *rng.integers(0, p.nq, 11)])
    books = rng.standard_normal((p.heads, 8, p.head_dim)), rng.standard_normal((p.hk, 16, p.head_dim))
    # Classes fall in frequency: the rarest has a few keys of the whole length.
    shares = np.geomspace(1.0, 1e-4, 16)
    queries = Coded(books[0], rng.integers(0, 8, (p.batch, p.nq, p.heads)))
    keys = Coded(books[1], rng.choice(16, (p.batch, p.nk, p.hk), p=shares / shares.sum()))
    v = rng.standard_normal((p.batch, p.nk, p.hk, p.dv))
    dout, dlse = np.zeros((p.batch, p.nq, p.heads, p.dv)), np.zeros((p.batch, p.heads, p.nq))
    dout[:, rows] = rng.standard_normal((p.batch, len(rows), p.heads, p.dv))
    dlse[:, :, rows] = rng.standard_normal((p.batch, p.heads, len(rows)))
    found = class_attention(p, queries, keys, v, dout, dlse)

    k = keys.vectors()
    right = SampledRows(p, rows, queries.vectors()[:, rows], dout[:, rows], dlse[:, :, rows])
    pieces = np.array_split(np.arange(p.nk), 32)
    for piece in pieces:
        right.see(piece, k[:, piece], v[:, piece])
    dk, dv, _ = zip(*(right.differentiate(piece, k[:, piece], v[:, piece]) for piece in pieces), strict=True)
    bound = witness_bound("float64", p.nk) * 100
    for result, seen, expected in (
        ("out", found.out[:, rows], right.out),
        ("lse", found.lse[:, :, rows], right.lse),
        ("dq", found.dq[:, rows], right.dq),
        ("dk", found.dk, np.concatenate(dk, axis=1)),
        ("dv", found.dv, np.concatenate(dv, axis=1)),
    ):
        finite = np.isfinite(expected)
        assert (finite == np.isfinite(seen)).all()
        largest = np.abs(expected[finite]).max(initial=1.0)
        assert np.abs(seen[finite] - expected[finite]).max(initial=0.0) <= bound * largest, result
