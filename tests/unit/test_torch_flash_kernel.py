"""The CPU kernels of torch's flash operator: they answer as the oracle does, and in the shapes that torch says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from comparing import assert_agree, oracle, results
from drawing import Inputs, normal_inputs

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.comparing import worst
from ringverify.cases.running import Runner
from ringverify.implementation import AttentionCall, implementation
from ringverify.peers import torch_flash_kernel as kernel
from ringverify.worlds.simulated import SimulatedWorld

torch_op = torch.ops.aten._scaled_dot_product_flash_attention
torch_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward

PROBLEMS = [
    Problem(batch=2, query_length=5, key_length=3, heads=2, head_dim=3),
    Problem(batch=2, query_length=6, heads=2, head_dim=4, causal=True),
    Problem(query_length=7, heads=6, key_heads=2, head_dim=5, causal=True, scale=0.7),
    Problem(query_length=4, heads=2, head_dim=3, causal=True, scale=-0.7),
    Problem(query_length=1, heads=1, head_dim=1),
]


@pytest.fixture(autouse=True)
def registered() -> None:
    """As an adapter does."""
    kernel.register()


def tensors(inputs: Inputs, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v and dout, heads first."""
    return [torch.from_numpy(x.swapaxes(1, 2).copy()).to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]


def without_dlse(problem: Problem) -> Inputs:
    """Inputs whose log-sum-exps have no cotangent: the operator takes none."""
    drawn = normal_inputs(problem)
    return Inputs(drawn.q, drawn.k, drawn.v, drawn.dout, np.zeros_like(drawn.dlse))


def by_name(*found: torch.Tensor) -> dict[str, np.ndarray]:
    """out, lse, dq, dk, dv as the oracle has them."""
    return results(*(x.double().transpose(1, 2).numpy() if x.dim() == 4 else x.double().numpy() for x in found))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_both_directions_agree_with_the_oracle(problem: Problem) -> None:
    """Through torch's dispatcher and its formula of the gradient, grouped heads and any scale."""
    inputs = without_dlse(problem)
    q, k, v, dout = tensors(inputs)
    for leaf in (q, k, v):
        leaf.requires_grad_()
    out, lse, *_ = torch_op(q, k, v, 0.0, problem.causal, scale=problem.scale)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert_agree(problem, inputs, by_name(out.detach(), lse.detach(), *gradients), oracle(problem, inputs), "float32")


def test_backward_takes_the_out_and_the_log_sum_exp_of_a_merge() -> None:
    """Two halves of the keys, each with the merged results: their dq add up, their dk and dv lie side by side."""
    problem = Problem(batch=2, query_length=4, key_length=6, heads=4, key_heads=2, head_dim=3)
    inputs = without_dlse(problem)
    q, k, v, dout = tensors(inputs)
    right = oracle(problem, inputs)
    out, lse = torch.from_numpy(right["out"].swapaxes(1, 2)).float(), torch.from_numpy(right["lse"]).float()
    state = torch.zeros((), dtype=torch.uint64)
    found = [
        torch_backward(dout, q, k[:, :, half], v[:, :, half], out, lse, None, None, 4, 3, 0.0, False, state, state)
        for half in (slice(0, 3), slice(3, 6))
    ]
    (dq, dk, dv), (dq_, dk_, dv_) = found
    gradients = (dq + dq_, torch.cat((dk, dk_), dim=2), torch.cat((dv, dv_), dim=2))
    assert_agree(problem, inputs, by_name(out, lse, *gradients), right, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_as_an_implementation_it_is_conformant(dtype: str) -> None:
    """Within what is allowed to weights that are rounded to the input dtype, and to nothing else."""

    @implementation(
        tensor_layout="bhsd", dtypes=(dtype,), lse=True, gqa=True, probabilities="input", world_sizes=(1,), name="flash"
    )
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = torch_op(q, k, v, 0.0, call.causal)
        return out, lse

    problem = Problem(batch=2, query_length=33, heads=4, key_heads=2, head_dim=8, dtype=dtype, causal=True)  # type: ignore[arg-type]
    for values in ("normal", "large_scores", "dominating_key"):
        case = Case(problem=problem, values=values)  # type: ignore[arg-type]
        observation = Runner(attend, SimulatedWorld()).run(case, gradients=True)
        assert observation.failure is None
        margin, finding = worst(case, attend.capabilities, observation, ("out", "lse", "dq", "dk", "dv"))
        assert finding is None
        assert margin > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_it_returns_has_the_shapes_that_torch_expects(dtype: torch.dtype) -> None:
    """Number, kinds, shapes and dtypes are those of the operator's own meta kernel."""
    shapes = ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8))
    seen = torch_op(*(torch.randn(shape, dtype=dtype) for shape in shapes))
    meant = torch_op(*(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes))
    assert len(seen) == len(meant) == 9
    for ours, theirs in zip(seen, meant, strict=True):
        assert type(ours) is type(theirs)
        if isinstance(ours, torch.Tensor):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_a_wrong_kernel_is_told_from_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these comparisons fails for a kernel that forgets the scale."""
    right = kernel._scores
    monkeypatch.setattr(kernel, "_scores", lambda q, k, causal, scale: right(q, k, causal, 1.0))
    problem = PROBLEMS[1]
    with pytest.raises(AssertionError):
        test_both_directions_agree_with_the_oracle(problem)
    with pytest.raises(AssertionError):
        test_as_an_implementation_it_is_conformant("float32")
    with pytest.raises(AssertionError):
        test_backward_takes_the_out_and_the_log_sum_exp_of_a_merge()


def test_what_it_does_not_do_is_refused() -> None:
    """Dropout, a debug mask, and a causal mask over different lengths, each with a line."""
    q = torch.randn(1, 1, 4, 8)
    for arguments, told in (
        ((q, q, q, 0.1), "no dropout"),
        ((q, q, q, 0.0, False, True), "no debug mask"),
        ((q, q[:, :, :3], q[:, :, :3], 0.0, True), "4 queries and 3 keys"),
    ):
        with pytest.raises(NotImplementedError, match=told):
            torch_op(*arguments)


def test_where_there_is_no_key_out_is_zero_and_the_log_sum_exp_plus_infinity() -> None:
    """As the GPU kernels have it."""
    q, none = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 0, 4)
    out, lse, *_ = torch_op(q, none, none)
    assert not out.any()
    assert bool((lse == torch.inf).all())
    assert lse.shape == (1, 2, 3)
