"""Correct merges, written in the ways in which people write them, and wrong ones, made of the faults."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ringref.problem import DtypeName
from ringverify.merge_contract import MergeImplementation, merge
from ringverify.merging.faults import FAULTS, MergeFault

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
INF = math.inf
ALL: tuple[DtypeName, ...] = ("float64", "float32", "bfloat16", "float16")


@merge(dtypes=ALL, gradients=True, nan=True)
def by_maximum(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    """Shifted by the larger lse, normalised at the end."""
    top = torch.maximum(lse_a, lse_b).detach()
    top = torch.where(top == -INF, 0.0, top)
    a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = a + b
    empty = total == 0
    some = torch.where(empty, 1.0, total)
    wa, wb = ((x / some).transpose(1, 2)[..., None] for x in (a, b))
    return (wa * out_a + wb * out_b).to(out_a.dtype), torch.where(empty, -INF, some.log() + top)


@merge(out_layout="bhsd", lse_layout="bhs1", dtypes=("float32", "bfloat16"), nan=True)
def by_logaddexp(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    """The lse first, the weights from it."""
    lse = torch.logaddexp(lse_a, lse_b)
    shift = torch.where(lse == -INF, 0.0, lse)
    return (torch.exp(lse_a - shift) * out_a + torch.exp(lse_b - shift) * out_b).to(out_a.dtype), lse


@merge(out_layout="thd", lse_layout="ht", dtypes=("float32", "float16"), gradients=True)
def by_sigmoid(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    """out_a − w (out_a − out_b), guarded where either is empty, so that the gradient is finite too."""
    none_a, none_b = lse_a == -INF, lse_b == -INF
    difference = torch.where(none_a | none_b, 0.0, lse_b) - torch.where(none_a | none_b, 0.0, lse_a)
    share = torch.where(none_b, 0.0, torch.where(none_a, 1.0, torch.sigmoid(difference)))
    w = share.T[..., None]
    both = torch.where(none_a | none_b, 0.0, lse_a) - F.logsigmoid(-difference)
    lse = torch.where(none_b, lse_a, torch.where(none_a, lse_b, both))
    return (out_a - w * (out_a.float() - out_b.float())).to(out_a.dtype), lse


@merge(stacked=True, out_layout="thd", lse_layout="th", dtypes=("float32", "bfloat16"))
def by_softmax(out: Tensor, lse: Tensor) -> Pair:
    """All at once."""
    empty = (lse == -INF).all(0)
    safe = torch.where(empty, 0.0, lse)
    w = torch.where(empty, 0.0, torch.softmax(safe, 0))
    return (w[..., None] * out).sum(0).to(out.dtype), torch.where(empty, -INF, torch.logsumexp(safe, 0))


@merge(out_layout="bhsd", dtypes=("float32", "bfloat16"), in_place=True)
def in_place(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Into the first."""
    lse = torch.logaddexp(lse_a, lse_b)
    shift = torch.where(lse == -INF, 0.0, lse)
    out_a.copy_(torch.exp(lse_a - shift)[..., None] * out_a + torch.exp(lse_b - shift)[..., None] * out_b)
    lse_a.copy_(lse)


@merge(base=2, empty=INF, out_layout="thd", lse_layout="ht", dtypes=("float32", "float16"), head_dims=(4, 8))
def in_base_2(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    """As in kernels that use exp2, with the mark that FlashAttention-2 has for a row without keys."""
    a, b = (torch.where(x == INF, -INF, x) for x in (lse_a, lse_b))
    top = torch.maximum(a, b)
    top = torch.where(top == -INF, 0.0, top)
    wa, wb = torch.exp2(a - top), torch.exp2(b - top)
    total = wa + wb
    some = torch.where(total == 0, 1.0, total)
    out = ((wa / some).T[..., None] * out_a + (wb / some).T[..., None] * out_b).to(out_a.dtype)
    return out, torch.where(total == 0, INF, some.log2() + top)


@merge(empty=-1e10, lse=False, out_dtype="float32", dtypes=("bfloat16",))
def out_alone(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """A finite mark, no lse, a result in float32."""
    w = torch.sigmoid(lse_b - lse_a).transpose(1, 2)[..., None]
    return out_a.float() - w * (out_a.float() - out_b.float())


@merge(dtypes=("bfloat16",), accumulates="bfloat16", strided=False)
def in_sixteen_bits(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    """Weights and sums in bfloat16, and declared so."""
    lse = torch.logaddexp(lse_a, lse_b)
    shift = torch.where(lse == -INF, 0.0, lse)
    wa, wb = (torch.exp(x - shift).to(out_a.dtype).transpose(1, 2)[..., None] for x in (lse_a, lse_b))
    return wa * out_a + wb * out_b, lse


CORRECT: dict[str, MergeImplementation] = {
    one.function.__name__: one
    for one in (by_maximum, by_logaddexp, by_sigmoid, by_softmax, in_place, in_base_2, out_alone, in_sixteen_bits)
}
"""By the names of their functions."""


def broken(fault: MergeFault, **declared: Any) -> MergeImplementation:
    """Return the merge of two, or of n where `stacked` is declared, that has a fault."""
    claims: dict[str, Any] = {"gradients": True, "nan": fault.id == "nan_hidden", **declared}
    if claims.get("stacked"):

        @merge(name=fault.id, **claims)
        def of_several(out: Tensor, lse: Tensor) -> Pair:
            return fault.function(out, lse, "e")

        return of_several

    @merge(name=fault.id, **claims)
    def of_two(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
        return fault.function(torch.stack([out_a, out_b]), torch.stack([lse_a, lse_b]), claims.get("base", "e"))

    return of_two


WRONG: dict[str, tuple[MergeImplementation, MergeImplementation]] = {
    id: (broken(fault), broken(fault, stacked=True)) for id, fault in FAULTS.items()
}
"""By fault: it in a merge of two, and in one of n."""
