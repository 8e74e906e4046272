"""Strided tensors in collectives: right where gloo is right, an error where it moves the wrong elements."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from simulated_runs import failure


def _slice() -> torch.Tensor:
    return torch.arange(12.0).view(3, 4)[:, 1:3]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("all_reduce(SUM)", lambda: dist.all_reduce(_slice())),
        ("reduce(SUM, to 1)", lambda: dist.reduce(_slice(), 1)),
        ("broadcast(from 0)", lambda: dist.broadcast(_slice(), 0)),
        ("scatter", lambda: dist.scatter(_slice(), [torch.zeros(3, 2)] * 2 if dist.get_rank() == 0 else None, 0)),
        ("reduce_scatter", lambda: dist.reduce_scatter(torch.zeros(3, 2), [_slice(), _slice()])),
        ("reduce_scatter", lambda: dist.reduce_scatter(_slice(), [torch.zeros(3, 2)] * 2)),
    ],
)
def test_where_gloo_would_move_the_wrong_elements_there_is_an_error(name, call):
    """A slice of the last axis: gloo reads and writes past it silently, NCCL refuses it; so does this."""
    found = failure(call, 2)
    assert (
        f"RuntimeError: {name} of [3, 2] float32 with strides [4, 1]: gloo silently moves the wrong elements"
        in found.message
    )
    assert "pass .contiguous()" in found.message


@pytest.mark.parametrize("call", [lambda x: dist.all_reduce(x), lambda x: dist.broadcast(x, 0)])
def test_tensors_that_lie_in_different_orders_on_two_ranks_do_not_match(call):
    """Each has no gaps, so gloo would pair up elements by their place in memory: the wrong ones."""

    def program():
        values = torch.arange(6.0).view(2, 3)
        call(values.t().contiguous().t() if dist.get_rank() else values)

    message = failure(program, 2).message
    assert "collective mismatch" in message
    assert "of strides [1, 2]" in message
