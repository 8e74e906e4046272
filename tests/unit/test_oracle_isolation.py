"""What the pattern excludes cannot matter, even where it is NaN or infinite; what it includes is not hidden."""

from __future__ import annotations

import numpy as np
import pytest
from comparing import assert_agree, loops, oracle
from drawing import Inputs, normal_inputs, problems, seeds
from hypothesis import assume, given
from hypothesis import strategies as st
from wrong_oracles import PLAIN

from ringref.pattern import multiplicity
from ringref.problem import Problem

pytestmark = pytest.mark.filterwarnings("error")

ORACLES = {"vectorised": oracle, "loops": loops}


def reach(problem: Problem, tensor: str, b: int, position: int, head: int) -> dict[str, np.ndarray]:
    """Which elements of each result one row of one tensor may change; True in the shape of (…, row, head)."""
    m = multiplicity(problem) > 0
    group = problem.heads // problem.hk
    row = np.zeros(m.shape[:3], dtype=bool)
    own_keys = np.zeros((problem.batch, problem.hk, problem.nk), dtype=bool)
    if tensor in ("k", "v"):
        reading = slice(head * group, (head + 1) * group)
        row[b, reading] = m[b, reading, :, position]
        own_keys[b, head, position] = row[b, reading].any()
    else:
        # An empty row has results of its own that stay what they are.
        row[b, head, position] = m[b, head, position].any()
    keys = (row[..., None] & m).reshape(problem.batch, problem.hk, group, problem.nq, problem.nk).any(axis=(2, 3))
    nothing, no_keys = np.zeros_like(row), np.zeros_like(keys)
    by_tensor = {
        "q": {"out": row, "lse": row, "dq": row, "dk": keys, "dv": keys},
        "k": {"out": row, "lse": row, "dq": row, "dk": keys, "dv": keys},
        "v": {"out": row, "lse": nothing, "dq": row, "dk": keys, "dv": no_keys},
        "dout": {"out": nothing, "lse": nothing, "dq": row, "dk": keys, "dv": keys},
        "dlse": {"out": nothing, "lse": nothing, "dq": row, "dk": keys, "dv": no_keys},
    }
    return {name: x if name == "lse" else x.swapaxes(1, 2) for name, x in by_tensor[tensor].items()}


def poison(inputs: Inputs, tensor: str, b: int, position: int, head: int, value: float) -> Inputs:
    """The inputs with one row of one tensor replaced."""
    arrays = {name: x.copy() for name, x in zip(("q", "k", "v", "dout", "dlse"), inputs.arrays(), strict=True)}
    index = (b, head, position) if tensor == "dlse" else (b, position, head)
    arrays[tensor][index] = value
    return Inputs(**arrays)


def draw_place(data: st.DataObject, problem: Problem) -> tuple[str, int, int, int]:
    """A tensor and one of its rows."""
    tensor = data.draw(st.sampled_from(["q", "k", "v", "dout", "dlse"]))
    length, heads = (problem.nk, problem.hk) if tensor in ("k", "v") else (problem.nq, problem.heads)
    assume(length)
    b = data.draw(st.integers(0, problem.batch - 1))
    return tensor, b, data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, heads - 1))


@pytest.mark.parametrize("name", ORACLES)
@given(problem=problems(max_length=5), seed=seeds, value=st.sampled_from([np.nan, np.inf, -np.inf]), data=st.data())
def test_nan_and_infinity_reach_only_what_attends_them(
    name: str, problem: Problem, seed: int, value: float, data: st.DataObject
) -> None:
    """One row of q, k, v, dout or dlse is poisoned; out of its reach every result is what it was."""
    tensor, *place = draw_place(data, problem)
    clean = normal_inputs(problem, seed=seed)
    before, after = (ORACLES[name](problem, inputs) for inputs in (clean, poison(clean, tensor, *place, value)))
    for result, reached in reach(problem, tensor, *place).items():
        before[result][reached] = after[result][reached] = 0.0
    assert_agree(problem, clean, after, before)


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("tensor", ["q", "k", "v", "dout", "dlse"])
def test_nan_that_is_attended_is_not_hidden(name: str, tensor: str) -> None:
    """Where everything attends everything, NaN reaches all that it should: isolation is not suppression."""
    problem = PLAIN.replace(heads=1)
    after = ORACLES[name](problem, poison(normal_inputs(problem), tensor, 0, 1, 0, np.nan))
    for result, reached in reach(problem, tensor, 0, 1, 0).items():
        assert np.isnan(after[result][reached]).all(), result


def test_a_product_with_zero_weights_leaks_what_is_masked() -> None:
    """The check above can fail: the plain matrix product, 0 · NaN, reaches every query."""
    problem = PLAIN.replace(causal=True, heads=1)
    clean = normal_inputs(problem)
    poisoned = poison(clean, "v", 0, 4, 0, np.nan)
    weights = np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None]
    before, after = oracle(problem, clean), oracle(problem, poisoned)
    after["out"] = np.einsum("ij,bjhe->bihe", weights, poisoned.v)
    reached = reach(problem, "v", 0, 4, 0)["out"]
    before["out"][reached] = after["out"][reached] = 0.0
    with pytest.raises(AssertionError, match="times the difference allowed"):
        assert_agree(problem, clean, after, before)
