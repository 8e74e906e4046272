"""The plain call: torch's `scaled_dot_product_attention` on the whole sequence, in one process.

Its inputs are `(batch, sequence, heads, head_dim)` seen as `(batch, heads, sequence, head_dim)`, which is how a model's
projections leave them. Each packed document is a call of its own, since with a mask of all pairs the excluded pairs
would be computed, too; for a window there is only the mask.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from ringref.problem import Problem
from ringverify.bench.workload import Workload


class Plain:
    """The plain call with its inputs."""

    def __init__(self, workload: Workload, device: str = "cpu") -> None:
        problem = workload.problem
        shape = (problem.batch, problem.nq, problem.heads, problem.head_dim)
        dtype = getattr(torch, problem.dtype)
        self.q, self.k, self.v, self.dout = (torch.randn(shape, dtype=dtype, device=device) for _ in range(4))
        for leaf in (self.q, self.k, self.v):
            leaf.requires_grad_()
        self._problem = problem
        self._mask = _mask(problem, device)

    def forward(self) -> torch.Tensor:
        """Return the output `(batch, sequence, heads, head_dim)`."""
        problem = self._problem
        if problem.documents is None:
            return self._attend(0, problem.nq)
        parts = [self._attend(start, stop) for start, stop in pairwise(problem.documents) if start < stop]
        return torch.cat(parts, dim=1)

    def backward(self, made: torch.Tensor) -> None:
        """Gradients of q, k and v."""
        torch.autograd.grad(made, (self.q, self.k, self.v), self.dout)

    def _attend(self, start: int, stop: int) -> torch.Tensor:
        q, k, v = (x[:, start:stop].transpose(1, 2) for x in (self.q, self.k, self.v))
        causal = self._problem.causal and self._mask is None
        return scaled_dot_product_attention(q, k, v, attn_mask=self._mask, is_causal=causal).transpose(1, 2)


def _mask(problem: Problem, device: str) -> torch.Tensor | None:
    if problem.window is None:
        return None
    mask = torch.ones(problem.nq, problem.nk, dtype=torch.bool, device=device)
    left, right = problem.window
    if left is not None:
        mask.triu_(-left)
    if problem.causal or right is not None:
        mask.tril_(0 if problem.causal or right is None else right)
    return mask
