"""Decoding with a sharded cache: every rank has all queries and some keys; partial results are merged by their lse."""

import torch
import torch.distributed as dist

from ringverify import AttentionCall, implementation


class ToRanks(torch.autograd.Function):
    """Identity on a replicated tensor; its gradient is the sum over the ranks' uses."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class FromRanks(torch.autograd.Function):
    """Stack the ranks' tensors. What follows is replicated, and so is its gradient: each rank takes its own slice."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.rank, size = dist.get_rank(group), dist.get_world_size(group)
        x = x.contiguous()
        parts = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(size)]
        dist.all_gather(parts, x, group=group)
        return torch.stack(parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad[ctx.rank], None


INF = float("inf")


def log_of(total, top):
    """log(total) + top, and -inf where total is 0, with gradients that are 0 there."""
    empty = total == 0
    return (total.masked_fill(empty, 1.0).log() + top).masked_fill(empty, -INF)


def partial_attention(q, k, v, hidden, scale):
    """(B, H, Nq, Dv) and (B, H, Nq): what the local keys give, normalised among themselves."""
    s = (scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(hidden, -INF)
    top = torch.nn.functional.pad(s.detach(), (0, 1), value=-INF).amax(-1)  # there may be no local keys
    top = top.masked_fill(top == -INF, 0.0)
    p = (s - top[..., None]).exp()
    total = p.sum(-1)
    out = torch.einsum("bhqk,bkhd->bhqd", p, v) / (total + (total == 0))[..., None]
    return out, log_of(total, top)


def decode_attention(q, k, v, group, positions, key_positions, nq, nk, causal, scale, key_lengths=None, window=None):
    dtype, acc, groups = q.dtype, torch.promote_types(q.dtype, torch.float32), q.shape[2] // k.shape[2]
    qa = ToRanks.apply(q.to(acc), group)
    ka, va = k.to(acc), v.to(acc)
    distance = key_positions[None, :] - (positions[:, None] + nk - nq)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance > 0
    if window is not None:
        left, right = window
        if left is not None:
            hidden |= distance < -left
        if right is not None:
            hidden |= distance > right
    hidden = hidden[None].expand(q.shape[0], -1, -1)
    if key_lengths is not None:
        ends = torch.as_tensor(key_lengths, device=q.device)
        hidden = hidden | (key_positions[None, :] >= ends[:, None])[:, None, :]
    unused = hidden.all(1)[:, :, None, None]  # the rest of the cache may hold anything
    ka, va = ka.masked_fill(unused, 0.0), va.masked_fill(unused, 0.0)
    out, lse = partial_attention(
        qa, ka.repeat_interleave(groups, 2), va.repeat_interleave(groups, 2), hidden[:, None], scale
    )
    both = FromRanks.apply(torch.cat((out, lse[..., None]), -1), group)
    outs, lses = both[..., :-1], both[..., -1]
    top = lses.detach().amax(0)
    top = top.masked_fill(top == -INF, 0.0)
    weights = (lses - top).exp()
    total = weights.sum(0)
    out = (weights[..., None] * outs).sum(0) / (total + (total == 0))[..., None]
    return out.transpose(1, 2).to(dtype), log_of(total, top)


@implementation(
    sharding="replicated_query",
    causal="both",
    dtypes=("float32", "float64", "bfloat16", "float16"),
    lse=True,
    lse_gradient=True,
    gqa=True,
    value_dim=True,
    scale=True,
    window=True,
    key_lengths=True,
    cross_lengths=True,
    uneven=True,
    empty_shards=True,
    subgroups=True,
)
def attend(q, k, v, call: AttentionCall):
    return decode_attention(
        q,
        k,
        v,
        call.group,
        call.positions,
        call.key_positions,
        call.problem.nq,
        call.problem.nk,
        call.causal,
        call.scale,
        call.key_lengths,
        call.window,
    )
