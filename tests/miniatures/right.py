"""A right attention in few lines: keys and values gathered, the rest by autograd. Others spoil a step of it."""

import torch
import torch.distributed as dist

from ringverify import AttentionCall, implementation


class Gathered(torch.autograd.Function):
    """All ranks' shards in rank order. Backward: what every rank has for this shard, added up."""

    @staticmethod
    def forward(ctx, shard, call):
        ctx.call = call
        pieces = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(call.world_size)]
        dist.all_gather(pieces, shard.detach().contiguous(), group=call.group)
        return torch.cat(pieces, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.call.group)
        return total.chunk(ctx.call.world_size, dim=1)[ctx.call.rank], None


def scores(q, k, call, scale):
    """Scores of this rank's queries and all keys, -inf where the mask forbids: (batch, heads, queries, keys)."""
    found = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if call.causal:
        later = torch.arange(k.shape[1])[None, :] > call.positions[:, None]
        found = found.masked_fill(later, float("-inf"))
    return found


def attention(q, k, v, call):
    """This rank's output."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    return torch.einsum("bhqk,bkhd->bqhd", scores(q, k, call, call.scale).softmax(-1), v)


@implementation(name="right")
def attend(q, k, v, call: AttentionCall):
    """As it should be."""
    return attention(q, k, v, call)


@implementation(name="right with lse", lse=True)
def attend_with_lse(q, k, v, call: AttentionCall):
    """The same, and its log-sum-exp."""
    lse = scores(q, Gathered.apply(k, call), call, call.scale).logsumexp(-1)
    return attention(q, k, v, call), lse


@implementation(name="right in processes", processes=True, world_sizes=(1, 2))
def attend_in_processes(q, k, v, call: AttentionCall):
    """The same, declared as unable to share a process."""
    return attention(q, k, v, call)
