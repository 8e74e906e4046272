"""A ring with one mistake: right on one rank and on two, wrong on three."""

import torch
import torch.distributed as dist

from ringverify import AttentionCall, implementation


def rotated(block, call):
    """Pass a block to the right, and take the one that comes from the left."""
    arriving = torch.empty_like(block)
    right, left = (dist.get_global_rank(call.group, (call.rank + by) % call.world_size) for by in (1, -1))
    passes = [dist.P2POp(dist.isend, block, right, call.group), dist.P2POp(dist.irecv, arriving, left, call.group)]
    for work in dist.batch_isend_irecv(passes):
        work.wait()
    return arriving


@implementation(sharding="contiguous", gradients=False)
def attend(q, k, v, call: AttentionCall):
    """Merge one block a step; q, k, v and out are (batch, sequence, heads, head_dim)."""
    block, out, lse = torch.stack((k, v)), 0.0, torch.tensor(-torch.inf)
    for step in range(call.world_size):
        source = (call.rank + step) % call.world_size
        if not call.causal or source <= call.rank:
            scores = call.scale * torch.einsum("bqhd,bkhd->bqhk", q, block[0])
            if call.causal and source == call.rank:
                later = torch.ones(scores.shape[1], scores.shape[3], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later[:, None], -torch.inf)
            merged = torch.logaddexp(lse, scores.logsumexp(dim=-1))
            new = torch.einsum("bqhk,bkhd->bqhd", (scores - merged[..., None]).exp(), block[1])
            out, lse = out * (lse - merged).exp()[..., None] + new, merged
        block = rotated(block, call) if call.world_size > 1 else block
    return out
