"""Under autocast the ring does what `scaled_dot_product_attention` does: dtypes in and out, and no autocast within."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from on_ranks import WORLD
from torch.nn.functional import scaled_dot_product_attention

from ringverify.ring import RingAttention, ring_attention, ring_sdpa, shard

pytestmark = pytest.mark.timeout(60)

KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LOWER = (torch.bfloat16, torch.float16)


def tensors(*dtypes):
    """q, k and v, `(2, 7, 2, 4)`, whose numbers every dtype holds."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 7, 2, 4, generator=generator).to(torch.bfloat16).to(torch.float32).to(d) for d in dtypes]


def attended(attend, inputs, lower=None):
    """out and the gradients, of a call under autocast to a dtype, or without."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.autocast("cpu", lower, enabled=lower is not None):
        out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]


def by_torch(q, k, v):
    """SDPA in our layout."""
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def by_context(q, k, v):
    """SDPA that is a ring."""
    with ring_sdpa():
        return by_torch(q, k, v)


@pytest.mark.parametrize("ours", [ring_attention, RingAttention(), by_context])
@pytest.mark.parametrize("lower", LOWER)
def test_dtypes_are_those_of_scaled_dot_product_attention(ours, lower):
    """Every mix of dtypes of q, k and v: the result's, the gradients', and which mixes raise."""
    for dtypes in itertools.product(KINDS, repeat=3):
        inputs = tensors(*dtypes)
        try:
            expected = [x.dtype for x in attended(by_torch, inputs, lower)]
        except RuntimeError:
            words = r"torch\.\w+ on rank 0: expected \w+, the dtype of q; autocast casts all but float64"
            with pytest.raises(ValueError, match=words):
                attended(ours, inputs, lower)
            continue
        assert [x.dtype for x in attended(ours, inputs, lower)] == expected, dtypes


@pytest.mark.parametrize("lower", LOWER)
def test_what_is_computed_is_the_call_on_cast_inputs(lower):
    """Bit for bit, forward and backward; lse is float32 as without autocast."""
    inputs = tensors(torch.float32, torch.float32, torch.float32)
    plain = attended(lambda *x: ring_attention(*(t.to(lower) for t in x), causal=True), inputs)
    cast = attended(lambda *x: ring_attention(*x, causal=True), inputs, lower)
    assert cast[0].dtype == lower
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))
    with torch.autocast("cpu", lower):
        assert ring_attention(*inputs, return_lse=True)[1].dtype == torch.float32


def test_backward_is_the_same_inside_and_outside():
    """It runs without autocast either way."""
    inputs = tensors(torch.float32, torch.bfloat16, torch.float32)
    outside = attended(ring_attention, inputs, torch.bfloat16)
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        out = ring_attention(*leaves)
        inside = [out, *torch.autograd.grad(out, leaves, out.detach())]
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


def test_autocast_that_is_off_or_of_another_device_does_nothing():
    """Disabled within, and of CUDA around a call on CPU."""
    inputs = tensors(torch.float32, torch.float32, torch.float32)
    plain = ring_attention(*inputs)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert torch.equal(ring_attention(*inputs), plain)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert torch.equal(ring_attention(*inputs), plain)
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_under_autocast_compute_together(method, dtype):
    """As they would on inputs cast before, also where q alone is narrow; autocast is of each rank's own thread."""
    inputs = tensors(dtype, torch.float32, torch.float32)

    def program(_):
        shards = [shard(x) for x in inputs]
        how = {"causal": True, "query_length": 7, "key_length": 7, "method": method, "check_shards": True}
        plain = attended(lambda *x: ring_attention(*(t.bfloat16() for t in x), **how), shards)
        cast = attended(lambda *x: ring_attention(*x, **how), shards, torch.bfloat16)
        return all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True)) and dist.get_rank()

    run = WORLD.run(program, None, world_size=3, seed=0, deadline=30)
    assert run.failure is None, run.failure.detail
    assert run.results == (0, 1, 2)
