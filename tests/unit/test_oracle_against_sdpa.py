"""The oracle against torch's scaled_dot_product_attention, in float64 with its math backend."""

from __future__ import annotations

import dataclasses

import dense_formula
import numpy as np
import pytest
import torch
from comparing import assert_agree, oracle
from drawing import Inputs, normal_inputs, problems, seeds
from hypothesis import given
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from wrong_oracles import WRONG

from ringref.problem import Problem


def sdpa(problem: Problem, inputs: Inputs, *, is_causal: bool = False) -> dict[str, np.ndarray]:
    """The witness: out and its gradients; the pattern is a mask, or the argument `is_causal`."""
    q, k, v = (torch.tensor(x.swapaxes(1, 2), requires_grad=True) for x in (inputs.q, inputs.k, inputs.v))
    mask = None if is_causal else dense_formula.counts(problem).bool()
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=problem.scale, enable_gqa=True
        )
    gradients = torch.autograd.grad(out, (q, k, v), torch.tensor(inputs.dout.swapaxes(1, 2)))
    names = ("out", "dq", "dk", "dv")
    return {name: x.detach().numpy().swapaxes(1, 2) for name, x in zip(names, (out, *gradients), strict=True)}


def without_dlse(problem: Problem, seed: int) -> Inputs:
    """Inputs whose gradients are those of out alone, which is all that this witness returns."""
    inputs = normal_inputs(problem, seed=seed)
    return dataclasses.replace(inputs, dlse=np.zeros_like(inputs.dlse))


def expressible(problem: Problem) -> bool:
    """A mask counts to one, has no softcap, and the math backend makes no promise for a row without keys."""
    counts = dense_formula.counts(problem)
    attended_once = counts.numel() > 0 and bool((counts <= 1).all()) and bool(counts.sum(dim=3).all())
    return problem.softcap is None and attended_once


@given(problem=problems().map(lambda problem: problem.replace(softcap=None)).filter(expressible), seed=seeds)
def test_out_and_its_gradients_are_those_of_sdpa_with_a_mask(problem: Problem, seed: int) -> None:
    """Every pattern that is a boolean mask, with grouped queries, a scale and a value dimension of its own."""
    inputs = without_dlse(problem, seed)
    assert_agree(problem, inputs, oracle(problem, inputs), sdpa(problem, inputs))


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_out_and_its_gradients_are_those_of_sdpa_is_causal(length: int, key_heads: int) -> None:
    """torch's own causal mask, at equal lengths: elsewhere it aligns top-left and means another thing."""
    problem = Problem(query_length=length, heads=4, key_heads=key_heads, head_dim=5, causal=True, scale=0.7)
    inputs = without_dlse(problem, seed=length)
    assert_agree(problem, inputs, oracle(problem, inputs), sdpa(problem, inputs, is_causal=True))


def test_sdpa_is_causal_at_unequal_lengths_is_the_alignment_that_ours_is_not() -> None:
    """The top-left alignment of `is_causal` is a fact this suite relies on: our oracle must not agree with it."""
    problem = Problem(query_length=3, key_length=5, causal=True)
    inputs = without_dlse(problem, seed=0)
    with pytest.raises(AssertionError, match="times the difference allowed"):
        assert_agree(problem, inputs, oracle(problem, inputs), sdpa(problem, inputs, is_causal=True))


@pytest.mark.parametrize(
    "name",
    [
        "causal aligned top-left",
        "causal leaks one key",
        "window one too wide",
        "documents ignored",
        "scale 1 / D",
        "dk and dv swapped",
        "dq not scaled",
    ],
)
def test_sdpa_rejects_an_oracle_that_is_wrong(name: str) -> None:
    """The comparison that passes above can fail."""
    wrong, problem = WRONG[name], WRONG[name].problem
    assert expressible(problem)
    inputs = without_dlse(problem, seed=0)
    witness = sdpa(problem, inputs)
    assert_agree(problem, inputs, oracle(problem, inputs), witness)
    with pytest.raises(AssertionError, match="times the difference allowed"):
        assert_agree(problem, inputs, wrong.answer(problem, inputs), witness)
