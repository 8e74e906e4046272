"""Forward and backward of a call as one differentiable operation.

Autograd could not follow a block round the ring, and what it would save, the ring's buffers, the next hop overwrites.
Saved instead are the inputs, out and lse; backward sends the blocks round once more.

All ranks of the group call together, forward and backward. A backward runs the whole pass whichever inputs require a
gradient, so that ranks need not agree on k or v; but each rank has to run one, a rank that holds no tokens included.
Where no input of a rank requires a gradient and another rank's do, `for_others` does, so that autograd runs its
backward; it gets no gradient.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch

from ringverify.ring.accumulate import Running, Sum
from ringverify.ring.aligned import aligned
from ringverify.ring.compute import Job, Rows


class Attention(torch.autograd.Function):
    """Attention over the group, by the `forward` and `backward` of a method's module."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        for_others: torch.Tensor | None,
        job: Job,
        method: ModuleType,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns out `(B, S, H, E)` in the dtype of q, and lse `(B, H, S)`; `for_others` is as the module says."""
        del for_others
        with _no_autocast(q.device.type):
            mask = job.whole(k, v, backward=False)
            if mask is not False:  # one call
                by_head = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                out_BHSE, lse = job.kernel.forward(job.setting, *by_head, mask)
                out = out_BHSE.transpose(1, 2).to(q.dtype).contiguous()
            else:
                shape = *q.shape[:3], job.setting.value_dim
                running = Running(shape, job.setting.accumulates, q.device, keeps=job.at_most_two)
                method.forward(job, q, k, v, running)
                out, lse = running.result(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.job, ctx.method = job, method
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, k and v in their dtypes."""
        q, k, v, out, lse = ctx.saved_tensors
        again = torch.is_grad_enabled()
        with torch.no_grad(), _no_autocast(q.device.type):
            dout = torch.zeros_like(out) if dout is None else aligned(dout)
            dlse = None if dlse is None else aligned(dlse)
            gradients = _gradients(ctx.job, ctx.method, k, v, Rows(q, dout, out, lse, dlse))
        wanted = [g if needed else None for needed, g in zip(ctx.needs_input_grad, gradients, strict=False)]
        if again:  # with create_graph=True these gradients may be differentiated
            inputs = [x for x in (dout, dlse, q, k, v) if x is not None and x.requires_grad]
            wanted = [None if g is None else _Once.apply(g, *inputs) for g in wanted]  # type: ignore[no-untyped-call]
        return *wanted, None, None, None


def _gradients(job: Job, method: ModuleType, k: torch.Tensor, v: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, ...]:
    q = rows.q
    mask = job.whole(q, k, v, rows.dout, rows.out, backward=True)
    if mask is not False:
        dout, out = (x.transpose(1, 2) for x in (rows.dout, rows.out))
        by_head = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        found = job.kernel.backward(job.setting, dout, *by_head, out, rows.lse, rows.dlse, mask)
        return tuple(g.transpose(1, 2).to(q.dtype) for g in found)
    dq = Sum(q.shape, job.setting.accumulates, q.device)
    dk, dv = method.backward(job, rows, k, v, dq)
    return tuple(x.to(q.dtype, memory_format=torch.contiguous_format) for x in (dq.total, dk, dv))


class _Once(torch.autograd.Function):
    """A gradient that says so when somebody differentiates it, before anything is sent."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        del ctx, inputs
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        del ctx
        raise RuntimeError(
            "ring attention cannot be differentiated twice: its backward is not differentiable; leave out "
            "create_graph=True, or compute second derivatives on one process without ring_attention"
        )


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast would round scores and sums to half precision behind our back."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
