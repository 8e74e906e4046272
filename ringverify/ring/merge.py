"""Partial attention over some of the keys, and how two partials become one.

A partial is (max, sum, acc): the largest score, the sum of `m · exp(score − max)`, and the same sum weighted with
values (Milakov & Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv:1805.02867, section 3). Empty is
(−inf, 0, 0), the identity of `merge`.

This differs from the merge of published rings in:
1. Partials are not normalised until the end: the weights of two partials then add up to 1 whatever the size of the
   scores, whereas merging (out, lse) pairs rounds lse, an error that grows with |lse|.
2. No sigmoid or log of a difference of log-sum-exps, which is NaN when both are −inf and overflows past 88.
3. No finite number stands for −inf.

Shape letters: any leading dimensions, here `...`, E value_dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Partial(NamedTuple):
    """Attention over some keys, not yet normalised, in the accumulation dtype.

    Attributes:
        max: largest score, `(..., 1)`; −inf where no key was attended.
        sum: `Σ m · exp(score − max)`, `(..., 1)`; at least 1, or 0 where no key was attended.
        acc: `Σ m · exp(score − max) · v`, `(..., E)`.
    """

    max: torch.Tensor
    sum: torch.Tensor
    acc: torch.Tensor


def empty(leading: tuple[int, ...], value_dim: int, dtype: torch.dtype, device: torch.device) -> Partial:
    """The partial over no keys."""
    return Partial(
        torch.full((*leading, 1), -math.inf, dtype=dtype, device=device),
        torch.zeros((*leading, 1), dtype=dtype, device=device),
        torch.zeros((*leading, value_dim), dtype=dtype, device=device),
    )


def shift(largest: torch.Tensor) -> torch.Tensor:
    """What to subtract from scores before exp: their maximum, or 0 where it is −inf, since −inf − (−inf) is NaN."""
    return torch.where(largest == -math.inf, 0.0, largest)


def merge(first: Partial, second: Partial) -> Partial:
    """The partial over the keys of both. Commutative bit for bit; associative up to rounding."""
    largest = torch.maximum(first.max, second.max)
    shifted = shift(largest)
    first_weight = (first.max - shifted).exp_()
    second_weight = (second.max - shifted).exp_()
    return Partial(
        largest,
        first.sum * first_weight + second.sum * second_weight,
        first.acc * first_weight + second.acc * second_weight,
    )


def finish(partial: Partial) -> tuple[torch.Tensor, torch.Tensor]:
    """`out (..., E)` and `lse (...)` in the accumulation dtype; an empty row has out 0 and lse −inf."""
    # A sum is 0 or at least 1, because the largest score contributes exp(0): the clamp only spares empty rows 0 / 0.
    out = partial.acc / partial.sum.clamp(min=1)
    lse = partial.max + partial.sum.log()
    return out, lse.squeeze(-1)


def to_rows(partial: Partial) -> torch.Tensor:
    """The partial as one contiguous matrix with a row a query and head, `(rows, 2 + E)`, for the wire."""
    return torch.cat(partial, dim=-1).flatten(0, -2)


def from_rows(rows: torch.Tensor) -> Partial:
    """The partial of `to_rows`, its leading dimensions flattened to one."""
    return Partial(rows[..., :1], rows[..., 1:2], rows[..., 2:])


def merge_rows(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """`merge` of partials as matrices."""
    return torch.cat(merge(from_rows(first), from_rows(second)), dim=-1)
