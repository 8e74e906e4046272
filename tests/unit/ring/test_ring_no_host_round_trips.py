"""A pass never asks a device for a number: on the device "meta", which has none to give, it runs to its end.

There the ops are torch's own descriptions of those of CUDA devices, so that a call which they refuse fails as well.
"""

import pytest
import torch
from on_ranks import run_on_ranks

from ringref.problem import Dilation, Problem
from ringverify.ring import calls
from ringverify.ring.kernels.choose import STREAMING
from ringverify.ring.kernels.fused_cpu import FusedCPU
from ringverify.ring.kernels.fused_cuda import EfficientCUDA, FlashCUDA
from ringverify.ring.uploading import uploaded

PATTERNS = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (20, 0)},
    "documents": {"causal": True, "documents": (0, 17, 40, 96)},
    "padding": {"batch": 2, "key_lengths": (50, 96)},
    "dilation": {"dilation": Dilation(((32, 1), (64, 2)), heads="shared")},
}
KERNELS = [
    (FlashCUDA(), "bfloat16"),
    (EfficientCUDA(), "float16"),
    (EfficientCUDA(), "float32"),
    (STREAMING, "float64"),
]


def dealt(length, world_size):
    """Blocks of 8 in turn, whose masks are looked up by position."""
    return [[p for p in range(length) if p // 8 % world_size == rank] for rank in range(world_size)]


class Given:
    """q, k, v and cotangents without numbers."""

    def __init__(self, problem):
        def shaped(length, heads, width):
            return torch.empty(problem.batch, length, heads, width, dtype=getattr(torch, problem.dtype), device="meta")

        self.q, self.k = (
            shaped(problem.nq, problem.heads, problem.head_dim),
            shaped(problem.nk, problem.hk, problem.head_dim),
        )
        self.v, self.dout = shaped(problem.nk, problem.hk, problem.dv), shaped(problem.nq, problem.heads, problem.dv)
        self.dlse = None


def _host(device):
    """The device of what torch makes of an array, which has to be the host: a copy to another one waits for it."""
    assert torch.device(device).type == "cpu"
    return device


def passes_through(monkeypatch, kernel, problem, sharding):
    """A forward and a backward on three ranks."""
    made = torch.as_tensor
    monkeypatch.setattr(torch, "as_tensor", lambda x, device="cpu", **how: made(x, device=_host(device), **how))
    monkeypatch.setattr(calls, "choose_kernel", lambda name, setting: (kernel, name))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # meta has no autocast to ask for
    run = run_on_ranks(problem, Given(problem), sharding, 3)
    for out, lse, dq, dk, dv in run.results:
        assert (out.shape[-1], dq.shape[-1], dk.shape[-1], dv.shape[-1]) == (24, 20, 20, 24)
        assert lse.shape == (problem.batch, problem.heads, out.size(1))


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS, ids=[f"{kernel.name}-{dtype}" for kernel, dtype in KERNELS])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("sharding", ["zigzag", dealt])
@pytest.mark.by_day(19)
def test_a_pass_asks_the_device_nothing(monkeypatch, kernel, dtype, pattern, sharding):
    """Masks, what is not finite, rows of nothing: all of it is decided on the host, or on the device."""
    dims = {"heads": 4, "key_heads": 2, "head_dim": 20, "value_dim": 24}
    problem = Problem(**{"query_length": 96, **dims, **PATTERNS[pattern]}, dtype=dtype)
    passes_through(monkeypatch, kernel, problem, sharding)


def test_a_kernel_that_asks_is_seen(monkeypatch):
    """That of a CPU may ask whether keys are finite, and does."""
    kernel = type("Asking", (EfficientCUDA,), {"keeps_out": FusedCPU.keeps_out})()
    problem = Problem(query_length=96, heads=4, key_heads=2, head_dim=20, value_dim=24, causal=True)
    with pytest.raises(AssertionError, match="meta tensors"):
        passes_through(monkeypatch, kernel, problem, "zigzag")


def test_what_is_uploaded_is_not_waited_for(monkeypatch):
    """From pinned memory; elsewhere than on a CUDA device nothing is copied."""
    asked, places = [], torch.arange(3)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: asked.append("pinned") or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, **how: asked.append((device.type, how)) or x)
    uploaded(places, torch.device("cuda", 0))
    assert asked == ["pinned", ("cuda", {"non_blocking": True})]
    monkeypatch.undo()
    assert uploaded(places, torch.device("cpu")) is places
