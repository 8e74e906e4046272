"""When two answers to one problem agree: each element within what the roundings of the two computations explain.

The magnitudes that a rounding is relative to come from the dense formula, not from the oracle, so that a wrong oracle
cannot excuse itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import dense_formula
import numpy as np
import torch
from drawing import Inputs

from ringref import attention_loops
from ringref.attention import attention
from ringref.problem import DtypeName, Problem
from ringref.rounding import UNDERFLOW, witness_bound

Results = Mapping[str, np.ndarray]

ELEMENTARY_ROUNDINGS = 32
"""exp, log, tanh and sech within 2 ulp each; scale, shift, quotient and the factors of a gradient, once each."""


def oracle(problem: Problem, inputs: Inputs) -> dict[str, np.ndarray]:
    """The answer under test, by name."""
    answer = attention(problem, *inputs.arrays())
    return results(answer.out, answer.lse, answer.dq, answer.dk, answer.dv)


def loops(problem: Problem, inputs: Inputs) -> dict[str, np.ndarray]:
    """The scalar oracle's answer."""
    out, lse = attention_loops.forward(problem, inputs.q, inputs.k, inputs.v)
    return results(out, lse, *attention_loops.backward(problem, *inputs.arrays()))


def results(*arrays: np.ndarray) -> dict[str, np.ndarray]:
    """out, lse, dq, dk, dv by name; a witness may stop early."""
    return dict(zip(("out", "lse", "dq", "dk", "dv"), arrays, strict=False))


def allowed(problem: Problem, inputs: Inputs, dtype: DtypeName = "float64") -> dict[str, np.ndarray]:
    """The largest difference of each element between two computations in `dtype`.

    A score is a sum of D products, so a probability is relatively wrong by u times the sum of their sizes; a value it
    weighs carries that on, and a gradient multiplies it by what the cotangents say of the row.
    """
    group = problem.heads // problem.hk
    terms = problem.head_dim + problem.dv + 2 * problem.nk + group * problem.nq + ELEMENTARY_ROUNDINGS
    bound = witness_bound(dtype, terms)

    m = dense_formula.counts(problem).numpy()
    scale = abs(problem.head_dim**-0.5 if problem.scale is None else problem.scale)
    q, dout = np.abs(inputs.q), np.abs(inputs.dout)
    k, v = (np.repeat(np.abs(x), group, axis=2) for x in (inputs.k, inputs.v))
    score_size = np.where(m > 0, scale * np.einsum("bihd,bjhd->bhij", q, k), 0.0)
    condition = 1 + score_size.max(axis=3, initial=0.0) + np.log1p(m.sum(axis=3))
    p = _probabilities(problem, inputs, m)

    value_size = p * condition[..., None]
    cotangent = np.einsum("bihe,bjhe->bhij", dout, v)
    row = (p * cotangent).sum(axis=3) + np.where(m.sum(axis=3) > 0, np.abs(inputs.dlse), 0.0)
    score_gradient = p * (cotangent + row[..., None]) * condition[..., None]
    if problem.softcap is not None:
        score_gradient = score_gradient * (1 + score_size / problem.softcap)
    dk = scale * np.einsum("bhij,bihd->bjhd", score_gradient, q)
    dv = np.einsum("bhij,bihe->bjhe", value_size, dout)
    sizes = {
        "out": np.einsum("bhij,bjhe->bihe", value_size, v),
        "lse": condition,
        "dq": scale * np.einsum("bhij,bjhd->bihd", score_gradient, k),
        "dk": dk.reshape(*dk.shape[:2], problem.hk, group, problem.head_dim).sum(axis=3),
        "dv": dv.reshape(*dv.shape[:2], problem.hk, group, problem.dv).sum(axis=3),
    }
    return {name: bound * size + terms * UNDERFLOW[dtype] for name, size in sizes.items()}


def assert_agree(
    problem: Problem, inputs: Inputs, actual: Results, expected: Results, dtype: DtypeName = "float64"
) -> None:
    """Every result that the witness gives is also the oracle's.

    Raises:
        AssertionError: with the worst element of the first result that differs.
    """
    limits = allowed(problem, inputs, dtype)
    for name, right in expected.items():
        got, limit = actual[name], limits[name]
        assert got.shape == right.shape, f"{name} has shape {got.shape}, the witness {right.shape}"
        with np.errstate(invalid="ignore"):
            excess = np.where(got == right, 0.0, np.abs(got - right) / limit)
        excess = np.where(np.isnan(excess), np.inf, excess)
        if excess.max(initial=0.0) > 1:
            worst = np.unravel_index(int(excess.argmax()), excess.shape)
            raise AssertionError(
                f"{name}{[int(x) for x in worst]} is {got[worst]}, the witness says {right[worst]}: "
                f"{excess[worst]:.3g} times the difference allowed, in {problem}"
            )


def _probabilities(problem: Problem, inputs: Inputs, m: np.ndarray) -> np.ndarray:
    s = dense_formula.scores(problem, torch.from_numpy(inputs.q), torch.from_numpy(inputs.k)).numpy()
    with np.errstate(divide="ignore"):
        s = s + np.log(m)
    top = s.max(axis=3, keepdims=True, initial=-np.inf)
    weights = np.exp(s - np.where(np.isinf(top), 0.0, top))
    total = weights.sum(axis=3, keepdims=True)
    return weights / np.where(total == 0, 1.0, total)
