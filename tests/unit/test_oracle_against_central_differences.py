"""The oracle's gradients against differences of its own forward: is the backward that of this forward?"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from comparing import ELEMENTARY_ROUNDINGS
from drawing import Inputs, normal_inputs, problems, seeds
from hypothesis import given, settings
from wrong_oracles import PLAIN, TWICE

from ringref.attention import attention
from ringref.problem import Problem
from ringref.rounding import witness_bound


def largest_excess(problem: Problem, inputs: Inputs, gradients: dict[str, np.ndarray]) -> float:
    """The largest difference between a gradient and a central difference, over the one allowed.

    A central difference of step h is off by at most h² / 6 times the third derivative, and by the rounding of two
    losses over 2h. h is the cube root of a loss's relative rounding, which makes both h² times a magnitude. The loss
    is a sum over rows of `<dout_i, out_i> + dlse_i lse_i`; a row moves by its scores, a score by `slope` for a unit
    step in q or k, and its third derivatives in the scores are at most six times its size.
    """
    terms = problem.head_dim + 2 * problem.nk + problem.nq * problem.heads * problem.dv + ELEMENTARY_ROUNDINGS
    h = np.cbrt(witness_bound("float64", terms))
    scale = abs(problem.scale_value)
    largest = {name: np.abs(getattr(inputs, name)).max(initial=0.0) for name in ("q", "k", "v")}
    slope = scale * problem.head_dim * max(largest["q"], largest["k"])
    if problem.softcap is not None:
        slope *= 1 + 1 / problem.softcap
    score = slope * min(largest["q"], largest["k"])
    size = np.abs(inputs.dout).sum() * largest["v"] + np.abs(inputs.dlse).sum() * (score + np.log1p(2 * problem.nk))
    limit = h**2 * (1 + size) * (1 + slope) ** 3 * (1 + score)

    worst = 0.0
    for name, gradient in gradients.items():
        for index in np.ndindex(gradient.shape):
            difference = (_loss(problem, inputs, name, index, h) - _loss(problem, inputs, name, index, -h)) / (2 * h)
            worst = max(worst, abs(difference - gradient[index]) / limit)
    return worst


def _loss(problem: Problem, inputs: Inputs, name: str, index: tuple[int, ...], step: float) -> float:
    moved = getattr(inputs, name).copy()
    moved[index] += step
    inputs = dataclasses.replace(inputs, **{name: moved})
    answer = attention(problem, inputs.q, inputs.k, inputs.v)
    lse = np.where(np.isfinite(answer.lse), answer.lse, 0.0)
    return float((inputs.dout * answer.out).sum() + (inputs.dlse * lse).sum())


def gradients(problem: Problem, inputs: Inputs) -> dict[str, np.ndarray]:
    """The oracle's, by the input they belong to."""
    answer = attention(problem, *inputs.arrays())
    return {"q": answer.dq, "k": answer.dk, "v": answer.dv}


@settings(max_examples=60)
@given(problem=problems(max_length=4), seed=seeds)
def test_gradients_are_the_central_differences_of_the_forward(problem: Problem, seed: int) -> None:
    """Every element of dq, dk and dv, through out and lse together."""
    inputs = normal_inputs(problem, seed=seed)
    assert largest_excess(problem, inputs, gradients(problem, inputs)) <= 1


@pytest.mark.parametrize("problem", [PLAIN, TWICE], ids=["plain", "multiplicities"])
@pytest.mark.parametrize("fault", ["dlse ignored", "dout ignored", "dk doubled", "dq not scaled", "dv of head 0 lost"])
def test_central_differences_reject_gradients_that_are_wrong(problem: Problem, fault: str) -> None:
    """The comparison that passes above can fail."""
    inputs = normal_inputs(problem)
    right = gradients(problem, inputs)
    match fault:
        case "dlse ignored":
            wrong = gradients(problem, dataclasses.replace(inputs, dlse=np.zeros_like(inputs.dlse)))
        case "dout ignored":
            wrong = gradients(problem, dataclasses.replace(inputs, dout=np.zeros_like(inputs.dout)))
        case "dk doubled":
            wrong = {**right, "k": 2 * right["k"]}
        case "dq not scaled":
            wrong = {**right, "q": right["q"] / problem.scale_value}
        case _:
            wrong = {**right, "v": right["v"] * (np.arange(problem.hk) > 0)[:, None]}
    assert largest_excess(problem, inputs, right) <= 1
    assert largest_excess(problem, inputs, wrong) > 1
