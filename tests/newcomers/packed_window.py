"""Packed documents with a sliding window: keys and values go round a ring until every rank has all of them."""

import torch
import torch.distributed as dist

from ringverify import AttentionCall, implementation


def ring_gather(x, sizes, group):
    """All shards along dimension 1, P - 1 hops; shards may differ in length and be empty."""
    rank, size = dist.get_rank(group), len(sizes)
    right, left = (dist.get_global_rank(group, (rank + by) % size) for by in (1, -1))
    parts = [None] * size
    parts[rank] = x.contiguous()
    for hop in range(size - 1):
        have, want = (rank - hop) % size, (rank - hop - 1) % size
        parts[want] = torch.empty((x.shape[0], sizes[want], *x.shape[2:]), dtype=x.dtype, device=x.device)
        ops = []
        if parts[have].numel():
            ops.append(dist.P2POp(dist.isend, parts[have], right, group))
        if parts[want].numel():
            ops.append(dist.P2POp(dist.irecv, parts[want], left, group))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
    return torch.cat(parts, 1)


class RingAllGather(torch.autograd.Function):
    """Gathers in the input dtype, returns the accumulator's; gradients are summed in that and rounded once."""

    @staticmethod
    def forward(ctx, x, sizes, group, acc):
        ctx.sizes, ctx.group, ctx.dtype = sizes, group, x.dtype
        return ring_gather(x, sizes, group).to(acc)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.split(ctx.sizes, 1)[dist.get_rank(ctx.group)].to(ctx.dtype), None, None, None


def packed_attention(q, k, v, group, positions, length, causal, scale, window=None, cu_seqlens=None):
    rank_count = dist.get_world_size(group)
    sizes = [length // rank_count + (r < length % rank_count) for r in range(rank_count)]
    dtype, acc, groups = q.dtype, torch.promote_types(q.dtype, torch.float32), q.shape[2] // k.shape[2]
    k, v = (RingAllGather.apply(x, sizes, group, acc).repeat_interleave(groups, 2) for x in (k, v))
    i, j = positions[:, None], torch.arange(length, device=q.device)[None, :]
    hidden = torch.zeros((positions.numel(), length), dtype=torch.bool, device=q.device)
    if causal:
        hidden |= j > i
    if window is not None:
        left, right = window
        if left is not None:
            hidden |= j < i - left
        if right is not None:
            hidden |= j > i + right
    if cu_seqlens is not None:
        document = torch.bucketize(torch.arange(length), torch.as_tensor(cu_seqlens)[1:], right=True)
        hidden |= document[positions][:, None] != document[None, :]
    s = (scale * torch.einsum("bqhd,bkhd->bhqk", q.to(acc), k)).masked_fill(hidden, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v).to(dtype), s.logsumexp(-1)


@implementation(
    sharding="contiguous",
    causal="both",
    dtypes=("float32", "float64", "bfloat16"),
    lse=True,
    lse_gradient=True,
    gqa=True,
    value_dim=True,
    scale=True,
    window=True,
    uneven=True,
    empty_shards=True,
    subgroups=True,
)
def attend(q, k, v, call: AttentionCall):
    return packed_attention(
        q, k, v, call.group, call.positions, call.problem.nk, call.causal, call.scale, call.window, call.documents
    )
