"""What one rank knows before anything is computed or sent: sizes, positions of every rank, and dtypes, all checked.

No metadata is ever communicated: the shards of all ranks follow from the sharding and the global lengths.

Shape letters: B batch, S this rank's queries, T keys of one block, H query heads, K key heads, P = B K pairs,
X = (H / K) S queries that read one key head, D head_dim, E value_dim.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from ringref.problem import Problem
from ringref.sharding import Positions, key_positions
from ringverify.implementation import AttentionCall

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ACCUMULATES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""Input dtype to the dtype of scores, running sums, log-sum-exps and travelling gradients."""


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """Positions that one rank holds.

    Attributes:
        positions: global positions, int64, shape `(count,)`, in the order of the rows.
        count: how many.
        low: the smallest of them, or 0 if there are none.
        high: the largest of them, or 0 if there are none.
    """

    positions: torch.Tensor
    count: int
    low: int
    high: int


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One attention as one rank sees it.

    Attributes:
        problem: what all ranks compute together.
        group: the process group that is the ring.
        rank: this rank within the group.
        world_size: ranks in the group.
        replicated: whether every rank holds all queries (sharding `replicated_query`).
        queries: this rank's queries.
        keys: every rank's keys, by rank.
        dtype: dtype of q, k, v, out and of the keys and values on the wire.
        accumulates: dtype of scores, running sums, lse and of gradients on the wire.
    """

    problem: Problem
    group: ProcessGroup
    rank: int
    world_size: int
    replicated: bool
    queries: Held
    keys: tuple[Held, ...]
    dtype: torch.dtype
    accumulates: torch.dtype

    def block_numel(self, owner: int) -> int:
        """Number of elements of the packed keys and values of a rank."""
        problem = self.problem
        return problem.batch * problem.hk * self.keys[owner].count * (problem.head_dim + problem.dv)

    def unpack(self, block: torch.Tensor, owner: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views k `(P, T, D)` and v `(P, T, E)` of a rank's packed keys and values."""
        pairs, count = self.problem.batch * self.problem.hk, self.keys[owner].count
        numel = pairs * count * self.problem.head_dim
        k, v = block[:numel], block[numel:]
        return k.view(pairs, count, self.problem.head_dim), v.view(pairs, count, self.problem.dv)


def pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values in one flat, contiguous buffer, all keys first; a copy, never the inputs themselves.

    Packing along the head dimension instead would leave both as strided views and invites splitting gradients along
    the wrong axis when value_dim differs from head_dim.
    """
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def make_plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> Plan:
    """Check the inputs against the call and work out who holds what.

    Args:
        q: this rank's queries `(B, S, H, D)`.
        k: this rank's keys `(B, T, K, D)`.
        v: this rank's values `(B, T, K, E)`.
        call: what all ranks compute, and this rank's place in it.

    Raises:
        ValueError: a shape, dtype or device does not fit the call, or the call contradicts its sharding. Raised before
            any communication.
    """
    problem, rank, world_size = call.problem, call.rank, call.world_size
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} with world_size={world_size}: expected 0 <= rank < world_size, within the group")
    shards = key_positions(call.sharding, problem.nk, world_size)
    replicated = call.sharding == "replicated_query"
    if replicated:
        queries = _held(torch.arange(problem.nq), q.device)
    else:
        queries = _held(key_positions(call.sharding, problem.nq, world_size)[rank], q.device)
    keys = tuple(_held(shard, q.device) for shard in shards)
    for name, told, own in (
        ("positions", call.positions, queries),
        ("key_positions", call.key_positions, keys[rank]),
    ):
        if not torch.equal(told.to(q.device), own.positions):
            raise ValueError(
                f"{name}={told.tolist()} on rank {rank} of {world_size}: sharding {call.sharding!r} puts "
                f"{own.positions.tolist()} there"
            )
    for name, tensor, shape in (
        ("q", q, (problem.batch, queries.count, problem.heads, problem.head_dim)),
        ("k", k, (problem.batch, keys[rank].count, problem.hk, problem.head_dim)),
        ("v", v, (problem.batch, keys[rank].count, problem.hk, problem.dv)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} on rank {rank} of {world_size}: expected {shape}, that is "
                "(batch, positions of this rank, heads, head_dim)"
            )
        # Checked against the problem, which all ranks share: were two ranks to differ, messages would not fit.
        if str(tensor.dtype) != f"torch.{problem.dtype}":
            raise ValueError(f"{name} is {tensor.dtype} on rank {rank}: the problem says {problem.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}: expected one device")
    return Plan(
        problem=problem,
        group=call.group,
        rank=rank,
        world_size=world_size,
        replicated=replicated,
        queries=queries,
        keys=keys,
        dtype=q.dtype,
        accumulates=ACCUMULATES[q.dtype],
    )


def _held(positions: Positions | torch.Tensor, device: torch.device) -> Held:
    count = len(positions)
    low, high = (int(positions.min()), int(positions.max())) if count else (0, 0)
    return Held(torch.as_tensor(positions, device=device), count, low, high)
