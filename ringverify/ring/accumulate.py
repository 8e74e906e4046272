"""Partials of one row over different keys, merged in place by their log-sum-exps.

    w = sigmoid(lse_b − lse),  out ← (1 − w) · out + w · out_b,  lse ← log(exp lse + exp lse_b)

The empty partial (0, −inf) is the identity: sigmoid(±inf) is 1 or 0, and where both are empty, which would be NaN, w is
0. Milakov & Gimelshein 2018, arXiv:1805.02867, section 3, with the weights of normalised partials.

Shape letters: B batch, S queries, H query heads, E value_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Partial(NamedTuple):
    """Attention of some queries over some keys, in the accumulation dtype.

    Attributes:
        out: `(B, S, H, E)`; 0 where nothing was attended.
        lse: `(B, H, S)`; −inf there.
    """

    out: torch.Tensor
    lse: torch.Tensor


class Running:
    """The partial of some queries over the keys so far, made when it is first needed.

    Args:
        shape: of out, `(B, S, H, E)`.
        dtype: dtype of sums.
        device: where.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._partial: Partial | None = None

    def take(self, out_b: torch.Tensor, lse_b: torch.Tensor) -> bool:
        """Let the partial of all rows and heads `(B, H, S, E)` be the first one, as it is; whether it can be."""
        if self._partial is not None or out_b.dtype != self._dtype:
            return False
        self._partial = Partial(out_b.transpose(1, 2).contiguous(), lse_b.contiguous())
        return True

    @property
    def partial(self) -> Partial:
        """What has been merged so far, to be merged into; empty to begin with."""
        if self._partial is None:
            batch, rows, heads, _ = self._shape
            self._partial = Partial(
                torch.zeros(self._shape, dtype=self._dtype, device=self._device),
                torch.full((batch, heads, rows), -torch.inf, dtype=self._dtype, device=self._device),
            )
        return self._partial


class Sum:
    """A gradient `(B, S, H, D)` so far, made when it is first needed.

    Args:
        shape: of it.
        dtype: dtype of sums.
        device: where.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._total: torch.Tensor | None = None

    def take(self, part: torch.Tensor) -> bool:
        """Let what is added to all rows and heads `(B, H, S, D)` be the first, as it is; whether it can be."""
        if self._total is not None or part.dtype != self._dtype:
            return False
        self._total = part.transpose(1, 2).contiguous()
        return True

    @property
    def total(self) -> torch.Tensor:
        """What has been added so far, to be added to; 0 to begin with."""
        if self._total is None:
            self._total = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._total


def add_(total: torch.Tensor, part: torch.Tensor) -> None:
    """Add in place. Converted first: an addition of two dtypes is several times as slow as both steps."""
    total.add_(part.to(total.dtype))


def merge_(out: torch.Tensor, lse: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    """Merge one partial into another in place.

    Args:
        out: `(..., E)`, written to; so is lse.
        lse: `(...)`.
        out_b: the other partial; it may be of a narrower dtype.
        lse_b: likewise.
    """
    # Where neither has attended anything the difference is −inf − (−inf); an lse that is NaN must stay seen.
    weight = torch.sigmoid(lse_b - lse).masked_fill_(lse_b == -torch.inf, 0.0)
    out.lerp_(out_b.to(out.dtype), weight[..., None])
    torch.logaddexp(lse, lse_b, out=lse)


def to_rows(partial: Partial) -> torch.Tensor:
    """The partial as one contiguous matrix with a row a query and head, `(B S H, E + 1)`, for the wire."""
    return torch.cat([partial.out, partial.lse.transpose(1, 2)[..., None]], dim=-1).flatten(0, 2)


def from_rows(rows: torch.Tensor, batch: int, heads: int) -> Partial:
    """The partial of `to_rows`."""
    by_place = rows.view(batch, -1, heads, rows.size(-1))
    return Partial(by_place[..., :-1].contiguous(), by_place[..., -1].transpose(1, 2).contiguous())


def merge_rows(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Both partials of the same rows as one, a new tensor."""
    merged = first.clone()
    merge_(merged[..., :-1], merged[..., -1], second[..., :-1], second[..., -1])
    return merged
