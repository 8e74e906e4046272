"""Emulation of a declared pipeline, which rounds where the declaration says and nowhere else.

The property `precision` compares an implementation's errors with those of this emulation. It is dense attention in the
dtype of the declared running sums. With `probabilities="input"` the probabilities and the gradients of scores are
rounded to the input dtype; results are rounded to the dtype in which they are returned. With `reduces="input"` each
rank's part of dk and dv is rounded to the input dtype, and so is every sum of two parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ringref.pattern import multiplicity
from ringref.problem import Problem
from ringref.rounding import Pipeline

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Emulated:
    """Results of the declared pipeline, as float64; shapes as in `ringref.attention.Answer`."""

    out: Array
    dq: Array
    dk: Array
    dv: Array


def emulate(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    pipeline: Pipeline,
    queries: Sequence[NDArray[np.int64]] | None = None,
) -> Emulated:
    """Run the declared pipeline.

    Args:
        problem: what to compute.
        q: queries `(B, Nq, Hq, D)`, values representable in the pipeline's dtype.
        k: keys `(B, Nk, Hk, D)`.
        v: values `(B, Nk, Hk, Dv)`.
        dout: cotangent of out `(B, Nq, Hq, Dv)`; that of lse is zero.
        pipeline: how to compute.
        queries: positions of the queries of each rank, for gradients that are summed over ranks in the input dtype;
            by default one rank holds them all.
    """
    problem.without_sinks("the emulated pipeline")
    sums: torch.dtype = getattr(torch, pipeline.sums)
    returned: torch.dtype = getattr(torch, pipeline.dtype)

    def narrowed(x: torch.Tensor) -> torch.Tensor:
        return x.to(returned).to(sums) if pipeline.probabilities == "input" else x

    def by_head(x: Array, groups: int = 1) -> torch.Tensor:
        return torch.from_numpy(np.array(x)).to(sums).transpose(1, 2).repeat_interleave(groups, dim=1)

    def back(x: torch.Tensor, groups: int = 1) -> Array:
        if groups > 1:
            x = x.reshape(x.shape[0], x.shape[1] // groups, groups, *x.shape[2:]).sum(2)
        rounded: Array = x.transpose(1, 2).to(returned).to(torch.float64).numpy()
        return rounded

    group = problem.group_size
    q_, k_, v_, dout_ = by_head(q), by_head(k, group), by_head(v, group), by_head(dout)
    m = torch.from_numpy(multiplicity(problem)).to(sums)
    s = problem.scale_value * (q_ @ k_.mT)
    if problem.softcap is not None:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    unseen = s.new_full((*s.shape[:-1], 1), -torch.inf)  # so that a row without keys has a maximum
    top = torch.cat([s.masked_fill(m == 0, -torch.inf), unseen], dim=-1).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.where(m > 0, m * torch.exp(s - top), 0.0)
    total = weights.sum(-1, keepdim=True)
    p = weights / total.masked_fill(total == 0, 1.0)
    # Unnormalised weights multiply the values, as in an online softmax; their sum divides at the end.
    out = (narrowed(weights) @ v_) / total.masked_fill(total == 0, 1.0)
    out_returned = out.to(returned).to(sums)
    ds = p * (dout_ @ v_.mT - (dout_ * out_returned).sum(-1, keepdim=True))
    if problem.softcap is not None:
        ds = ds * (1 - (s / problem.softcap) ** 2)
    ds = narrowed(ds)
    dq, p = problem.scale_value * (ds @ k_), narrowed(p)
    if pipeline.reduces == "accumulates" or queries is None:
        dk, dv = problem.scale_value * (ds.mT @ q_), p.mT @ dout_
        return Emulated(back(out), back(dq), back(dk, group), back(dv, group))
    parts = [torch.from_numpy(np.array(rows)) for rows in queries]
    dk_parts = [back(problem.scale_value * (ds[..., rows, :].mT @ q_[..., rows, :]), group) for rows in parts]
    dv_parts = [back(p[..., rows, :].mT @ dout_[..., rows, :], group) for rows in parts]
    return Emulated(back(out), back(dq), _summed(dk_parts, returned), _summed(dv_parts, returned))


def _summed(parts: Sequence[Array], dtype: torch.dtype) -> Array:
    """Add the ranks' parts of a gradient one after the other, each sum rounded to `dtype`."""
    total = torch.from_numpy(parts[0]).to(dtype)
    for part in parts[1:]:
        total = total + torch.from_numpy(part).to(dtype)
    summed: Array = total.to(torch.float64).numpy()
    return summed
