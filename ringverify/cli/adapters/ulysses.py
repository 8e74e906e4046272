"""An adapter for Ulysses: what ringverify runs, once on each rank, to check that your code computes attention.

As written, it exchanges sequence shards for head shards by all-to-all, calls torch's own attention on whole sequences
of some heads, exchanges back, and passes. Replace these parts by calls of your own, then run

    ringverify check adapter.py:attend --suite smoke    in seconds, while you write
    ringverify check adapter.py:attend                  the verdict
"""

import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import pad, scaled_dot_product_attention

from ringverify import AttentionCall, implementation


def exchanged(blocks: tuple[torch.Tensor, ...], call: AttentionCall) -> tuple[torch.Tensor, ...]:
    """Send block r to rank r; block r of the result came from rank r."""
    sizes = [1] * call.world_size
    return all_to_all_single_autograd(torch.stack(blocks), sizes, sizes, call.group).unbind()


def sequence_to_heads(shard: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Turn all heads of this rank's positions into some heads of all positions."""
    return torch.cat(exchanged(shard.chunk(call.world_size, dim=2), call), dim=1)


def heads_to_sequence(part: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Turn some heads of all positions back into all heads of this rank's positions."""
    return torch.cat(exchanged(part.chunk(call.world_size, dim=1), call), dim=2)


# Declare what your code supports; what is not declared is not tested. docs/adapters.md has the whole list.
#   gqa=True           fewer key heads than heads
#   scale=True         other scales than head_dim ** -0.5
#   processes=True     it keeps its rank or its group for the whole process


@implementation(sharding="contiguous", causal="both")
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Return this rank's output for its shards of q, k and v; all are (batch, sequence, heads, head_dim)."""
    heads = q.shape[2]
    missing = -heads % call.world_size  # heads of zeros to add if the number of ranks does not divide the heads
    q, k, v = (sequence_to_heads(pad(shard, (0, 0, 0, missing)), call).transpose(1, 2) for shard in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=call.causal, scale=call.scale)
    return heads_to_sequence(out.transpose(1, 2), call)[:, :, :heads]
