"""Counts the live bytes of the tensors that one rank allocates.

A storage counts from the operation that returned it until nothing holds it any more. Storages are followed, not
tensors: views cost nothing, and what autograd saves counts. What an operation allocates and frees within itself is not
seen, nor is memory that numpy owns.
"""

from __future__ import annotations

import collections
import weakref
from types import FrameType
from typing import Any, NamedTuple

import torch

from ringverify.worlds.stacks import UserLine, place_of_caller
from ringverify.worlds.watch.memory import Memory, PeakShare


class _Live(NamedTuple):
    alive: weakref.ref[Any]
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: UserLine


class MemoryMeter:
    """Counts what one rank has allocated.

    Args:
        rank: global rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._live: dict[int, _Live] = {}
        self._total = 0
        self._peak = 0
        self._at_peak: list[_Live] | None = []  # None: the peak is now
        self._counting = True
        self._in_parts = False

    def region(self, *, inside: bool) -> None:
        """Start or stop counting. The first region discards what was counted before it."""
        if inside and not self._in_parts:
            self._live, self._total, self._peak, self._at_peak = {}, 0, 0, []
            self._in_parts = True
        self._counting = inside

    def made(self, result: Any, frame: FrameType) -> None:
        """Count the result of an operation that was called from `frame`."""
        if self._counting:
            for one in result if isinstance(result, (list, tuple)) else (result,):
                if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                    self._note(one, frame)

    def memory(self) -> Memory:
        """Return the peak so far."""
        parts: dict[tuple[str, tuple[int, ...], str], list[int]] = collections.defaultdict(lambda: [0, 0])
        for live in self._live.values() if self._at_peak is None else self._at_peak:
            counts = parts[str(live.place), live.shape, str(live.dtype).removeprefix("torch.")]
            counts[0] += 1
            counts[1] += live.nbytes
        made = [PeakShare(*form, *counts) for form, counts in parts.items()]
        return Memory(self._rank, self._peak, tuple(sorted(made, key=lambda part: (-part.nbytes, part.place))))

    def _note(self, tensor: torch.Tensor, frame: FrameType) -> None:
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:
            return  # a tensor without memory of its own
        key = id(storage)  # torch keeps this object as long as the memory lives
        if key in self._live:
            return
        nbytes = storage.nbytes()
        place = place_of_caller(frame) if nbytes else None
        if place is None:
            return  # no bytes, or allocated by the world itself
        alive = weakref.ref(storage, lambda _: self._freed(key))
        self._live[key] = _Live(alive, nbytes, tuple(tensor.shape), tensor.dtype, place)
        self._total += nbytes
        if self._total > self._peak:
            self._peak, self._at_peak = self._total, None

    def _freed(self, key: int) -> None:
        if self._at_peak is None:
            self._at_peak = list(self._live.values())
        live = self._live.pop(key, None)
        if live is not None:
            self._total -= live.nbytes
