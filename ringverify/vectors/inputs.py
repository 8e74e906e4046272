"""Inputs of vectors, the same bits on every machine: whole numbers from SplitMix64, times powers of two.

SplitMix64 (Steele, Lea and Flood 2014, *Fast splittable pseudorandom number generators*, OOPSLA, figure 17) is ten
operations on 64-bit integers in any language. No logarithm, no cosine and no rounding comes after it: every value is
a whole number times a power of two, and is representable in the problem's dtype as it is.

Arrays are float64, `(batch, sequence, heads, dim)`; the cotangent of lse is `(batch, heads, sequence)`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ringref.problem import DtypeName
from ringverify.cases.inputs import Inputs, attended_keys, selectors
from ringverify.vectors.story import Story

Array = NDArray[np.float64]

SIGNIFICANT: dict[DtypeName, int] = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of a significand, the leading one included."""

GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64's step: 2^64 divided by the golden ratio, made odd."""

TENSORS = ("q", "k", "v", "dout", "dlse", "choice", "sinks")
"""Random streams of a vector; the seed of each is 8 times the vector's number plus the index in this list."""

LARGE_SINK = 100.0
"""The sink of the third head, whose exp overflows float32. The fourth head has none, −inf."""

GAP, STEEP = 32.0, 256.0
"""Steps of k's first component from one quarter of the keys to the next; times q's 8 and the scale, gaps in scores."""


def splitmix64(seed: int, count: int) -> NDArray[np.uint64]:
    """The first `count` numbers of the stream with that seed."""
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def bell(seed: int, shape: tuple[int, ...], bits: int) -> Array:
    """Draw values of mean 0 and variance 1 in [−3, 3]: sums of three uniform numbers, of at most `bits` bits."""
    raw = splitmix64(seed, 3 * math.prod(shape)) >> np.uint64(65 - bits)
    whole = raw.astype(np.int64) - 2 ** (bits - 2)
    values: Array = np.ldexp(whole.reshape(*shape, 3).sum(axis=-1).astype(np.float64), 2 - bits)
    return values


def _whole(seed: int, shape: tuple[int, ...], largest: int) -> Array:
    """Draw whole numbers from −`largest` to `largest`."""
    drawn = splitmix64(seed, math.prod(shape)) % np.uint64(2 * largest + 1)
    values: Array = drawn.astype(np.float64).reshape(shape) - largest
    return values


def make(story: Story) -> Inputs:
    """Return the inputs of a vector as read-only arrays."""
    p, bits = story.problem, SIGNIFICANT[story.problem.dtype]
    seeds = {name: 8 * story.number + place for place, name in enumerate(TENSORS)}
    shapes = {
        "q": (p.batch, p.nq, p.heads, p.head_dim),
        "k": (p.batch, p.nk, p.hk, p.head_dim),
        "v": (p.batch, p.nk, p.hk, p.dv),
        "dout": (p.batch, p.nq, p.heads, p.dv),
        "dlse": (p.batch, p.heads, p.nq),
    }
    q, k, v, dout, dlse = (
        bell(seeds[name], shape, SIGNIFICANT[p.lse_dtype] if name == "dlse" else bits) for name, shape in shapes.items()
    )
    quarter = np.arange(p.nk) * 4 // max(p.nk, 1)
    match story.values:
        case "integers":
            q, k, v, dout, dlse = (_whole(seeds[name], shape, 3) for name, shape in shapes.items())
        case "zero_queries":
            q = np.zeros_like(q)
        case "unit_values":
            v = np.ones_like(v)
        case "large_scores":
            q, k = 8 * q, 8 * k
        case "shifted_up" | "shifted_down":
            q[..., 0], k[..., 0] = 16.0, 64.0 if story.values == "shifted_up" else -64.0
        case "rising" | "steep_rising" | "falling" | "steep_falling":
            level = quarter if story.values.endswith("rising") else 3 - quarter
            q[..., 0] = 8.0
            k[..., 0] = (level * (STEEP if story.values.startswith("steep") else GAP))[None, :, None]
        case "dominating_first" | "dominating_last":
            q[..., 0] = 4.0
            k[:, 0 if story.values == "dominating_first" else -1, :, 0] = 64.0
        case "float16_limits":
            # q·k is past 65504, the largest float16, before and after the scale, and values come close to it.
            q, k = (
                np.where(x < 0, -1.0, 1.0) * (240 + _whole(seeds[name], x.shape, 8)) for name, x in (("q", q), ("k", k))
            )
            v, dout = 32 * _whole(seeds["v"], v.shape, 1900), dout / 1024
        case "tiny_values":
            v = _whole(seeds["v"], v.shape, 100) * 2.0**-24
        case "unattended_nan":
            unattended = ~attended_keys(p)
            k[unattended], v[unattended] = np.nan, np.nan
        case "selectors":
            order = splitmix64(seeds["q"], p.batch * p.heads * p.nq * p.nk).reshape(p.batch, p.heads, p.nq, p.nk)
            choice = splitmix64(seeds["choice"], p.batch * p.heads * p.nq).reshape(p.batch, p.heads, p.nq)
            q, k = selectors(
                p,
                order.argsort(axis=-1),
                lambda row, allowed: allowed[int(choice[row]) % allowed.size],
                called=story.id,
            )
            v, dout = _whole(seeds["v"], v.shape, 9), _whole(seeds["dout"], dout.shape, 1)
    if story.cotangent == "lse":
        dout = np.zeros_like(dout)
    if story.cotangent == "out":
        dlse = np.zeros_like(dlse)
    sinks = None
    if p.sinks:
        sinks = 2 * bell(seeds["sinks"], (p.heads,), SIGNIFICANT["float32"])
        sinks[2:4] = LARGE_SINK, -math.inf
        sinks.setflags(write=False)
    for x in (q, k, v, dout, dlse):
        x.setflags(write=False)
    return Inputs(q, k, v, dout, dlse, sinks)
