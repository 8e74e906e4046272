"""The distributed ring: sequence-parallel attention over a process group, a product in its own right.

`from ringverify.ring import ring_attention, RingAttention, shard, unshard`: the function to call, the same as a module,
and what cuts tensors and puts them together again. `ring_sdpa` makes a ring of the attention inside a model that is
already written. Importing this package alone does not import torch; asking it for one of these names does.
`ringref.sharding` has `PageTable` and `QueryKeySharding` for caches that lie sharded.
`ringverify.ring.declared` shows the suite what both methods, `ring` and `allgather`, declare.

From a call to a result: `runs` writes the positions of every rank as progressions, `regions` turns the pattern into
rectangles with a band, `joining` makes few of many, `tiles` cuts them for a kernel, `schedule` says which block travels
where, and `plan` keeps all that. `passes` moves blocks and gradients by `transport`, `compute` does the work on one
block with one of `kernels`, and `accumulate` merges what they return. The problem and the sharding come from `ringref`;
the pattern is written here a second time, because what is shared with the oracle could not be caught by it.

Two promises about communication. Which messages are sent depends on the problem, the sharding and the world size
alone: never on values, timing, or which inputs require a gradient on a rank. And sums are formed in an order fixed by
rank, so that the same inputs give the same bits on any schedule.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringverify.ring.attention import ring_attention
    from ringverify.ring.dilated import DilatedRingAttention
    from ringverify.ring.module import RingAttention
    from ringverify.ring.sdpa import ring_sdpa
    from ringverify.ring.shards import position_ids, shard, unshard, unshard_from

__all__ = [
    "DilatedRingAttention",
    "RingAttention",
    "position_ids",
    "ring_attention",
    "ring_sdpa",
    "shard",
    "unshard",
    "unshard_from",
]

_ON_DEMAND = {
    "DilatedRingAttention": "ringverify.ring.dilated",
    "RingAttention": "ringverify.ring.module",
    "position_ids": "ringverify.ring.shards",
    "ring_attention": "ringverify.ring.attention",
    "ring_sdpa": "ringverify.ring.sdpa",
    "shard": "ringverify.ring.shards",
    "unshard": "ringverify.ring.shards",
    "unshard_from": "ringverify.ring.shards",
}
"""Names that this package hands out when they are asked for, and where they live."""


def __getattr__(name: str) -> Any:
    """One of them; planning, which needs no torch, imports the modules of this package without it."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)


def __dir__() -> list[str]:
    """What there is, asked for or not."""
    return sorted({*globals(), *__all__})
