"""The oracle against torch's float64 autograd of a dense formula written independently."""

from __future__ import annotations

import dense_formula
import numpy as np
import pytest
import torch
from comparing import assert_agree, oracle, results
from drawing import Inputs, normal_inputs, problems, seeds, sizes
from hypothesis import example, given
from wrong_oracles import TWICE, WRONG

from ringref.attention import attention
from ringref.problem import Dilation, Problem


def autograd(problem: Problem, inputs: Inputs) -> dict[str, np.ndarray]:
    """The witness: out, lse and the gradients that flow back through both."""
    q, k, v = (torch.tensor(x, requires_grad=True) for x in (inputs.q, inputs.k, inputs.v))
    out, lse = dense_formula.attend(problem, q, k, v)
    # Through the finite rows only: the others are constants, and their cotangent is to be ignored.
    finite = lse.isfinite()
    loss = (out * torch.tensor(inputs.dout)).sum() + (lse[finite] * torch.tensor(inputs.dlse)[finite]).sum()
    gradients = torch.autograd.grad(loss, (q, k, v), materialize_grads=True)
    return results(*(x.detach().numpy() for x in (out, lse, *gradients)))


@given(problem=problems(), seed=seeds, size=sizes)
@example(problem=Problem(query_length=0, key_length=0), seed=0, size=1.0)
@example(problem=Problem(query_length=3, key_length=0, causal=True), seed=0, size=1.0)
@example(problem=Problem(query_length=0, key_length=3), seed=0, size=1.0)
@example(problem=Problem(query_length=5, documents=(1, 1, 3, 3, 4), causal=True), seed=0, size=1.0)
@example(problem=Problem(query_length=6, key_length=2, causal=True), seed=0, size=1.0)
def test_out_lse_and_every_gradient_are_those_of_autograd(problem: Problem, seed: int, size: float) -> None:
    """Over every constraint and combination; small scores, equal scores and scores that leave one key standing."""
    inputs = normal_inputs(problem, seed=seed, size=size)
    assert_agree(problem, inputs, oracle(problem, inputs), autograd(problem, inputs))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "problem",
    [
        TWICE,
        TWICE.replace(dilation=Dilation(((6, 2), (3, 2), (4, 1)), heads="shared", head_offset="block"), heads=4),
        TWICE.replace(dilation=Dilation(((6, 1), (6, 1), (6, 1)), heads="shared"), causal=True),
    ],
    ids=["cyclic", "block", "one branch three times"],
)
def test_multiplicities_above_one_are_really_met_and_right(problem: Problem, seed: int) -> None:
    """The sweep above would be empty of them if dilations never overlapped; here they do."""
    assert dense_formula.counts(problem).max() > 1
    inputs = normal_inputs(problem, seed=seed)
    assert_agree(problem, inputs, oracle(problem, inputs), autograd(problem, inputs))


def test_merging_branches_by_their_log_sum_exps_is_adding_multiplicities() -> None:
    """LongNet's recipe: each branch by itself, then weighted by exp(lse of the branch − lse of all)."""
    branches = ((6, 1), (4, 2), (3, 3))
    problem = Problem(query_length=9, heads=3, head_dim=3, dilation=Dilation(branches, heads="shared"))
    inputs = normal_inputs(problem)
    outs, lses = [], []
    for branch in branches:
        alone = problem.replace(dilation=Dilation((branch,), heads="shared"))
        out, lse = dense_formula.attend(alone, *(torch.tensor(x) for x in (inputs.q, inputs.k, inputs.v)))
        outs.append(out)
        lses.append(lse)
    lse = torch.stack(lses).logsumexp(dim=0)
    shares = torch.where(lse.isneginf(), 0.0, (torch.stack(lses) - lse).exp())
    out = torch.einsum("gbhi,gbihe->bihe", shares, torch.stack(outs))
    assert_agree(problem, inputs, oracle(problem, inputs), results(out.numpy(), lse.numpy()))


@pytest.mark.parametrize("name", WRONG)
def test_autograd_rejects_an_oracle_that_is_wrong(name: str) -> None:
    """The comparison that passes above can fail: each wrong oracle differs from the witness somewhere."""
    wrong, inputs = WRONG[name], normal_inputs(WRONG[name].problem)
    witness = autograd(wrong.problem, inputs)
    assert_agree(wrong.problem, inputs, oracle(wrong.problem, inputs), witness)
    with pytest.raises(AssertionError, match=r"times the difference allowed|has shape"):
        assert_agree(wrong.problem, inputs, wrong.answer(wrong.problem, inputs), witness)


class ClosedForm(torch.autograd.Function):
    """The oracle as a torch function, so that gradcheck can differentiate it."""

    @staticmethod
    def forward(ctx, problem, q, k, v):
        ctx.problem = problem
        ctx.save_for_backward(q, k, v)
        answer = attention(problem, q.numpy(), k.numpy(), v.numpy())
        return torch.from_numpy(answer.out), torch.from_numpy(answer.lse)

    @staticmethod
    def backward(ctx, dout, dlse):
        answer = attention(ctx.problem, *(x.numpy() for x in (*ctx.saved_tensors, dout, dlse)))
        return None, *(torch.from_numpy(x) for x in (answer.dq, answer.dk, answer.dv))


class DlseIgnored(ClosedForm):
    """The same without the cotangent of lse."""

    @staticmethod
    def backward(ctx, dout, dlse):
        return ClosedForm.backward(ctx, dout, torch.zeros_like(dlse))


GRADCHECKED = {
    "causal, grouped queries, softcap": Problem(
        batch=2, query_length=3, key_length=4, heads=2, key_heads=1, head_dim=2, value_dim=3, causal=True, softcap=2.0
    ),
    "documents, window": Problem(query_length=5, head_dim=2, documents=(0, 2, 2, 5), window=(1, None), scale=-0.5),
    "dilation": TWICE.replace(query_length=4, head_dim=2),
}


@pytest.mark.parametrize("problem", GRADCHECKED.values(), ids=GRADCHECKED)
def test_gradcheck_accepts_the_closed_form(problem: Problem) -> None:
    """torch's own numerical differentiation, at its own tolerances, of out and lse in every input."""
    inputs = normal_inputs(problem)
    q, k, v = (torch.tensor(x, requires_grad=True) for x in (inputs.q, inputs.k, inputs.v))
    assert torch.autograd.gradcheck(lambda *x: ClosedForm.apply(problem, *x), (q, k, v))


def test_gradcheck_rejects_a_closed_form_without_the_cotangent_of_lse() -> None:
    """The check above can fail."""
    problem = GRADCHECKED["dilation"]
    inputs = normal_inputs(problem)
    q, k, v = (torch.tensor(x, requires_grad=True) for x in (inputs.q, inputs.k, inputs.v))
    assert not torch.autograd.gradcheck(lambda *x: DlseIgnored.apply(problem, *x), (q, k, v), raise_exception=False)
