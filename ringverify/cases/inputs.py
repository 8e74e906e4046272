"""Make the inputs of a case: values by family, and tensors in a given memory layout. A case decides every bit.

Values are drawn with numpy, rounded to the problem's dtype, and kept as float64: the oracle is given the very numbers
that the implementation is given. Arrays are `(batch, sequence, heads, dim)`; lse and its cotangent `(batch, heads,
sequence)`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ringref.pattern import multiplicity
from ringref.problem import DtypeName, Problem
from ringverify.cases.case import Case, Memory

Array = NDArray[np.float64]

GAP = 100.0
"""Score difference between neighbouring quarters of the keys; more than 88.8, so that its exp overflows float32."""

DTYPE: dict[DtypeName, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Global inputs of a case: read-only float64 arrays of values that the problem's dtype represents exactly.

    Attributes:
        q: `(B, Nq, Hq, D)`.
        k: `(B, Nk, Hk, D)`.
        v: `(B, Nk, Hk, Dv)`.
        dout: cotangent of out `(B, Nq, Hq, Dv)`; zero if the case has none.
        dlse: cotangent of lse `(B, Hq, Nq)`, float32 values; zero if the case has none.
        sinks: learned sinks `(Hq,)`, float32 values, −inf in a head without one; `None` if the problem has none.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array
    sinks: Array | None = None


@functools.lru_cache(maxsize=8)
def make_inputs(case: Case) -> Inputs:
    """Draw the inputs of a case from its family of values and its seed."""
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
            # q.k exceeds 65504, the largest float16, before and after the scale; v comes close to it; cotangents are
            # small so that the gradients stay in range.
            q, k = np.sign(q) * 240 + np.round(4 * q), np.sign(k) * 240 + np.round(4 * k)
            v, dout = 60000 * np.tanh(v), dout / 1024
        case "poisoned":
            unused = padding(p)
            k[unused], v[unused] = np.nan, np.nan
        case "poisoned_skips":
            unused = ~attended_keys(p)
            k[unused], v[unused] = np.nan, np.nan
        case "selectors":
            order = rng.random((p.batch, p.heads, p.nq, p.nk)).argsort(axis=-1)
            q, k = selectors(p, order, lambda row, allowed: rng.choice(allowed), called=case.describe())
            v = rng.integers(-9, 10, size=v.shape).astype(np.float64)
            dout = rng.integers(-1, 2, size=dout.shape).astype(np.float64)
    if case.cotangent == "lse":
        dout = np.zeros_like(dout)
    if case.cotangent == "out":
        dlse = np.zeros_like(dlse)
    if case.memory == "expanded":
        q, k, v, dout = (np.broadcast_to(x[:1, :, :1], x.shape) for x in (q, k, v, dout))
        dlse = np.broadcast_to(dlse[:1, :1], dlse.shape)
    q, k, v, dout = (round_to(x, p.dtype) for x in (q, k, v, dout))
    return Inputs(q, k, v, dout, round_to(dlse, p.lse_dtype), _sinks(case, rng) if p.sinks else None)


SINK_SIZES = {"large_scores": 100.0, "dominating_key": 60.0, "rising_blocks": 3 * GAP, "falling_blocks": 3 * GAP}
"""Size of the sinks that are of the size of a family's scores; 2.0 where these are ordinary."""
FAR_ABOVE = 100.0
"""What a sink that is far above all scores has beside an ordinary one."""
FAR_BELOW = -2000.0
"""A sink whose weight beside any score of 0 is exactly 0, in float64 too."""


def has_ordinary_sinks(case: Case) -> bool:
    """Whether some head has a sink of the size of its scores, of which small changes show."""
    sinks = make_inputs(case).sinks
    most = np.inf if case.values in SINK_SIZES else FAR_ABOVE / 2
    return sinks is not None and bool(((sinks > FAR_BELOW) & (sinks < most)).any())


def _sinks(case: Case, rng: np.random.Generator) -> Array:
    """Draw a sink for each head: most of the size of its scores, others far above or below all scores, or none."""
    heads = case.problem.heads
    sinks = rng.standard_normal(heads) * SINK_SIZES.get(case.values, 2.0)
    if case.values == "integers":
        sinks = np.round(sinks)
    sinks = np.choose(rng.integers(8, size=heads), [sinks + FAR_ABOVE, np.full(heads, FAR_BELOW), *[sinks] * 6])
    sinks = np.where(rng.integers(10, size=heads) == 0, -np.inf, sinks)
    if case.values == "selectors":  # whose answer stays exact
        sinks = np.minimum(sinks, FAR_BELOW)
    return round_to(sinks, "float32")


def padding(problem: Problem) -> NDArray[np.bool_]:
    """Return which keys are padding, `(B, Nk)`: those beyond a key length or outside all documents.

    Padding may hold anything, NaN included. A key that a window, a dilation or causality excludes is not padding: it
    is an ordinary key that some query does not attend.
    """
    places = np.arange(problem.nk)
    found = np.zeros((problem.batch, problem.nk), dtype=bool)
    if problem.key_lengths is not None:
        found |= places >= np.array(problem.key_lengths)[:, None]
    if problem.documents is not None:
        found |= (places < problem.documents[0]) | (places >= problem.documents[-1])
    return found


def attended_keys(problem: Problem) -> NDArray[np.bool_]:
    """Return whether any query attends a key, in any query head that reads its key head: `(B, Nk, Hk)`."""
    p = problem
    by_head = (multiplicity(p) > 0).max(axis=2, initial=False).reshape(p.batch, p.hk, p.group_size, p.nk)
    attended: NDArray[np.bool_] = by_head.max(axis=2, initial=False).transpose(0, 2, 1)
    return attended


SELECTOR = 128.0
"""Nonzero entry of selector keys, and step between entries of selector queries. Two scores of a row differ by at least
128 * 128 * scale: the softmax weight of the lower one is exactly 0, in float64 too, for head_dim up to `MOST_KEYS`."""

MOST_KEYS = 400
"""Largest head_dim, and so most keys, for which selectors are built."""


def selectable(case: Case) -> bool:
    """Return whether selectors can be built: a dimension for each key, no scale, softcap or shared dilation."""
    return _selectable(case.problem)


def _selectable(p: Problem) -> bool:
    plain = p.scale is None and p.softcap is None and (p.dilation is None or p.dilation.heads == "split")
    return plain and p.nk <= p.head_dim <= MOST_KEYS


def selectors(
    problem: Problem, order: NDArray[Any], chosen: Callable[[tuple[int, ...], NDArray[np.int64]], int], *, called: str
) -> tuple[Array, Array]:
    """Make q and k whose answer is exact in every dtype: each query selects one key, and a forbidden key scores higher.

    Keys are multiples of unit vectors. A query scores 0 on its target, and on each other key a different score, far
    below 0 and far from one another. So lse is exactly 0, whatever the base of the exponential and the order of merges,
    and out, like every partial result, is the value of one key: an integer, if all values are. One key that the pattern
    forbids, the first after the query if there is one, scores far above 0: if the mask leaks, out is that key's value.

    Args:
        problem: what to compute.
        order: for each query of each head, the keys in an order, `(B, Hq, Nq, Nk)`: it decides how low they score.
        chosen: returns a query's target, given its batch entry, head and position, and the keys that it attends.
        called: what the problem is called in messages.

    Returns:
        q and k, shaped as in `Inputs`.

    Raises:
        ValueError: the problem has too few dimensions, or is one for which the answer would not be exact.
    """
    p = problem
    if not _selectable(p):
        raise ValueError(f"{called}: selectors need head_dim >= key_length, no scale, softcap or shared dilation")
    attended = multiplicity(p) > 0  # (B, Hq, Nq, Nk)
    q = np.zeros((p.batch, p.heads, p.nq, p.head_dim))
    q[..., : p.nk] = -SELECTOR * (1 + order)
    for row in np.ndindex(p.batch, p.heads, p.nq):
        allowed, forbidden = np.flatnonzero(attended[row]), np.flatnonzero(~attended[row])
        if allowed.size:
            q[(*row, chosen(row, allowed))] = 0.0
        if forbidden.size:
            later = forbidden[forbidden > row[2]]
            q[(*row, later[0] if later.size else forbidden[0])] = SELECTOR
    k = np.zeros((p.batch, p.nk, p.hk, p.head_dim))
    k[:, np.arange(p.nk), :, np.arange(p.nk)] = SELECTOR
    return np.ascontiguousarray(q.swapaxes(1, 2)), k


def round_to(values: Array, dtype: DtypeName) -> Array:
    """Round values to nearest in `dtype`; the result is a read-only float64 array."""
    rounded: Array = torch.from_numpy(np.array(values)).to(DTYPE[dtype]).to(torch.float64).numpy()
    rounded.setflags(write=False)
    return rounded


def lay_out(values: Array, dtype: torch.dtype, memory: Memory, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor of these values in the given memory layout, and the whole buffer that it is a view of.

    contiguous: a buffer of its own. transposed: axes 1 and 2 swapped in memory. strided: every second row of a longer
    buffer. offset: storage offset 7 in a longer buffer. packed: a slice of the last axis of a wider buffer, like q, k
    and v of one projection. expanded: stride 0 on every axis along which the values do not vary.
    What the tensor does not cover in the buffer is NaN, so that reading it shows.

    torch allocates the buffer, at an aligned address (numpy's may be unaligned), so that the alignment is the same in
    every run: the last bits of a matrix product may depend on it.
    """
    # Indexing with an array of positions may permute the axes in memory; order="C" undoes that.
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
