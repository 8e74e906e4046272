"""What adapters hand to packages that distribute any attention, and the stand-in for xformers: held to the oracle."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
import torch
from comparing import assert_agree, oracle, results
from drawing import Inputs, normal_inputs

from ringref.problem import Problem
from ringverify.peers import xformers_ops
from ringverify.peers.dense import attention, causal_mask, with_key_heads

DENSE = [
    Problem(batch=2, query_length=5, key_length=3, heads=2, head_dim=3, value_dim=2),
    Problem(batch=2, query_length=6, heads=6, key_heads=2, head_dim=4, causal=True),
    Problem(query_length=4, heads=2, head_dim=3, causal=True, scale=-0.7),
]


def by_autograd(problem: Problem, inputs: Inputs, function) -> dict[str, np.ndarray]:
    """out, a log-sum-exp that is the oracle's own, and the gradients, of a function of bshd tensors."""
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = function(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), torch.from_numpy(inputs.dout))
    lse = oracle(problem, inputs)["lse"]
    return results(out.detach().numpy(), lse, *(x.numpy() for x in gradients))


def inputs_of(problem: Problem) -> Inputs:
    """Normal inputs without a cotangent of lse."""
    drawn = normal_inputs(problem)
    return Inputs(drawn.q, drawn.k, drawn.v, drawn.dout, np.zeros_like(drawn.dlse))


def dense(problem: Problem, shift: int = 0):
    """The attention of `ringverify.peers.dense` as a function of bshd tensors; a shift makes its mask wrong."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        positions = torch.arange(problem.nq)
        mask = causal_mask(positions + shift, positions) if problem.causal else None
        return attention(q, k, v, mask=mask, scale=problem.scale_value).transpose(1, 2)

    return function


@pytest.mark.parametrize("problem", DENSE, ids=str)
def test_dense_attention_agrees_with_the_oracle(problem: Problem) -> None:
    """Out and gradients, grouped heads, another value_dim, any scale."""
    inputs = inputs_of(problem)
    assert_agree(problem, inputs, by_autograd(problem, inputs, dense(problem)), oracle(problem, inputs))


def test_a_mask_that_is_off_by_one_is_told_from_the_right_one() -> None:
    """The comparison can fail."""
    inputs = inputs_of(DENSE[1])
    with pytest.raises(AssertionError):
        assert_agree(DENSE[1], inputs, by_autograd(DENSE[1], inputs, dense(DENSE[1], 1)), oracle(DENSE[1], inputs))


def test_heads_of_zeros_come_after_those_there_are_and_change_none() -> None:
    """Out of the heads that were there is the same, and nothing flows back into what was added."""
    problem = DENSE[1]
    inputs = inputs_of(problem)

    def filled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = q.shape[2]
        more = with_key_heads((q, k, v), 5)
        assert [x.shape[2] for x in more] == [15, 5, 5]
        return dense(problem)(*more)[:, :, :heads]

    assert_agree(problem, inputs, by_autograd(problem, inputs, filled), oracle(problem, inputs))
    q, k, v = (torch.from_numpy(x) for x in (inputs.q, inputs.k, inputs.v))
    assert with_key_heads((q, k, v), 2) == (q, k, v)


@pytest.mark.parametrize("problem", [p for p in DENSE if p.dv == p.head_dim and p.hk == p.heads], ids=str)
def test_the_stand_in_for_xformers_agrees_with_the_oracle(problem: Problem) -> None:
    """`memory_efficient_attention` in its layout, with and without its causal mask, and with its default scale."""
    inputs = inputs_of(problem)
    bias = xformers_ops.LowerTriangularMask() if problem.causal else None

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return xformers_ops.memory_efficient_attention(query=q, key=k, value=v, attn_bias=bias, scale=problem.scale)

    assert_agree(problem, inputs, by_autograd(problem, inputs, function), oracle(problem, inputs))


def test_no_query_and_no_head_give_nothing() -> None:
    """A rate beyond its segment leaves a branch empty, and more branches than heads one without heads."""
    for shape in ((1, 0, 2, 4), (1, 3, 0, 4)):
        x = torch.randn(shape)
        assert xformers_ops.memory_efficient_attention(x, x, x).shape == shape


def test_what_the_stand_in_does_not_do_is_refused() -> None:
    """Dropout and other biases, each with a line."""
    x = torch.randn(1, 2, 1, 4)
    for arguments in ({"p": 0.1}, {"attn_bias": torch.zeros(2, 2)}):
        with pytest.raises(NotImplementedError, match="no dropout and no bias but LowerTriangularMask"):
            xformers_ops.memory_efficient_attention(x, x, x, **arguments)


def test_the_stand_in_is_found_within_and_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was imported before under its names is back, and where nothing was, nothing stays."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "xformers"]:
        monkeypatch.delitem(sys.modules, name)
    with xformers_ops.standing_in():
        assert importlib.import_module("xformers.ops") is xformers_ops
    assert not [name for name in sys.modules if name.partition(".")[0] == "xformers"]
    installed = object()
    monkeypatch.setitem(sys.modules, "xformers", installed)
    with xformers_ops.standing_in():
        assert sys.modules["xformers"] is not installed
    assert sys.modules["xformers"] is installed
