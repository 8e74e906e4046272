"""Our two implementations as the suite sees them, under the names `ring` and `allgather`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringref.problem import DTYPES
from ringref.sharding import SHARDINGS
from ringverify.implementation import AttentionCall, implementation
from ringverify.ring.ring import allgather_attention, ring_attention

if TYPE_CHECKING:
    import torch

EVERYTHING: dict[str, Any] = {
    "sharding": SHARDINGS,
    "dtypes": DTYPES,
    "devices": ("cpu", "cuda"),
    "causal": "both",
    "lse": True,
    "lse_gradient": True,
    "gqa": True,
    "value_dim": True,
    "scale": True,
    "window": True,
    "documents": True,
    "key_lengths": True,
    "cross_lengths": True,
    "softcap": True,
    "dilation": ("split", "shared"),
    "uneven": True,
    "empty_shards": True,
    "subgroups": True,
    "deterministic": True,
}
"""What both declare: all that the written semantics covers."""


@implementation(name="ring", traffic="neighbours", memory="sharded", **EVERYTHING)
def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values passed hop by hop; see `ringverify.ring.ring.ring_attention`."""
    return ring_attention(q, k, v, call)


@implementation(name="allgather", **EVERYTHING)
def allgather(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values gathered; see `ringverify.ring.ring.allgather_attention`."""
    return allgather_attention(q, k, v, call)
