"""Decoding over a sharded cache: each rank attends its own keys, and partial results are merged. Forward alone."""

import torch
import torch.distributed as dist

from ringverify import AttentionCall, implementation


@implementation(
    sharding="replicated_query",
    gradients=False,
    lse=True,
    gqa=True,
    window=True,
    cross_lengths=True,
    uneven=True,
    empty_shards=True,
    incremental=True,
    query_sharding="replicated",
    key_sharding=("contiguous", "striped", "pages"),
)
def attend(q, k, v, call: AttentionCall):
    """The new queries, and this rank's rows of the cache; out and lse of these queries on every rank."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    distance = call.key_positions - (call.positions[:, None] + call.offset)
    left, right = call.window or (None, None)
    hidden = (distance > 0) & call.causal
    hidden |= False if left is None else distance < -left
    hidden |= False if right is None else distance > right
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.einsum("bhqk,bkhd->bqhd", torch.exp(scores - lse[..., None]).nan_to_num(0.0), v)
    outs, lses = ([torch.empty_like(x) for _ in range(call.world_size)] for x in (out, lse))
    dist.all_gather(outs, out, group=call.group)
    dist.all_gather(lses, lse, group=call.group)
    whole = torch.logsumexp(torch.stack(lses), dim=0)
    weights = torch.exp(torch.stack(lses) - whole).nan_to_num(0.0)  # a rank without keys has none
    return torch.einsum("pbhq,pbqhd->bqhd", weights, torch.stack(outs)), whole
