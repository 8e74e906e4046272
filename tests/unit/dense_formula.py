"""The first witness: attention as one dense formula in torch, which shares no code and no idea with `ringref`.

Patterns are made of triangles and of index sets, multiplicities enter as the logarithm added to a score, the softmax
is torch's and the gradients are autograd's.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from ringref.problem import Problem


def counts(problem: Problem) -> torch.Tensor:
    """How often each key is attended, `(B, Hq, Nq, Nk)`, float64."""
    nq, nk = problem.query_length, problem.nk
    allowed = torch.ones(nq, nk, dtype=torch.float64)
    aligned = nk - nq
    if problem.causal:
        allowed = allowed.tril(aligned)
    if problem.window is not None:
        left, right = problem.window
        if right is not None:
            allowed = allowed.tril(aligned + right)
        if left is not None:
            allowed = allowed.triu(aligned - left)
    if problem.documents is not None:
        together = torch.zeros(nq, nk, dtype=torch.float64)
        for start, end in pairwise(problem.documents):
            together[start:end, start:end] = 1
        allowed = allowed * together
    allowed = allowed.expand(problem.batch, problem.heads, nq, nk).clone()
    if problem.key_lengths is not None:
        for element, length in enumerate(problem.key_lengths):
            allowed[element, :, :, length:] = 0
    if problem.dilation is not None:
        allowed = allowed * torch.stack([_dilated(problem, head) for head in range(problem.heads)])
    return allowed


def _dilated(problem: Problem, head: int) -> torch.Tensor:
    assert problem.dilation is not None
    length, branches = problem.query_length, problem.dilation.branches
    through = torch.zeros(length, length, dtype=torch.float64)
    if problem.dilation.heads == "split":
        # Deal the heads out in order, the first branches getting one more where they do not come out even.
        hands = torch.tensor_split(torch.arange(problem.heads), len(branches))
        mine = [(branch, branch % branches[branch][1]) for branch, hand in enumerate(hands) if head in hand.tolist()]
    elif problem.dilation.head_offset == "cyclic":
        mine = [(branch, head % rate) for branch, (_, rate) in enumerate(branches)]
    else:
        mine = [(branch, head // -(-problem.heads // rate)) for branch, (_, rate) in enumerate(branches)]
    for branch, offset in mine:
        segment, rate = branches[branch]
        for start in range(0, length, segment):
            chosen = list(range(start + offset, min(start + segment, length), rate))
            for i in chosen:
                for j in chosen:
                    through[i, j] += 1
    return through


def scores(problem: Problem, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`(B, Hq, Nq, Nk)`, softcapped, nothing masked."""
    k = k.repeat_interleave(problem.heads // problem.hk, dim=2)
    scale = 1 / math.sqrt(problem.head_dim) if problem.scale is None else problem.scale
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    return s if problem.softcap is None else problem.softcap * torch.tanh(s / problem.softcap)


def attend(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)`, differentiable; an empty row has out 0 and lse −inf, both constant."""
    multiplicity = counts(problem).to(q.dtype)
    biased = scores(problem, q, k) + multiplicity.log()
    empty = multiplicity.sum(dim=3) == 0
    # The gradient of a softmax over nothing is NaN even where it is not used, so empty rows never enter it.
    biased = torch.where(empty[..., None], torch.zeros_like(biased), biased)
    p = torch.where(empty[..., None], torch.zeros_like(biased), biased.softmax(dim=3))
    infinite = torch.full_like(empty, -math.inf, dtype=q.dtype)
    lse = infinite if problem.nk == 0 else torch.where(empty, infinite, biased.logsumexp(dim=3))
    return torch.einsum("bhij,bjhe->bihe", p, v.repeat_interleave(problem.heads // problem.hk, dim=2)), lse
