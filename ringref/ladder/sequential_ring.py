"""Rung 4, sequential ring: ring attention on one process, its ranks taking turns.

New over online softmax: no rank has all the keys. Each virtual rank owns a KV block, the blocks pass from neighbour to
neighbour, and each rank merges its partial results by log-sum-exp. In the backward dk and dv travel with their block
and are complete when it is back at its owner (Liu, Zaharia & Abbeel 2023, arXiv:2310.01889).

Under `replicated_query` every rank has all the queries, so the blocks stay and partial results travel instead.

Shape letters: B batch, N queries, M keys, H query heads, K key heads, D head_dim, E value_dim; n, m: those of a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from ringref.ladder import online_softmax, tile
from ringref.pattern import multiplicity
from ringref.problem import Problem
from ringref.sharding import Positions, Sharding, key_positions, query_positions

Array = NDArray[np.floating]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Merge:
    """One line of the trace: at this hop, this rank merged the partial result over the block of rank `block`.

    `pairs` is the number of attended (batch element, head, query, key) there, each counted with its multiplicity; 0
    means that the hop contributed nothing.
    """

    hop: int
    rank: int
    block: int
    pairs: int


@dataclasses.dataclass(frozen=True)
class VisitingBlock:
    """The KV block of one rank while it travels round the ring."""

    owner: int
    positions: Positions
    k: Array
    v: Array


def forward(
    problem: Problem,
    q: Float[np.ndarray, "B N H D"],
    k: Float[np.ndarray, "B M K D"],
    v: Float[np.ndarray, "B M K E"],
    *,
    sharding: Sharding = "contiguous",
    world_size: int = 4,
    trace: Callable[[Merge], None] | None = None,
) -> tuple[Float[np.ndarray, "B N H E"], Float[np.ndarray, "B H N"]]:
    """Compute `(out, lse)` of all positions, assembled from all ranks, in the dtype of the inputs.

    Args:
        problem: what to compute.
        q: queries.
        k: keys.
        v: values.
        sharding: which rank holds which positions.
        world_size: how many virtual ranks.
        trace: called after every merge.

    Raises:
        ValueError: the sharding is unknown or no partition, or the world is empty.
    """
    by_rank = forward_by_rank(problem, q, k, v, sharding=sharding, world_size=world_size, trace=trace)
    out = np.zeros((problem.batch, problem.nq, problem.heads, problem.dv), dtype=q.dtype)
    lse = np.full((problem.batch, problem.heads, problem.nq), -np.inf, dtype=q.dtype)
    for i, (out_rank, lse_rank) in zip(
        query_positions(sharding, problem.nq, world_size, problem.documents), by_rank, strict=True
    ):
        out[:, i], lse[:, :, i] = out_rank, lse_rank
    return out, lse


def forward_by_rank(
    problem: Problem,
    q: Float[np.ndarray, "B N H D"],
    k: Float[np.ndarray, "B M K D"],
    v: Float[np.ndarray, "B M K E"],
    *,
    sharding: Sharding = "contiguous",
    world_size: int = 4,
    trace: Callable[[Merge], None] | None = None,
) -> list[tuple[Float[np.ndarray, "B _ H E"], Float[np.ndarray, "B H _"]]]:
    """Compute `(out, lse)` of each rank's own queries; arguments and errors as in `forward`."""
    queries = query_positions(sharding, problem.nq, world_size, problem.documents)
    blocks = _blocks(problem, k, v, sharding, world_size)
    merged = [
        (
            np.zeros((problem.batch, len(i), problem.heads, problem.dv), dtype=q.dtype),
            np.full((problem.batch, problem.heads, len(i)), -np.inf, dtype=q.dtype),
        )
        for i in queries
    ]

    def partial(rank: int, block: VisitingBlock) -> tuple[Array, Array]:
        i = queries[rank]
        return online_softmax.forward(
            problem, q[:, i], block.k, block.v, query_positions=i, key_positions=block.positions
        )

    stay = sharding == "replicated_query"
    partials = [partial(rank, block) for rank, block in enumerate(blocks)] if stay else []
    for hop in range(world_size):
        for rank, block in enumerate(blocks):
            merged[rank] = merge(*merged[rank], *(partials[rank] if stay else partial(rank, block)))
            if trace is not None:
                pairs = int(multiplicity(problem, queries[rank], block.positions).sum())
                trace(Merge(hop, rank, block.owner, pairs))
        blocks, partials = passed_on(blocks), passed_on(partials)
    return merged


def backward(
    problem: Problem,
    q: Float[np.ndarray, "B N H D"],
    k: Float[np.ndarray, "B M K D"],
    v: Float[np.ndarray, "B M K E"],
    out: Float[np.ndarray, "B N H E"],
    lse: Float[np.ndarray, "B H N"],
    dout: Float[np.ndarray, "B N H E"],
    dlse: Float[np.ndarray, "B H N"] | None = None,
    *,
    sharding: Sharding = "contiguous",
    world_size: int = 4,
) -> tuple[Float[np.ndarray, "B N H D"], Float[np.ndarray, "B M K D"], Float[np.ndarray, "B M K E"]]:
    """Compute `(dq, dk, dv)` of all positions; out and lse are those that `forward` returned.

    Raises:
        ValueError: the sharding is unknown or no partition, or the world is empty.
    """
    queries = query_positions(sharding, problem.nq, world_size, problem.documents)
    blocks = _blocks(problem, k, v, sharding, world_size)
    stay = sharding == "replicated_query"
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    travelling = [(np.zeros_like(block.k), np.zeros_like(block.v)) for block in blocks]
    for _ in range(1 if stay else world_size):
        for rank, (i, block) in enumerate(zip(queries, blocks, strict=True)):
            dq_part, dk_part, dv_part = online_softmax.backward(
                problem,
                q[:, i],
                block.k,
                block.v,
                out[:, i],
                lse[:, :, i],
                dout[:, i],
                None if dlse is None else dlse[:, :, i],
                query_positions=i,
                key_positions=block.positions,
            )
            # Under replicated_query the ranks' dq are parts of one sum; elsewhere no two ranks hold the same query.
            dq[:, i] += dq_part
            dk_block, dv_block = travelling[rank]
            travelling[rank] = (dk_block + dk_part, dv_block + dv_part)
        if not stay:
            blocks, travelling = passed_on(blocks), passed_on(travelling)
    # After as many hops as there are ranks every block is back at its owner, and so are its dk and dv.
    for rank, (block, (dk_block, dv_block)) in enumerate(zip(blocks, travelling, strict=True)):
        assert block.owner == rank
        dk[:, block.positions], dv[:, block.positions] = dk_block, dv_block
    return dq, dk, dv


def merge(
    out_a: Float[np.ndarray, "B n H E"],
    lse_a: Float[np.ndarray, "B H n"],
    out_b: Float[np.ndarray, "B n H E"],
    lse_b: Float[np.ndarray, "B H n"],
) -> tuple[Float[np.ndarray, "B n H E"], Float[np.ndarray, "B H n"]]:
    """Merge two partial results over disjoint keys; the partial result of an empty row is the identity."""
    lse = np.logaddexp(lse_a, lse_b)
    shift = tile.finite(lse)
    weight_a, weight_b = np.exp(lse_a - shift), np.exp(lse_b - shift)
    return weight_a.swapaxes(1, 2)[..., None] * out_a + weight_b.swapaxes(1, 2)[..., None] * out_b, lse


def passed_on(held: Sequence[T]) -> list[T]:
    """Return what each rank holds after a hop: what the rank before it held."""
    return [held[rank - 1] for rank in range(len(held))]


def _blocks(problem: Problem, k: Array, v: Array, sharding: Sharding, world_size: int) -> list[VisitingBlock]:
    owned = key_positions(sharding, problem.nk, world_size, problem.documents)
    return [VisitingBlock(rank, positions, k[:, positions], v[:, positions]) for rank, positions in enumerate(owned)]
