"""Bytes of tensors: where they lie, whether they overlap, and whether they have changed."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from ringverify.worlds.simulated.operations import snapshot

_POISON = 0xFF
"""The byte that fills a floating-point buffer until its message arrives: NaN, in all formats."""
_INTEGER_POISON = 0xA5
"""The byte that fills any other buffer: far from zero, negative if signed, no valid index."""


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the address after its last byte."""
    low = tensor.data_ptr()
    if tensor.is_contiguous():
        return low, low + tensor.nbytes
    if not tensor.numel():
        return low, low
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (last + 1) * tensor.itemsize


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share a byte of memory, views with gaps included."""
    (low, high), (other_low, other_high) = span(one), span(other)
    if high <= other_low or other_high <= low:
        return False
    if _dense(one, high - low) and _dense(other, other_high - other_low):
        return True
    start = min(low, other_low)
    touched = _bytes(one, start)
    return bool(np.isin(_bytes(other, start), touched, assume_unique=False).any())


def covers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all of `other` lies within the memory of `one`, which is contiguous."""
    (low, high), (other_low, other_high) = span(one), span(other)
    return low <= other_low and other_high <= high


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same shape and dtype hold the same bits; the second is contiguous."""
    return _raw(one) == _raw(other)


def poison(buffer: torch.Tensor) -> None:
    """Fill a buffer with values that no message holds. Autograd does not notice, as with a real transport."""
    if buffer.is_cpu and buffer.is_contiguous():
        ctypes.memset(buffer.data_ptr(), _poison_of(buffer), buffer.nbytes)
    elif buffer.numel():
        spoilt = torch.empty(buffer.shape, dtype=buffer.dtype)
        ctypes.memset(spoilt.data_ptr(), _poison_of(buffer), spoilt.nbytes)
        buffer.data.copy_(spoilt)


def poisoned(buffer: torch.Tensor) -> bool:
    """Whether every byte of a buffer is still poison."""
    raw = _raw(buffer)
    return raw.count(_poison_of(buffer)) == len(raw)


def _poison_of(buffer: torch.Tensor) -> int:
    if buffer.dtype is torch.bool:
        return 1  # a boolean's byte is 0 or 1
    return _POISON if buffer.is_floating_point() or buffer.is_complex() else _INTEGER_POISON


def _raw(tensor: torch.Tensor) -> bytes:
    if not (tensor.is_cpu and tensor.is_contiguous()):
        tensor = snapshot(tensor).cpu()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _dense(tensor: torch.Tensor, span: int) -> bool:
    return tensor.is_contiguous() or (tensor.nbytes == span and 0 not in tensor.stride())


def _bytes(tensor: torch.Tensor, start: int) -> NDArray[np.int64]:
    """Return the offset of every byte of a tensor from the address `start`, int64."""
    places = np.zeros(1, np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = np.add.outer(places, np.arange(size, dtype=np.int64) * stride).reshape(-1)
    places = tensor.data_ptr() - start + places * tensor.itemsize
    return np.add.outer(places, np.arange(tensor.itemsize, dtype=np.int64)).reshape(-1)
