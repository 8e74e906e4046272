"""Ten attentions over all keys, each wrong in one way that another feature shows; none of them needs the tool."""

import math

import torch
import torch.distributed as dist

from ringverify import implementation

INF = math.inf


class Gathered(torch.autograd.Function):
    """All ranks' shards, joined; in backward the sum over ranks of what belongs to this one, or only its own part."""

    @staticmethod
    def forward(ctx, shard, call, summed):
        ctx.call, ctx.summed, shard = call, summed, shard.contiguous()
        shards = [torch.empty_like(shard) for _ in range(call.world_size)]
        dist.all_gather(shards, shard, group=call.group)
        return torch.cat(shards, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if ctx.summed:
            dist.all_reduce(grad, group=ctx.call.group)
        return grad.chunk(ctx.call.world_size, dim=1)[ctx.call.rank], None, None


def visible(call, i, j, *, causal=0, window=0, length=0, documents=True):
    """Which of the keys at positions `j` the queries at `i` attend `(B, 1, S, T)`; the numbers shift a comparison."""
    p = call.problem
    ahead = j[None, :] - i[:, None] - (p.nk - p.nq)
    seen = torch.ones(p.batch, 1, len(i), len(j), dtype=torch.bool)
    if call.causal:
        seen = seen & (ahead <= causal)
    if call.window is not None:
        left, right = call.window
        seen = seen & (ahead >= -(INF if left is None else left + window))
        seen = seen & (ahead <= (INF if right is None else right))
    if call.documents is not None and documents:
        ends = torch.tensor(call.documents)
        of_i, of_j = (torch.searchsorted(ends, x, right=True) for x in (i, j))
        inside = (of_i > 0) & (of_i < len(ends))
        seen = seen & (of_i[:, None] == of_j[None, :]) & inside[:, None]
    if call.key_lengths is not None:
        seen = seen & (j[None, :] < torch.tensor(call.key_lengths)[:, None] + length)[:, None, None, :]
    return seen


def attention(q, k, v, call, *, scale=None, cap=True, interleaved=False, summed=True, local=False, **shifts):
    """out `(B, S, H, E)` and lse `(B, H, S)`."""
    k, v = (Gathered.apply(x, call, summed) for x in (k, v))
    j = Gathered.apply(call.key_positions[None], call, summed)[0]
    i = torch.arange(len(call.positions)) if local else call.positions
    group = q.shape[2] // k.shape[2]
    heads = torch.arange(q.shape[2])
    heads = heads % k.shape[2] if interleaved else heads // group
    s = (call.scale if scale is None else scale) * torch.einsum("bqhd,bkhd->bhqk", q, k[:, :, heads])
    if call.softcap is not None and cap:
        s = call.softcap * torch.tanh(s / call.softcap)
    seen = visible(call, i, j, **shifts)
    empty = ~seen.any(dim=-1, keepdim=True)
    s = s.masked_fill(~seen, -INF).masked_fill(empty, 0.0)
    lse = s.logsumexp(dim=-1, keepdim=True)
    p = (s - lse).exp().masked_fill(empty, 0.0)
    out = torch.einsum("bhqk,bkhe->bqhe", p, v[:, :, heads])
    return out, lse.masked_fill(empty, -INF)[..., 0]


@implementation()
def scale(q, k, v, call):
    """1/sqrt(D + 1)."""
    return attention(q, k, v, call, scale=(q.shape[-1] + 1) ** -0.5)[0]


@implementation(sharding="zigzag", causal="always")
def causal(q, k, v, call):
    """One key too many."""
    return attention(q, k, v, call, causal=1)[0]


@implementation(sharding="striped", causal="always")
def local(q, k, v, call):
    """Positions of queries within the rank."""
    return attention(q, k, v, call, local=True)[0]


@implementation(window=True)
def window(q, k, v, call):
    """One key too many on the left."""
    return attention(q, k, v, call, window=1)[0]


@implementation(documents=True, dtypes=("float64",))
def documents(q, k, v, call):
    """Ignored."""
    return attention(q, k, v, call, documents=False)[0]


@implementation(key_lengths=True)
def key_lengths(q, k, v, call):
    """One padded key attended."""
    return attention(q, k, v, call, length=1)[0]


@implementation(lse=True)
def base_2(q, k, v, call):
    """lse in base 2."""
    out, lse = attention(q, k, v, call)
    return out, lse / math.log(2)


@implementation(gqa=True, tensor_layout="bhsd", value_dim=True)
def grouped(q, k, v, call):
    """Query head h reads key head h % K."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention(q, k, v, call, interleaved=True)[0].transpose(1, 2)


@implementation(softcap=True, gradients=False)
def softcap(q, k, v, call):
    """Left out."""
    return attention(q, k, v, call, cap=False)[0]


@implementation(dtypes=("bfloat16", "float32"), lse=True, lse_gradient=True)
def own_gradients(q, k, v, call):
    """dk and dv of the rank's own queries alone."""
    return attention(q, k, v, call, summed=False)
