"""The declared pipeline, emulated, and the statistic it is the yardstick of."""

from __future__ import annotations

import numpy as np
import pytest

from ringref.attention import attention
from ringref.emulation import emulate
from ringref.problem import Dilation, Problem
from ringref.rounding import Pipeline, allowed_error, margins, precision_allowed, rms_error
from ringverify.cases.case import Case
from ringverify.cases.inputs import make_inputs

PROBLEMS = {
    "plain": Problem(query_length=40, heads=4, head_dim=8),
    "causal, grouped": Problem(query_length=40, heads=4, key_heads=2, head_dim=8, value_dim=5, causal=True),
    "no keys": Problem(query_length=3, key_length=0, heads=2, head_dim=4),
    "nothing": Problem(query_length=0, heads=2, head_dim=4),
    "softcap": Problem(query_length=30, heads=2, head_dim=8, softcap=2.0),
    "empty rows": Problem(query_length=30, key_length=12, heads=2, head_dim=8, causal=True),
    "multiplicities": Problem(query_length=30, heads=4, dilation=Dilation(((8, 1), (16, 2), (30, 3)), "shared")),
}
TENSORS = ("out", "dq", "dk", "dv")


def emulated(problem, pipeline, seed=0):
    """The oracle's answer, the emulated pipeline's, and what error the bound allows it."""
    problem = problem.replace(dtype=pipeline.dtype)
    x = make_inputs(Case(problem=problem, seed=seed))
    answer = attention(problem, x.q, x.k, x.v, x.dout, x.dlse)
    bound = allowed_error(problem, answer, x.q, x.k, x.v, x.dout, x.dlse, pipeline)
    return answer, emulate(problem, x.q, x.k, x.v, x.dout, pipeline), bound


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("probabilities", ["accumulates", "input"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_emulated_pipeline_stays_within_its_own_bound(name, probabilities, dtype):
    """On every element: the two descriptions of a declaration agree with each other, and with the oracle."""
    pipeline = Pipeline(dtype=dtype, probabilities=probabilities)
    answer, found, bound = emulated(PROBLEMS[name], pipeline)
    for tensor in TENSORS:
        margin = margins(getattr(found, tensor), getattr(answer, tensor), getattr(bound, tensor), dtype)
        assert margin.max(initial=0.0) <= 1, tensor


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_once_gives_less_than_half_a_unit_and_rounding_sums_more(dtype):
    """0.3 to 0.5 for what rounds once; a pipeline that accumulates in the input dtype is over the line by far."""
    problem = PROBLEMS["plain"]
    answer, once, _ = emulated(problem, Pipeline(dtype=dtype))
    _, always, _ = emulated(problem, Pipeline(dtype=dtype, accumulates=dtype))
    rho, rows = rms_error(once.out, answer.out, dtype)
    assert 0.3 < rho < 0.5
    assert rows == answer.out[..., 0].size
    assert rms_error(always.out, answer.out, dtype)[0] > 1.5 * precision_allowed(rho, rows, "accumulates")


def test_the_statistic_leaves_rows_out_whose_answer_is_zero():
    """A relative error has no meaning there."""
    exact = np.array([[0.0, 0.0], [3.0, 4.0]])
    assert rms_error(exact, exact, "bfloat16") == (0.0, 1)
    rho, _ = rms_error(exact + np.array([[9.0, 9.0], [5.0 * 2.0**-8, 0.0]]), exact, "bfloat16")
    assert rho == 1.0
    assert rms_error(np.zeros((3, 2)), np.zeros((3, 2)), "float16") == (0.0, 0)


def test_the_statistic_leaves_rows_out_that_cancellation_left():
    """One row of a hundred whose answer is a millionth of its terms would be all of the mean."""
    exact = np.ones((100, 2))
    exact[7] = 1e-6
    bound = np.full((100, 2), 2.0**-8)
    assert rms_error(exact + 2.0**-8, exact, "bfloat16", bound)[1] == 99
    assert rms_error(exact + 2.0**-8, exact, "bfloat16", bound)[0] == 1.0  # one unit in every row, exactly
    assert rms_error(exact + 2.0**-8, exact, "bfloat16")[0] > 1e3


def test_more_rows_leave_less_room():
    """The mean of many is surer than that of few, and never more is asked than the emulation itself does."""
    many, few, rounded = (
        precision_allowed(1.0, *how) for how in ((10**6, "accumulates"), (200, "accumulates"), (200, "input"))
    )
    assert 1 < many < few < rounded < 2.1  # sqrt(3), and room for 200 rows
    assert few < np.sqrt(2)


def test_what_has_no_keys_is_emulated_with_grouped_heads():
    """Nothing attended, nothing added: no shape is ambiguous for being empty."""
    problem = Problem(query_length=3, key_length=0, heads=4, key_heads=2, head_dim=2, dtype="bfloat16")
    q, k = np.ones((1, 3, 4, 2)), np.ones((1, 0, 2, 2))
    emulated = emulate(problem, q, k, k, q, Pipeline("bfloat16"))
    assert emulated.dk.shape == emulated.dv.shape == (1, 0, 2, 2)
    assert not emulated.out.any()
