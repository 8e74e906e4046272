"""Partials of one row over different keys, merged in place by their log-sum-exps.

    w = sigmoid(lse_b − lse),  out ← (1 − w) · out + w · out_b,  lse ← log(exp lse + exp lse_b)

The empty partial (0, −inf) is the identity: sigmoid(±inf) is 1 or 0, and where both are empty, which would be NaN, w is
0. Milakov & Gimelshein 2018, arXiv:1805.02867, section 3, with the weights of normalised partials.

Shape letters: B batch, S queries, H query heads, E value_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

WIDENED = 1 << 17
"""Most elements that are converted to the accumulation dtype at a time on CPU: half a megabyte stays in the cache."""
ALL_AT_ONCE = 1 << 12
"""Elements that are always converted at once; of more, an eighth, which is little beside what they are part of."""


class PartialResult(NamedTuple):
    """Attention of some queries over some keys, in the accumulation dtype.

    Attributes:
        out: `(B, S, H, E)`; 0 where nothing was attended.
        lse: `(B, H, S)`; −inf there.
    """

    out: torch.Tensor
    lse: torch.Tensor


class Running:
    """The partial of some queries over the keys so far, made when it is first needed.

    Rows after those written hold nothing yet, not even the empty partial: what comes first is copied there, which
    spares a pass over memory and a merge.

    Args:
        shape: of out, `(B, S, H, E)`.
        dtype: dtype of sums.
        device: where.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._partial: PartialResult | None = None
        self._written = 0

    def merge(self, batch: slice, rows: slice, heads: slice, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
        """Merge in a partial of some rows: `out_b (B, H, S, E)`, in this or a narrower dtype, and `lse_b (B, H, S)`.

        Both may be written to later on.
        """
        first = _first(batch, rows, heads, self._written, (self._shape[0], self._shape[2]))
        if first == self._shape[1] and out_b.dtype == self._dtype and self._partial is None:
            self._partial = PartialResult(out_b.transpose(1, 2).contiguous(), lse_b.contiguous())
        elif first is not None:
            out, lse = self._made()
            out[:, rows].transpose(1, 2).copy_(out_b)
            lse[:, :, rows].copy_(lse_b)
        else:
            out_BHSE, lse = self.partial.out.transpose(1, 2), self.partial.lse
            if lse.shape != lse_b.shape:
                out_BHSE, lse = out_BHSE[batch, heads, rows], lse[batch, heads, rows]
            merge_(out_BHSE, lse, out_b, lse_b)
        self._written = first or self._written

    @property
    def partial(self) -> PartialResult:
        """What has been merged so far, empty where nothing was."""
        made = self._made()
        if self._written < self._shape[1]:
            made.out[:, self._written :].zero_()
            made.lse[:, :, self._written :].fill_(-torch.inf)
            self._written = self._shape[1]
        return made

    def result(self, dtype: torch.dtype, sinks: torch.Tensor | None = None) -> PartialResult:
        """The same with out in a dtype that may be narrower, and with sinks `(H,)`. Nothing is merged after that."""
        whole = self.partial if sinks is None else join_sinks(self.partial, sinks)
        return PartialResult(whole.out.to(dtype), whole.lse)

    def _made(self) -> PartialResult:
        if self._partial is None:
            batch, rows, heads, _ = self._shape
            self._partial = PartialResult(
                torch.empty(self._shape, dtype=self._dtype, device=self._device),
                torch.empty((batch, heads, rows), dtype=self._dtype, device=self._device),
            )
        return self._partial


class Sum:
    """A gradient `(B, R, H, D)` so far, made when it is first needed.

    Rows after those written hold nothing yet, not even 0: what comes first is copied there, not added.

    Args:
        shape: of it.
        dtype: dtype of sums.
        device: where.
        into: memory for it, or `None`.
        written: rows of that, from the first one on, that are part of the sum already.
    """

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        *,
        into: torch.Tensor | None = None,
        written: int = 0,
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._total = into
        self._written = written

    def add(self, batch: slice, rows: slice, heads: slice, part: torch.Tensor) -> None:
        """Add `part (B, H, R, D)`, of this or a narrower dtype, to some rows."""
        first = _first(batch, rows, heads, self._written, (self._shape[0], self._shape[2]))
        if first == self._shape[1] and part.dtype == self._dtype and self._total is None:
            self._total = part.transpose(1, 2).contiguous()
        elif first is not None:
            self._made()[:, rows].transpose(1, 2).copy_(part)
        else:
            total = self.total.transpose(1, 2)
            if total.shape != part.shape:
                total = total[batch, heads, rows]
            add(total, part)
        self._written = first or self._written

    @property
    def total(self) -> torch.Tensor:
        """What has been added so far, 0 where nothing was."""
        self.complete()
        return self._made()

    def complete(self) -> None:
        """Make rows 0 to which nothing was added."""
        if self._written < self._shape[1]:
            self._made()[:, self._written :].zero_()
            self._written = self._shape[1]

    def _made(self) -> torch.Tensor:
        if self._total is None:
            self._total = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._total


def add(total: torch.Tensor, part: torch.Tensor) -> None:
    """Add a part of this or a narrower dtype in place. A device converts what it reads; see `widened`."""
    if total.is_cpu:
        for _, (sums, wide) in widened(total.dtype, total, part):
            sums.add_(wide)
    else:
        total.add_(part)


def _first(batch: slice, rows: slice, heads: slice, written: int, whole: tuple[int, int]) -> int | None:
    """Where rows end that go on where those written so far end, if they are of the whole batch and all heads."""
    complete = batch.indices(whole[0]) == (0, whole[0], 1) and heads.indices(whole[1]) == (0, whole[1], 1)
    return rows.stop if complete and rows.start == written and rows.step in (None, 1) else None


def merge_(out: torch.Tensor, lse: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    """Merge one partial into another in place.

    Args:
        out: `(..., R, E)`, written to; so is lse.
        lse: `(..., R)`, of the same dtype.
        out_b: the other partial; out of this or a narrower dtype.
        lse_b: likewise, of this dtype.
    """
    # Where neither has attended anything the difference is −inf − (−inf); an lse that is NaN must stay seen.
    weight = torch.sigmoid(lse_b - lse).masked_fill_(lse_b == -torch.inf, 0.0)
    for piece, (mine, other) in widened(lse.dtype, out, out_b):
        mine.lerp_(other, weight[..., piece, None])
    torch.logaddexp(lse, lse_b, out=lse)


def join_sinks(whole: PartialResult, sinks: torch.Tensor) -> PartialResult:
    """Merge in sinks `(H,)`, once for each row: partials of lse `sinks` whose out is 0. out is written to.

        out ← sigmoid(lse − sink) · out,  lse ← log(exp lse + exp sink)

    A sink of −inf is an empty partial, which changes nothing.
    """
    each = sinks.to(whole.lse.dtype)[:, None]
    weight = torch.sigmoid(whole.lse - each).masked_fill_(whole.lse == -torch.inf, 0.0)
    out_BHSE = whole.out.transpose(1, 2)
    for rows, (wide,) in widened(whole.lse.dtype, out_BHSE):
        wide.mul_(weight[..., rows, None])
        if wide.dtype != out_BHSE.dtype:
            out_BHSE[..., rows, :].copy_(wide)
    return PartialResult(whole.out, torch.logaddexp(whole.lse, each))


def sink_gradient(
    sinks: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """What some queries add to the gradient of sinks: Σ exp(sink − lse) · (dlse − dout·out), as of a key of value 0.

    Args:
        sinks: `(H,)`.
        out: `(B, S, H, E)`, merged with them.
        lse: `(B, H, S)`, likewise.
        dout: cotangent of out.
        dlse: cotangent of lse, or `None`.
    """
    of_row = torch.empty_like(lse)
    for rows, (a, b) in widened(lse.dtype, dout.transpose(1, 2), out.transpose(1, 2)):
        torch.sum(a * b, dim=-1, out=of_row[..., rows])
    of_row = of_row.neg_() if dlse is None else dlse - of_row
    each = sinks.to(lse.dtype)[:, None]
    weight = torch.exp(each - lse).masked_fill_(each == -torch.inf, 0.0)
    return (weight * of_row).sum(dim=(0, 2)).to(sinks.dtype)


def widened(dtype: torch.dtype, *parts: torch.Tensor) -> Iterator[tuple[slice, Sequence[torch.Tensor]]]:
    """The rows of some `(..., R, D)` piece by piece in a wider dtype, each to be used before the next one is asked for.

    What is of that dtype already is not copied. An operation on two dtypes takes longer than converting first, and a
    conversion of all of it writes, and reads again, twice what there is to read.
    """
    narrow = [part for part in parts if part.dtype != dtype]
    if not narrow:
        yield slice(None), parts
        return
    if not narrow[0].is_cpu:
        yield slice(None), [part.to(dtype) for part in parts]
        return
    rows, width = narrow[0].size(-2), max(1, sum(part[..., :1, :].numel() for part in narrow))
    most = max(1, min(WIDENED, max(ALL_AT_ONCE, rows * width // 8)) // width)
    scratch = [torch.empty_like(part[..., :most, :], dtype=dtype) if part.dtype != dtype else None for part in parts]
    for start in range(0, rows, most):
        piece = slice(start, min(start + most, rows))
        yield (
            piece,
            [
                part[..., piece, :] if wide is None else wide[..., : piece.stop - start, :].copy_(part[..., piece, :])
                for part, wide in zip(parts, scratch, strict=True)
            ],
        )


def to_rows(partial: PartialResult) -> torch.Tensor:
    """The partial as one contiguous matrix with a row a query and head, `(B S H, E + 1)`, for the wire."""
    return torch.cat([partial.out, partial.lse.transpose(1, 2)[..., None]], dim=-1).flatten(0, 2)


def from_rows(rows: torch.Tensor, batch: int, heads: int) -> PartialResult:
    """The partial of `to_rows`."""
    by_place = rows.view(batch, -1, heads, rows.size(-1))
    return PartialResult(by_place[..., :-1].contiguous(), by_place[..., -1].transpose(1, 2).contiguous())


def merge_rows(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Both partials of the same rows as one, a new tensor."""
    merged = first.clone()
    merge_(merged[..., :-1], merged[..., -1], second[..., :-1], second[..., -1])
    return merged
