"""A plug-in: gather every rank's keys and values, then attend. Twenty lines, and a verdict on them."""

import torch
import torch.distributed as dist

from ringverify import AttentionCall, implementation


class Gather(torch.autograd.Function):
    """All ranks' shards, joined along the sequence; every rank's gradient comes home in backward."""

    @staticmethod
    def forward(ctx, shard, call):
        ctx.call, shard = call, shard.contiguous()
        shards = [torch.empty_like(shard) for _ in range(call.world_size)]
        dist.all_gather(shards, shard, group=call.group)
        return torch.cat(shards, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.call.group)
        return grad.chunk(ctx.call.world_size, dim=1)[ctx.call.rank], None


@implementation(sharding="contiguous", causal="both")
def attend(q, k, v, call: AttentionCall):
    """This rank's shards in, this rank's output out, all (batch, sequence, heads, head_dim)."""
    k, v = Gather.apply(k, call), Gather.apply(v, call)
    scores = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    if call.causal:
        visible = torch.arange(k.shape[1]) <= call.positions[:, None]
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)
