"""The oracle against torch's flex_attention in eager mode: out and lse. It has no backward on CPU."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from comparing import assert_agree, oracle, results
from drawing import Inputs, normal_inputs
from torch.nn.attention import flex_attention as flex
from wrong_oracles import WRONG

from ringref.problem import Dilation, Problem

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

PROBLEMS = {
    "full": Problem(query_length=5, key_length=3, heads=2),
    "causal": Problem(batch=2, query_length=6, heads=2, causal=True),
    "causal, more keys": Problem(query_length=4, key_length=7, causal=True),
    "causal, more queries, so empty rows": Problem(query_length=7, key_length=4, causal=True),
    "window": Problem(query_length=9, window=(2, 1), heads=2, key_heads=1),
    "window to the left": Problem(query_length=9, window=(2, None)),
    "window to the right, more keys": Problem(query_length=5, key_length=9, window=(None, 3)),
    "sliding window": Problem(query_length=9, window=(3, 0), causal=True, softcap=5.0),
    "documents": Problem(query_length=10, documents=(0, 3, 3, 7, 10), causal=True, heads=4, key_heads=2),
    "documents, some positions in none": Problem(query_length=10, documents=(2, 3, 8), value_dim=3),
    "key_lengths, one of them zero": Problem(batch=3, query_length=5, key_lengths=(5, 0, 2)),
    "softcap": Problem(query_length=6, softcap=1.5, scale=0.9, heads=2),
    "dilation, a branch a head": Problem(
        query_length=13, heads=5, dilation=Dilation(((4, 1), (8, 2), (13, 4))), causal=True
    ),
}


def flex_attention(problem: Problem, inputs: Inputs, dtype: torch.dtype = torch.float64) -> dict[str, np.ndarray]:
    """The witness: the pattern as a mask_mod, the softcap as a score_mod."""
    q, k, v = (torch.from_numpy(x.swapaxes(1, 2)).to(dtype) for x in (inputs.q, inputs.k, inputs.v))
    mask = flex.create_block_mask(mask_mod(problem), problem.batch, problem.heads, problem.nq, problem.nk, device="cpu")
    cap = None if problem.softcap is None else torch.tensor(problem.softcap, dtype=dtype)
    arguments: dict[str, Any] = {
        "score_mod": None if cap is None else lambda score, b, h, i, j: cap * torch.tanh(score / cap),
        "block_mask": mask,
        "scale": problem.scale,
        "enable_gqa": True,
    }
    if "return_aux" in inspect.signature(flex.flex_attention).parameters:
        out, aux = flex.flex_attention(q, k, v, **arguments, return_aux=flex.AuxRequest(lse=True))
        lse = aux.lse
    else:
        out, lse = flex.flex_attention(q, k, v, **arguments, return_lse=True)
    return results(out.double().numpy().swapaxes(1, 2), lse.double().numpy())


def mask_mod(problem: Problem):
    """The pattern as flex_attention wants it: a function of one batch element, head, query and key."""
    nothing = torch.tensor(True)
    aligned = problem.nk - problem.nq
    document = torch.full((max(problem.nq, problem.nk),), -1)
    for number, (start, end) in enumerate(pairwise(problem.documents or ())):
        document[start:end] = number
    lengths = torch.tensor(problem.key_lengths or [problem.nk] * problem.batch)
    if problem.dilation is not None:
        branches = problem.dilation.branches
        hands = torch.tensor_split(torch.arange(problem.heads), len(branches))
        mine = torch.cat([torch.full_like(hand, branch) for branch, hand in enumerate(hands)])
        segment, rate = torch.tensor(branches)[mine].T

    def mod(b, h, i, j):
        allowed = nothing & (j < lengths[b])
        if problem.causal:
            allowed = allowed & (i + aligned >= j)
        if problem.window is not None:
            left, right = problem.window
            if left is not None:
                allowed = allowed & (i + aligned - j <= left)
            if right is not None:
                allowed = allowed & (j - i - aligned <= right)
        if problem.documents is not None:
            allowed = allowed & (document[i] == document[j]) & (document[i] >= 0)
        if problem.dilation is not None:
            w, r, offset = segment[h], rate[h], mine[h] % rate[h]
            allowed = allowed & (i // w == j // w) & (i % w % r == offset) & (j % w % r == offset)
        return allowed

    return mod


@pytest.mark.parametrize("size", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.by_day(14)
def test_out_and_lse_are_those_of_flex_attention(problem: Problem, size: float) -> None:
    """Natural logarithm, −inf and 0 in empty rows, both window ends inclusive: as flex_attention has them."""
    inputs = normal_inputs(problem, size=size)
    assert_agree(problem, inputs, oracle(problem, inputs), flex_attention(problem, inputs))


def test_out_and_lse_are_those_of_flex_attention_in_float32() -> None:
    """The dtype in which flex_attention is used; the comparison is as sharp as float32 lets it be."""
    problem = PROBLEMS["sliding window"]
    drawn = normal_inputs(problem)
    inputs = Inputs(*(x.astype(np.float32).astype(np.float64) for x in drawn.arrays()))
    witness = flex_attention(problem, inputs, torch.float32)
    assert_agree(problem, inputs, oracle(problem, inputs), witness, dtype="float32")


@pytest.mark.parametrize(
    "name",
    [
        "causal aligned top-left",
        "causal leaks one key",
        "window one too wide",
        "documents ignored",
        "softcap ignored",
        "scale 1 / D",
        "lse in base 2",
        "lse 0 where empty",
    ],
)
def test_flex_attention_rejects_an_oracle_that_is_wrong(name: str) -> None:
    """The comparison that passes above can fail."""
    wrong, problem = WRONG[name], WRONG[name].problem
    inputs = normal_inputs(problem)
    witness = flex_attention(problem, inputs)
    assert_agree(problem, inputs, oracle(problem, inputs), witness)
    with pytest.raises(AssertionError, match="times the difference allowed"):
        assert_agree(problem, inputs, wrong.answer(problem, inputs), witness)
