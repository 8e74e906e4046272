"""Our two implementations as the suite sees them, under the names `ring` and `allgather`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringref.problem import DTYPES
from ringref.sharding import SHARDING_NAMES
from ringverify.implementation import AttentionCall, implementation
from ringverify.ring.attention import attend
from ringverify.ring.calls import Engine
from ringverify.ring.group import Ring

if TYPE_CHECKING:
    import torch

EVERYTHING: dict[str, Any] = {
    "sharding": SHARDING_NAMES,
    "dtypes": DTYPES,
    "devices": ("cpu", "cuda"),
    "causal": "both",
    "lse": True,
    "lse_gradient": True,
    "gqa": True,
    "value_dim": True,
    "scale": True,
    "negative_scale": True,
    "window": True,
    "documents": True,
    "key_lengths": True,
    "cross_lengths": True,
    "incremental": True,
    "query_sharding": ("replicated", "contiguous", "zigzag", "striped"),
    "key_sharding": ("contiguous", "zigzag", "striped", "pages"),
    "softcap": True,
    "dilation": ("split", "shared"),
    "uneven": True,
    "empty_shards": True,
    "subgroups": True,
    "deterministic": True,
    "balance": 1.05,
    "poison_safe": True,
    "probabilities": "input",
}
"""What both declare: all that the written semantics covers. They are deterministic on CUDA too, by asking for it.
Sinks are apart: `ring` returns a rank's part of their gradient, and `allgather` the whole."""


@implementation(name="ring", traffic="neighbours", memory="streaming", sinks="partial", **EVERYTHING)
def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values passed hop by hop; see `ringverify.ring.attention`."""
    return attended(q, k, v, call, Engine("ring", deterministic=True))


@implementation(name="allgather", sinks=True, **EVERYTHING)
def allgather(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values gathered; see `ringverify.ring.allgather`."""
    return attended(q, k, v, call, Engine("allgather", deterministic=True, sink_gradient="whole"))


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall, engine: Engine
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a call asks for, as an engine computes it."""
    ring = Ring(call.group, call.rank, call.world_size)
    return attend(q, k, v, problem=call.problem, sharding=call.sharding, ring=ring, engine=engine, sinks=call.sinks)
