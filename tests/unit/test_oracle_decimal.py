"""The oracle in decimal arithmetic agrees with the others, and is right to the last bit."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from comparing import assert_agree, oracle, results
from drawing import Inputs, normal_inputs, problems, seeds, sizes
from hypothesis import given
from wrong_oracles import CROSS, PLAIN, TWICE, WRONG

from ringref import attention_decimal
from ringref.problem import Dilation, Problem


def decimal(problem: Problem, inputs: Inputs) -> dict[str, np.ndarray]:
    """The answer under test, by name."""
    return results(*attention_decimal.attention(problem, *inputs.arrays()))


@given(problem=problems(max_length=5), seed=seeds, size=sizes)
def test_decimal_and_vectorised_agree_on_any_problem(problem: Problem, seed: int, size: float) -> None:
    """Over every constraint and combination."""
    inputs = normal_inputs(problem, seed=seed, size=size)
    assert_agree(problem, inputs, oracle(problem, inputs), decimal(problem, inputs))


@pytest.mark.parametrize("name", WRONG)
def test_decimal_rejects_an_oracle_that_is_wrong(name: str) -> None:
    """The comparison that passes above can fail."""
    wrong, inputs = WRONG[name], normal_inputs(WRONG[name].problem)
    with pytest.raises(AssertionError, match=r"times the difference allowed|has shape"):
        assert_agree(wrong.problem, inputs, wrong.answer(wrong.problem, inputs), decimal(wrong.problem, inputs))


def test_what_is_known_exactly_is_exact() -> None:
    """Equal scores: out is a mean of fractions, rounded once; lse is log n; dk and dq vanish where they have to."""
    problem = PLAIN.replace(causal=True)
    inputs = normal_inputs(problem)
    inputs = dataclasses.replace(inputs, q=np.zeros_like(inputs.q), dlse=np.zeros_like(inputs.dlse))
    answer = decimal(problem, inputs)
    for i in range(problem.nq):
        assert answer["lse"][0, 0, i] == math.log(i + 1)
        for h, e in np.ndindex(problem.heads, problem.dv):
            mean = sum(Fraction(x) for x in inputs.v[0, : i + 1, h, e]) / (i + 1)
            assert answer["out"][0, i, h, e] == float(mean)
    assert (answer["dk"] == 0).all()
    assert (answer["dq"][0, 0] == 0).all()
    assert (answer["dq"][0, 1:] != 0).all()


def test_a_dominated_key_keeps_its_digits() -> None:
    """A lead of 300: the gradient of the leader's score is 1e-131, where a difference of sums would leave nothing."""
    problem = Problem(query_length=1, key_length=2, head_dim=1, scale=1.0)
    inputs = Inputs(
        q=np.ones((1, 1, 1, 1)),
        k=np.array([300.0, 0.0]).reshape(1, 2, 1, 1),
        v=np.array([2.0, 5.0]).reshape(1, 2, 1, 1),
        dout=np.ones((1, 1, 1, 1)),
        dlse=np.zeros((1, 1, 1)),
    )
    answer = decimal(problem, inputs)
    with mpmath.workdps(50):
        gradient = float(3 * mpmath.exp(-300))  # 1 / (1 + exp(−300)) is 1 to 130 digits
    assert answer["dk"].ravel().tolist() == [-gradient, gradient]
    assert answer["out"].item() == 2.0
    assert answer["lse"].item() == 300.0


def test_softcap_and_its_slope_at_zero_and_far_out() -> None:
    """tanh is odd and its slope is 1 at 0; far out the slope is the smallest number's, not NaN."""
    problem = Problem(query_length=1, key_length=3, head_dim=1, scale=1.0, softcap=1.0)
    inputs = Inputs(
        q=np.ones((1, 1, 1, 1)),
        k=np.array([0.0, 1000.0, -1000.0]).reshape(1, 3, 1, 1),
        v=np.ones((1, 3, 1, 1)),
        dout=np.zeros((1, 1, 1, 1)),
        dlse=np.ones((1, 1, 1)),
    )
    answer = decimal(problem, inputs)
    total = 1 + math.e + 1 / math.e
    assert math.ulp(1.0) >= abs(answer["dk"].ravel()[0] * total - 1)
    assert (answer["dk"].ravel()[1:] == 0).all()
    assert answer["dq"].item() == 0


@pytest.mark.parametrize(
    "problem", [CROSS.replace(query_length=6, key_length=2), PLAIN.replace(key_lengths=(2,)), TWICE]
)
def test_nan_where_nobody_looks_changes_nothing(problem: Problem) -> None:
    """In keys that are not attended, and in the cotangents of empty rows."""
    inputs = normal_inputs(problem)
    right = decimal(problem, inputs)
    empty = np.isneginf(right["lse"])
    inputs.dlse[empty], inputs.dout[empty.swapaxes(1, 2)] = np.nan, np.inf
    if problem.key_lengths:
        inputs.k[:, 2:], inputs.v[:, 2:] = np.nan, np.inf
    for name, expected in right.items():
        np.testing.assert_array_equal(decimal(problem, inputs)[name], expected)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_matters_has_to_be_finite(name: str, value: float) -> None:
    """There are no digits of it."""
    inputs = normal_inputs(PLAIN)
    getattr(inputs, name)[0, 1] = value
    with pytest.raises(ValueError, match="is not finite"):
        decimal(PLAIN, inputs)


def test_no_zero_is_negative() -> None:
    """The sign of a zero says nothing, and would be one more bit to disagree on."""
    problem = Problem(query_length=4, heads=2, head_dim=2, dilation=Dilation(((4, 2),)))
    inputs = normal_inputs(problem)
    inputs = dataclasses.replace(inputs, v=-np.abs(inputs.v), dout=np.zeros_like(inputs.dout))
    for name, x in decimal(problem, inputs).items():
        assert not np.signbit(x[x == 0]).any(), name
