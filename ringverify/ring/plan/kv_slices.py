"""What of a block travels: keys and values, or their gradients, of some rows of some heads.

A KV slice is the part of a block that somebody still needs, compacted: for every class of key heads (those that run the
same branches) the rows that are needed. On the wire it is one flat, contiguous buffer, class by class, all keys of a
class before its values: packing along the head dimension instead would leave both as strided views and invites
splitting gradients along the wrong axis when value_dim differs from head_dim.

Shape letters: B batch, R rows of one class, K its key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from ringref.problem import Problem
from ringverify.ring.plan.rectangles import Rectangle
from ringverify.ring.plan.rows import Rows, Span, locate, same
from ringverify.ring.uploading import uploaded

Places = slice | np.ndarray


class ClassRows(NamedTuple):
    """Rows of the key heads of one class."""

    key_heads: Span
    rows: Rows


class KVSlice:
    """Which rows of which key heads of a block it holds.

    Args:
        problem: what all ranks compute.
        parts: by class number; a class of which it holds nothing is left out.
    """

    def __init__(self, problem: Problem, parts: dict[int, ClassRows]) -> None:
        self.parts = parts
        self.numel = 0
        self._views: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
        for part in parts.values():
            rows, heads = part.rows.size, part.key_heads.size
            for width in (problem.head_dim, problem.dv):
                size, stride = (problem.batch, rows, heads, width), (heads * rows * width, width, rows * width, 1)
                self._views.append((size, stride, self.numel))
                self.numel += math.prod(size)

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same rows."""
        if not isinstance(other, KVSlice) or self.parts.keys() != other.parts.keys():
            return False
        return all(same(part.rows, other.parts[number].rows) for number, part in self.parts.items())

    __hash__ = None  # type: ignore[assignment]  # rows may be arrays

    def unpack(self, flat: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Views k `(B, R, K, D)` and v `(B, R, K, E)` of a flat buffer, which may be longer, by class.

        In the buffer the rows of a head lie together: kernels are several per cent faster on such keys.
        """
        views = [flat.as_strided(size, stride, flat.storage_offset() + start) for size, stride, start in self._views]
        return dict(zip(self.parts, zip(views[::2], views[1::2], strict=True), strict=True))


def everything(problem: Problem, classes: tuple[Span, ...], count: int) -> KVSlice:
    """A whole block of `count` keys."""
    parts = {number: ClassRows(heads, Span(0, count)) for number, heads in enumerate(classes)} if count else {}
    return KVSlice(problem, parts)


class KVTensors:
    """Keys and values, or their gradients, of a KV slice.

    Args:
        kv_slice: which of them.
        parts: k `(B, R, K, D)` and v `(B, R, K, E)` by class.
        flat: the buffer that `parts` are views of, if they are.
    """

    def __init__(
        self, kv_slice: KVSlice, parts: dict[int, tuple[torch.Tensor, torch.Tensor]], flat: torch.Tensor | None
    ) -> None:
        self.slice, self.parts, self.flat = kv_slice, parts, flat

    @classmethod
    def of_tensors(cls, kv_slice: KVSlice, k: torch.Tensor, v: torch.Tensor) -> KVTensors:
        """A whole block `k (B, T, K, D)`, `v (B, T, K, E)`, as it is."""
        by_class = {number: part.key_heads.slice() for number, part in kv_slice.parts.items()}
        return cls(kv_slice, {number: (k[:, :, heads], v[:, :, heads]) for number, heads in by_class.items()}, None)

    @classmethod
    def of_flat(cls, kv_slice: KVSlice, flat: torch.Tensor) -> KVTensors:
        """A KV slice in a buffer that is at least as long."""
        flat = flat[: kv_slice.numel]
        return cls(kv_slice, kv_slice.unpack(flat), flat)

    @property
    def message(self) -> torch.Tensor:
        """The buffer that travels."""
        assert self.flat is not None
        return self.flat

    def packed(self) -> KVTensors:
        """A copy as it would travel: the rows of a head lie together, and kernels take less time."""
        for some, _ in self.parts.values():
            return self.copy_to(KVTensors.of_flat(self.slice, some.new_empty(self.slice.numel)))
        return self

    def copy_to(self, other: KVTensors) -> KVTensors:
        """Copy the rows that `other` holds, all of which are held here, into it; returns it."""
        for number, targets in other.parts.items():
            places = self.locate(number, other.slice.parts[number].rows)
            for target, source in zip(targets, self.parts[number], strict=True):
                target.copy_(_select(source, places))
        return other

    def of(self, region: Rectangle) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `(B, K, T, D)` and values `(B, K, T, E)` of a region; views where its rows are evenly spaced here."""
        places, heads = self.places(region)
        batch, (k, v) = slice(*region.batch), self.parts[region.head_class]
        if isinstance(places, slice):
            k, v = k[batch, places, heads], v[batch, places, heads]
        else:
            k, v = _select(k[batch, :, heads], places), _select(v[batch, :, heads], places)
        return k.transpose(1, 2), v.transpose(1, 2)

    def places(self, region: Rectangle, keys: slice | None = None) -> tuple[Places, slice]:
        """Where a region's rows, or some of them counted within it, and its key heads lie within their part."""
        rows = region.keys
        if keys is not None:
            rows = Span(rows.start + rows.step * keys.start, keys.stop - keys.start, rows.step)
        heads = locate(region.key_heads, self.slice.parts[region.head_class].key_heads)
        assert isinstance(heads, slice)
        return self.locate(region.head_class, rows), heads

    def locate(self, number: int, rows: Rows) -> Places:
        """Where some rows of a class, all held here, lie within their part."""
        return locate(rows, self.slice.parts[number].rows)


def _select(x: torch.Tensor, places: Places) -> torch.Tensor:
    return x[:, places] if isinstance(places, slice) else x[:, uploaded(torch.from_numpy(places), x.device)]
