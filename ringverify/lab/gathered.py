"""Correct implementations without a backward of their own: differentiable collectives, and autograd does the rest.

What the mask excludes is replaced by 0 before anything is multiplied, so that a masked NaN does not spread, forward or
backward. Shape letters: B batch, H query heads, S queries, T keys, D head_dim, E value_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringref.sharding import pieces
from ringverify.faults.place import Here
from ringverify.faults.ring import STEPS
from ringverify.implementation import AttentionCall

Tensor = torch.Tensor


def _here(q: Tensor, call: AttentionCall) -> Here:
    return Here(call, q.dtype, STEPS.wide(q.dtype))


class _GatherRows(torch.autograd.Function):
    """All-gather every rank's rows in rank order; backward sums the gradients of this rank's rows over all ranks."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, here: Here) -> Tensor:
        ctx.here = here
        counts = [len(rows) for rows in here.shards]
        padded = F.pad(shard.detach(), (0, 0, 0, 0, 0, max(counts) - shard.size(1))).contiguous()
        everyone = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everyone, padded, group=here.group)
        return torch.cat([rows[:, :count] for rows, count in zip(everyone, counts, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        here: Here = ctx.here
        total = gradient.clone(memory_format=torch.contiguous_format)
        if not here.replicated:  # replicated queries: every rank has the same cotangent, and the whole gradient
            dist.all_reduce(total, group=here.group)
        start = sum(len(rows) for rows in here.shards[: here.rank])
        return total.narrow(1, start, len(here.shards[here.rank])), None


def attention(here: Here, m: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Dense attention, differentiable by autograd: out `(B, H, S, E)` and lse `(B, H, S)`."""
    problem, attended = here.problem, m > 0
    pairs = attended[..., None]
    s = (torch.where(pairs, q[:, :, :, None], 0.0) * torch.where(pairs, k[:, :, None], 0.0)).sum(dim=-1)
    s = s * problem.scale_value
    if problem.softcap is not None:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    masked = s.detach().masked_fill(~attended, -math.inf)
    top = masked.amax(dim=-1, keepdim=True) if m.size(-1) else masked.new_zeros((*m.shape[:3], 1))
    top = torch.where(top == -math.inf, 0.0, top)
    w = torch.where(attended, m * torch.exp(torch.where(attended, s - top, 0.0)), 0.0)
    total = w.sum(dim=-1)
    acc = (w[..., None] * torch.where(pairs, v[:, :, None], 0.0)).sum(dim=-2)
    safe = torch.where(total == 0, 1.0, total)
    return acc / safe[..., None], torch.where(total == 0, -math.inf, top[..., 0] + safe.log())


Joined = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""What becomes of out `(B, H, S, E)` and lse `(B, H, S)` beside learned sinks `(H, 1)`."""


def by_allgather(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, joined: Joined | None = None
) -> tuple[Tensor, Tensor]:
    """Attend all keys, after a differentiable all-gather in the wide dtype; autograd does the backward."""
    here = _here(q, call)
    q, k, v = (x.to(here.wide) for x in (q, k, v))
    k, v = _GatherRows.apply(k, here), _GatherRows.apply(v, here)  # type: ignore[no-untyped-call]  # torch's
    positions = torch.cat(here.shards)
    m = STEPS.pattern(replace(STEPS, keys=lambda here, hop, owner: positions), here, 0, 0)
    q, k, v = q.transpose(1, 2), *(STEPS.per_query_head(here, x.transpose(1, 2)) for x in (k, v))
    out, lse = attention(here, m, q, k, v)
    if joined is not None and call.sinks is not None:
        out, lse = joined(out, lse, call.sinks.to(here.wide)[:, None])
    return out.transpose(1, 2).to(here.dtype), lse


class _Exchanged(torch.autograd.Function):
    """All-to-all of one flat tensor; its backward is the all-to-all in the other direction."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, here: Here, leaving: list[int], arriving: list[int]) -> Tensor:
        ctx.here, ctx.sizes = here, (leaving, arriving)
        return _all_to_all(here, flat, leaving, arriving)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        leaving, arriving = ctx.sizes
        return _all_to_all(ctx.here, gradient, arriving, leaving), None, None, None


def _all_to_all(here: Here, flat: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
    received = flat.new_empty(sum(arriving))
    dist.all_to_all_single(received, flat.detach().contiguous(), arriving, leaving, group=here.group)
    return received


def _exchange(here: Here, leaving: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Send one tensor to every rank, and return the tensors received, one of these shapes from each rank."""
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.cat([x.reshape(-1) for x in leaving])
    arrived = _Exchanged.apply(flat, here, [x.numel() for x in leaving], sizes)  # type: ignore[no-untyped-call]
    return [x.view(shape) for x, shape in zip(torch.split(arrived, sizes), shapes, strict=True)]


def by_heads(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Exchange sequence against heads and back by all-to-all, as DeepSpeed-Ulysses does, but for any sizes.

    Jacobs et al. 2023, arXiv:2309.14509. A rank may get no head; a key head goes to every rank that reads it.
    """
    here = _here(q, call)
    problem = here.problem
    q, k, v = (x.to(here.wide) for x in (q, k, v))
    heads = [torch.as_tensor(piece, device=q.device) for piece in pieces(problem.heads, here.size)]
    key_heads = [torch.unique(piece // problem.group_size) for piece in heads]
    # Queries and keys are sharded alike, each over its own length.
    queries = _query_shards(here)

    def by_head(x: Tensor, of: list[Tensor], rows: list[Tensor]) -> Tensor:
        """`(B, this rank's rows, all heads, D)` to `(B, this rank's heads, all rows, D)`."""
        shapes = [(problem.batch, len(held), len(of[here.rank]), x.size(-1)) for held in rows]
        arrived = _exchange(here, [x[:, :, chosen] for chosen in of], shapes)
        return torch.cat(arrived, dim=1).transpose(1, 2)

    q, k, v = by_head(q, heads, queries), by_head(k, key_heads, here.shards), by_head(v, key_heads, here.shards)
    mine = heads[here.rank]
    at = torch.searchsorted(key_heads[here.rank], mine // problem.group_size)
    i, j = torch.cat(queries), torch.cat(here.shards)
    steps = replace(STEPS, queries=lambda here: i, keys=lambda here, hop, owner: j)
    m = steps.pattern(steps, here, 0, 0)[:, mine]
    out, lse = attention(here, m, q, k[:, at], v[:, at])
    whole = torch.cat([out, lse[..., None]], dim=-1)
    rows = len(queries[here.rank])
    shapes = [(problem.batch, len(theirs), rows, problem.dv + 1) for theirs in heads]
    arrived = _exchange(here, torch.split(whole, [len(held) for held in queries], dim=2), shapes)
    whole = torch.cat(arrived, dim=1)
    return whole[..., :-1].transpose(1, 2).to(here.dtype), whole[..., -1]


def _query_shards(here: Here) -> list[Tensor]:
    problem = here.problem.replace(key_length=here.problem.nq, key_lengths=None)
    return replace(here, call=replace(here.call, problem=problem)).shards
