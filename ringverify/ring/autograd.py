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
from typing import Any

import torch
import torch.distributed as dist

from ringverify.ring.accumulate import sink_gradient
from ringverify.ring.aligned import aligned
from ringverify.ring.compute import Job, Rows
from ringverify.ring.method import Method


class Attention(torch.autograd.Function):
    """Attention over the group, by a method's `forward` and `backward`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        for_others: torch.Tensor | None,
        job: Job,
        method: Method,
        whole: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns out `(B, S, H, E)` in the dtype of q, and lse `(B, H, S)`; `for_others` is as the module says.

        The sinks are those of `job`, given again to have a gradient: `whole`, summed over the ranks, or this rank's.
        """
        del for_others, sinks
        with _no_autocast(q.device.type):
            out, lse = method.forward(job, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.job, ctx.method, ctx.whole = job, method, whole
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, k, v and sinks in their dtypes."""
        q, k, v, out, lse = ctx.saved_tensors
        again = torch.is_grad_enabled()
        with torch.no_grad(), _no_autocast(q.device.type):
            dout = torch.zeros_like(out) if dout is None else aligned(dout)
            dlse = None if dlse is None else aligned(dlse)
            found = ctx.method.backward(ctx.job, Rows(q, dout, out, lse, dlse), k, v)
            gradients = [x.to(q.dtype, memory_format=torch.contiguous_format) for x in found]
            if (sinks := ctx.job.sinks) is not None:
                gradients.append(sink_gradient(sinks, out, lse, dout, dlse))
                if ctx.whole and ctx.job.plan.world_size > 1 and not ctx.job.plan.replicated:
                    dist.all_reduce(gradients[-1], group=ctx.job.transport.group)
        wanted = [g if needed else None for needed, g in zip(ctx.needs_input_grad, gradients, strict=False)]
        if again:  # with create_graph=True these gradients may be differentiated
            inputs = [x for x in (dout, dlse, q, k, v) if x is not None and x.requires_grad]
            wanted = [None if g is None else _Once.apply(g, *inputs) for g in wanted]  # type: ignore[no-untyped-call]
        return *wanted, *[None] * (8 - len(wanted))


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
