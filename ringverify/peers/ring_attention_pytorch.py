"""`ring_flash_attn` of the package `ring-attention-pytorch` (PyPI, 0.5.20): its plain PyTorch ring, not the CUDA one.

The adapter only translates: it reorders grouped query heads and names the arguments as the package's own
`RingAttention` module does. What is declared is what the package's signature and its test scripts claim:

- float32 and CPU: the scripts that check it run nothing else on this path;
- equal shards: "ring passing makes assumption tensor is all same shape", says the module that pads for it;
- no window: `max_lookback_seq_len` counts whole buckets, so it is no window by positions;
- no key lengths: its key padding mask is ignored under a causal mask, and a capability holds for all patterns;
- no cross lengths, no other scale, no other value_dim: it gives no argument for them or refuses.

It caches `get_rank()` and `get_world_size()` for the life of the process: hence `processes=True`.

Importing this module imports the package.

Raises:
    Inconclusive: the package is missing, is of another version, or does not import.
"""

from __future__ import annotations

import torch

from ringverify.implementation import AttentionCall, implementation
from ringverify.peers.package import imported

NAME = "peer:ring-attention-pytorch"
PACKAGE = "ring-attention-pytorch"
VERSION = "0.5.20"


_ring_flash_attn = imported("ring_attention_pytorch", peer=NAME, package=PACKAGE, version=VERSION).ring_flash_attn


def _bucket_size(length: int) -> int:
    """Two buckets per shard, as in the package's own scripts; buckets must divide the shard, says `RingAttention`."""
    return length if length % 2 else length // 2


@implementation(
    name=NAME,
    sharding="contiguous",
    dtypes=("float32",),
    causal="both",
    gradients=True,
    gqa=True,
    softcap=True,
    processes=True,
)
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """This rank's output; q, k and v are this rank's shards."""
    key_heads, group_size = call.problem.hk, call.problem.group_size
    # Query head h reads key head h % Hk in the package, and h // (Hq // Hk) in the suite.
    q_theirs = _reorder_heads(q, key_heads, group_size)
    out: torch.Tensor = _ring_flash_attn(
        q_theirs,
        k,
        v,
        causal=call.causal,
        bucket_size=_bucket_size(k.shape[1]),
        ring_reduce_col=call.world_size > 1,  # as `RingAttention` decides it: `ring_attn & is_distributed()`
        **({} if call.softcap is None else {"softclamp_qk_sim": True, "softclamp_value": call.softcap}),
    )
    return _reorder_heads(out, group_size, key_heads)


def _reorder_heads(tensor: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Reorder heads that are counted by `outer`, then `inner`, to be counted by `inner`, then `outer`."""
    batch, length, _, dim = tensor.shape
    return tensor.reshape(batch, length, outer, inner, dim).transpose(2, 3).reshape(batch, length, -1, dim)
