"""A ring of one rank needs no process group, and bad input is refused before anything is sent."""

import math

import pytest
import torch

from ringref.problem import Problem
from ringref.sharding import key_positions, query_positions
from ringverify.implementation import AttentionCall
from ringverify.ring.declared import allgather, ring
from ringverify.ring.ring import allgather_attention, ring_attention

BOTH = pytest.mark.parametrize("attend", [ring_attention, allgather_attention])


def call_of(problem, *, rank=0, world_size=1, sharding="contiguous"):
    """A call without a process group: communicating would raise an AttributeError or TypeError."""
    queries = query_positions(sharding, problem.nq, world_size)[rank]
    keys = key_positions(sharding, problem.nk, world_size)[rank]
    return AttentionCall(
        group=None,
        rank=rank,
        world_size=world_size,
        problem=problem,
        sharding=sharding,
        positions=torch.as_tensor(queries),
        key_positions=torch.as_tensor(keys),
    )


def inputs_of(call, seed=0):
    """This rank's q, k and v, as leaves."""
    p, generator = call.problem, torch.Generator().manual_seed(seed)
    queries, keys = len(call.positions), len(call.key_positions)
    shapes = (p.batch, queries, p.heads, p.head_dim), (p.batch, keys, p.hk, p.head_dim), (p.batch, keys, p.hk, p.dv)
    dtype = getattr(torch, p.dtype)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@BOTH
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_dtypes_layouts_and_shapes_of_results(attend, dtype):
    """out in the input dtype, lse at least float32, gradients shaped like the inputs."""
    call = call_of(Problem(query_length=5, key_length=3, heads=4, key_heads=2, head_dim=3, value_dim=2, dtype=dtype))
    q, k, v = inputs_of(call)
    out, lse = attend(q, k, v, call)
    assert (out.shape, out.dtype) == ((1, 5, 4, 2), q.dtype)
    assert (lse.shape, lse.dtype) == ((1, 4, 5), torch.float64 if dtype == "float64" else torch.float32)
    (out.float().square().sum() + lse.square().sum()).backward()
    assert [(x.grad.shape, x.grad.dtype) for x in (q, k, v)] == [(x.shape, x.dtype) for x in (q, k, v)]


@BOTH
def test_gradients_are_those_of_finite_differences(attend):
    """gradcheck in float64, through out and lse, with every query attending something."""
    call = call_of(Problem(query_length=4, heads=2, key_heads=1, head_dim=2, causal=True, softcap=3.0, dtype="float64"))
    assert torch.autograd.gradcheck(lambda *x: attend(*x, call), inputs_of(call))


@BOTH
@pytest.mark.parametrize(("nq", "nk"), [(0, 0), (0, 3), (3, 0)])
def test_lengths_of_zero(attend, nq, nk):
    """No keys: out 0, lse −inf; no queries: gradients 0."""
    call = call_of(Problem(query_length=nq, key_length=nk, heads=2, head_dim=2))
    q, k, v = inputs_of(call)
    out, lse = attend(q, k, v, call)
    assert torch.equal(out, torch.zeros(1, nq, 2, 2))
    assert torch.equal(lse, torch.full((1, 2, nq), -math.inf))
    (out.sum() + lse.exp().sum()).backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in (q, k, v))


@BOTH
def test_only_the_inputs_that_require_a_gradient_get_one(attend):
    """Each alone."""
    call = call_of(Problem(query_length=4, head_dim=2))
    for wanted in range(3):
        inputs = inputs_of(call)
        for place, x in enumerate(inputs):
            x.requires_grad_(place == wanted)
        attend(*inputs, call)[0].sum().backward()
        assert [x.grad is not None for x in inputs] == [place == wanted for place in range(3)]


@BOTH
def test_lse_alone_may_be_differentiated(attend):
    """out without a cotangent counts as zero."""
    call = call_of(Problem(query_length=4, head_dim=2, dtype="float64"))
    q, k, v = inputs_of(call)
    dq, dk, dv = torch.autograd.grad(attend(q, k, v, call)[1].sum(), [q, k, v])
    assert bool(dq.any())
    assert bool(dk.any())
    assert not bool(dv.any())


@BOTH
def test_a_second_derivative_is_refused_clearly(attend):
    """Rather than being silently wrong."""
    call = call_of(Problem(query_length=4, head_dim=2))
    q, k, v = inputs_of(call)
    (dq,) = torch.autograd.grad(attend(q, k, v, call)[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()


@BOTH
def test_backward_may_run_twice(attend):
    """What is saved is not a buffer that the first backward used up."""
    call = call_of(Problem(query_length=4, head_dim=2, causal=True))
    inputs = inputs_of(call)
    out, lse = attend(*inputs, call)
    loss = out.square().sum() + lse.sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, inputs), strict=True))


@BOTH
def test_autocast_does_not_lower_the_precision_of_sums(attend):
    """Bit for bit the same with autocast to bfloat16 around it, forward and backward."""
    call = call_of(Problem(query_length=6, head_dim=4))

    def results():
        inputs = inputs_of(call)
        out, lse = attend(*inputs, call)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), inputs)

    plain = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(plain, results(), strict=True))


PROBLEM = Problem(query_length=5, heads=2, key_heads=1, head_dim=3)


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[:, :1], k, v), r"q has shape \(1, 1, 2, 3\) on rank 1 of 2: expected \(1, 2, 2, 3\)"),
        (lambda q, k, v: (q, k.repeat(1, 1, 2, 1), v), r"k has shape \(1, 2, 2, 3\).*expected \(1, 2, 1, 3\)"),
        (lambda q, k, v: (q, k, v[..., :1]), r"v has shape \(1, 2, 1, 1\).*expected \(1, 2, 1, 3\)"),
        (lambda q, k, v: (q[0], k, v), r"q has shape \(2, 2, 3\)"),
        (lambda q, k, v: (q, k.double(), v), r"k is torch.float64 on rank 1: the problem says float32"),
        (lambda q, k, v: (q.half(), k.half(), v.half()), r"q is torch.float16"),
        (lambda q, k, v: (q, k, v.to("meta")), "v is on meta and q on cpu"),
    ],
)
def test_bad_tensors_are_refused_before_any_communication(attend, change, message):
    """One ValueError that shows the value and what was expected; there is no group here to communicate with."""
    call = call_of(PROBLEM, rank=1, world_size=2)
    q, k, v = change(*inputs_of(call))
    with pytest.raises(ValueError, match=message):
        attend(q, k, v, call)


@BOTH
def test_positions_that_are_not_the_shardings_are_refused(attend):
    """Masks would be silently wrong."""
    contiguous = call_of(PROBLEM, rank=1, world_size=2)
    wrong = AttentionCall(**{**vars(contiguous), "sharding": "striped"})
    with pytest.raises(ValueError, match=r"positions=\[3, 4\] on rank 1 of 2: sharding 'striped' puts \[1, 3\] there"):
        attend(*inputs_of(contiguous), wrong)
    with pytest.raises(ValueError, match="rank=2 with world_size=2"):
        attend(*inputs_of(contiguous), AttentionCall(**{**vars(contiguous), "rank": 2}))


def test_both_are_declared_under_their_names():
    """Everything of the written semantics, nothing undeclared that could be reported as unsupported."""
    assert (ring.name, allgather.name) == ("ring", "allgather")
    for implementation in (ring, allgather):
        declared = implementation.capabilities
        flags = "lse lse_gradient gqa value_dim scale window documents key_lengths cross_lengths softcap uneven"
        flags += " empty_shards subgroups gradients deterministic"
        assert all(getattr(declared, flag) for flag in flags.split())
        assert declared.causal == "both"
        assert declared.dilation == ("split", "shared")
        assert len(declared.shardings) == len(declared.dtypes) == 4
