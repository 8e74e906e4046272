"""The kernels for CUDA without a GPU: definitions stand in for their ops, and refuse what those refuse.

What the real ones take for granted is in torch's sources, aten/src/ATen/native/transformers/cuda: attention_backward.cu
makes grad_out contiguous, and for flash out too, but hands out on to the memory-efficient kernel as it is; with 16-bit
inputs kernel_backward.h adds up dout·out itself, from rows of out that lie `num_heads * head_dim_value` apart. What
they refuse is there too: attention.cu and attention_backward.cu (shapes), `check_supported` of kernel_forward.h and
kernel_backward.h (addresses and strides), flash_api.cpp. Flash checks no address, and reads 16 bytes at one. Every call
is made once more on the device "meta", of torch's own op, which checks its arguments and says the shapes of results.
"""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from by_tile import computed, inputs_of, setting_of, worst_margin
from on_ranks import WORLD

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case
from ringverify.cases.inputs import make_inputs
from ringverify.cases.running import Task, run_rank
from ringverify.ring import attention, calls
from ringverify.ring.declared import allgather, ring
from ringverify.ring.kernels import fused_cuda
from ringverify.ring.kernels.choose import choose_kernel
from ringverify.ring.kernels.flex import Flex
from ringverify.ring.kernels.fused_cuda import LSE_ALIGNMENT, EfficientCUDA, FlashCUDA
from ringverify.ring.kernels.kernel import Extent, KernelTile, MergedRows

READ_BYTES = 16
"""Bytes that are read at a time: addresses and strides are multiples of it."""


def as_read(x, *strides):
    """`x` as code sees it that takes some of its strides for granted; `None` stands for one that is asked for."""
    assert x.stride(-1) == 1
    found = [own if one is None else one for one, own in zip(strides, x.stride(), strict=True)]
    return x.as_strided(x.shape, found, x.storage_offset())


def readable(*tensors):
    """What both ops ask of q, k, v and, where they say so, of others: `(B, H, S, D)` with 16 bytes at a time."""
    for x in tensors:
        assert x.stride(-1) == 1, "not contiguous in the last dimension"
        assert x.data_ptr() % READ_BYTES == 0, "is not correctly aligned"
        assert x.size(-1) % (READ_BYTES // x.element_size()) == 0, "head dimension"
        for stride in x.stride()[:3]:  # of an axis of length 1 too
            assert stride * x.element_size() % READ_BYTES == 0, "no kernel found to launch, or misaligned"


def agree_in_shape(q, k, v):
    """Batch and key lengths agree, heads divide one another, and q and k are as wide."""
    assert q.size(0) == k.size(0) == v.size(0)
    assert k.shape[1:3] == v.shape[1:3]
    assert q.size(1) % k.size(1) == 0
    assert q.size(3) == k.size(3)
    assert q.dtype == k.dtype == v.dtype


def as_described(op, *arguments, scale):
    """The shapes that torch's own op says it returns."""
    there = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    return [x.shape if isinstance(x, torch.Tensor) else None for x in op(*there, scale=scale)]


def scores(q, k, bias, causal, scale):
    """Scores in float32, −inf where a pair is excluded; grouped-query heads repeat their keys."""
    s = q.float() @ k.float().repeat_interleave(q.size(1) // k.size(1), dim=1).transpose(2, 3) * scale
    if bias is not None:
        assert bias.dtype == q.dtype, "invalid dtype for bias - should match query's dtype"
        assert bias.shape == s.shape, "attn_bias: wrong shape"
        assert bias.stride(-1) == 1, "attn_bias: wrong alignment (last dimension must be contiguous)"
        assert bias.data_ptr() % READ_BYTES == 0, "attn_bias_ptr is not correctly aligned"
        for size, stride in zip(bias.shape[:3], bias.stride()[:3], strict=True):
            assert size == 1 or stride * bias.element_size() % READ_BYTES == 0, "attn_bias is not correctly aligned"
        s = s + bias.float()
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf) if causal else s


def forward_by_definition(q, k, v, bias, causal, scale):
    """out and lse; 0 and −inf for a row of nothing."""
    agree_in_shape(q, k, v)
    readable(q, k, v)
    s = scores(q, k, bias, causal, scale)
    lse = s.logsumexp(dim=-1)
    p = (s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = p @ v.float().repeat_interleave(q.size(1) // v.size(1), dim=1)
    return out.to(q.dtype), lse


def backward_by_definition(dout, q, k, v, out, lse, bias, causal, scale):
    """dq, dk and dv of `(B, H, S, ...)` in the dtype of the inputs, out and lse read as the caller says."""
    agree_in_shape(q, k, v)
    readable(q, k, v, out, dout)
    assert dout.shape == out.shape == (*q.shape[:3], v.size(3))
    assert lse.dtype == torch.float32
    group = q.size(1) // k.size(1)
    wide_k, wide_v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    p = (scores(q, k, bias, causal, scale) - lse[..., None]).exp()
    delta = (dout.float() * out.float()).sum(dim=-1, keepdim=True)
    ds = p * (dout.float() @ wide_v.transpose(2, 3) - delta) * scale
    dk, dv = ds.transpose(2, 3) @ q.float(), p.transpose(2, 3) @ dout.float()
    dk, dv = (x.unflatten(1, (-1, group)).sum(dim=2) for x in (dk, dv))
    return tuple(x.to(q.dtype) for x in (ds @ wide_k, dk, dv))


@pytest.fixture
def ops(monkeypatch):
    """The four ops; by name how often each was called, and the deterministic "modes" in which backwards were."""
    calls = dict.fromkeys(("efficient", "efficient_backward", "flash", "flash_backward"), 0)
    calls["modes"] = []

    def note_mode():
        calls["modes"].append(torch.get_deterministic_debug_mode())

    described = {
        name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}")
        for op in ("efficient_attention", "flash_attention")
        for name in (op, f"{op}_backward")
    }

    def efficient(q, k, v, bias, compute_lse, dropout, causal, *, scale):
        calls["efficient"] += 1
        assert compute_lse
        assert not dropout
        assert q.size(1) == k.size(1)
        out, lse = forward_by_definition(q, k, v, bias, causal, scale)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # kernel_forward.h, 7. Calculate logsumexp
        lse = torch.nn.functional.pad(lse, (0, -lse.size(-1) % LSE_ALIGNMENT), value=torch.inf)
        op = described["efficient_attention"]
        assert as_described(op, q, k, v, bias, compute_lse, dropout, causal, scale=scale)[:2] == [out.shape, lse.shape]
        return out, lse, None, None

    def efficient_backward(dout, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal, *, scale):
        calls["efficient_backward"] += 1
        note_mode()
        assert q.size(1) == k.size(1)
        assert wanted == [True, True, True, False]
        assert lse.stride(-1) == 1
        assert lse.stride(-2) % LSE_ALIGNMENT == 0
        arguments = dout, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal
        shapes = as_described(described["efficient_attention_backward"], *arguments, scale=scale)
        assert shapes[:3] == [q.shape, k.shape, v.shape]
        if out.dtype != torch.float32:  # for float32 torch adds dout·out up, by their real strides
            heads, width = out.size(1), out.size(3)
            out = as_read(out.transpose(1, 2), None, heads * width, None, 1).transpose(1, 2)
        lse = lse[..., : q.size(2)]
        return *backward_by_definition(dout, q, k, v, out, lse, bias, causal, scale), None

    def flash(q, k, v, dropout, causal, debug, *, scale):
        calls["flash"] += 1
        assert q.dtype in (torch.bfloat16, torch.float16)
        assert q.size(-1) == v.size(-1) <= 256
        out, lse = forward_by_definition(q, k, v, None, causal, scale)
        shapes = as_described(described["flash_attention"], q, k, v, dropout, causal, debug, scale=scale)
        assert shapes[:2] == [out.shape, lse.shape]
        return out, lse.masked_fill((lse == -torch.inf) | lse.isnan(), torch.inf)  # softmax.h, normalize_softmax_lse

    def flash_backward(dout, q, k, v, out, lse, cum_q, cum_k, rows, keys, dropout, causal, seed, offset, *, scale):
        calls["flash_backward"] += 1
        note_mode()
        assert q.size(-1) == v.size(-1) <= 256
        assert lse.shape == q.shape[:3]
        assert (rows, keys) == (q.size(2), k.size(2))
        assert cum_q is cum_k is None
        rest = cum_q, cum_k, rows, keys, dropout, causal, seed, offset
        shapes = as_described(described["flash_attention_backward"], dout, q, k, v, out, lse, *rest, scale=scale)
        assert shapes == [q.shape, k.shape, v.shape]
        lse = as_read(lse, lse.size(1) * rows, rows, 1)
        return backward_by_definition(dout, q, k, v, out, lse, None, causal, scale)

    for name, stand_in in (("efficient", efficient), ("flash", flash)):
        monkeypatch.setattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention", stand_in)
    for name, stand_in in (("efficient", efficient_backward), ("flash", flash_backward)):
        monkeypatch.setattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward", stand_in)
    return calls


SHAPES = [
    {"heads": 2, "head_dim": 8},
    {"batch": 2, "heads": 4, "key_heads": 2, "head_dim": 3, "value_dim": 10},
    {"batch": 2, "heads": 6, "key_heads": 1, "head_dim": 8, "value_dim": 16},
    {"heads": 2, "head_dim": 8, "scale": -0.7},
    {"head_dim": 1},
    {"batch": 2, "head_dim": 3},
]
MASKS = {
    "none": ({"query_length": 7, "key_length": 11}, ((5,), (4,))),
    "causal": ({"query_length": 9, "causal": True}, ((3, 5), (3, 5))),
    "bias": ({"query_length": 9, "dilation": Dilation(((4, 1), (9, 1)), heads="shared")}, ((5,), (6,))),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", [EfficientCUDA(), FlashCUDA()], ids=lambda kernel: kernel.name)
def test_tiles_are_attention_by_what_the_op_reads(ops, kernel, mask, dtype):
    """Padded head dimensions, further columns for lse, tiles of some rows: out is where the op looks for it."""
    if kernel.name == "flash_cuda" and (mask == "bias" or dtype == "float32"):
        pytest.skip("flash takes no bias and no 32 bits")
    fields, cuts = MASKS[mask]
    for shape, dlse in itertools.product(SHAPES, (True, False)):
        problem = Problem(**shape, **fields, dtype=dtype)
        given = inputs_of(problem, dlse=dlse)
        assert worst_margin(problem, given, computed(kernel, problem, given, cuts)[0]) <= 1, (shape, dlse)
    forwards, backwards = (ops[kernel.name.removesuffix("_cuda") + suffix] for suffix in ("", "_backward"))
    assert forwards == backwards > 0


@pytest.mark.parametrize("kernel", [EfficientCUDA(), FlashCUDA()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dims", [(5, 8), (20, 24), (8, 8), (24, 20)])
def test_what_lies_at_any_address_in_a_kv_block_is_read(ops, kernel, dtype, dims):
    """Keys and values one after another in a flat buffer, and rows that start anywhere in it: out, dk and dv too."""
    d, e = dims
    problem = Problem(batch=2, query_length=7, key_length=9, heads=4, key_heads=2, head_dim=d, value_dim=e, dtype=dtype)
    given = inputs_of(problem)
    for odd in (0, 1, 4, 7):
        flat = torch.empty(odd + sum(x.numel() for x in given[:4]), dtype=given.q.dtype)
        views, start = [], odd
        for x in given[:4]:
            by_head = x.transpose(1, 2)
            view = flat[start : start + x.numel()].view(by_head.shape)
            start += view.copy_(by_head).numel()
            views.append(view.transpose(1, 2))
        there = given._replace(q=views[0], k=views[1], v=views[2], dout=views[3])
        assert worst_margin(problem, given, computed(kernel, problem, there, ((3,), (4,)))[0]) <= 1, odd


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_of_one_row_is_that_of_every_row(ops, dtype):
    """As of key_lengths alone: `(B, 1, 1, T)`, where the op wants a row for each query."""
    problem = Problem(batch=2, query_length=6, key_length=9, heads=2, head_dim=8, key_lengths=(4, 9), dtype=dtype)
    given, setting = inputs_of(problem), setting_of(problem)
    bias = torch.zeros(2, 1, 1, 9)
    bias[0, ..., 4:] = -torch.inf
    q, k, v, dout = (x.transpose(1, 2) for x in given[:4])
    for_all = bias.expand(2, 2, 6, 9)
    tiles = [KernelTile(q, k, v, mask) for mask in (bias, for_all)]
    (out, lse), expected = (EfficientCUDA().forward(setting, tile) for tile in tiles)
    assert all(map(torch.equal, (out, lse), expected))
    rows = MergedRows(dout, out, lse, given.dlse)
    found, expected = (EfficientCUDA().backward(setting, tile, rows) for tile in tiles)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_widest_heads_have_a_cotangent_of_lse_too(ops, dtype):
    """Its columns do not fit flash, which computes all else of that width; the other op computes that backward."""
    problem = Problem(query_length=5, key_length=7, heads=4, key_heads=2, head_dim=256, dtype=dtype)
    setting = setting_of(problem, "cuda")
    assert FlashCUDA().why_not(setting) is None
    for dlse, flash, efficient in ((False, 1, 0), (True, 0, 1)):
        given = inputs_of(problem, dlse=dlse)
        before = dict(ops)
        assert worst_margin(problem, given, computed(FlashCUDA(), problem, given)[0]) <= 1
        taken = [ops[f"{name}_backward"] - before[f"{name}_backward"] for name in ("flash", "efficient")]
        assert taken == [flash, efficient]


@pytest.mark.parametrize("kernel", [EfficientCUDA(), FlashCUDA()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("size", [6e4, 7e4, 1e6, 3e8])
def test_a_cotangent_of_lse_may_be_larger_than_the_largest_float16(ops, kernel, size):
    """65504, as of a loss that is scaled: gradients are those of float32, rounded."""
    problem = Problem(query_length=5, key_length=7, heads=2, head_dim=8, dtype="float16", scale=2**-30)
    given = inputs_of(problem)
    given.dlse.mul_(size)
    results, _ = computed(kernel, problem, given)
    assert all(bool(x.isfinite().all()) for x in results)
    assert worst_margin(problem, given, results) <= 1


def test_sums_of_the_deterministic_mode_are_part_of_a_budget(monkeypatch):
    """Flash then has a sum of dq in float32 for each multiprocessor that a pair of batch element and head has."""
    setting = setting_of(Problem(query_length=4, head_dim=80, dtype="bfloat16"), "cuda")
    tile = Extent(1, 8, 8, 1000, 1000)
    monkeypatch.setattr(fused_cuda, "_processors", lambda: 132)
    usual = FlashCUDA().held(setting, tile)
    more = 17 * 8 * 1024 * 96 * 4  # splits, heads, rows and columns as `mha_bwd` rounds them, bytes
    assert FlashCUDA().held(setting._replace(deterministic=True), tile) == usual + more
    with deterministic_mode(RAISES):
        assert FlashCUDA().held(setting, tile) == usual + more
    with deterministic_mode(WARNS):
        assert FlashCUDA().held(setting, tile) == usual
    assert EfficientCUDA().held(setting._replace(deterministic=True), tile) == EfficientCUDA().held(setting, tile)


EXCLUDING = {
    "causal": ({"query_length": 9, "causal": True}, ((4,), (4,))),
    "window": ({"query_length": 9, "causal": True, "window": (3, 0)}, ((), ())),
    "padding": ({"batch": 2, "query_length": 7, "key_length": 9, "key_lengths": (4, 6)}, ((3,), ())),
    "dilation": ({"query_length": 9, "dilation": Dilation(((4, 1), (9, 2)))}, ((), (6,))),
}


@pytest.mark.parametrize("kernel", [EfficientCUDA(), FlashCUDA()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("pattern", EXCLUDING)
def test_what_a_mask_excludes_is_kept_out_on_the_device(ops, kernel, poison, pattern):
    """Every key and every row in turn is not finite: rows and keys that do not meet it are as they were, others NaN.

    Nobody asks whether there is one: the op is given 0 in its place.
    """
    fields, cuts = EXCLUDING[pattern]
    if kernel.name == "flash_cuda" and pattern != "causal":
        pytest.skip("flash takes no bias")
    problem = Problem(heads=2, key_heads=1, head_dim=8, dtype="bfloat16", **fields)
    attends = multiplicity(problem) > 0
    clean, _ = computed(kernel, problem, inputs_of(problem), cuts)
    for name, place in (("k", 1), ("v", 3), ("k", 8), ("q", 2), ("dout", 6)):
        given = inputs_of(problem)
        getattr(given, name)[:, place] = poison
        results, _ = computed(kernel, problem, given, cuts)
        meets = np.broadcast_to(attends, (problem.batch, 2, problem.nq, problem.nk))
        rows = meets[..., place] if name in "kv" else np.broadcast_to(np.arange(problem.nq) == place, meets.shape[:3])
        rows = torch.from_numpy(rows & meets.any(axis=-1))
        keys = torch.from_numpy((meets & rows.numpy()[..., None]).any(axis=2).any(axis=1))
        spared = [~rows.transpose(1, 2), ~rows, ~rows.transpose(1, 2), ~keys[..., None], ~keys[..., None]]
        for number, (was, now, same) in enumerate(zip(clean, results, spared, strict=True)):
            same = same if number == 1 else same.expand(was.shape[:3])[..., None].expand(was.shape)
            if name == "v" and number == 1:  # of which lse does not depend
                same = torch.ones_like(same)
            assert torch.equal(was[same], now[same]), (name, number)
            if number >= 2 or not (name == "dout" or (name == "v" and number == 1)):
                assert not bool(now[~same].isfinite().any()), (name, number)


@pytest.mark.parametrize("causal", [False, True])
def test_efficient_rows_whose_scores_are_all_minus_infinity_are_empty(ops, causal):
    """The op says (0, 0) of them, as of a query of 0 among values of 0, which stays as it is."""
    problem = Problem(query_length=6, key_length=6, heads=2, head_dim=8, causal=causal, scale=1.0)
    given = inputs_of(problem)
    given.q[:, 3:], given.k[:] = 1e20, -1e20
    given.q[:, 0], given.v[:, 0] = 0.0, 0.0
    q, k, v, _ = (x.transpose(1, 2) for x in given[:4])
    out, lse = EfficientCUDA().forward(setting_of(problem), KernelTile(q, k, v, "causal" if causal else None))
    assert bool((lse[:, :, 3:] == -torch.inf).all())
    assert not bool(out[:, :, 3:].any())
    if causal:
        assert bool((lse[:, :, 0] == 0).all())
    assert bool(lse[:, :, 0].isfinite().all())


def test_flash_rows_that_weigh_nothing_are_told_from_those_that_are_nan(ops):
    """Of both the op says that lse is +inf, by which such a row would be all that counts in a merge."""
    problem = Problem(query_length=3, key_length=6, heads=2, head_dim=8, dtype="bfloat16")
    given = inputs_of(problem)
    given.q[:, 0], given.k[:, :4], given.q[:, 1] = 1.0, -torch.inf, torch.nan
    (out, lse, *_), _ = computed(FlashCUDA(), problem, given, ((), (4,)))
    alone = computed(FlashCUDA(), problem.replace(key_length=2), given._replace(k=given.k[:, 4:], v=given.v[:, 4:]))[0]
    assert torch.equal(out[:, 0], alone[0][:, 0])
    assert torch.equal(lse[:, :, 0], alone[1][:, :, 0])
    assert bool(out[:, 1].isnan().all())
    assert bool(lse[:, :, 1].isnan().all())


def test_efficient_rows_that_a_mask_empties_are_empty_whatever_their_query_holds(ops):
    """Its out is 0, and not NaN times 0."""
    problem = Problem(query_length=6, heads=2, head_dim=8, documents=(2, 6), causal=True)
    given = inputs_of(problem)
    given.q[:, 0] = torch.nan
    out, lse, *_ = computed(EfficientCUDA(), problem, given)[0]
    assert not bool(out[:, 0].any())
    assert bool((lse[:, :, 0] == -torch.inf).all())
    assert bool(out[:, 1:].isfinite().all())


@pytest.mark.parametrize("part", [(slice(None), slice(0, None, 2)), (slice(0, None, 2), slice(None))])
def test_rows_and_heads_of_a_dilation_are_packed(ops, part):
    """Every second row, or every second head, of what a rank holds: the gradients of a copy of them, bit for bit."""
    given = inputs_of(Problem(batch=2, query_length=12, heads=4, head_dim=8, dtype="bfloat16"), dlse=False)
    rows, heads = part
    q, k, v, dout = (x[:, rows, heads].transpose(1, 2) for x in given[:4])
    setting = setting_of(Problem(query_length=12, head_dim=8, dtype="bfloat16"))
    tile = KernelTile(q, k, v)
    out, lse = EfficientCUDA().forward(setting, tile)
    apart = torch.zeros(2, 12, 4, 8, dtype=torch.bfloat16)
    apart[:, rows, heads] = out.transpose(1, 2)
    outs = apart[:, rows, heads].transpose(1, 2), out.transpose(1, 2).contiguous().transpose(1, 2)
    found, expected = (EfficientCUDA().backward(setting, tile, MergedRows(dout, one, lse)) for one in outs)
    assert all(map(torch.equal, found, expected))


DEFAULT, WARNS, RAISES = range(3)
"""torch's modes: any order, a warning that says so, or an order that is always the same."""


@contextlib.contextmanager
def deterministic_mode(mode):
    """The mode of the process, until the end of the block."""
    torch.set_deterministic_debug_mode(mode)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(DEFAULT)


@pytest.mark.parametrize("kernel", [EfficientCUDA(), FlashCUDA()], ids=lambda kernel: kernel.name)
def test_the_deterministic_mode_is_on_where_it_was_asked_for(ops, kernel):
    """While the op is launched; otherwise, and afterwards, it is as the user has set it."""
    q, k, v, dout = (x.transpose(1, 2) for x in inputs_of(Problem(query_length=4, dtype="float16"))[:4])
    setting, tile = setting_of(Problem(query_length=4, dtype="float16")), KernelTile(q, k, v)
    for asked, mode in itertools.product((False, True), (DEFAULT, WARNS, RAISES)):
        with deterministic_mode(mode):
            given = setting._replace(deterministic=asked)
            kernel.backward(given, tile, MergedRows(dout, *kernel.forward(given, tile)))
            assert torch.get_deterministic_debug_mode() == mode
        assert ops["modes"].pop() == (RAISES if asked else mode)


def test_a_failing_op_leaves_the_mode_as_it_was(monkeypatch):
    """Out of memory, say."""

    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", fails)
    q = torch.zeros(1, 1, 4, 8, dtype=torch.float16)
    setting = setting_of(Problem(query_length=4, dtype="float16"))._replace(deterministic=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        FlashCUDA().backward(setting, KernelTile(q, q, q), MergedRows(q, q, torch.zeros(1, 1, 4)))
    assert torch.get_deterministic_debug_mode() == DEFAULT


@pytest.mark.parametrize("implementation", [ring, allgather], ids=["ring", "allgather"])
def test_what_declares_determinism_asks_for_it(monkeypatch, implementation):
    """And a call of the function does not: it would be slower, and the mode is the user's."""
    seen = []

    def noted(name, setting):
        seen.append(setting.deterministic)
        return choose_kernel(name, setting)

    monkeypatch.setattr(calls, "choose_kernel", noted)
    tensors = [torch.zeros(1, 4, 1, 8) for _ in range(3)]
    case = Case(problem=Problem(query_length=4), world_size=1)
    make_inputs(case)
    run = WORLD.run(run_rank, Task(implementation, case, True, "cpu"), world_size=1, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    attention.ring_attention(*tensors)
    assert seen == [implementation.capabilities.deterministic, False]
    assert seen[0]


@pytest.mark.parametrize(("capability", "flash", "efficient"), [((7, 5), False, False), ((8, 0), True, True)])
def test_old_devices_are_told_what_they_cannot_run(monkeypatch, capability, flash, efficient):
    """Flash needs compute capability 8.0, memory-efficient needs it for bfloat16 alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(Flex, "why_not", lambda kernel, setting: "needs triton to be compiled")
    half, bfloat = (setting_of(Problem(query_length=4, dtype=dtype), "cuda") for dtype in ("float16", "bfloat16"))
    assert (FlashCUDA().why_not(half) is None) == (FlashCUDA().why_not(bfloat) is None) == flash
    assert EfficientCUDA().why_not(half) is None
    assert (EfficientCUDA().why_not(bfloat) is None) == efficient
    if not flash:
        assert FlashCUDA().why_not(half) == "needs compute capability 8.0, and this device has 7.5"
        assert choose_kernel("auto", half)[0].name == "efficient_cuda"
        assert choose_kernel("auto", bfloat)[0].name == "streaming"
