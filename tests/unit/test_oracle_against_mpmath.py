"""The oracle against the definition evaluated by mpmath at 50 digits, where float64 has the least to spare.

Gradients are mpmath's numerical derivatives of `<dout, out> + <dlse, lse>`, so no formula for a gradient is shared.
"""

from __future__ import annotations

import dataclasses

import dense_formula
import mpmath
import numpy as np
import pytest
from comparing import ELEMENTARY_ROUNDINGS, assert_agree, oracle, results
from drawing import Inputs, normal_inputs
from mpmath import mpf
from wrong_oracles import CROSS, PLAIN, TWICE, WRONG

from ringref.attention import attention
from ringref.problem import Problem
from ringref.rounding import witness_bound

DIGITS = 50
TINY_DIGITS = 310
"""A derivative's error is relative to the loss, not to itself: so many more, and 50 are left of float64's smallest."""


def exact(problem: Problem, inputs: Inputs) -> dict[str, np.ndarray]:
    """The witness: all five results, rounded to float64 at the very end."""
    with mpmath.workdps(DIGITS):
        numbers = [np.vectorize(mpf, otypes=[object])(x) for x in inputs.arrays()]
        out, lse = definition(problem, *numbers[:3])
        with mpmath.extradps(TINY_DIGITS):
            gradients = [derivative(problem, numbers, which) for which in range(3)]
        return results(*(x.astype(np.float64) for x in (out, lse, *gradients)))


def definition(problem: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """out and lse, unshifted: at this precision, and with exponents without bound, nothing overflows."""
    m = dense_formula.counts(problem).long().numpy()
    scale = 1 / mpmath.sqrt(problem.head_dim) if problem.scale is None else mpf(problem.scale)
    out = np.full((problem.batch, problem.nq, problem.heads, problem.dv), mpf(0), dtype=object)
    lse = np.full((problem.batch, problem.heads, problem.nq), mpf("-inf"), dtype=object)
    for b, h, i in np.ndindex(lse.shape):
        keys = np.flatnonzero(m[b, h, i])
        key_head = h * problem.hk // problem.heads
        weights = []
        for j in keys:
            s = scale * mpmath.fdot(q[b, i, h], k[b, j, key_head])
            if problem.softcap is not None:
                s = problem.softcap * mpmath.tanh(s / problem.softcap)
            weights.append(int(m[b, h, i, j]) * mpmath.exp(s))
        if len(keys):
            total = mpmath.fsum(weights)
            lse[b, h, i] = mpmath.log(total)
            out[b, i, h] = [mpmath.fdot(weights, v[b, keys, key_head, e]) / total for e in range(problem.dv)]
    return out, lse


def derivative(problem: Problem, numbers: list[np.ndarray], which: int) -> np.ndarray:
    """The derivative of the loss in every element of one of q, k, v."""
    *arrays, dout, dlse = numbers
    gradient = np.empty(arrays[which].shape, dtype=object)
    for index in np.ndindex(gradient.shape):

        def loss(x, index=index):
            moved = [array.copy() for array in arrays]
            moved[which][index] = x
            out, lse = definition(problem, *moved)
            through_lse = [cotangent * value for cotangent, value in zip(dlse.flat, lse.flat, strict=True)]
            finite = [value for value in through_lse if mpmath.isfinite(value)]
            return mpmath.fdot(dout.flat, out.flat) + mpmath.fsum(finite)

        gradient[index] = mpmath.diff(loss, arrays[which][index])
    return gradient


def with_scores(problem: Problem, scores: list[list[float]]) -> Inputs:
    """Inputs of one head whose scores q·k are these, a row a query: the queries select, the keys hold the scores."""
    table = np.array(scores, dtype=np.float64)
    inputs = normal_inputs(problem)
    return dataclasses.replace(
        inputs, q=np.eye(len(table))[None, :, None, :], k=np.ascontiguousarray(table.T)[None, :, None, :]
    )


NEXT = np.nextafter(1000.0, 2000.0)
TABLES = {
    "all scores 1000": [[1000.0, 1000.0, 1000.0], [1000.0, 1000.0, 1000.0]],
    "all scores -1000": [[-1000.0, -1000.0, -1000.0], [-1000.0, -1001.0, -1000.5]],
    "1000 against -1000": [[1000.0, -1000.0, 1000.0], [-1000.0, 1000.0, -1000.0]],
    "near-ties at 1000": [[1000.0, NEXT, 1000.0], [NEXT, 1000.0, 999.9999999]],
    "a lead that just underflows": [[0.0, 745.0, 0.0], [0.0, -745.0, -746.0]],
    "ties at zero": [[0.0, 0.0, 0.0], [0.0, -0.0, 1e-300]],
}


@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_extreme_scores_give_the_exact_answer(table: list[list[float]], causal: bool, softcap: float | None) -> None:
    """Scores of ±1000, near-ties and single leaders: out, lse and every gradient."""
    problem = Problem(query_length=2, key_length=3, head_dim=2, value_dim=2, causal=causal, scale=1.0, softcap=softcap)
    inputs = with_scores(problem, table)
    assert_agree(problem, inputs, oracle(problem, inputs), exact(problem, inputs))


@pytest.mark.parametrize(
    "problem",
    [
        Problem(query_length=3, key_length=1, heads=2, head_dim=2),
        Problem(query_length=3, head_dim=2, causal=True, window=(0, None)),
        Problem(query_length=4, key_length=2, head_dim=2, causal=True),
        Problem(batch=2, query_length=2, head_dim=2, key_lengths=(0, 1)),
        TWICE.replace(query_length=4, head_dim=2, causal=True),
        CROSS.replace(query_length=2, key_length=3, key_heads=1, softcap=3.0),
    ],
    ids=["one key", "every key alone", "empty rows", "an empty element", "multiplicities", "softcap, grouped"],
)
def test_single_keys_empty_rows_and_multiplicities_give_the_exact_answer(problem: Problem) -> None:
    """Normal values of a size that spreads the scores over hundreds."""
    inputs = normal_inputs(problem, size=100.0)
    assert_agree(problem, inputs, oracle(problem, inputs), exact(problem, inputs))


def test_gradients_keep_their_digits_where_the_softcap_saturates() -> None:
    """sech² of 30 is 4e-26 and still right relative to itself; 1 − tanh² would be 0 or noise."""
    problem = Problem(query_length=1, key_length=2, head_dim=1, scale=1.0, softcap=1.0)
    inputs = dataclasses.replace(
        with_scores(problem, [[30.0, 25.0]]), dout=np.zeros((1, 1, 1, 1)), dlse=np.ones((1, 1, 1))
    )
    witness = exact(problem, inputs)
    # Relative, since nothing cancels: the slope sech²(x) turns a relative error of x into one 2x as large.
    bound = witness_bound("float64", 2 * ELEMENTARY_ROUNDINGS * 30)
    answer = attention(problem, *inputs.arrays())
    assert np.all(witness["dk"] != 0)
    assert np.all(np.abs(answer.dk - witness["dk"]) <= bound * np.abs(witness["dk"]))
    assert np.all(np.abs(answer.dq - witness["dq"]) <= bound * np.abs(witness["dq"]))


@pytest.mark.parametrize("name", ["multiplicity ignored", "lse in base 2", "dlse ignored", "dq not scaled"])
def test_mpmath_rejects_an_oracle_that_is_wrong(name: str) -> None:
    """The comparison that passes above can fail."""
    wrong = WRONG[name]
    problem = wrong.problem.replace(query_length=3, key_length=None, heads=1, key_heads=None)
    inputs = normal_inputs(problem)
    witness = exact(problem, inputs)
    assert_agree(problem, inputs, oracle(problem, inputs), witness)
    with pytest.raises(AssertionError, match="times the difference allowed"):
        assert_agree(problem, inputs, wrong.answer(problem, inputs), witness)


def test_mpmath_rejects_a_softmax_that_is_not_shifted() -> None:
    """exp(1000) is infinite in float64; an oracle without the shift must not pass for right."""
    problem = PLAIN.replace(query_length=2, key_length=2, heads=1, key_heads=None, head_dim=2, scale=1.0)
    inputs = with_scores(problem, [[1000.0, 999.0], [1.0, 2.0]])
    answer = oracle(problem, inputs)
    with np.errstate(over="ignore"):
        scores = np.einsum("bihd,bjhd->bhij", inputs.q, inputs.k)
        unshifted = {**answer, "lse": np.log(np.exp(scores).sum(axis=3))}
    with pytest.raises(AssertionError, match="times the difference allowed"):
        assert_agree(problem, inputs, unshifted, exact(problem, inputs))
