"""`tree_attn_decode` of the package `ring-attention-pytorch` (PyPI, 0.5.20): decoding over sharded keys, after
Tree Attention (arXiv:2408.04093), on its plain PyTorch path.

The adapter only translates. The function takes one query and masks nothing: it is called for every query of a call by
itself, with `shard_kv_seq=False` and those keys of the rank that the query attends. What is declared is what its
signature and its comments claim:

- float32 and CPU; value_dim may differ ("b h n dv"), key heads may not;
- no gradients: it is decorated with `torch.no_grad`;
- ranks without keys: "handle edge case where seq length < world size". It passes tensors without rows here; with
  `k=None`, the other way that the signature has, the function ends with an UnboundLocalError unless it shards itself;
- all-reduces go to the default group, so no subgroups.

Importing this module imports the package.

Raises:
    Inconclusive: the package is missing, is of another version, or does not import.
"""

from __future__ import annotations

import torch

from ringverify.implementation import AttentionCall, implementation
from ringverify.peers.package import imported

NAME = "peer:ring-attention-pytorch-tree-decode"
PACKAGE = "ring-attention-pytorch"
VERSION = "0.5.20"

_package = imported("ring_attention_pytorch", peer=NAME, package=PACKAGE, version=VERSION)


@implementation(
    name=NAME,
    sharding="replicated_query",
    causal="both",
    gradients=False,
    value_dim=True,
    uneven=True,
    empty_shards=True,
    incremental=True,
    key_sharding=("contiguous", "striped", "pages"),
)
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """out of all queries, on every rank."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    for row, position in enumerate((call.positions + call.offset).tolist()):
        seen = call.key_positions <= position if call.causal else slice(None)
        keys, values = k[:, :, seen], v[:, :, seen]
        out[:, :, row : row + 1] = _package.tree_attn_decode(q[:, :, row : row + 1], keys, values, shard_kv_seq=False)
    return out.transpose(1, 2)
