"""The plain ring's own mask, a function for each constraint of the pattern.

Letters: i query positions `(S, 1)`, j key positions `(1, T)`; B batch, H query heads, R branches.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ringref.problem import Problem

Branch = tuple[int, int, int]
"""Segment length, dilation rate, offset."""


def causal(problem: Problem, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Whether each key is no later than the query, `(S, T)`."""
    return j <= i + problem.diagonal


def near(problem: Problem, window: tuple[int | None, int | None], i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Whether each key is no farther from the query than a window's ends, `(S, T)`."""
    left, right = window
    distance = j - (i + problem.diagonal)
    near = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        near &= -left <= distance
    if right is not None:
        near &= distance <= right
    return near


def window(problem: Problem, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Whether each key lies in the query's window, `(S, T)`."""
    assert problem.window is not None
    return near(problem, problem.window, i, j)


def documents(problem: Problem, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Whether query and key lie in one document, `(S, T)`."""
    assert problem.documents is not None
    together = torch.zeros_like(i - j, dtype=torch.bool)
    for start, end in pairwise(problem.documents):
        together |= (start <= i) & (i < end) & (start <= j) & (j < end)
    return together


def key_lengths(problem: Problem, j: torch.Tensor) -> torch.Tensor:
    """Whether each key is within its batch element's key length, `(B, 1, 1, T)`."""
    lengths = torch.tensor(problem.key_lengths, device=j.device)
    return j < lengths[:, None, None, None]


def branches(problem: Problem) -> list[list[Branch]]:
    """For each head, the branches that it runs: one where heads are split, all where they are shared."""
    dilation, heads = problem.dilation, problem.heads
    assert dilation is not None
    if dilation.heads == "split":
        size, larger = divmod(heads, len(dilation.branches))
        runs: list[list[Branch]] = []
        for number, (w, r) in enumerate(dilation.branches):
            runs += [[(w, r, number % r)]] * (size + 1 if number < larger else size)
        return runs
    if dilation.head_offset == "cyclic":
        return [[(w, r, head % r) for w, r in dilation.branches] for head in range(heads)]
    return [[(w, r, head // -(-heads // r)) for w, r in dilation.branches] for head in range(heads)]


def covers(p: torch.Tensor, w: torch.Tensor, r: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Whether a branch covers a position."""
    return p % w % r == offset


def segment(p: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The segment that a position lies in."""
    return p // w
