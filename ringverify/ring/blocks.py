"""Keys and values of one rank in one flat, contiguous buffer: one message a hop. Gradients travel in the same form.

All keys come first, then all values. Packing along the head dimension instead would leave both as strided views and
invites splitting gradients along the wrong axis when value_dim differs from head_dim.

Shape letters: B batch, T keys of one block, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import torch

from ringverify.ring.plan import Plan


def block_numel(plan: Plan, owner: int) -> int:
    """Number of elements of a rank's block."""
    problem = plan.problem
    return problem.batch * plan.key_count(owner) * problem.hk * (problem.head_dim + problem.dv)


def largest_numel(plan: Plan) -> int:
    """Number of elements of the largest block."""
    return max(block_numel(plan, owner) for owner in range(plan.world_size))


def unpack(plan: Plan, flat: torch.Tensor, owner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views k `(B, T, K, D)` and v `(B, T, K, E)` of a flat buffer, which may be longer than the block."""
    problem, count = plan.problem, plan.key_count(owner)
    rows = problem.batch * count * problem.hk
    k, v = flat[: rows * problem.head_dim], flat[rows * problem.head_dim : rows * (problem.head_dim + problem.dv)]
    return (
        k.view(problem.batch, count, problem.hk, problem.head_dim),
        v.view(problem.batch, count, problem.hk, problem.dv),
    )


def pack_into(plan: Plan, flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Copy this rank's keys and values into a flat buffer."""
    for part, given in zip(unpack(plan, flat, plan.rank), (k, v), strict=True):
        part.copy_(given)
