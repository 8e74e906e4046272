"""Tensors and position ids in shards, and whole again: what a training loop does on both sides of the ring.

Which rank holds which positions is `ringref.sharding`'s to say; no length has to divide anything, and a rank may hold
nothing. Queries and whatever runs along with them (tokens, labels, hidden states) are cut as `of="queries"`, keys and
values as `of="keys"`; the two differ for `replicated_query`, where every rank holds all queries, and for a
`QueryKeySharding`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from ringref.sharding import (
    PageTable,
    Positions,
    QueryKeySharding,
    Sharding,
    by_documents,
    key_positions,
    query_positions,
    replicates_queries,
)
from ringverify.ring.group import Ring

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Of = Literal["queries", "keys"]


def shard(
    tensor: torch.Tensor,
    *,
    sharding: Sharding = "contiguous",
    rank: int | None = None,
    world_size: int | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    documents: Sequence[int] | torch.Tensor | None = None,
    dim: int = 1,
    of: Of = "queries",
) -> torch.Tensor:
    """What one rank holds of a tensor that is whole: a copy, differentiable, without communication.

    Args:
        tensor: the whole tensor, `(B, N, …)` for `dim=1`, of any dtype.
        sharding: which rank holds which positions, as in `ring_attention`.
        rank: whose shard, within the group; given together with `world_size` and instead of `group`.
        world_size: number of ranks.
        group: the process group that is the ring, or a one-dimensional `DeviceMesh`; without it, and without `rank`,
            the default group, or this process alone where torch.distributed is not initialised.
        documents: cumulative document lengths (`cu_seqlens`) of the whole sequence, as given to `ring_attention`; only
            `zigzag_documents` and a balancer depend on them, and need them: `(0, N)` if all is one document.
        dim: the dimension that runs along the sequence.
        of: "queries" or "keys"; they differ for `replicated_query` and a `QueryKeySharding`.

    Returns:
        `(B, n, …)` with this rank's n positions in ascending order (a function may order them as it likes), in the
        dtype of `tensor`. Its gradient with respect to the whole tensor is that of this rank's part alone: summed over
        ranks, it is the whole gradient.

    Raises:
        ValueError: no such dimension, rank, sharding or group, or documents that do not fit or are missing.
    """
    rank, world_size = _place(group, rank, world_size)
    length = _length(tensor, dim)
    positions = _positions(sharding, length, world_size, of, documents)[rank]
    return tensor.index_select(dim, torch.as_tensor(positions, device=tensor.device))


def unshard(
    tensor: torch.Tensor,
    *,
    length: int,
    sharding: Sharding = "contiguous",
    group: ProcessGroup | DeviceMesh | None = None,
    documents: Sequence[int] | torch.Tensor | None = None,
    dim: int = 1,
    of: Of = "queries",
    replicated_loss: bool = False,
) -> torch.Tensor:
    """The whole tensor on every rank, gathered from the shards of all ranks; differentiable.

    All ranks of the group call together, and where a gradient is wanted all of them run backward. The adjoint of a
    gather to all is a sum over all: if the loss is the sum of the ranks' losses, the gradient of a shard is the sum of
    the cotangents that the ranks have for it, added in the order of ranks, in float32 or wider. If instead every rank
    computes one and the same loss from the whole tensor, that sum would count it once a rank: `replicated_loss=True`
    takes this rank's cotangent alone, without communication.

    Args:
        tensor: this rank's shard, `(B, n, …)` for `dim=1`, in any memory layout and of any dtype, the same on all
            ranks, and all other dimensions too.
        length: N, the number of positions over all ranks.
        sharding: which rank holds which positions, as in `ring_attention`.
        group: the process group that is the ring, or a one-dimensional `DeviceMesh`; `None` is the default group, or
            this process alone where torch.distributed is not initialised.
        documents: cumulative document lengths (`cu_seqlens`) of the whole sequence, as given to `ring_attention`; only
            `zigzag_documents` and a balancer depend on them, and need them: `(0, N)` if all is one document.
        dim: the dimension that runs along the sequence.
        of: "queries" or "keys". Replicated queries are whole already and come back as they are.
        replicated_loss: whether all ranks compute the same loss from the result, which counts once.

    Returns:
        `(B, N, …)` in the order of positions, in the dtype of `tensor`.

    Raises:
        ValueError: the shard is not as long as the sharding has it on this rank, or there is no such dimension,
            sharding or group; raised before any communication.
        RuntimeError: on differentiating a gradient again, which is not supported.
    """
    rank, world_size = _place(group, None, None)
    held = _positions(sharding, length, world_size, of, documents)
    if _length(tensor, dim) != len(held[rank]):
        raise ValueError(
            f"shard of {tensor.size(dim)} positions along dim={dim}: rank {rank} of {world_size} holds "
            f"{len(held[rank])} of length={length} under {_name(sharding)}; give the length over all ranks"
        )
    if world_size == 1 or (replicates_queries(sharding) and of == "queries"):
        return tensor if _ascending(held[rank]) else _in_order([tensor], held, dim)
    process_group = group.get_group() if isinstance(group, DeviceMesh) else group
    by_position = tensor.movedim(dim, 0)
    whole: torch.Tensor = _Gather.apply(by_position, process_group, held, rank, replicated_loss)  # type: ignore[no-untyped-call]
    return whole.movedim(0, dim)


def unshard_from(
    shards: Sequence[torch.Tensor],
    *,
    sharding: Sharding = "contiguous",
    documents: Sequence[int] | torch.Tensor | None = None,
    dim: int = 1,
    of: Of = "queries",
) -> torch.Tensor:
    """The whole tensor from the shards of all ranks, where one process has them all; differentiable, no communication.

    Args:
        shards: the shards in rank order, each `(B, n, …)` for `dim=1`; a rank that holds nothing has n = 0.
        sharding: which rank holds which positions, as in `ring_attention`.
        documents: cumulative document lengths (`cu_seqlens`) of the whole sequence, as given to `ring_attention`; only
            `zigzag_documents` and a balancer depend on them, and need them: `(0, N)` if all is one document.
        dim: the dimension that runs along the sequence.
        of: "queries" or "keys". Replicated queries are taken from rank 0.

    Returns:
        `(B, N, …)` in the order of positions, in the dtype of the shards.

    Raises:
        ValueError: there are no shards, or they are not as long as the sharding has them.
    """
    if not shards:
        raise ValueError(f"shards={shards!r}: expected one a rank, at least one")
    sizes = [_length(shard, dim) for shard in shards]
    replicated = replicates_queries(sharding) and of == "queries"
    held = _positions(sharding, sizes[0] if replicated else sum(sizes), len(shards), of, documents)
    expected = [len(positions) for positions in held]
    if sizes != expected:
        raise ValueError(
            f"shards of {sizes} positions along dim={dim}: under {_name(sharding)} the ranks hold {expected}; "
            "give them in rank order, cut by the same sharding"
        )
    return shards[0] if replicated else _in_order(shards, held, dim)


def position_ids(
    length: int,
    *,
    sharding: Sharding = "contiguous",
    rank: int | None = None,
    world_size: int | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
    documents: Sequence[int] | torch.Tensor | None = None,
    of: Of = "queries",
) -> torch.Tensor:
    """The positions that one rank holds, as rotary and learned position embeddings want them.

    Args:
        length: N, the number of positions over all ranks.
        sharding: which rank holds which positions, as in `ring_attention`.
        rank: whose positions, within the group; given together with `world_size` and instead of `group`.
        world_size: number of ranks.
        group: as for `shard`.
        device: where the result goes; `None` is torch's default.
        documents: cumulative document lengths (`cu_seqlens`) of the whole sequence: count from the start of each
            document. `None` counts from the start of the sequence. A sharding that depends on documents needs them;
            `shard(torch.arange(N), dim=0, …)` then counts from the start of the sequence.
        of: "queries" or "keys"; they differ for `replicated_query` and a `QueryKeySharding`.

    Returns:
        int64 `(n,)`, in the order in which `shard` leaves them.

    Raises:
        ValueError: a negative length, documents that do not fit it, or no such rank, sharding or group.
    """
    rank, world_size = _place(group, rank, world_size)
    positions = _positions(sharding, length, world_size, of, documents)[rank]
    if documents is not None:
        starts = np.asarray([0, *(int(start) for start in documents)], dtype=np.int64)
        if any(a > b for a, b in pairwise(starts)) or starts[-1] > length:
            raise ValueError(
                f"documents={documents!r}: expected cumulative lengths, non-decreasing within [0, {length}]"
            )
        positions = positions - starts[np.searchsorted(starts, positions, side="right") - 1]
    return torch.as_tensor(positions, device=device)


class _Gather(torch.autograd.Function):
    """Shards `(n, …)` of all ranks to the whole `(N, …)` on every rank; its adjoint sums over ranks."""

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, group: Any, held: list[Positions], rank: int, replicated_loss: bool
    ) -> torch.Tensor:
        ctx.group, ctx.held, ctx.rank, ctx.replicated_loss = group, held, rank, replicated_loss
        whole = shard.new_empty(sum(map(len, held)), *shard.shape[1:])
        longest = max(map(len, held))
        if not whole.numel():
            return whole
        # Collectives want equal shapes. As bytes, any dtype can be sent by any backend.
        padded = shard.new_zeros(longest, *shard.shape[1:])
        padded[: shard.size(0)] = shard
        sent = padded.flatten().view(torch.uint8)
        received = [torch.empty_like(sent) for _ in held]
        dist.all_gather(received, sent, group=group)
        for positions, theirs in zip(held, received, strict=True):
            whole[torch.as_tensor(positions, device=whole.device)] = theirs.view(whole.dtype).view(padded.shape)[
                : len(positions)
            ]
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        held: list[Positions] = ctx.held
        parts = [grad[torch.as_tensor(positions, device=grad.device)] for positions in held]
        own = parts[ctx.rank]
        if ctx.replicated_loss or not grad.numel():
            return own, None, None, None, None
        sent = torch.cat([part.flatten() for part in parts])
        received = sent.new_empty(len(held) * own.numel())
        dist.all_to_all_single(
            received, sent, [own.numel()] * len(held), [part.numel() for part in parts], group=ctx.group
        )
        # Added here rather than by the backend: in the same order everywhere, and not in half precision.
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(own.numel(), dtype=wide, device=grad.device)
        for theirs in received.view(len(held), own.numel()):
            total += theirs
        return total.to(grad.dtype).view(own.shape), None, None, None, None


def _positions(
    sharding: Sharding, length: int, world_size: int, of: Of, documents: Sequence[int] | torch.Tensor | None
) -> list[Positions]:
    try:
        length = operator.index(length)
    except TypeError:
        raise ValueError(f"length={length!r}: expected an integer") from None
    if length < 0:
        raise ValueError(f"length={length}: expected at least 0")
    if by_documents(sharding) and documents is None:
        raise ValueError(
            f"sharding {_name(sharding)} depends on documents: give those of the attention, or documents=(0, {length}) "
            "if it has none"
        )
    offsets = None if documents is None else [int(offset) for offset in documents]
    match of:
        case "queries":
            return query_positions(sharding, length, world_size, offsets)
        case "keys":
            return key_positions(sharding, length, world_size, offsets)
    raise ValueError(f"of={of!r}: expected 'queries' or 'keys'")


def _in_order(shards: Sequence[torch.Tensor], held: list[Positions], dim: int) -> torch.Tensor:
    order = torch.as_tensor(np.argsort(np.concatenate(held)), device=shards[0].device)
    return torch.cat(list(shards), dim=dim).index_select(dim, order)


def _ascending(positions: Positions) -> bool:
    return bool((np.diff(positions) > 0).all())


def _length(tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"dim={dim} of a tensor of shape {tuple(tensor.shape)}: expected the dimension that runs along the sequence"
        )
    return tensor.size(dim)


def _place(group: ProcessGroup | DeviceMesh | None, rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size, as given or of the group."""
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise ValueError(f"rank={rank}, world_size={world_size}: give both, or the group, or none of them")
        if group is not None:
            raise ValueError(f"rank={rank}, world_size={world_size} and a group: give one or the other")
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: expected at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}: expected 0 to {world_size - 1}, the rank within a group of {world_size}")
        return rank, world_size
    ring = Ring.of(group)
    return ring.rank, ring.world_size


def _name(sharding: Sharding) -> str:
    if isinstance(sharding, PageTable):
        return f"a page table of {sharding.page_size} positions a page"
    if isinstance(sharding, str | QueryKeySharding):
        return str(sharding)
    return getattr(sharding, "__qualname__", repr(sharding))
