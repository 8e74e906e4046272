"""An adapter for a module: what ringverify runs, once on each rank, to check that your code computes attention.

As written, it holds a module that gathers all keys and values, and passes. Import your own module in place of
`YourAttention`, build it in `attend`, then run

    ringverify check adapter.py:attend --suite smoke    in seconds, while you write
    ringverify check adapter.py:attend                  the verdict
"""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather

from ringverify import AttentionCall, implementation


class YourAttention(torch.nn.Module):
    """Placeholder for your module: remove it and import yours."""

    def __init__(self, group: dist.ProcessGroup, *, causal: bool) -> None:
        """Keep the process group of the ring."""
        super().__init__()
        self.group, self.causal = group, causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return this rank's output; all tensors are (batch, sequence, heads, head_dim)."""
        first = dist.get_rank(self.group) * q.shape[1]
        k, v = torch.cat(all_gather(torch.stack([k, v]), self.group), dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        if self.causal:
            later = torch.arange(k.shape[1]) > first + torch.arange(q.shape[1])[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)


# Declare what your module supports; what is not declared is not tested. docs/adapters.md has the whole list.
#   tensor_layout="bhsd"     it takes (batch, heads, sequence, head_dim); for other layouts transpose in `attend`
#   processes=True           it keeps its rank or its group for the whole process, as Megatron's parallel state does:
#                            its ranks are then processes; otherwise they are threads of one process
#   gradients=False          for inference only


@implementation(sharding="contiguous", causal="both")
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Return this rank's output for its shards; builds a new module each time, since the group may change."""
    module = YourAttention(call.group, causal=call.causal)
    out: torch.Tensor = module(q, k, v)
    return out
