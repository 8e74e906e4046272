"""One process on its own, without a process group: every argument, every layout, and what autograd may ask for."""

import contextlib
import itertools
import math
import random

import numpy as np
import pytest
import torch
from by_address import OFFSETS, ByAddress, shifted
from by_tile import inputs_of, setting_of, worst_margin

from ringref.problem import DTYPES, Dilation, Problem
from ringverify.ring.attention import ring_attention
from ringverify.ring.kernels.fused_cpu import FusedCPU
from ringverify.ring.kernels.kernel import Extent
from ringverify.ring.kernels.streaming import Streaming
from ringverify.ring.method import METHODS
from ringverify.ring.sides import BUDGET_SHARE, SMALLEST

BY_METHOD = pytest.mark.parametrize("method", METHODS)


def shuffled(length, world_size):
    """A sharding function whose rows are in no order."""
    return [random.Random(0).sample(range(length), length)] if world_size == 1 else NotImplemented


def call(problem, q, k, v, **how):
    """`ring_attention` of a problem, by the keywords that a user would give."""
    fields = ["causal", "window", "documents", "key_lengths", "dilation", "scale", "softcap"]
    return ring_attention(q, k, v, **{name: getattr(problem, name) for name in fields}, **how)


def results(problem, given, **how):
    """out, lse, dq, dk and dv."""
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    out, lse = call(problem, *leaves, return_lse=True, **how)
    cotangents = [given.dout, torch.zeros_like(lse) if given.dlse is None else given.dlse]
    return [out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, cotangents)]


PROBLEMS = [
    Problem(query_length=5, key_length=3, heads=4, key_heads=2, head_dim=3, value_dim=2),
    Problem(query_length=7, heads=2, head_dim=4, causal=True),
    Problem(query_length=70, heads=2, key_heads=1, head_dim=4, causal=True),
    Problem(query_length=6, key_length=9, heads=2, head_dim=4, window=(3, 1)),
    Problem(query_length=9, key_length=4, heads=2, head_dim=4, causal=True),
    Problem(batch=2, query_length=9, heads=3, head_dim=4, documents=(1, 4, 4, 8), causal=True),
    Problem(batch=3, query_length=6, heads=2, head_dim=4, key_lengths=(6, 0, 3)),
    Problem(query_length=11, heads=4, key_heads=2, head_dim=4, dilation=Dilation(((4, 1), (8, 3)), heads="shared")),
    Problem(query_length=11, heads=3, head_dim=4, dilation=Dilation(((4, 2), (8, 3))), causal=True),
    Problem(query_length=5, heads=2, head_dim=4, softcap=1.5, scale=-0.8),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_world_of_one_computes_attention(dtype):
    """Every constraint, by every method, out and lse and all gradients, and whatever computes the tiles."""
    for problem in PROBLEMS:
        problem = problem.replace(dtype=dtype)
        given = inputs_of(problem)
        for how in (
            *({"method": method} for method in METHODS),
            {"kernel": "streaming"},
            {"memory_budget": 1},
            {"sharding": "zigzag", "transport": "blocking"},
            {"sharding": "replicated_query"},
        ):
            assert worst_margin(problem, given, results(problem, given, **how)) <= 1, (problem, how)


def test_rows_in_any_order_are_attended_by_position():
    """A sharding function deals positions as it likes: masks follow them, and results lie where the inputs do."""
    for problem in PROBLEMS:
        given = inputs_of(problem)
        i, j = (torch.tensor(shuffled(length, 1)[0]) for length in (problem.nq, problem.nk))
        mixed = given._replace(
            q=given.q[:, i], k=given.k[:, j], v=given.v[:, j], dout=given.dout[:, i], dlse=given.dlse[:, :, i]
        )
        out, lse, dq, dk, dv = results(problem, mixed, sharding=shuffled)
        i, j = i.argsort(), j.argsort()
        assert worst_margin(problem, given, [out[:, i], lse[:, :, i], dq[:, i], dk[:, j], dv[:, j]]) <= 1, problem


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_shapes_of_results(dtype):
    """out and gradients in the dtype of the inputs, lse at least in float32; out alone unless lse is asked for."""
    problem = PROBLEMS[0].replace(dtype=dtype)
    given = inputs_of(problem)
    out, lse, *gradients = results(problem, given)
    assert (out.shape, out.dtype) == ((1, 5, 4, 2), given.q.dtype)
    assert (lse.shape, lse.dtype) == ((1, 4, 5), torch.float64 if dtype == "float64" else torch.float32)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in given[:3]]
    alone = call(problem, *given[:3])
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, out)


@BY_METHOD
def test_gradients_are_those_of_finite_differences(method):
    """gradcheck in float64, through out and lse."""
    problem = Problem(query_length=4, heads=2, key_heads=1, head_dim=2, causal=True, softcap=3.0, dtype="float64")
    leaves = [x.requires_grad_() for x in inputs_of(problem)[:3]]
    assert torch.autograd.gradcheck(lambda *x: call(problem, *x, method=method, return_lse=True), leaves)


@BY_METHOD
@pytest.mark.parametrize(("nq", "nk"), [(0, 0), (0, 3), (3, 0)])
def test_lengths_of_zero(method, nq, nk):
    """No keys: out 0, lse −inf; no queries: gradients 0."""
    for causal in (False, True):
        problem = Problem(query_length=nq, key_length=nk, heads=2, head_dim=2, causal=causal)
        out, lse, *gradients = results(problem, inputs_of(problem), method=method)
        assert torch.equal(out, torch.zeros(1, nq, 2, 2))
        assert torch.equal(lse, torch.full((1, 2, nq), -math.inf))
        assert not any(bool(x.any()) for x in gradients)


def test_documents_and_key_lengths_may_be_tensors_or_arrays():
    """Of any integer dtype, as `cu_seqlens` come; the same bits as from tuples."""
    for problem in PROBLEMS[5:7]:
        given = inputs_of(problem)
        name = "documents" if problem.documents is not None else "key_lengths"
        offsets = getattr(problem, name)
        expected = call(problem, *given[:3])
        for other in (torch.tensor(offsets, dtype=torch.int32), np.array(offsets), list(offsets)):
            assert torch.equal(expected, ring_attention(*given[:3], causal=problem.causal, **{name: other}))


def test_only_the_inputs_that_require_a_gradient_get_one():
    """Every subset of them, with the same bits as all together; none is fine, and saves nothing.

    All of them for out alone: a cotangent of lse, be it 0, takes columns of its own, and so other products.
    """
    problem = PROBLEMS[2]
    given = inputs_of(problem)
    together = [x.clone().requires_grad_() for x in given[:3]]
    every = torch.autograd.grad(call(problem, *together), together, given.dout)
    for wanted in itertools.product((False, True), repeat=3):
        leaves = [x.clone().requires_grad_(need) for x, need in zip(given[:3], wanted, strict=True)]
        out = call(problem, *leaves)
        assert out.requires_grad == any(wanted)
        if any(wanted):
            out.backward(given.dout)
        for leaf, need, gradient in zip(leaves, wanted, every, strict=True):
            assert (leaf.grad is not None) == need
            assert not need or torch.equal(leaf.grad, gradient)


@BY_METHOD
def test_out_or_lse_alone_may_be_differentiated(method):
    """What has no cotangent counts as zero: the two gradients add up to that of both."""
    problem = PROBLEMS[1].replace(dtype="float64")
    given = inputs_of(problem)
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    out, lse = call(problem, *leaves, return_lse=True, method=method)
    of_out = torch.autograd.grad(out, leaves, given.dout, retain_graph=True)
    of_lse = torch.autograd.grad(lse, leaves, given.dlse, retain_graph=True)
    nothing = torch.zeros_like(given.dout)
    for cotangents, gradients in ((given._replace(dlse=None), of_out), (given._replace(dout=nothing), of_lse)):
        assert worst_margin(problem, cotangents, [out.detach(), lse.detach(), *gradients]) <= 1
    assert bool(of_lse[0].any())
    assert not bool(of_lse[2].any())


def test_differentiating_twice_is_refused_and_create_graph_alone_is_not():
    """A gradient penalty would be silently wrong; the error names the ring and a way out, before any communication."""
    for problem in (PROBLEMS[1], PROBLEMS[7]):
        leaves = [x.requires_grad_() for x in inputs_of(problem)[:3]]
        plain = torch.autograd.grad(call(problem, *leaves).square().sum(), leaves)
        gradients = torch.autograd.grad(call(problem, *leaves).square().sum(), leaves, create_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))
        for gradient in gradients:
            with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*create_graph=True") as raised:
                gradient.square().sum().backward(retain_graph=True)
            assert "\n" not in str(raised.value)


def test_backward_may_run_twice():
    """What is saved is not a buffer that the first backward used up."""
    problem = PROBLEMS[2]
    leaves = [x.requires_grad_() for x in inputs_of(problem)[:3]]
    out, lse = call(problem, *leaves, return_lse=True)
    loss = out.square().sum() + lse.sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, leaves), strict=True))


@pytest.mark.parametrize("kernel", ["fused_cpu", "streaming"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_autocast_does_not_lower_the_precision_of_sums(kernel, dtype):
    """Bit for bit the same with autocast to bfloat16 around it, both ways, of dtypes that it leaves alone."""
    problem = PROBLEMS[4].replace(dtype=dtype)
    given = inputs_of(problem)
    plain = results(problem, given, kernel=kernel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(plain, results(problem, given, kernel=kernel), strict=True))


def layouts(x):
    """The same numbers, lying otherwise in memory."""
    batch, rows, heads, width = x.shape
    yield "heads first", x.transpose(1, 2).contiguous().transpose(1, 2)
    yield "width first", x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    every_other = torch.full((batch, 2 * rows, heads, 3 * width), math.nan, dtype=x.dtype)[:, ::2, :, 1::3]
    yield "with gaps", every_other.copy_(x)
    within = torch.full((batch + 1, rows + 3, heads + 1, width + 1), math.nan, dtype=x.dtype)
    yield "offset", within[1:, 2:-1, 1:, 1:].copy_(x)
    for offset in OFFSETS:
        yield f"{offset} bytes on", shifted(x, offset)
    backwards = x.flip(1).contiguous()
    yield "of one storage", torch.cat([backwards, x], dim=1)[:, rows:]


def changing(problem, kernel):
    """The layouts in which some result has other bits than where inputs and cotangents lie as torch lays them."""
    given = inputs_of(problem)
    expected = results(problem, given, kernel=kernel)
    for names in zip(*(layouts(x) for x in given[:4]), strict=True):
        q, k, v, dout = (x for _, x in names)
        assert all(torch.equal(a, b) for a, b in zip((q, k, v, dout), given, strict=False))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = call(problem, *leaves, return_lse=True, kernel=kernel)
        found = [out, lse, *torch.autograd.grad([out, lse], leaves, [dout, given.dlse])]
        if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
            yield names[0][0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("kernel", ["fused_cpu", "streaming"])
def test_inputs_give_the_same_bits_however_they_lie_in_memory(dtype, kernel):
    """Transposed, strided, offset, unaligned; the cotangents too. Values beside them are NaN and are not read.

    Once as this processor multiplies, and once as one does whose bits depend on the addresses of operands.
    """
    for problem, products in itertools.product(PROBLEMS[:7], (contextlib.nullcontext(), ByAddress())):
        with products:
            assert list(changing(problem.replace(dtype=dtype), kernel)) == [], problem


def test_products_by_address_have_other_bits_at_other_addresses():
    """The stand-in that this rests on: it can tell addresses apart, by as much as another order of a sum makes."""
    one, other = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with ByAddress():
        found = [shifted(one, offset) @ other for offset in (0, *OFFSETS)]
    assert not all(torch.equal(found[0], x) for x in found)
    assert float((found[0] - torch.stack(found)).abs().max()) < 100 * torch.finfo(torch.float64).eps
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with ByAddress():
        outs = [fused(*[shifted(x[None, None], offset) for x in (one, other, one)])[0] for offset in (0, *OFFSETS)]
    assert not all(torch.equal(outs[0], x) for x in outs)


@pytest.mark.parametrize("kernel", ["fused_cpu", "streaming"])
def test_expanded_inputs_give_the_same_bits_and_their_gradient_is_summed(kernel):
    """One head of keys for all, as a view without memory of its own; the cotangent of a sum is expanded as well."""
    problem = Problem(batch=2, query_length=6, heads=4, head_dim=4, causal=True)
    given = inputs_of(problem)
    k, v = (x[:, :, :1].clone().requires_grad_() for x in given[1:3])
    wide = [x.detach().repeat(1, 1, 4, 1).requires_grad_() for x in (k, v)]
    out = ring_attention(given.q, k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1), causal=True, kernel=kernel)
    expected = ring_attention(given.q, *wide, causal=True, kernel=kernel)
    assert torch.equal(out, expected)
    found = torch.autograd.grad(out.sum(), (k, v))
    whole = torch.autograd.grad(expected, wide, torch.ones_like(expected))
    assert all(torch.equal(a, b.sum(dim=2, keepdim=True)) for a, b in zip(found, whole, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_float16_scores_beyond_its_largest_number(causal):
    """The call as a whole: finite, and right to rounding."""
    problem = Problem(query_length=40, heads=2, head_dim=8, scale=1.0, causal=causal, dtype="float16")
    given = inputs_of(problem, size=200.0)
    found = results(problem, given)
    assert float(found[1].max()) > torch.finfo(torch.float16).max
    assert worst_margin(problem, given, found) <= 1


def spied(monkeypatch, kernel):
    """The sides of the tiles that a kernel is given."""
    sides = []
    for name in ("forward", "backward"):
        original = getattr(kernel, name)

        def seen(self, setting, tile, *rows, original=original):
            sides.append((tile.q.size(2), tile.k.size(2)))
            return original(self, setting, tile, *rows)

        monkeypatch.setattr(kernel, name, seen)
    return sides


def test_a_memory_budget_makes_tiles_smaller(monkeypatch):
    """From those of one call down to the smallest; what a tile takes fits, and the results are as right."""
    sides = spied(monkeypatch, FusedCPU)
    problem = Problem(query_length=200, heads=2, head_dim=4, causal=True, dtype="bfloat16")
    given = inputs_of(problem)
    largest = {}
    setting = setting_of(problem, "cpu")
    for rows in (128, 64, 32, 1):
        sides.clear()
        # A part is set aside for masks.
        budget = BUDGET_SHARE * FusedCPU().held(setting, Extent(1, 2, 2, rows, rows)) // (BUDGET_SHARE - 1) + 1
        assert worst_margin(problem, given, results(problem, given, memory_budget=budget)) <= 1
        largest[rows] = max(side[0] for side in sides)
    assert largest == {128: 128, 64: 64, 32: SMALLEST, 1: SMALLEST}


@pytest.mark.parametrize(
    ("dtype", "forward", "backward"),
    [("float32", True, True), ("float64", True, True), ("bfloat16", True, False), ("float16", False, False)],
)
def test_alone_a_rank_makes_one_call_where_its_sums_are_as_wide(monkeypatch, dtype, forward, backward):
    """On CPU, causal: not for what is converted, gradients in bfloat16 and all in float16."""
    sides = spied(monkeypatch, FusedCPU)
    rows = 4200  # more than tiles of bfloat16 have
    q, k, v = (torch.ones(1, rows, 1, 4, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3))
    out = ring_attention(q, k, v, causal=True)
    assert (sides == [(rows, rows)]) == forward
    sides.clear()
    out.sum().backward()
    assert (sides == [(rows, rows)]) == backward


def test_a_kernel_asked_for_is_the_one_that_computes(monkeypatch):
    """And `auto` takes the fused one, but for softcap."""
    fused, streaming = spied(monkeypatch, FusedCPU), spied(monkeypatch, Streaming)
    q, k, v = inputs_of(PROBLEMS[1])[:3]
    for how, wanted in (({}, fused), ({"kernel": "fused_cpu"}, fused), ({"kernel": "streaming"}, streaming)):
        ring_attention(q, k, v, **how)
        assert wanted
        assert not (streaming if wanted is fused else fused)
        wanted.clear()
    ring_attention(q, k, v, softcap=1.0)
    assert streaming
    assert not fused


def test_inputs_that_are_not_finite_leave_masks_to_the_streaming_kernel(monkeypatch):
    """A fused op multiplies what a mask excludes with 0. Rows before the NaN keep the bits of the other kernel."""
    problem = Problem(query_length=8, heads=2, head_dim=4, causal=True)
    clean = results(problem, inputs_of(problem), kernel="streaming")
    fused, streaming = spied(monkeypatch, FusedCPU), spied(monkeypatch, Streaming)
    results(problem, inputs_of(problem))
    assert fused
    assert not streaming
    fused.clear()
    given = inputs_of(problem)
    given.k[:, 5:], given.v[:, 5:] = math.nan, math.inf
    spoilt = results(problem, given)
    assert streaming
    assert not fused
    for axis, before, after in zip((1, 2, 1), clean, spoilt, strict=False):
        assert torch.equal(before.narrow(axis, 0, 5), after.narrow(axis, 0, 5))
    assert bool(spoilt[0][:, 5:].isnan().any())


def test_what_computes_a_call_is_told_with_the_reasons(capsys):
    """With `explain`, a line for the method and one for the kernel, on standard error; else nothing."""
    q, k, v = inputs_of(PROBLEMS[1])[:3]
    ring_attention(q, k, v)
    assert capsys.readouterr() == ("", "")
    ring_attention(q, k, v, method="allgather", softcap=2.0, explain=True)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "ring_attention: method allgather: nothing is sent, there is one rank"
    assert told[1].startswith("ring_attention: kernel streaming: fused_cpu knows no softcap; ")
