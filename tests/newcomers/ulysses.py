"""Ulysses: all_to_all_single from sequence shards to head shards, attention over the whole sequence, and back."""

import torch
import torch.distributed as dist

from ringverify import AttentionCall, implementation


def all_to_all(x, group):
    """Along dimension 0, of the size of the group."""
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dist.all_to_all_single(y, x, group=group)
    return y


class SeqToHeads(torch.autograd.Function):
    """(B, S, H, D) to (B, P * S, H / P, D)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        size = dist.get_world_size(group)
        b, s, h, d = x.shape
        y = all_to_all(x.reshape(b, s, size, h // size, d).permute(2, 0, 1, 3, 4), group)
        return y.permute(1, 0, 2, 3, 4).reshape(b, size * s, h // size, d)

    @staticmethod
    def backward(ctx, grad):
        return HeadsToSeq.apply(grad, ctx.group), None


class HeadsToSeq(torch.autograd.Function):
    """(B, P * S, H / P, D) to (B, S, H, D)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        size = dist.get_world_size(group)
        b, s, h, d = x.shape
        y = all_to_all(x.reshape(b, size, s // size, h, d).permute(1, 0, 2, 3, 4), group)
        return y.permute(1, 2, 0, 3, 4).reshape(b, s // size, size * h, d)

    @staticmethod
    def backward(ctx, grad):
        return SeqToHeads.apply(grad, ctx.group), None


def local_attention(q, k, v, causal, scale, window, softcap):
    """The whole sequence, some heads; softmax and sums in float32 at least."""
    acc, groups = torch.promote_types(q.dtype, torch.float32), q.shape[2] // k.shape[2]
    qa, ka, va = q.to(acc), k.to(acc).repeat_interleave(groups, 2), v.to(acc).repeat_interleave(groups, 2)
    s = scale * torch.einsum("bqhd,bkhd->bhqk", qa, ka)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance > 0
    if window is not None:
        left, right = window
        if left is not None:
            hidden |= distance < -left
        if right is not None:
            hidden |= distance > right
    p = s.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, va).to(q.dtype)


def ulysses_attention(q, k, v, group, causal, scale, window=None, softcap=None):
    size = dist.get_world_size(group)
    if q.shape[2] % size:
        raise ValueError(f"{q.shape[2]} heads cannot be divided among {size} ranks")
    dtype = q.dtype
    if k.shape[2] % size:  # too few key heads for the ranks: replicate them (in float32, where their gradients add up)
        groups = q.shape[2] // k.shape[2]
        acc = torch.promote_types(dtype, torch.float32)
        q, k, v = q.to(acc), k.to(acc).repeat_interleave(groups, 2), v.to(acc).repeat_interleave(groups, 2)
    q, k, v = (SeqToHeads.apply(x, group) for x in (q, k, v))
    out = local_attention(q, k, v, causal, scale, window, softcap)
    return HeadsToSeq.apply(out, group).to(dtype)


CLAIMS = dict(
    sharding="contiguous",
    causal="both",
    dtypes=("float32", "float64", "bfloat16"),
    gqa=True,
    value_dim=True,
    scale=True,
    window=True,
    softcap=True,
    subgroups=True,
)


@implementation(name="ulysses.attend", heads_multiple="world_size", **CLAIMS)
def attend(q, k, v, call: AttentionCall):
    """As published: raises if the number of heads is no multiple of the number of ranks."""
    return ulysses_attention(q, k, v, call.group, call.causal, call.scale, call.window, call.softcap)


@implementation(name="ulysses.attend_padded", **CLAIMS)
def attend_padded(q, k, v, call: AttentionCall):
    """The adapter adds heads of zeros until the ranks divide them."""
    heads, groups = q.shape[2], q.shape[2] // k.shape[2]
    missing = -heads % call.world_size
    if missing:
        acc = torch.promote_types(q.dtype, torch.float32)
        dtype = q.dtype
        q, k, v = q.to(acc), k.to(acc).repeat_interleave(groups, 2), v.to(acc).repeat_interleave(groups, 2)
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
        out = ulysses_attention(q, k, v, call.group, call.causal, call.scale, call.window, call.softcap)
        return out[:, :, :heads].to(dtype)
    return ulysses_attention(q, k, v, call.group, call.causal, call.scale, call.window, call.softcap)
