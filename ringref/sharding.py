"""Which rank holds which positions. No divisibility is ever required; a rank may hold nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

ShardingName = Literal["contiguous", "zigzag", "striped", "replicated_query"]
SHARDINGS: tuple[ShardingName, ...] = get_args(ShardingName)

Positions = NDArray[np.int64]
ShardingFunction = Callable[[int, int], Sequence[Any]]
"""A user's own sharding: `(seq_len, world_size) -> list of position tensors`, one per rank."""
Sharding = ShardingName | ShardingFunction


def pieces(length: int, count: int) -> list[Positions]:
    """Cut `length` positions into `count` consecutive pieces whose sizes differ by at most one, larger ones first."""
    size, larger = divmod(length, count)
    starts = [piece * size + min(piece, larger) for piece in range(count + 1)]
    return [np.arange(a, b, dtype=np.int64) for a, b in pairwise(starts)]


def key_positions(sharding: Sharding, length: int, world_size: int) -> list[Positions]:
    """The key positions of each rank, `world_size` int64 arrays that partition `range(length)`.

    Raises:
        ValueError: the name is unknown, the world is empty, or a sharding function does not return a partition.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected at least 1")
    match sharding:
        case "contiguous" | "replicated_query":
            return pieces(length, world_size)
        case "zigzag":
            halves = pieces(length, 2 * world_size)
            return [np.concatenate([halves[r], halves[2 * world_size - 1 - r]]) for r in range(world_size)]
        case "striped":
            return [np.arange(r, length, world_size, dtype=np.int64) for r in range(world_size)]
        case _ if not isinstance(sharding, str) and callable(sharding):
            return _checked(sharding, length, world_size)
        case _:
            raise ValueError(f"sharding={sharding!r}: expected one of {', '.join(SHARDINGS)}, or a function")


def query_positions(sharding: Sharding, length: int, world_size: int) -> list[Positions]:
    """The query positions of each rank: sharded like keys, but with `replicated_query` all of them on every rank.

    Raises:
        ValueError: as `key_positions`.
    """
    if sharding == "replicated_query":
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: expected at least 1")
        return [np.arange(length, dtype=np.int64) for _ in range(world_size)]
    return key_positions(sharding, length, world_size)


def _checked(sharding: ShardingFunction, length: int, world_size: int) -> list[Positions]:
    name = getattr(sharding, "__qualname__", repr(sharding))
    returned = sharding(length, world_size)
    try:
        arrays = [np.asarray(shard).reshape(-1) for shard in returned]
    except TypeError:
        raise ValueError(
            f"sharding {name}({length}, {world_size}) returned {returned!r}: expected a list of positions, one a rank"
        ) from None
    for rank, array in enumerate(arrays):
        # An empty list is an array of floats to numpy, and a rank may hold nothing.
        if array.size and array.dtype.kind not in "iu":
            raise ValueError(
                f"sharding {name}({length}, {world_size}) returned positions of dtype {array.dtype} for rank {rank}: "
                "expected integers"
            )
    shards = [array.astype(np.int64) for array in arrays]
    if len(shards) != world_size:
        raise ValueError(
            f"sharding {name}({length}, {world_size}) returned {len(shards)} shards: expected one a rank, {world_size}"
        )
    held = np.sort(np.concatenate(shards))
    if not np.array_equal(held, np.arange(length)):
        raise ValueError(
            f"sharding {name}({length}, {world_size}) is not a partition: every position of range({length}) must be "
            "held by exactly one rank"
        )
    return shards
