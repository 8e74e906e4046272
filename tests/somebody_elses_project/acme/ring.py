"""Ring attention: keys and values go round, each rank merges what it sees; gradients go round with them and home."""

import torch
import torch.distributed as dist

from ringverify import implementation


def pass_on(tensors, group):
    """Send tensors to the next rank of a ring and return those of the previous one."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return tensors
    following, previous = (dist.get_global_rank(group, (rank + by) % size) for by in (1, -1))
    sent = [tensor.contiguous() for tensor in tensors]
    received = [torch.empty_like(tensor) for tensor in sent]
    passes = [dist.P2POp(dist.isend, tensor, following, group) for tensor in sent]
    passes += [dist.P2POp(dist.irecv, tensor, previous, group) for tensor in received]
    for work in dist.batch_isend_irecv(passes):
        work.wait()
    return received


def scores_of(q, k, scale, source, rank, causal):
    """Scores (batch, heads, queries, keys) of the block of a rank; `None` if a causal mask hides all of it."""
    if causal and source > rank:
        return None
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal and source == rank:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return scores


class Ring(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks."""

    @staticmethod
    def forward(ctx, q, k, v, group, scale, causal):
        """One block a step, merged by log-sum-exps."""
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=q.dtype).transpose(1, 2)
        block = [k, v]
        for step in range(size):
            scores = scores_of(q, block[0], scale, (rank - step) % size, rank, causal)
            if scores is not None:
                both = torch.logaddexp(lse, scores.logsumexp(-1))
                out = out * (lse - both).exp().transpose(1, 2)[..., None]
                out = out + torch.einsum("bhqk,bkhd->bqhd", (scores - both[..., None]).exp(), block[1])
                lse = both
            if step + 1 < size:
                block = pass_on(block, group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.scale, ctx.causal = group, scale, causal
        return out

    @staticmethod
    def backward(ctx, dout):
        """The same way round, with the gradients of a block beside it; one pass more takes them home."""
        q, k, v, out, lse = ctx.saved_tensors
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        delta = (dout * out).sum(-1).transpose(1, 2)[..., None]
        dq = torch.zeros_like(q)
        block = [k, v, torch.zeros_like(k), torch.zeros_like(v)]
        for step in range(size):
            keys, values, dk, dv = block
            scores = scores_of(q, keys, ctx.scale, (rank - step) % size, rank, ctx.causal)
            if scores is not None:
                weights = (scores - lse[..., None]).exp()
                dscores = weights * (torch.einsum("bqhd,bkhd->bhqk", dout, values) - delta) * ctx.scale
                dq = dq + torch.einsum("bhqk,bkhd->bqhd", dscores, keys)
                dk = dk + torch.einsum("bhqk,bqhd->bkhd", dscores, q)
                dv = dv + torch.einsum("bhqk,bqhd->bkhd", weights, dout)
            onwards = [keys, values] if step + 1 < size else []
            block = pass_on([*onwards, dk, dv], ctx.group)
        return dq, *block, None, None, None


@implementation(name="acme ring", subgroups=True, scale=True, traffic="neighbours")
def attend(q, k, v, call):
    """The ring as RingVerify calls it."""
    return Ring.apply(q, k, v, call.group, call.scale, call.causal)
