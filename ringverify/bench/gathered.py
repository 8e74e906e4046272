"""A dilated problem as dense problems: what the dilation would cost if gathering and merging were free.

Every segment of every branch is dense attention among the positions that the branch covers. Segments of equal size are
one call, in which they extend the batch; inputs are made as if gathered before, and branches are not merged.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from ringref.pattern import branch_of_head
from ringref.problem import Dilation, Problem


class Dense(NamedTuple):
    """A number of equal dense problems.

    Attributes:
        segments: segments of this size for each head.
        heads: heads with such segments.
        rows: queries of a segment, as many as keys.
    """

    segments: int
    heads: int
    rows: int


def dense_problems(problem: Problem) -> list[Dense]:
    """Return the dense problems of a dilated one; equal ones of a branch are counted together."""
    found = []
    assert problem.dilation is not None
    for number, (w, r) in enumerate(problem.dilation.branches):
        full, rest = divmod(problem.nq, w)
        for length, segments in ((w, full), (rest, 1)):
            by_rows = Counter(-(-max(length - at, 0) // r) for at in _offsets(problem.dilation, problem.heads, number))
            found += [Dense(segments, heads, rows) for rows, heads in by_rows.items() if rows and segments]
    return found


def _offsets(dilation: Dilation, heads: int, branch: int) -> list[int]:
    """Return the offset of every head that runs a branch."""
    rate = dilation.branches[branch][1]
    if dilation.heads == "split":
        many = len(dilation.branches)
        return [branch % rate for h in range(heads) if branch_of_head(h, heads=heads, branches=many) == branch]
    return [h % rate if dilation.head_offset == "cyclic" else h // math.ceil(heads / rate) for h in range(heads)]


def pairs(problem: Problem) -> int:
    """Count the query-key pairs of a dilated problem over heads and batch, each as often as it is attended."""
    found = 0
    for segments, heads, rows in dense_problems(problem):
        found += segments * heads * (rows * (rows + 1) // 2 if problem.causal else rows * rows)
    return problem.batch * found


class Gathered:
    """The dense problems with their inputs."""

    def __init__(self, problem: Problem) -> None:
        dtype = getattr(torch, problem.dtype)
        self._causal = problem.causal
        self._leaves, self._douts = [], []
        for one in dense_problems(problem):
            shape = (problem.batch * one.segments, one.heads, one.rows, problem.head_dim)
            self._leaves.append(tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)))
            self._douts.append(torch.randn(shape, dtype=dtype))

    def forward(self) -> list[torch.Tensor]:
        """Return the output of each dense problem."""
        return [scaled_dot_product_attention(q, k, v, is_causal=self._causal) for q, k, v in self._leaves]

    def backward(self, made: list[torch.Tensor]) -> None:
        """Gradients of every q, k and v."""
        torch.autograd.grad(made, [x for qkv in self._leaves for x in qkv], self._douts)
