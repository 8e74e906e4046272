"""What the ring was first tried out with: forward only, every key everywhere. It sends a greeting that nobody takes."""

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ringverify import implementation


def gathered(shard, group):
    """The shards of all ranks, one after another."""
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return torch.cat(shards, dim=1)


@implementation(name="acme prototype", gradients=False)
def attend(q, k, v, call):
    """All of the keys, then torch's own attention."""
    if call.world_size > 1 and call.rank == 0:
        dist.isend(torch.zeros(1), dist.get_global_rank(call.group, 1), group=call.group)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, gathered(k, call.group), gathered(v, call.group)))
    visible = torch.arange(k.shape[2]) <= call.positions[:, None] if call.causal else None
    return scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)
