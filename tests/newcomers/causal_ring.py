"""Contiguous ring by plain autograd: a differentiable shift, and the online softmax written out."""

import torch
import torch.distributed as dist

from ringverify import AttentionCall, implementation


def exchange(tensor, group, by):
    """Send to rank + by, receive from rank - by."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tensor = tensor.contiguous()
    arriving = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    send = dist.isend(tensor, dist.get_global_rank(group, (rank + by) % size), group=group)
    receive = dist.irecv(arriving, dist.get_global_rank(group, (rank - by) % size), group=group)
    send.wait()
    receive.wait()
    return arriving


class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group, by):
        ctx.group, ctx.by = group, by
        return exchange(tensor, group, by)

    @staticmethod
    def backward(ctx, grad):
        return Shift.apply(grad, ctx.group, -ctx.by), None, None


def ring_attention(q, k, v, group, causal, scale, softcap=None):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    groups = q.shape[2] // k.shape[2]
    mine = torch.arange(q.shape[1]) + rank * q.shape[1]
    block, top, total, acc = torch.stack((k, v)), None, None, None
    for step in range(size):
        source = (rank - step) % size
        kk, vv = block.repeat_interleave(groups, 3)
        s = scale * torch.einsum("bqhd,bkhd->bhqk", q, kk)
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if causal:  # blocks of the future are masked, not skipped: their shifts must run backward on every rank
            theirs = torch.arange(k.shape[1]) + source * k.shape[1]
            s = s.masked_fill(theirs > mine[:, None], float("-inf"))
        high = s.detach().amax(-1)
        if top is None:  # our own block: at least the diagonal, so that the maximum is finite from here on
            p = (s - high[..., None]).exp()
            top, total, acc = high, p.sum(-1), torch.einsum("bhqk,bkhd->bhqd", p, vv)
        else:
            high = torch.maximum(top, high)
            keep, p = (top - high).exp(), (s - high[..., None]).exp()
            total = total * keep + p.sum(-1)
            acc = acc * keep[..., None] + torch.einsum("bhqk,bkhd->bhqd", p, vv)
            top = high
        if step + 1 < size:
            block = Shift.apply(block, group, 1)
    return (acc / total[..., None]).transpose(1, 2), top + total.log()


@implementation(
    sharding="contiguous",
    causal="both",
    dtypes=("float32", "float64"),
    lse=True,
    lse_gradient=True,
    gqa=True,
    scale=True,
    softcap=True,
    subgroups=True,
    traffic="neighbours",
)
def attend(q, k, v, call: AttentionCall):
    return ring_attention(q, k, v, call.group, call.causal, call.scale, call.softcap)
