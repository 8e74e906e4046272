"""Inputs that every rank makes for the positions it wants: each number is a function of seed, name, head and position.

The function is SplitMix64 on a counter (Steele, Lea & Flood 2014, *Fast splittable pseudorandom number generators*), of
whose 64 bits eight numbers are made. All of them are odd multiples of a power of two with eight significant bits, so
that every dtype holds them: nothing is rounded on the way to an implementation or to the oracle.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ringref.problem import Problem

Float = NDArray[np.float64]
Positions = NDArray[np.int64]

Kind = Literal["classes", "counted", "free"]
MOST_CLASSES = 32
"""Classes of keys, at most. Half of head_dim is enough freedom to choose the scores of all pairs of classes."""
QUERY_CLASSES = 16
RAREST = 8
"""Expected keys of the rarest class: losing one of them moves a row by an eighth, whatever the length."""


def words(seed: int, name: str, positions: Positions, width: int) -> NDArray[np.uint8]:
    """Return `(positions, width)` bytes that depend on seed, name and position, and on nothing else."""
    start = np.uint64((seed * 0x9E3779B97F4A7C15 + zlib.crc32(name.encode()) * 0xD1B54A32D192ED03) % 2**64)
    count = -(-width // 8)
    counters: Any = positions.astype(np.uint64)[:, None] * np.uint64(count)
    x: NDArray[np.uint64] = counters + np.arange(1, count + 1, dtype=np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x += start
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x.astype("<u8", copy=False).view(np.uint8)[:, :width]


def _steps(raw: NDArray[np.uint8], least: int) -> Float:
    """Return `least` and the numbers above it at distances of 2."""
    return raw.astype(np.float64) * 2 + least


@dataclasses.dataclass(frozen=True, eq=False)
class Numbers:
    """The inputs of a problem.

    Values rise or fall slightly with the position, and cotangents are positive: what is left out or counted twice then
    changes a mean, which no average over many keys hides.

    Attributes:
        problem: what is computed.
        seed: decides all numbers.
        kind: "classes": queries and keys come from codebooks, for `ringref.classes`; "counted": likewise, and these
            are made by counting too, for golden vectors; "free": each is its own.
    """

    problem: Problem
    seed: int
    kind: Kind

    def q(self, b: int, head: int, positions: Positions) -> Float:
        """Return queries `(n, D)`."""
        if self.kind != "free":
            return self.codebooks[0][self.query_classes(b, head, positions)]
        return self._free("q", b, head, positions)

    def k(self, b: int, head: int, positions: Positions) -> Float:
        """Return keys `(n, D)` of a key head."""
        if self.kind != "free":
            return self.codebooks[1][self.key_classes(b, head, positions)]
        return self._free("k", b, head, positions)

    def _free(self, name: str, b: int, head: int, positions: Positions) -> Float:
        return _steps(words(self.seed, f"{name} {b} {head}", positions, self.problem.head_dim), -255) / 128

    def v(self, b: int, head: int, positions: Positions) -> Float:
        """Return values `(n, E)` of a key head, in (−1, 1).

        Half of a value is the same in all dimensions and goes with the key, by its class or along a line of signs:
        then dout·v goes with the key too, and gradients do not cancel in sums over keys that are alike. A quarter
        depends on the place in the sequence, and a quarter is each number's own.
        """
        p = self.problem
        noise = _steps(words(self.seed, f"v {b} {head}", positions, p.dv) // 4, -63)
        if self.kind != "free":
            levels = words(self.seed, f"v of classes {b} {head}", self.key_classes(b, head, positions), 1)
        else:
            line = np.where(words(self.seed, "line", np.arange(1), p.head_dim)[0] % 2, 1, -1) / np.sqrt(p.head_dim)
            levels = np.clip(self.k(b, head, positions) @ line[:, None] * 64 + 128, 0, 255).astype(np.uint8)
        common = _steps(levels // 2, -126)
        place = 2 * (positions * 63 // max(p.nk, 1)) - 62
        signs = np.where(words(self.seed, "signs", np.arange(1), p.dv)[0] % 2, 1, -1)
        return (noise + common + place[:, None] * signs) / 256

    def dout(self, b: int, head: int, positions: Positions) -> Float:
        """Return cotangents of out `(n, E)`, in (0, 1)."""
        return _steps(words(self.seed, f"dout {b} {head}", positions, self.problem.dv) // 2, 1) / 256

    def dlse(self, b: int, head: int, positions: Positions) -> Float:
        """Return cotangents of lse `(n,)`."""
        return _steps(words(self.seed, f"dlse {b} {head}", positions, 1)[:, 0], -255) / 256

    @functools.cached_property
    def sinks(self) -> Float | None:
        """Learned sinks `(H,)` in float32; `None` where the problem has none.

        They weigh about as much as the root of the number of keys: half of a short row, and of a row of a million keys
        a thousandth. One head in eight, and not the first, has none: −inf.
        """
        if not self.problem.sinks:
            return None
        drawn = words(self.seed, "sink", np.arange(self.problem.heads), 2)
        sinks = np.log(max(self.problem.nk, 1)) / 2 + (drawn[:, 0] - 127.5) / 64
        sinks[(drawn[:, 1] < 32) & (np.arange(len(sinks)) > 0)] = -np.inf
        rounded: Float = sinks.astype(np.float32).astype(np.float64)
        return rounded

    @functools.cached_property
    def shares(self) -> tuple[Float, int]:
        """The share of keys of each class, falling geometrically, and the number of classes of queries."""
        count = max(2, min(MOST_CLASSES, self.problem.head_dim // 2))
        least = min(RAREST / max(self.problem.nk, 1), 1 / count)
        shares = np.geomspace(1.0, least, count)
        return shares / shares.sum(), min(QUERY_CLASSES, count)

    @functools.cached_property
    def codebooks(self) -> tuple[Float, Float]:
        """The vectors of queries and keys, `(classes, D)`.

        Every class of keys is sought by one class of queries, which gives it about the weight of all other keys.
        """
        if self.kind == "counted":
            vectors = _steps(words(self.seed, "codebook", np.arange(QUERY_CLASSES), self.problem.head_dim), -255) / 128
            return vectors * np.arange(1, QUERY_CLASSES + 1)[:, None] / QUERY_CLASSES, vectors
        shares, seekers = self.shares
        rng = np.random.default_rng(self.seed)
        wanted = rng.uniform(-1, 1, (seekers, len(shares)))
        every = np.arange(len(shares))
        wanted[every % seekers, every] = -np.log(shares)
        keys = rng.standard_normal((len(shares), self.problem.head_dim))
        scale = self.problem.scale_value
        queries = np.linalg.lstsq(keys, wanted.T, rcond=None)[0].T / (scale or 1.0)
        return self._rounded(np.asarray(queries, dtype=np.float64)), self._rounded(keys)

    def _rounded(self, x: Float) -> Float:
        dtype = getattr(torch, self.problem.dtype)
        rounded: Float = torch.from_numpy(x).to(dtype).to(torch.float64).numpy()
        return rounded

    def query_classes(self, b: int, head: int, positions: Positions) -> Positions:
        """Return the class of each query."""
        drawn = words(self.seed, f"a {b} {head}", positions, 1)[:, 0]
        return drawn.astype(np.int64) % (QUERY_CLASSES if self.kind == "counted" else self.shares[1])

    def key_classes(self, b: int, head: int, positions: Positions) -> Positions:
        """Return the class of each key."""
        if self.kind == "counted":  # the number of zeros at the end
            ends = words(self.seed, f"c {b} {head}", positions, 2).astype(np.int64) @ np.array([1, 256])
            zeros: Positions = (ends[:, None] % 2 ** np.arange(1, QUERY_CLASSES) == 0).sum(axis=-1)
            return zeros
        drawn = words(self.seed, f"c {b} {head}", positions, 8).view("<u8")[:, 0] / 2.0**64
        return np.searchsorted(np.cumsum(self.shares[0])[:-1], drawn, side="right")
