"""What a rank of the plain ring knows before anything is computed or sent."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ringref.problem import Problem
from ringref.sharding import key_positions, replicates_queries
from ringverify.implementation import AttentionCall, TensorLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Block(NamedTuple):
    """Keys `(B, T, K, D)` and values `(B, T, K, E)` of one rank, contiguous, as they travel; or their gradients."""

    k: torch.Tensor
    v: torch.Tensor


class Partial(NamedTuple):
    """Attention over some of the keys: out `(B, H, S, E)`, normalised, and lse `(B, H, S)`, −inf over none."""

    out: torch.Tensor
    lse: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Here:
    """One rank's part in one attention.

    Attributes:
        call: what the rank was told.
        dtype: of the inputs, and of keys and values on the wire.
        wide: of scores, sums, lse and of gradients on the wire.
        layout: in which order axes lie in the memory of the inputs, whose axes come as "bshd".
        notes: empty; the plain ring writes nothing here. A mutant may remember something from one hop to another.
        wanted: those of q, k and v that require gradients; `None` where autograd is switched off. Nothing in the plain
            ring depends on it.
    """

    call: AttentionCall
    dtype: torch.dtype
    wide: torch.dtype
    layout: TensorLayout = "bshd"
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    wanted: str | None = "qkv"

    @property
    def problem(self) -> Problem:
        """What all ranks compute together."""
        return self.call.problem

    @property
    def group(self) -> ProcessGroup:
        """The process group that is the ring."""
        return self.call.group

    @property
    def rank(self) -> int:
        """This rank within the ring."""
        return self.call.rank

    @property
    def size(self) -> int:
        """The number of ranks in the ring."""
        return self.call.world_size

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all queries."""
        return replicates_queries(self.call.sharding)

    @functools.cached_property
    def shards(self) -> list[torch.Tensor]:
        """Global positions of every rank's keys, int64 `(T,)` each."""
        device = self.call.positions.device
        shards = key_positions(self.call.sharding, self.problem.nk, self.size, self.problem.documents)
        return [torch.as_tensor(shard, device=device) for shard in shards]

    def block_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a rank's keys and values."""
        p, count = self.problem, len(self.shards[rank])
        return (p.batch, count, p.hk, p.head_dim), (p.batch, count, p.hk, p.dv)


def like(block: Block, here: Here, owner: int) -> Block:
    """A block cut, or continued with zeros, to the length of another rank's."""
    room = Block(*(x.new_zeros(shape) for x, shape in zip(block, here.block_shapes(owner), strict=True)))
    for into, x in zip(room, block, strict=True):
        count = min(into.size(1), x.size(1))
        into[:, :count] = x[:, :count]
    return room


def smallest_divisor(n: int) -> int:
    """Return the smallest divisor of a number but 1, which is 1 itself if there is none."""
    return next((m for m in range(2, n + 1) if n % m == 0), 1)
