"""The two oracles, loops and vectorised, agree; and what they share: shapes, empty rows, doors."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable

import numpy as np
import pytest
from comparing import assert_agree, loops, oracle
from drawing import normal_inputs, problems, seeds, sizes
from hypothesis import given
from wrong_oracles import CROSS, PLAIN, WRONG

import ringref.attention
from ringref.attention import Answer, attention
from ringref.problem import Dilation, Problem


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """`attention` as users have it, without the run-time shape check of the tests in front of its own."""
    name = "ringref_attention_unchecked"
    specification = importlib.util.spec_from_file_location(name, ringref.attention.__file__)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, name, module)
    specification.loader.exec_module(module)
    return module.attention


@given(problem=problems(), seed=seeds, size=sizes)
def test_loops_and_vectorised_agree_on_any_problem(problem: Problem, seed: int, size: float) -> None:
    """Over every constraint and combination."""
    inputs = normal_inputs(problem, seed=seed, size=size)
    assert_agree(problem, inputs, oracle(problem, inputs), loops(problem, inputs))


def small_problems() -> list[Problem]:
    """All lengths up to 3 against every constraint by itself and most pairs."""
    dense = []
    for nq, nk, causal in itertools.product(range(4), range(4), (False, True)):
        for window in (None, (0, 0), (1, None), (None, 1)):
            dense.append(Problem(query_length=nq, key_length=nk, causal=causal, window=window, head_dim=1))
        dense += [
            Problem(query_length=nq, key_length=nk, causal=causal, key_lengths=(length,), head_dim=1, softcap=1.0)
            for length in range(nk + 1)
        ]
    for n, causal in itertools.product(range(4), (False, True)):
        for cuts in itertools.combinations_with_replacement(range(n + 1), 3):
            dense.append(Problem(query_length=n, causal=causal, documents=cuts, head_dim=1))
        for w, r, mode in itertools.product((1, 2, 3), (1, 2), ("cyclic", "block", "split")):
            heads, offset = ("split", "cyclic") if mode == "split" else ("shared", mode)
            dilation = Dilation(((w, r), (2, 1)), heads=heads, head_offset=offset)
            dense.append(Problem(query_length=n, causal=causal, heads=3, head_dim=1, dilation=dilation))
    return dense


def test_loops_and_vectorised_agree_on_every_small_problem() -> None:
    """No example is left to chance here."""
    dense = small_problems()
    assert len(dense) > 400
    for problem in dense:
        inputs = normal_inputs(problem)
        assert_agree(problem, inputs, oracle(problem, inputs), loops(problem, inputs))


@pytest.mark.parametrize("name", WRONG)
def test_loops_reject_an_oracle_that_is_wrong(name: str) -> None:
    """The comparison that passes above can fail."""
    wrong, inputs = WRONG[name], normal_inputs(WRONG[name].problem)
    with pytest.raises(AssertionError, match=r"times the difference allowed|has shape"):
        assert_agree(wrong.problem, inputs, wrong.answer(wrong.problem, inputs), loops(wrong.problem, inputs))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("answer", [oracle, loops], ids=["vectorised", "loops"])
@pytest.mark.parametrize(
    "problem",
    [
        PLAIN.replace(key_lengths=(0,)),
        PLAIN.replace(key_length=0),
        CROSS.replace(query_length=6, key_length=2),
        PLAIN.replace(documents=(2, 2, 3)),
        PLAIN.replace(dilation=Dilation(((3, 3),), heads="shared")),
    ],
    ids=["no key counts", "no keys", "queries before the first key", "outside documents", "not covered"],
)
def test_an_empty_row_has_out_0_and_lse_minus_infinity_and_gives_no_gradient(answer, problem: Problem) -> None:
    """Whatever its cotangents say, NaN included, and without a warning."""
    inputs = normal_inputs(problem)
    empty = np.isneginf(answer(problem, inputs)["lse"])
    assert empty.any()
    inputs.dlse[empty] = np.nan
    inputs.dout[empty.swapaxes(1, 2)] = np.inf
    poisoned = answer(problem, inputs)
    assert (poisoned["out"].swapaxes(1, 2)[empty] == 0).all()
    assert (poisoned["dq"].swapaxes(1, 2)[empty] == 0).all()
    inputs.dlse[empty] = 0.0
    inputs.dout[empty.swapaxes(1, 2)] = 0.0
    assert_agree(problem, inputs, poisoned, answer(problem, inputs))


@pytest.mark.parametrize("nq", [0, 2])
@pytest.mark.parametrize("nk", [0, 3])
def test_zero_lengths_give_results_of_the_right_shape(nq: int, nk: int) -> None:
    """Zero queries, zero keys, or neither: every result has its shape and dtype."""
    problem = Problem(batch=2, query_length=nq, key_length=nk, heads=4, key_heads=2, head_dim=3, value_dim=5)
    answer = oracle(problem, normal_inputs(problem))
    shapes = {"out": (2, nq, 4, 5), "lse": (2, 4, nq), "dq": (2, nq, 4, 3), "dk": (2, nk, 2, 3), "dv": (2, nk, 2, 5)}
    assert shapes == {name: x.shape for name, x in answer.items()}
    assert all(x.dtype == np.float64 for x in answer.values())


def test_the_forward_alone_has_the_same_bits_and_the_inputs_are_left_as_they_were() -> None:
    """Gradients add to the answer and change nothing of it."""
    problem = CROSS.replace(softcap=2.0)
    inputs = normal_inputs(problem)
    before = [x.copy() for x in inputs.arrays()]
    answer = attention(problem, *inputs.arrays())
    alone = attention(problem, inputs.q, inputs.k, inputs.v)
    for expected, actual in zip((answer.out, answer.lse), (alone.out, alone.lse), strict=True):
        np.testing.assert_array_equal(actual, expected)
    for expected, actual in zip(before, inputs.arrays(), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_without_a_cotangent_there_are_no_gradients_and_without_dlse_it_is_zero() -> None:
    """The optional arguments mean what the docstring says."""
    inputs = normal_inputs(PLAIN)
    plain = attention(PLAIN, inputs.q, inputs.k, inputs.v)
    assert (plain.dq, plain.dk, plain.dv) == (None, None, None)
    left_out = attention(PLAIN, inputs.q, inputs.k, inputs.v, inputs.dout)
    zero = attention(PLAIN, inputs.q, inputs.k, inputs.v, inputs.dout, np.zeros_like(inputs.dlse))
    for name in ("out", "lse", "dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(left_out, name), getattr(zero, name))


def test_intermediates_are_zero_where_nothing_is_attended_and_rows_sum_to_one_elsewhere() -> None:
    """What `ringref.rounding` builds on: p = m · exp(s − lse), raw scores before the cap, nothing beyond the mask."""
    problem = CROSS.replace(query_length=8, key_length=6, softcap=2.0)
    inputs = normal_inputs(problem)
    inner = attention(problem, inputs.q, inputs.k, inputs.v).intermediates
    off = inner.m == 0
    assert off.any()
    for x in (inner.raw_scores, inner.scores, inner.probabilities):
        assert (x[off] == 0).all()
    sums, ones = inner.probabilities.sum(axis=3), (inner.m.sum(axis=3) > 0).astype(float)
    one_row = Problem(query_length=1, key_length=8, head_dim=3)
    np.testing.assert_array_max_ulp(sums, ones, maxulp=one_row.nk)
    assert (np.abs(inner.raw_scores[~off]) > np.abs(inner.scores[~off])).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((1, 4, 2, 3))}, r"q has shape \(1, 4, 2, 3\): the problem says \(1, 5, 2, 3\)"),
        ({"k": np.zeros((1, 5, 1, 3))}, r"k has shape \(1, 5, 1, 3\): the problem says \(1, 5, 2, 3\)"),
        ({"v": np.zeros((1, 5, 2, 4))}, r"v has shape \(1, 5, 2, 4\): the problem says \(1, 5, 2, 3\)"),
        ({"dout": np.zeros((1, 5, 2, 1))}, r"dout has shape \(1, 5, 2, 1\): the problem says \(1, 5, 2, 3\)"),
        ({"dlse": np.zeros((1, 5, 2))}, r"dlse has shape \(1, 5, 2\): the problem says \(1, 2, 5\)"),
        ({"q": np.zeros((1, 5, 2, 3), np.float32)}, "q has dtype float32: the oracle computes in float64; widen it"),
        ({"dout": None}, "dlse without dout: give a dout of zeros for the gradient of lse alone"),
    ],
    ids=["q", "k", "v", "dout", "dlse", "dtype", "dlse alone"],
)
def test_arrays_that_do_not_fit_the_problem_are_refused_at_the_door(change, message: str, unchecked) -> None:
    """The message names the array, what it is and what the problem says."""
    inputs = normal_inputs(PLAIN)
    arrays = dict(zip(("q", "k", "v", "dout", "dlse"), inputs.arrays(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        unchecked(PLAIN, **arrays)


def test_the_shape_check_of_the_tests_is_on() -> None:
    """A signature that lies would be caught: this call breaks one, and is stopped before the function's own check."""
    with pytest.raises(Exception, match="type"):
        Answer(np.zeros(3), np.zeros((1, 1, 1)), None, None, None, None)
