"""Sampled rows, and the gradients of all keys that come of them, agree with the dense oracle, whatever the pieces."""

from __future__ import annotations

import dataclasses

import numpy as np
from comparing import assert_agree, oracle, results
from drawing import Inputs, normal_inputs, problems, seeds, sizes
from hypothesis import given
from hypothesis import strategies as st

from ringref.problem import Problem
from ringref.rounding import witness_bound
from ringref.sampled import SampledRows


def sampled(problem: Problem, inputs: Inputs, rows: np.ndarray, pieces: list[np.ndarray]) -> dict[str, np.ndarray]:
    """out, lse and dq of some rows, and dk and dv of all keys, by pieces of the keys."""
    found = SampledRows(problem, rows, inputs.q[:, rows], inputs.dout[:, rows], inputs.dlse[:, :, rows])
    for piece in pieces:
        found.see(piece, inputs.k[:, piece], inputs.v[:, piece])
    dk, dv = np.zeros_like(inputs.k), np.zeros_like(inputs.v)
    for piece in reversed(pieces):
        dk[:, piece], dv[:, piece], _ = found.differentiate(piece, inputs.k[:, piece], inputs.v[:, piece])
    return results(found.out, found.lse, found.dq, dk, dv)


@given(problem=problems(max_length=9), seed=seeds, size=sizes, cuts=st.integers(1, 4))
def test_agrees_with_the_dense_oracle(problem: Problem, seed: int, size: float, cuts: int) -> None:
    """Over every constraint, with keys dealt to pieces at random; other rows have cotangents of zero."""
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(problem.nq) < 0.5)
    inputs = normal_inputs(problem, seed=seed, size=size)
    others = np.setdiff1d(np.arange(problem.nq), rows)
    inputs.dout[:, others], inputs.dlse[:, :, others] = 0.0, 0.0
    found = sampled(problem, inputs, rows, np.array_split(rng.permutation(problem.nk), cuts))
    expected = oracle(problem, inputs)
    whole = {name: expected[name].copy() for name in expected}
    whole["out"][:, rows], whole["lse"][:, :, rows], whole["dq"][:, rows] = found["out"], found["lse"], found["dq"]
    assert_agree(problem, inputs, whole | {"dk": found["dk"], "dv": found["dv"]}, expected)


def test_what_no_sampled_row_attends_may_hold_anything() -> None:
    """NaN in padding reaches no result."""
    problem = Problem(query_length=6, head_dim=2, causal=True, key_lengths=(4,))
    inputs = normal_inputs(problem)
    rows, pieces = np.array([1, 5]), [np.array([5, 0, 3]), np.array([1, 2, 4])]
    expected = sampled(problem, inputs, rows, pieces)
    poisoned = dataclasses.replace(inputs, k=inputs.k.copy(), v=inputs.v.copy())
    poisoned.k[:, 4:], poisoned.v[:, 4:] = np.nan, np.inf
    for name, seen in sampled(problem, poisoned, rows, pieces).items():
        assert np.isfinite(seen).all(), name
        bound = witness_bound("float64", 64) * np.abs(expected[name]).max()
        assert (np.abs(seen - expected[name]) <= bound).all(), name


def test_a_key_that_is_nan_is_seen() -> None:
    """An attended NaN makes its rows NaN, as in the oracle; rows that do not attend it stay as they were."""
    problem = Problem(query_length=4, head_dim=2, causal=True)
    inputs = normal_inputs(problem)
    inputs.v[:, 2] = np.nan
    found = sampled(problem, inputs, np.array([1, 3]), [np.array([2]), np.array([0, 1, 3])])
    assert np.isfinite(found["out"][:, 0]).all()
    assert np.isnan(found["out"][:, 1]).all()
