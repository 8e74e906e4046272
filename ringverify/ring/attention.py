"""Sequence-parallel attention to call: one function for every method, sharding and pattern.

Shape letters: B batch, S this rank's queries, T this rank's keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch.distributed.device_mesh import DeviceMesh

from ringref.problem import Dilation, Problem
from ringref.sharding import Sharding, key_positions, query_positions
from ringverify.implementation import AttentionCall
from ringverify.ring import allgather, passes
from ringverify.ring.ring import _attention

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Method = Literal["auto", "ring", "allgather", "local"]
Transport = Literal["p2p", "blocking"]


def ring_attention(
    q: Float[torch.Tensor, "B S H D"],
    k: Float[torch.Tensor, "B T K D"],
    v: Float[torch.Tensor, "B T K E"],
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    sharding: Sharding = "contiguous",
    query_length: int | None = None,
    key_length: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    documents: Sequence[int] | torch.Tensor | None = None,
    key_lengths: Sequence[int] | torch.Tensor | None = None,
    dilation: Dilation | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    method: Method = "ring",
    transport: Transport = "p2p",
    kernel: str = "auto",
    memory_budget: int | None = None,
    bandwidth: float | None = None,
    explain: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys of all ranks of a group, differentiable.

    Args:
        q: this rank's queries `(B, S, H, D)`, in any memory layout.
        k: this rank's keys `(B, T, K, D)`; K divides H.
        v: this rank's values `(B, T, K, E)`.
        group: the process group that is the ring, or a one-dimensional `DeviceMesh`; `None` is the default group, or
            this process alone where torch.distributed is not initialised.
        sharding: which rank holds which positions: contiguous, zigzag, striped, replicated_query, or a function
            `(length, world_size) -> positions of each rank`.
        query_length: queries over all ranks; `None` means that all ranks hold as many as this one.
        key_length: keys over all ranks, likewise.
        causal: query i attends key j only if `j <= i + (key_length - query_length)`.
        window: `(left, right)`, both ends inclusive; `None` on a side is unbounded.
        documents: cumulative document lengths (`cu_seqlens`) of the whole sequence.
        key_lengths: number of valid keys of each batch element, of the whole sequence.
        dilation: branches of segment lengths and dilation rates.
        scale: factor on `q·k`; `None` means `D ** -0.5`.
        softcap: c turns a score s into `c · tanh(s / c)`.
        dropout_p: only 0.0 is supported.
        return_lse: return `(out, lse)` instead of out.
        method: ring, allgather, local, or auto, which chooses.
        transport: p2p posts a hop's messages together and computes meanwhile; blocking uses plain send and recv.
        kernel: what computes a tile; auto chooses by device, dtype and shape.
        memory_budget: bytes that one rank may use beside its inputs and outputs; it bounds buckets and tiles.
        bandwidth: bytes a second between two neighbours, for `method="auto"`; `None` measures or assumes it.
        explain: say on standard error, on rank 0, which method and kernel were chosen and why.

    Returns:
        out `(B, S, H, E)` in the dtype of q, and with `return_lse` lse `(B, H, S)`, natural logarithm, float64 for
        float64 inputs and float32 otherwise. A query that attends nothing has out 0, lse −inf and gradients 0.

    Raises:
        ValueError: the inputs do not fit each other or the arguments; raised before any communication.
        RuntimeError: on differentiating a gradient again, which is not supported.
    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    nq = query_length if query_length is not None else q.size(1) * (1 if sharding == "replicated_query" else world_size)
    nk = key_length if key_length is not None else k.size(1) * world_size
    problem = Problem(
        batch=q.size(0),
        query_length=nq,
        key_length=nk,
        heads=q.size(2),
        key_heads=k.size(2),
        head_dim=q.size(3),
        value_dim=v.size(3),
        dtype=str(q.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # Problem checks it
        causal=causal,
        window=window,
        documents=documents,  # type: ignore[arg-type]
        key_lengths=key_lengths,  # type: ignore[arg-type]
        dilation=dilation,
        scale=scale,
        softcap=softcap,
    )
    call = AttentionCall(
        group,  # type: ignore[arg-type]
        rank,
        world_size,
        problem,
        sharding,
        torch.as_tensor(query_positions(sharding, nq, world_size)[rank]),
        torch.as_tensor(key_positions(sharding, nk, world_size)[rank]),
    )
    out, lse = _attention(q, k, v, call, allgather if method == "allgather" else passes)
    return (out, lse) if return_lse else out
