"""Input values by family, and how tensors lie in memory. A case decides every bit of them.

Values are drawn with numpy, rounded to the problem's dtype, and kept as float64: the oracle is given the very numbers
that the implementation is given. Arrays are `(batch, sequence, heads, dim)`; lse and its cotangent `(batch, heads,
sequence)`.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray

from ringref.pattern import multiplicity
from ringref.problem import DtypeName, Problem
from ringverify.cases.case import Case, Memory

Array = NDArray[np.float64]

GAP = 100.0
"""Score difference between neighbouring quarters of the keys: exp(88.8) is the largest float32, so it must be more."""

DTYPE: dict[DtypeName, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Global inputs of a case, read-only float64 arrays of values representable in the problem's dtype.

    Attributes:
        q: `(B, Nq, Hq, D)`.
        k: `(B, Nk, Hk, D)`.
        v: `(B, Nk, Hk, Dv)`.
        dout: cotangent of out `(B, Nq, Hq, Dv)`; zero if the case has none.
        dlse: cotangent of lse `(B, Hq, Nq)`, float32 values; zero if the case has none.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array


@functools.lru_cache(maxsize=8)
def make_inputs(case: Case) -> Inputs:
    """The inputs of a case."""
    p = case.problem
    rng = np.random.default_rng(case.seed)
    q = rng.standard_normal((p.batch, p.nq, p.heads, p.head_dim))
    k = rng.standard_normal((p.batch, p.nk, p.hk, p.head_dim))
    v = rng.standard_normal((p.batch, p.nk, p.hk, p.dv))
    dout = rng.standard_normal((p.batch, p.nq, p.heads, p.dv))
    dlse = rng.standard_normal((p.batch, p.heads, p.nq))
    scale = math.copysign(max(abs(p.scale_value), 0.05), p.scale_value)
    quarter = np.arange(p.nk) * 4 // max(p.nk, 1)
    match case.values:
        case "integers":
            q, k, v, dout, dlse = (np.clip(np.round(2 * x), -3, 3) for x in (q, k, v, dout, dlse))
        case "normal":
            pass
        case "zero_queries":
            q = np.zeros_like(q)
        case "unit_values":
            v = np.ones_like(v)
        case "dominating_key":
            q[..., 0] = 4.0
            if p.nk:
                chosen = rng.integers(p.nk, size=(p.batch, 1, p.hk))
                np.put_along_axis(k[..., 0], chosen, 60 / (4 * scale), axis=1)
        case "large_scores":
            factor = math.sqrt(100 / (abs(scale) * math.sqrt(p.head_dim)))
            q, k = q * factor, k * factor
        case "rising_blocks" | "falling_blocks":
            q[..., 0] = 8.0
            level = quarter if case.values == "rising_blocks" else 3 - quarter
            k[..., 0] = (level * GAP / (8 * scale))[None, :, None]
        case "float16_limits":
            # q.k passes 65504, the largest float16, before and after the scale; values reach it; cotangents are
            # small so that the gradients themselves stay in range.
            q, k = np.sign(q) * 240 + np.round(4 * q), np.sign(k) * 240 + np.round(4 * k)
            v, dout = 60000 * np.tanh(v), dout / 1024
        case "poisoned":
            unused = padding(p)
            k[unused], v[unused] = np.nan, np.nan
        case "poisoned_skips":
            unused = ~_reachable(case)
            k[unused], v[unused] = np.nan, np.nan
        case "selectors":
            q, k, v, dout = _selectors(case, rng)
    if case.cotangent == "lse":
        dout = np.zeros_like(dout)
    if case.cotangent == "out":
        dlse = np.zeros_like(dlse)
    if case.memory == "expanded":
        q, k, v, dout = (np.broadcast_to(x[:1, :, :1], x.shape) for x in (q, k, v, dout))
        dlse = np.broadcast_to(dlse[:1, :1], dlse.shape)
    lse_dtype: DtypeName = "float64" if p.dtype == "float64" else "float32"
    q, k, v, dout = (round_to(x, p.dtype) for x in (q, k, v, dout))
    return Inputs(q, k, v, dout, round_to(dlse, lse_dtype))


def padding(problem: Problem) -> NDArray[np.bool_]:
    """Which keys are padding, `(B, Nk)`: those beyond a length or outside all documents hold nothing that was written.

    What a window, a dilation or causality leaves out is no padding: it is an ordinary key that happens not to be used.
    """
    places = np.arange(problem.nk)
    found = np.zeros((problem.batch, problem.nk), dtype=bool)
    if problem.key_lengths is not None:
        found |= places >= np.array(problem.key_lengths)[:, None]
    if problem.documents is not None:
        found |= (places < problem.documents[0]) | (places >= problem.documents[-1])
    return found


def _reachable(case: Case) -> NDArray[np.bool_]:
    """Whether any query of any head attends a key: `(B, Nk, Hk)`."""
    p = case.problem
    by_head = (multiplicity(p) > 0).max(axis=2, initial=False).reshape(p.batch, p.hk, p.group_size, p.nk)
    reached: NDArray[np.bool_] = by_head.max(axis=2, initial=False).transpose(0, 2, 1)
    return reached


SELECTOR = 128.0
"""Entry of selector keys, and step of selector queries. Scores of two keys of a row differ by at least 16384 times the
scale, and the exponential of that, negated, is exactly 0 in float64 too for head_dim up to `MOST_KEYS`."""

MOST_KEYS = 400
"""Keys, and dimensions, for which selectors are built."""


def selectable(case: Case) -> bool:
    """Whether selectors can be built for a case: a dimension a key, the default scale, plain multiplicities."""
    p = case.problem
    plain = p.scale is None and p.softcap is None and (p.dilation is None or p.dilation.heads == "split")
    return plain and p.nk <= p.head_dim <= MOST_KEYS


def _selectors(case: Case, rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
    """Inputs whose answer is exact in every dtype: each query selects one key, and a forbidden key scores higher.

    Keys are unit vectors. A query scores 0 on its target and on every other key a number of its own, each far below
    the one before. So its log-sum-exp is exactly 0 in any base and by any way of merging, out is the target's value, an
    integer, and so is every partial result on the way. On the first key that the pattern forbids it scores far above:
    where the mask leaks, that key's value is what comes out.

    Raises:
        ValueError: the case has too few dimensions, or a pattern for which nothing is exact.
    """
    if not selectable(case):
        raise ValueError(
            f"selectors need head_dim >= key_length, no scale, softcap or shared dilation: {case.describe()}"
        )
    p = case.problem
    attended = multiplicity(p) > 0  # (B, Hq, Nq, Nk)
    q = np.zeros((p.batch, p.heads, p.nq, p.head_dim))
    q[..., : p.nk] = -SELECTOR * (1 + rng.random((*q.shape[:-1], p.nk)).argsort(axis=-1))
    for row in np.ndindex(p.batch, p.heads, p.nq):
        allowed = np.flatnonzero(attended[row])
        forbidden = np.flatnonzero(~attended[row])
        if allowed.size:
            q[(*row, rng.choice(allowed))] = 0.0
        if forbidden.size:
            later = forbidden[forbidden > row[2]]
            q[(*row, later[0] if later.size else forbidden[0])] = SELECTOR
    k = np.zeros((p.batch, p.nk, p.hk, p.head_dim))
    k[:, np.arange(p.nk), :, np.arange(p.nk)] = SELECTOR
    v = rng.integers(-9, 10, size=(p.batch, p.nk, p.hk, p.dv)).astype(np.float64)
    dout = rng.integers(-1, 2, size=(p.batch, p.nq, p.heads, p.dv)).astype(np.float64)
    return q.transpose(0, 2, 1, 3), k, v, dout


def round_to(values: Array, dtype: DtypeName) -> Array:
    """Values rounded to nearest in `dtype`, as read-only float64."""
    rounded: Array = torch.from_numpy(np.array(values)).to(DTYPE[dtype]).to(torch.float64).numpy()
    rounded.setflags(write=False)
    return rounded


def lay_out(values: Array, dtype: torch.dtype, memory: Memory, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor with these values that lies in memory as asked, and the whole buffer that it is a view of.

    contiguous: alone. transposed: axes 1 and 2 swapped in memory. strided: every second row of a longer buffer.
    offset: at an odd place of a longer buffer. packed: a slice of the last axis of a wider buffer, as q, k and v of
    one projection are. expanded: stride 0 over batch and heads, so values must not vary along them.
    What the tensor does not cover is NaN, so that reading it shows.

    The buffer begins at an aligned address, as torch's own memory does and numpy's may not, so that a case lies alike
    each time it is run: products of matrices may have other last bits where their operands begin elsewhere.
    """
    # Picking positions out of an array leaves its axes in another order in memory; plain memory is in order.
    source = torch.empty(values.shape, dtype=dtype, device=device).copy_(torch.from_numpy(np.array(values, order="C")))
    nan = math.nan
    match memory:
        case "contiguous":
            return source, source
        case "transposed":
            buffer = source.transpose(1, 2).contiguous()
            return buffer.transpose(1, 2), buffer
        case "strided":
            shape = list(source.shape)
            buffer = source.new_full((shape[0], 2 * shape[1] + 1, *shape[2:]), nan)
            view = buffer[:, 1 : 2 * shape[1] + 1 : 2]
        case "offset":
            buffer = source.new_full((source.numel() + 12,), nan)
            view = buffer[7 : 7 + source.numel()].view(source.shape)
        case "packed":
            buffer = source.new_full((*source.shape[:-1], source.shape[-1] + 3), nan)
            view = buffer[..., 1:-2]
        case "expanded":
            axes = [
                axis
                for axis, size in enumerate(source.shape)
                if size and bool((source == source.narrow(axis, 0, 1)).all())
            ]
            for axis in axes:
                source = source.narrow(axis, 0, 1)
            buffer = source.contiguous()
            return buffer.expand(values.shape), buffer
    view.copy_(source)
    return view, buffer
