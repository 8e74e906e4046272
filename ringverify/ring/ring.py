"""Sequence-parallel attention to call: `ring_attention` hop by hop, `allgather_attention` by collectives.

Both are differentiable in q, k and v, through out and through lse, with a backward of their own: autograd could not
follow a block round the ring, and what it would save, the ring's buffers, the next hop overwrites. Saved instead are
the inputs, the unrounded output, and a maximum and a sum a row.

All ranks of the group call together, forward and backward. A backward runs the whole pass whichever inputs require a
gradient, so that ranks need not agree on k or v; but each rank has to run one, so every rank needs some input that
requires one, a rank that holds no tokens included.

Shape letters: B batch, S this rank's queries, T this rank's keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch.autograd.function import once_differentiable

from ringverify.implementation import AttentionCall
from ringverify.ring import allgather, passes
from ringverify.ring.block import Queries, cotangents
from ringverify.ring.merge import finish
from ringverify.ring.plan import Plan, make_plan, pack


def ring_attention(
    q: Float[torch.Tensor, "B S H D"],
    k: Float[torch.Tensor, "B T K D"],
    v: Float[torch.Tensor, "B T K E"],
    call: AttentionCall,
) -> tuple[Float[torch.Tensor, "B S H E"], Float[torch.Tensor, "B H S"]]:
    """Attention of this rank's queries to the keys of all ranks, keys and values passed from neighbour to neighbour.

    Liu, Zaharia & Abbeel 2023, *Ring attention with blockwise transformers for near-infinite context*,
    arXiv:2310.01889, with the semantics of `ringref.problem.Problem`.

    Args:
        q: this rank's queries `(B, S, H, D)`, in any memory layout.
        k: this rank's keys `(B, T, K, D)`.
        v: this rank's values `(B, T, K, E)`.
        call: what all ranks compute, and this rank's place in it.

    Returns:
        out `(B, S, H, E)` in the dtype of q, and lse `(B, H, S)`, natural logarithm, in float64 for float64 inputs and
        float32 otherwise. A query that attends nothing has out 0, lse −inf and gradients 0.

    Raises:
        ValueError: the inputs do not fit the call; raised before any communication.
        RuntimeError: on differentiating a gradient again, which is not supported.
    """
    return _attention(q, k, v, call, passes)


def allgather_attention(
    q: Float[torch.Tensor, "B S H D"],
    k: Float[torch.Tensor, "B T K D"],
    v: Float[torch.Tensor, "B T K E"],
    call: AttentionCall,
) -> tuple[Float[torch.Tensor, "B S H E"], Float[torch.Tensor, "B H S"]]:
    """`ring_attention` with collectives: an all-gather of keys and values, a reduce-scatter of their gradients.

    Arguments, results and errors are those of `ring_attention`.
    """
    return _attention(q, k, v, call, allgather)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall, method: ModuleType
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = make_plan(q, k, v, call)
    out, lse = _Attention.apply(q, k, v, plan, method)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return out, lse


class _Attention(torch.autograd.Function):
    """Attention over the group, by the `forward` and `backward` of a method: `passes` or `allgather`."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, method: ModuleType
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with _no_autocast(q.device.type):
            partial = method.forward(plan, _queries(plan, q), _block(k, v))
            out_BHSE, lse = finish(partial)
            accumulated = out_BHSE.transpose(1, 2).contiguous()
            out = accumulated.to(plan.dtype)
        # Where no rounding took place the two are one tensor, kept once.
        ctx.save_for_backward(q, k, v, accumulated, partial.max, partial.sum)
        ctx.plan, ctx.method = plan, method
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, accumulated, largest, total = ctx.saved_tensors
        plan: Plan = ctx.plan
        problem = plan.problem
        with _no_autocast(q.device.type):
            queries = _queries(plan, q)
            out_BHSE = accumulated.transpose(1, 2)
            dout_BHSE = dout.to(plan.accumulates).transpose(1, 2)
            rows = cotangents(queries, (largest, total), out_BHSE, dout_BHSE, dlse)
            dq, block = ctx.method.backward(plan, queries, rows, _block(k, v))
            dq_BHSD = dq.view(queries.q_BHSD.shape) * problem.scale_value
            dk_PTD, dv_PTE = plan.unpack(block, plan.rank)
        by_head = (problem.batch, problem.hk, k.size(1))
        dk_BKTD, dv_BKTE = dk_PTD.view(*by_head, problem.head_dim), dv_PTE.view(*by_head, problem.dv)
        wanted = zip(ctx.needs_input_grad, (dq_BHSD, dk_BKTD, dv_BKTE), strict=False)
        return *(g.transpose(1, 2).to(plan.dtype) if needed else None for needed, g in wanted), None, None


def _queries(plan: Plan, q: torch.Tensor) -> Queries:
    scaled = q.transpose(1, 2).to(plan.accumulates) * plan.problem.scale_value
    return Queries(scaled.contiguous(), plan.problem.softcap, plan.problem.hk)


def _block(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return pack(k.transpose(1, 2), v.transpose(1, 2))


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast would round scores and sums to half precision behind our back."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
