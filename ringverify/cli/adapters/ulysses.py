"""An adapter for Ulysses: what ringverify runs, once on each rank, to see whether your attention is attention.

As it is written it exchanges sequence against heads by all-to-all, attends with torch's own attention to whole
sequences of some heads, exchanges back, and is right. Put calls of your own in the place of its parts, then run

    ringverify check adapter.py:attend --suite smoke    in seconds, while you write
    ringverify check adapter.py:attend                  the verdict
"""

import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import pad, scaled_dot_product_attention

from ringverify import AttentionCall, implementation


def exchanged(blocks: tuple[torch.Tensor, ...], call: AttentionCall) -> tuple[torch.Tensor, ...]:
    """Block r goes to rank r; block r of what is returned came from rank r."""
    sizes = [1] * call.world_size
    return all_to_all_single_autograd(torch.stack(blocks), sizes, sizes, call.group).unbind()


def sequence_to_heads(shard: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """From all heads of this rank's positions to some heads of all positions."""
    return torch.cat(exchanged(shard.chunk(call.world_size, dim=2), call), dim=1)


def heads_to_sequence(part: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """The way back."""
    return torch.cat(exchanged(part.chunk(call.world_size, dim=1), call), dim=2)


# Declare what your code supports; what is not declared is not tested. docs/adapters.md has the whole list.
#   gqa=True           fewer key heads than heads
#   scale=True         other scales than head_dim ** -0.5
#   processes=True     it keeps its rank or its group for the whole process


@implementation(sharding="contiguous", causal="both")
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """This rank's shards in, this rank's output out; all are (batch, sequence, heads, head_dim)."""
    heads = q.shape[2]
    missing = -heads % call.world_size  # heads of zeros, where the ranks do not divide them
    q, k, v = (sequence_to_heads(pad(shard, (0, 0, 0, missing)), call).transpose(1, 2) for shard in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=call.causal, scale=call.scale)
    return heads_to_sequence(out.transpose(1, 2), call)[:, :, :heads]
