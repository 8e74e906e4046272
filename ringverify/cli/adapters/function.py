"""An adapter: what ringverify runs, once on each rank, to check that your code computes attention.

As written, it gathers all keys and values, and passes. Replace the body of `attend` by a call of your own ring, then
run

    ringverify check adapter.py:attend --suite smoke    in seconds, while you write
    ringverify check adapter.py:attend                  the verdict
"""

import torch
from torch.distributed.nn.functional import all_gather

from ringverify import AttentionCall, implementation

# Declare what your ring supports; what is not declared is not tested. Some of what there is:
#   sharding="zigzag"                    or "striped", "replicated_query", or a function that says who holds what
#   dtypes=("float32", "bfloat16")       with accumulates="bfloat16" or probabilities="input" if it rounds to it
#   lse=True, lse_gradient=True          it returns (out, lse), and can be differentiated through lse too
#   gqa=True, window=True, scale=True    fewer key heads; sliding windows; other scales than head_dim ** -0.5
#   uneven=True, subgroups=True          lengths that the ranks do not divide; groups smaller than the world
#   processes=True                       it keeps its rank or its group for the whole process


@implementation(sharding="contiguous", causal="both")
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Return this rank's output for its shards of q, k and v; all are (batch, sequence, heads, head_dim).

    `call` has the process `group`, this rank's `positions`, whether to be `causal`, and the `scale`.
    """
    # Yours, for example: return my_package.ring_attention(q, k, v, group=call.group, causal=call.causal)
    k, v = torch.cat(all_gather(torch.stack([k, v]), call.group), dim=2)
    scores = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    if call.causal:
        later = torch.arange(k.shape[1]) > call.positions[:, None]
        scores = scores.masked_fill(later, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)
