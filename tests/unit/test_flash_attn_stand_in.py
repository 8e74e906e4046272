"""The CPU stand-in of flash-attn's kernels, held to the oracle: no package may be accused for a fault of ours."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ringref.attention import Answer, attention
from ringref.pattern import multiplicity
from ringref.problem import Problem
from ringref.rounding import Allowed, Pipeline, allowed_error, margins
from ringverify.cases.case import Case
from ringverify.cases.inputs import Inputs, make_inputs
from ringverify.peers import flash_attn_interface as flash_attn
from ringverify.peers import flash_attn_kernels as kernels

PROBLEMS = {
    "plain": Problem(batch=2, query_length=9, heads=3, head_dim=8),
    "causal": Problem(batch=2, query_length=9, heads=2, head_dim=16, causal=True, scale=0.3),
    "grouped": Problem(batch=2, query_length=6, heads=6, key_heads=2, head_dim=8, causal=True),
    "more keys": Problem(query_length=4, key_length=7, heads=2, head_dim=8, causal=True),
    "more queries": Problem(query_length=7, key_length=4, heads=4, key_heads=2, head_dim=8, causal=True),
    "no keys": Problem(query_length=3, key_length=0, heads=2, head_dim=8),
    "no queries": Problem(query_length=0, key_length=3, heads=2, head_dim=8),
    "window": Problem(query_length=9, key_length=11, heads=2, head_dim=8, window=(2, 1)),
    "window of one side": Problem(query_length=9, key_length=6, heads=2, head_dim=8, window=(None, 1)),
    "window and causal": Problem(query_length=9, heads=2, head_dim=8, window=(3, 2), causal=True),
    "empty window": Problem(query_length=12, key_length=3, heads=2, head_dim=8, window=(1, 0)),
    "softcap": Problem(batch=2, query_length=9, heads=2, head_dim=8, softcap=0.7, scale=1.0, causal=True),
}
MASK = ["window_size_left", "window_size_right", "softcap", "alibi_slopes"]
DOCUMENTS = {
    "packed": Problem(query_length=12, heads=2, head_dim=8, documents=(0, 3, 3, 4, 12)),
    "packed, causal, grouped": Problem(
        query_length=12, heads=4, key_heads=2, head_dim=8, documents=(0, 5, 12), causal=True, softcap=2.0
    ),
}


@dataclass
class Expected:
    """What the oracle says of a problem, and what it allows."""

    problem: Problem
    inputs: Inputs
    answer: Answer
    allowed: Allowed

    def tensors(self, *names: str) -> tuple[torch.Tensor, ...]:
        """Inputs by name, in the problem's dtype."""
        return tuple(torch.tensor(getattr(self.inputs, n)).to(getattr(torch, self.problem.dtype)) for n in names)

    @property
    def settings(self) -> dict[str, object]:
        """The same problem, as the kernels are told it."""
        left, right = self.problem.window or (None, None)
        return {
            "scale": self.problem.scale_value,
            "causal": self.problem.causal,
            "window": (-1 if left is None else left, -1 if right is None else right),
            "softcap": self.problem.softcap or 0.0,
        }

    def margin(self, **found: torch.Tensor) -> float:
        """The largest error over what is allowed."""
        largest = 0.0
        for name, tensor in found.items():
            actual = tensor.detach().to(torch.float64).numpy()
            expected, limit = getattr(self.answer, name), getattr(self.allowed, name)
            assert actual.shape == expected.shape
            dtype = "float32" if name == "lse" else self.problem.dtype
            largest = max(largest, float(margins(actual, expected, limit, dtype).max(initial=0.0)))
        return largest


def expected(problem: Problem, dtype: str, values: str = "normal") -> Expected:
    """The oracle's answer; no cotangent of lse, which the kernels do not know of."""
    problem = problem.replace(dtype=dtype)
    x = make_inputs(Case(problem=problem, seed=3, values=values))
    answer = attention(problem, x.q, x.k, x.v, x.dout, x.dlse)
    pipeline = Pipeline(problem.dtype, probabilities="input")
    return Expected(problem, x, answer, allowed_error(problem, answer, x.q, x.k, x.v, x.dout, x.dlse, pipeline))


def signed(lse: torch.Tensor) -> torch.Tensor:
    """The kernels' +inf of a row without keys as the oracle's -inf."""
    return torch.where(lse == torch.inf, -torch.inf, lse)


def gradients(right: Expected, out: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """dq, dk and dv, written into buffers of NaN."""
    q, k, v, dout = right.tensors("q", "k", "v", "dout")
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    kernels.backward(dout, q, k, v, out, lse, dq, dk, dv, **right.settings)
    return {"dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("values", ["normal", "large_scores", "zero_queries"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_forward_and_backward_are_the_oracles(name, dtype, values):
    """Out, log-sum-exp and gradients within what one kernel that rounds its weights is allowed."""
    right = expected(PROBLEMS[name], dtype, values)
    q, k, v = right.tensors("q", "k", "v")
    out, lse = kernels.forward(q, k, v, **right.settings)
    assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)
    assert right.margin(out=out, lse=signed(lse), **gradients(right, out, lse)) <= 1


def test_a_mask_that_is_off_by_one_is_far_from_the_oracle():
    """The comparison above can fail."""
    right = expected(PROBLEMS["window"], "bfloat16")
    out, lse = kernels.forward(*right.tensors("q", "k", "v"), **{**right.settings, "window": (2, 2)})
    assert right.margin(out=out) > 10
    assert right.margin(**gradients(right, out, lse)) > 10


def test_a_row_without_keys_has_out_zero_and_a_log_sum_exp_of_plus_infinity():
    """Where a mask leaves none, and where there are none; its gradients are exactly zero."""
    right = expected(PROBLEMS["more queries"], "float16")
    out, lse = kernels.forward(*right.tensors("q", "k", "v"), **right.settings)
    empty = torch.tensor(multiplicity(right.problem).sum(axis=3) == 0)
    assert empty.any()
    assert torch.equal(lse == torch.inf, empty)
    assert not out.transpose(1, 2)[empty].any()
    assert not gradients(right, out, lse)["dq"].transpose(1, 2)[empty].any()
    none = expected(PROBLEMS["no keys"], "float16")
    out, lse = kernels.forward(*none.tensors("q", "k", "v"), **none.settings)
    assert bool((lse == torch.inf).all())
    assert not out.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_packed_sequences_are_the_oracles_documents(name, dtype):
    """The log-sum-exps come as (heads, rows); rows of no sequence are not written."""
    right = expected(DOCUMENTS[name], dtype)
    q, k, v, dout = (x[0] for x in right.tensors("q", "k", "v", "dout"))
    ends = torch.tensor(right.problem.documents, dtype=torch.int32)
    out, lse = kernels.varlen_forward(q, k, v, ends, ends, **right.settings)
    assert lse.shape == (q.shape[1], q.shape[0])
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    kernels.varlen_backward(dout, q, k, v, out, lse, dq, dk, dv, ends, ends, **right.settings)
    assert right.margin(out=out[None], lse=lse[None], dq=dq[None], dk=dk[None], dv=dv[None]) <= 1
    dq = torch.full_like(q, torch.nan)
    kernels.varlen_backward(dout, q, k, v, out, lse, dq, dk, dv, ends[:-1], ends[:-1], **right.settings)
    assert bool(dq[int(ends[-2]) :].isnan().all())
    assert not dq[: int(ends[-2])].isnan().any()


def test_backward_takes_the_log_sum_exp_and_out_of_a_merge():
    """With those of all keys, the gradients of two blocks of keys add up: what every ring is built on."""
    right = expected(PROBLEMS["grouped"].replace(causal=False), "float16")
    q, k, v, dout = right.tensors("q", "k", "v", "dout")
    out, lse = kernels.forward(q, k, v, **right.settings)
    parts = []
    for keys in (slice(0, 2), slice(2, None)):
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k[:, keys]), torch.empty_like(v[:, keys])
        kernels.backward(dout, q, k[:, keys], v[:, keys], out, lse, dq, dk, dv, **right.settings)
        parts.append((dq.double(), dk, dv))
    (dq_0, dk_0, dv_0), (dq_1, dk_1, dv_1) = parts
    dk, dv = torch.cat((dk_0, dk_1), dim=1), torch.cat((dv_0, dv_1), dim=1)
    assert right.margin(dq=dq_0 + dq_1, dk=dk, dv=dv) <= 1


def test_backward_reads_the_log_sum_exps_as_dense_memory():
    """As the kernels do, who are handed an address and no strides."""
    right = expected(PROBLEMS["plain"], "bfloat16")
    out, lse = kernels.forward(*right.tensors("q", "k", "v"), **right.settings)
    scrambled = lse.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(lse, scrambled)
    assert right.margin(**gradients(right, out, lse)) <= 1
    assert right.margin(**gradients(right, out, scrambled)) > 1


def test_a_negative_scale_turns_masked_scores_into_infinity():
    """The kernels mask, then scale; so a caller has to keep the scale positive."""
    right = expected(PROBLEMS["causal"].replace(scale=-0.3), "bfloat16")
    out, _ = kernels.forward(*right.tensors("q", "k", "v"), **right.settings)
    assert bool(out[:, 0].isnan().any())


def test_a_masked_value_that_is_not_a_number_is_not_kept_out():
    """0 times NaN, within a tile."""
    right = expected(PROBLEMS["causal"], "bfloat16")
    q, k, v = right.tensors("q", "k", "v")
    v[:, -1] = torch.nan
    assert bool(kernels.forward(q, k, v, **right.settings)[0].isnan().all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q.float(), k.float(), v.float()), "FlashAttention only support fp16 and bf16 data type"),
        (lambda q, k, v: (q, k.half(), v), "must have the same dtype"),
        (lambda q, k, v: (q[..., :4], k[..., :4], v[..., :4]), "a multiple of 8"),
        (lambda q, k, v: (q.repeat(1, 1, 1, 33),) * 3, "at most 256"),
        (lambda q, k, v: (q, k[:, :, :2], v[:, :, :2]), "must divide number of heads in query"),
        (lambda q, k, v: (q.mT.contiguous().mT, k, v), "contiguous last dimension"),
        (lambda q, k, v: (q, k, v[:, :3]), "do not fit q"),
        (lambda q, k, v: (q[:0], k[:0], v[:0]), "batch size must be positive"),
    ],
)
def test_what_the_kernels_refuse_is_refused(change, words):
    """In their words where they have any."""
    right = expected(PROBLEMS["plain"], "bfloat16")
    with pytest.raises(RuntimeError, match=words):
        kernels.forward(*change(*right.tensors("q", "k", "v")), **right.settings)


def test_the_interface_has_the_arguments_of_flash_attn():
    """Packages look them up by name, and hand some over by place."""
    forward = inspect.getfullargspec(flash_attn._flash_attn_forward).args
    assert ["q", "k", "v", "dropout_p", "softmax_scale", "causal", *MASK, "return_softmax"] == forward
    packed = inspect.getfullargspec(flash_attn._flash_attn_varlen_forward)
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert packed.args[:10] == ["q", "k", "v", *lengths, *forward[3:6]]
    assert packed.args[10:15] == [*MASK, "return_softmax"]
    assert packed.defaults[:5] == (-1, -1, 0.0, None, False)
    gradients = ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"]
    backward = inspect.getfullargspec(flash_attn._flash_attn_backward).args
    assert backward == [*gradients, *forward[3:6], *MASK, "deterministic", "rng_state"]
    backward = inspect.getfullargspec(flash_attn._flash_attn_varlen_backward).args
    assert backward == [*gradients, *lengths, *forward[3:6], *MASK, "deterministic", "rng_state", "zero_tensors"]


@pytest.mark.parametrize("dim", [8, 5])
def test_flash_attn_func_pads_heads_and_is_differentiable(dim):
    """Through autograd, from inputs whose heads lie before their rows."""
    right = expected(PROBLEMS["grouped"].replace(head_dim=dim), "bfloat16")
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in right.tensors("q", "k", "v")]
    out, lse, _ = flash_attn.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    found = torch.autograd.grad(out, leaves, right.tensors("dout")[0])
    assert right.margin(out=out, lse=lse, **dict(zip(("dq", "dk", "dv"), found, strict=True))) <= 1


def test_dropout_is_refused():
    """There are no random numbers here."""
    with pytest.raises(NotImplementedError, match="no dropout"):
        flash_attn.flash_attn_func(*expected(PROBLEMS["plain"], "bfloat16").tensors("q", "k", "v"), dropout_p=0.1)


def test_afterwards_the_modules_are_as_they_were(monkeypatch):
    """Within, flash_attn is the stand-in, and the packages named are hidden; later imports get what is installed."""
    real = type(sys)("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    monkeypatch.setitem(sys.modules, "a_package.part", real)
    with flash_attn.standing_in("a_package"):
        import flash_attn as found

        assert found.__version__ == flash_attn.VERSION
        assert found.flash_attn_interface is flash_attn
        assert "a_package.part" not in sys.modules
    assert sys.modules["flash_attn"] is real
    assert sys.modules["a_package.part"] is real
    assert "flash_attn.flash_attn_interface" not in sys.modules


def test_every_gradient_of_the_oracle_is_compared():
    """`margin` of the wrong numbers is over the line for each tensor."""
    right = expected(PROBLEMS["grouped"], "bfloat16")
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert right.margin(**{name: torch.tensor(getattr(right.answer, name) + 1)}) > 1
    assert np.isfinite(right.allowed.out).all()
