"""What torch's fused CPU op does by itself, so that a release that changes it is noticed, and that the kernel mends it.

Each test shows the raw op first. Where one fails because torch has mended it, the workaround can go.
"""

import math
import re

import numpy as np
import pytest
import torch
from by_tile import computed, inputs_of, worst_margin
from on_ranks import run_on_ranks, whole

from ringref.attention import attention
from ringref.problem import Problem
from ringref.rounding import UNDERFLOW, rms_error, witness_bound
from ringverify.ring.attention import ring_attention
from ringverify.ring.kernels import fused_cpu
from ringverify.ring.kernels.columns import in_columns, positive, to_width, with_lse_cotangent
from ringverify.ring.kernels.fused_cpu import FusedCPU
from ringverify.ring.kernels.kernel import KernelTile, MergedRows, Setting
from ringverify.ring.plan.kv_slices import KVTensors

forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
KERNEL = FusedCPU()
SQUARE = Problem(query_length=6, heads=2, head_dim=4)


def by_head(inputs):
    """q, k, v and dout as `(B, H, S, ...)`."""
    return [x.transpose(1, 2) for x in inputs[:4]]


def test_a_fully_masked_row_has_lse_zero_and_the_kernel_says_minus_infinity():
    """Out is 0 in both. As an lse of 0 it would take part in a merge, with the weight of a real score."""
    q, k, v, _ = by_head(inputs_of(SQUARE))
    bias = torch.zeros(6, 6)
    bias[2] = -math.inf
    out, lse = forward(q, k, v, 0.0, False, attn_mask=bias, scale=0.5)
    assert not bool(out[:, :, 2].any())
    assert torch.equal(lse[:, :, 2], torch.zeros(1, 2))
    masked = SQUARE.replace(key_length=3, causal=True)
    results, _ = computed(KERNEL, masked, inputs_of(masked))
    assert bool((results[1][:, :, :3] == -math.inf).all())
    assert not bool(results[0][:, :3].any())


def test_unequal_head_dimensions_are_refused_and_the_kernel_pads():
    """Zeros after the shorter one, whichever it is."""
    q, k, v, _ = by_head(inputs_of(SQUARE.replace(value_dim=2)))
    with pytest.raises(RuntimeError, match="same head size"):
        forward(q, k, v, 0.0, False, scale=0.5)
    for dims in ({"value_dim": 2}, {"value_dim": 9}):
        problem = SQUARE.replace(**dims)
        given = inputs_of(problem)
        assert worst_margin(problem, given, computed(KERNEL, problem, given)[0]) <= 1


def test_the_op_takes_no_cotangent_of_lse_and_the_kernel_brings_it_in():
    """The schema has none; with dlse alone the gradients are right."""
    names = [argument.name for argument in backward.default._schema.arguments]
    assert names[:6] == ["grad_out", "query", "key", "value", "out", "logsumexp"]
    assert not any("logsumexp" in name and "grad" in name for name in names)
    for dtype in ("float32", "bfloat16"):
        problem = SQUARE.replace(dtype=dtype)
        given = inputs_of(problem)
        given.dout.zero_()
        assert worst_margin(problem, given, computed(KERNEL, problem, given)[0]) <= 1
        without = given._replace(dlse=torch.zeros_like(given.dlse))
        assert worst_margin(problem, given, computed(KERNEL, problem, without)[0]) > 1


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_under_causality_a_scale_must_be_positive(scale):
    """The op multiplies −inf with it: +inf or NaN, in the very first row. Without causality it is right."""
    problem = SQUARE.replace(scale=scale, causal=True)
    given = inputs_of(problem)
    q, k, v, _ = by_head(given)
    out, _ = forward(q, k, v, 0.0, True, scale=scale)
    assert not bool(torch.isfinite(out[:, :, 0]).all())
    assert bool(torch.isfinite(forward(q, k, v, 0.0, False, scale=scale)[0]).all())
    assert bool(torch.isfinite(computed(KERNEL, problem, given)[0][0]).all())
    assert worst_margin(problem, given, computed(KERNEL, problem, given)[0]) <= 1


def gradients(problem, given, kernel=None):
    """dq, dk, dv by the raw op, or by the kernel in a single tile."""
    if kernel is not None:
        return computed(kernel, problem, given)[0][2:]
    q, k, v, dout = by_head(given)
    scale = problem.scale_value
    out, lse = forward(q, k, v, 0.0, problem.causal, scale=scale)
    found = backward(dout, q, k, v, out, lse, 0.0, problem.causal, scale=scale)
    return [x.transpose(1, 2) for x in found]


def rho(problem, given, found):
    """Root mean square errors of dq, dk and dv in units of u."""
    answer = attention(problem, *given.arrays())
    return [
        rms_error(x.double().numpy(), getattr(answer, name), problem.dtype)[0]
        for name, x in zip(("dq", "dk", "dv"), found, strict=True)
    ]


def test_float16_gradients_round_more_and_the_kernel_computes_them_in_float32():
    """Converted, tile by tile, they are off by little more than the rounding of what is returned."""
    problem = Problem(query_length=256, heads=4, head_dim=16, dtype="float16")
    given = inputs_of(problem, dlse=False)
    raw, ours = rho(problem, given, gradients(problem, given)), rho(problem, given, gradients(problem, given, KERNEL))
    assert all(r > o for r, o in zip(raw, ours, strict=True)), (raw, ours)


def test_bfloat16_is_summed_over_query_heads_in_bfloat16_and_the_kernel_sums_in_float32():
    """Eight query heads a key head round dk and dv more than one does in the op, and no more in the kernel."""
    one = Problem(query_length=256, heads=1, key_heads=1, head_dim=16, dtype="bfloat16")
    eight = one.replace(heads=8)
    single, many = inputs_of(one, dlse=False), inputs_of(eight, dlse=False)
    alone = rho(one, single, gradients(one, single))
    raw, ours = rho(eight, many, gradients(eight, many)), rho(eight, many, gradients(eight, many, KERNEL))
    for name, a, r, o in list(zip(("dq", "dk", "dv"), alone, raw, ours, strict=True))[1:]:
        assert r > math.sqrt(2) * a, (name, alone, raw, ours)
        assert o < r / math.sqrt(2), (name, alone, raw, ours)


@pytest.mark.parametrize(("rows", "block"), [(32, 32), (160, 32), (192, 64), (704, 64), (768, 256), (2048, 256)])
def test_bfloat16_is_summed_over_inner_blocks_in_bfloat16_and_the_kernel_sums_in_float32(rows, block):
    """The op's dv has the bits of a sum that is rounded after each inner block, and the kernel's rounds less."""
    problem = Problem(query_length=rows, key_length=64, head_dim=16, dtype="bfloat16")
    given = inputs_of(problem, dlse=False)
    q, k, v, dout = by_head(given)
    out, lse = forward(q, k, v, 0.0, False, scale=problem.scale_value)
    _, _, raw = backward(dout, q, k, v, out, lse, 0.0, False, scale=problem.scale_value)
    weights = torch.exp(q.double() @ k.double().mT * problem.scale_value - lse.double()[..., None]).bfloat16().double()
    running, once = torch.zeros_like(raw), (weights.mT @ dout.double()).bfloat16()
    for at in range(0, rows, block):
        part = slice(at, at + block)
        running = (running.double() + weights[:, :, part].mT @ dout[:, :, part].double()).bfloat16()
    alike = [float((raw == x).double().mean()) for x in (running, once)]
    assert alike[0] > 0.99  # all but those beside a tie
    assert alike[1] < 0.9 or rows == block
    ours = gradients(problem, given, KERNEL)
    assert rho(problem, given, ours)[2] < rho(problem, given, gradients(problem, given))[2]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [0.3, 1.0, 3.0])
def test_lse_of_bfloat16_is_as_exact_as_is_promised(size, causal):
    """The op's exp is not to float32's rounding, which streaming is; what users are promised, it keeps."""
    problem = Problem(query_length=600, heads=2, head_dim=16, dtype="bfloat16", causal=causal)
    given = inputs_of(problem, size=size)
    q, k, v, _ = by_head(given)
    exact = attention(problem, *given.arrays()).lse
    promised = re.search(r"bfloat16 inputs on CPU it is exact to (\S+),", ring_attention.__doc__).group(1)
    _, raw = forward(q, k, v, 0.0, causal, scale=problem.scale_value)
    _, ours = ring_attention(*given[:3], causal=causal, return_lse=True)
    _, wide = ring_attention(*given[:3], causal=causal, return_lse=True, kernel="streaming")
    errors = {name: np.abs(x.double().numpy() - exact) for name, x in (("raw", raw), ("ours", ours), ("wide", wide))}
    rounding = witness_bound("float32", problem.head_dim) * (1 + np.abs(exact))
    assert errors["raw"].max() > 4 * errors["wide"].max()
    assert errors["ours"].max() <= float(promised)
    assert bool((errors["wide"] <= rounding).all())


# -- columns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_three_narrow_columns_hold_a_float32(narrow):
    """What is left out is below the rounding of float32, or vanishes in float16; in its own dtype one is the number."""
    x = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
    columns = in_columns(x, getattr(torch, narrow))
    assert columns.shape == (64, 3)
    left = (columns.double().sum(dim=-1, keepdim=True) - x.double()).abs()
    # Each column rounds away u of what was left; three leave u ** 3, for bfloat16 the rounding of float32 itself.
    assert bool((left <= witness_bound("float32", 1) * x.double().abs() + UNDERFLOW[narrow]).all())
    assert not bool(
        (columns[:, :2].double().sum(dim=-1, keepdim=True) == columns.double().sum(dim=-1, keepdim=True)).all()
    )
    assert torch.equal(in_columns(x, torch.float32), x)


def test_columns_lower_the_row_sum_by_dlse():
    """Σ dout · out with them is Σ dout · out − dlse without; no dlse, no columns and no copy."""
    generator = torch.Generator().manual_seed(0)
    dout, out = torch.randn(2, 1, 3, 5, 4, generator=generator, dtype=torch.float64)
    dlse = torch.randn(1, 3, 5, generator=generator, dtype=torch.float64)
    rows = MergedRows(dout, out, torch.zeros_like(dlse), dlse)
    wider = [x.numpy() for x in with_lse_cotangent(rows)[:2]]
    expected = (dout * out).sum(dim=-1) - dlse
    size = (dout * out).abs().sum(dim=-1) + dlse.abs()
    bound = witness_bound("float64", 10) * size.numpy()
    assert bool((np.abs((wider[0] * wider[1]).sum(axis=-1) - expected.numpy()) <= bound).all())
    rows = rows._replace(dlse=None)
    assert with_lse_cotangent(rows) is rows


def test_what_is_wide_and_contiguous_enough_is_not_copied():
    """Views go to the op as they are, transposed ones too; a last axis with gaps is copied."""
    x = torch.randn(2, 3, 4)
    assert to_width(x, 4) is x
    assert to_width(x.transpose(0, 1), 4).data_ptr() == x.data_ptr()
    assert to_width(x.transpose(1, 2), 3).is_contiguous()
    assert torch.equal(to_width(x, 6)[..., 4:], torch.zeros(2, 3, 2))


def test_a_sign_goes_into_the_queries():
    """The scores stay, and 0 becomes queries of 0 with a scale of 1."""
    q = torch.randn(3)
    setting, tile = Setting("cpu", torch.float32, torch.float32, 3, 3, 0.25, None), KernelTile(q, q, q)
    assert positive(setting, tile) == (setting, tile, 1)
    for scale in (-0.25, 0.0):
        other, moved, sign = positive(setting._replace(scale=scale), tile)
        assert other.scale > 0
        assert torch.equal(moved.q * other.scale, q * scale)
        assert sign == (-1 if scale else 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_few_queries_read_every_key_once(dtype, monkeypatch):
    """As in decoding: the heads that share a key head are queries of one head. The op would read keys once for each."""
    asked = []

    def seen(q, k, v, *rest, **how):
        asked.append((q.shape[1:3], k.size(1)))
        return forward(q, k, v, *rest, **how)

    monkeypatch.setattr(fused_cpu, "cpu_forward", seen)
    for rows, shape in ((1, (2, 3)), (4, (2, 12)), (40, (6, 40))):
        problem = Problem(query_length=rows, key_length=70, batch=2, heads=6, key_heads=2, head_dim=8, dtype=dtype)
        given = inputs_of(problem)
        assert worst_margin(problem, given, computed(KERNEL, problem, given)[0]) <= 1
        assert asked.pop() == (shape, 2)
    assert not asked


@pytest.mark.parametrize(("rows", "copies"), [(64, False), (65, True)])
def test_a_block_is_not_copied_for_few_queries(rows, copies, monkeypatch):
    """They read it once, strided as it is."""
    copied = []
    packed = KVTensors.packed
    monkeypatch.setattr(KVTensors, "packed", lambda block: copied.append(block) or packed(block))
    problem = Problem(query_length=rows, key_length=80, heads=2, head_dim=4)
    given = inputs_of(problem)
    run = run_on_ranks(problem, given, "replicated_query", 2)
    assert worst_margin(problem, given, whole(problem, run, "replicated_query", 2)) <= 1
    assert bool(copied) == copies
