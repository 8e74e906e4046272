"""The kernels for CUDA without a GPU: definitions stand in for their ops, and read memory as the real ones do.

What the real ones take for granted is in torch's sources, aten/src/ATen/native/transformers/cuda: attention_backward.cu
makes grad_out contiguous, and for flash out too, but hands out on to the memory-efficient kernel as it is; with 16-bit
inputs kernel_backward.h adds up dout·out itself, from rows of out that lie `num_heads * head_dim_value` apart.
"""

import contextlib
import itertools

import pytest
import torch
from by_tile import computed, inputs_of, setting_of, worst_margin
from on_ranks import WORLD

from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case
from ringverify.cases.inputs import make_inputs
from ringverify.cases.running import Task, run_rank
from ringverify.ring import attention, calls
from ringverify.ring.declared import allgather, ring
from ringverify.ring.kernels.choose import choose_kernel
from ringverify.ring.kernels.flex import Flex
from ringverify.ring.kernels.fused_cuda import LSE_ALIGNMENT, EfficientCUDA, FlashCUDA

ALIGNMENT = 8
"""Elements of which every stride of a 16-bit tensor has to be a multiple."""


def as_read(x, *strides):
    """`x` as code sees it that takes some of its strides for granted; `None` stands for one that is asked for."""
    assert x.stride(-1) == 1
    found = [own if one is None else one for one, own in zip(strides, x.stride(), strict=True)]
    return x.as_strided(x.shape, found, x.storage_offset())


def scores(q, k, bias, causal, scale):
    """Scores in float32, −inf where a pair is excluded; grouped-query heads repeat their keys."""
    s = q.float() @ k.float().repeat_interleave(q.size(1) // k.size(1), dim=1).transpose(2, 3) * scale
    if bias is not None:
        assert bias.dtype == q.dtype
        assert bias.stride(-1) == 1
        assert bias.stride(-2) % 16 == 0
        s = s + bias.float()
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf) if causal else s


def forward_by_definition(q, k, v, bias, causal, scale):
    """out and lse; 0 and −inf for a row of nothing."""
    for x in (q, k, v):
        assert x.size(-1) % ALIGNMENT == 0
        assert all(stride % ALIGNMENT == 0 for stride in x.stride()[:-1])
        assert x.stride(-1) == 1
    s = scores(q, k, bias, causal, scale)
    lse = s.logsumexp(dim=-1)
    p = (s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = p @ v.float().repeat_interleave(q.size(1) // v.size(1), dim=1)
    return out.to(q.dtype), lse


def backward_by_definition(dout, q, k, v, out, lse, bias, causal, scale):
    """dq, dk and dv of `(B, H, S, ...)` in the dtype of the inputs, out and lse read as the caller says."""
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

    def efficient(q, k, v, bias, compute_lse, dropout, causal, *, scale):
        calls["efficient"] += 1
        assert compute_lse
        assert not dropout
        assert q.size(1) == k.size(1)
        out, lse = forward_by_definition(q, k, v, bias, causal, scale)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        return out, torch.nn.functional.pad(lse, (0, -lse.size(-1) % LSE_ALIGNMENT)), None, None

    def efficient_backward(dout, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal, *, scale):
        calls["efficient_backward"] += 1
        note_mode()
        assert wanted == [True, True, True, False]
        assert lse.stride(-1) == 1
        assert lse.stride(-2) % LSE_ALIGNMENT == 0
        if out.dtype != torch.float32:  # for float32 torch adds dout·out up, by their real strides
            heads, width = out.size(1), out.size(3)
            out = as_read(out.transpose(1, 2), None, heads * width, None, 1).transpose(1, 2)
        lse = lse[..., : q.size(2)]
        return *backward_by_definition(dout, q, k, v, out, lse, bias, causal, scale), None

    def flash(q, k, v, dropout, causal, debug, *, scale):
        calls["flash"] += 1
        assert q.size(-1) == v.size(-1)
        out, lse = forward_by_definition(q, k, v, None, causal, scale)
        return out, lse.masked_fill((lse == -torch.inf) | lse.isnan(), torch.inf)  # softmax.h, normalize_softmax_lse

    def flash_backward(dout, q, k, v, out, lse, _, __, rows, keys, dropout, causal, seed, offset, *, scale):
        calls["flash_backward"] += 1
        note_mode()
        assert (rows, keys) == (q.size(2), k.size(2))
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
    out, lse = EfficientCUDA().forward(setting, q, k, v, None)
    apart = torch.zeros(2, 12, 4, 8, dtype=torch.bfloat16)
    apart[:, rows, heads] = out.transpose(1, 2)
    outs = apart[:, rows, heads].transpose(1, 2), out.transpose(1, 2).contiguous().transpose(1, 2)
    found, expected = (EfficientCUDA().backward(setting, dout, q, k, v, one, lse, None, None) for one in outs)
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
    setting = setting_of(Problem(query_length=4, dtype="float16"))
    for asked, mode in itertools.product((False, True), (DEFAULT, WARNS, RAISES)):
        with deterministic_mode(mode):
            given = setting._replace(deterministic=asked)
            out, lse = kernel.forward(given, q, k, v, None)
            kernel.backward(given, dout, q, k, v, out, lse, None, None)
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
        FlashCUDA().backward(setting, q, q, q, q, q, torch.zeros(1, 1, 4), None, None)
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
