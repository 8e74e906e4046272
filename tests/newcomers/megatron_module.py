"""Context-parallel core attention in the manner of Megatron: a module that keeps its group, (B, H, S, D), zigzag chunks."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from ringverify import AttentionCall, implementation


class GatherChunks(torch.autograd.Function):
    """Gather the zigzag chunks of all ranks along the sequence (dimension 2), in the order of the positions."""

    @staticmethod
    def forward(ctx, x, group, rank, size):
        ctx.group, ctx.rank, ctx.size = group, rank, size
        x = x.contiguous()
        parts = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(size)]
        dist.all_gather(parts, x, group=group)
        pairs = [part.chunk(2, dim=2) for part in parts]
        return torch.cat([a for a, _ in pairs] + [b for _, b in reversed(pairs)], dim=2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        total = grad.to(
            torch.promote_types(grad.dtype, torch.float32), memory_format=torch.contiguous_format, copy=True
        )
        dist.all_reduce(total, group=ctx.group)
        chunks = total.chunk(2 * ctx.size, dim=2)
        mine = torch.cat((chunks[ctx.rank], chunks[2 * ctx.size - 1 - ctx.rank]), dim=2)
        return mine.to(grad.dtype), None, None, None


class ContextParallelAttention(nn.Module):
    """Unfused core attention: scores by baddbmm in the dtype of the inputs, softmax in float32, P in the input dtype."""

    def __init__(self, cp_group, causal=True, softmax_scale=None):
        super().__init__()
        self.cp_group = cp_group
        self.cp_size = dist.get_world_size(cp_group)
        self.cp_rank = dist.get_rank(cp_group)
        self.causal = causal
        self.softmax_scale = softmax_scale

    def local_positions(self, length, device):
        half = length // 2
        steps = torch.arange(half, device=device)
        return torch.cat((self.cp_rank * half + steps, (2 * self.cp_size - 1 - self.cp_rank) * half + steps))

    def forward(self, query, key, value):
        b, h, s, d = query.shape
        key = GatherChunks.apply(key, self.cp_group, self.cp_rank, self.cp_size)
        value = GatherChunks.apply(value, self.cp_group, self.cp_rank, self.cp_size)
        groups, n = h // key.shape[1], key.shape[2]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scale = self.softmax_scale if self.softmax_scale is not None else d**-0.5
        scores = torch.baddbmm(
            torch.empty((b * h, s, n), dtype=query.dtype, device=query.device),
            query.reshape(b * h, s, d),
            key.reshape(b * h, n, d).transpose(1, 2),
            beta=0.0,
            alpha=scale,
        )
        if self.causal:
            later = torch.arange(n, device=query.device) > self.local_positions(s, query.device)[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        probs = torch.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(value.dtype)
        return torch.bmm(probs, value.reshape(b * h, n, value.shape[-1])).view(b, h, s, -1)


CLAIMS = dict(
    sharding="zigzag",
    tensor_layout="bhsd",
    causal="both",
    dtypes=("float32", "bfloat16"),
    gqa=True,
    value_dim=True,
    scale=True,
    subgroups=True,
    accumulates="bfloat16",  # the scores are a bfloat16 matmul's output
    probabilities="input",
)


@implementation(name="megatron_module.attend", **CLAIMS)
def attend(q, k, v, call: AttentionCall):
    return ContextParallelAttention(call.group, causal=call.causal, softmax_scale=call.scale)(q, k, v)


@functools.lru_cache(maxsize=64)
def module_for(group, causal, scale):
    return ContextParallelAttention(group, causal=causal, softmax_scale=scale)


@implementation(name="megatron_module.attend_cached", processes=True, **CLAIMS)
def attend_cached(q, k, v, call: AttentionCall):
    """One module for the life of the process, as a model has it."""
    return module_for(call.group, call.causal, call.scale)(q, k, v)
