"""Suspicions of inputs: read with the wrong strides, permuted, or rounded before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ringref.problem import DtypeName
from ringverify.cases.inputs import DTYPE, lay_out, round_to
from ringverify.diagnosis.masks import WHENS
from ringverify.diagnosis.model import STEPS, Block, Steps
from ringverify.diagnosis.scene import Array, Scene, Visit
from ringverify.diagnosis.suspicion import Suspicion

Read = Callable[[Scene, Array], Array]
"""What is read in place of a rank's piece of an input."""


def _laid_out(scene: Scene, x: Array) -> torch.Tensor:
    """A piece as the implementation is given it."""
    swap = scene.capabilities.tensor_layout == "bhsd" and x.ndim == 4
    lying, _ = lay_out(x.swapaxes(1, 2) if swap else x, DTYPE[scene.problem.dtype], scene.case.memory, "cpu")
    return lying


def _back(scene: Scene, tensor: torch.Tensor, ndim: int) -> Array:
    found: Array = tensor.to(torch.float64).numpy()
    return found.swapaxes(1, 2) if scene.capabilities.tensor_layout == "bhsd" and ndim == 4 else found


def as_dense(scene: Scene, x: Array) -> Array:
    """The elements that lie next in memory from the first one on; zeros where memory ends."""
    lying = _laid_out(scene, x)
    memory = torch.empty(0, dtype=lying.dtype).set_(lying.untyped_storage())[lying.storage_offset() :]
    read = torch.zeros(lying.numel(), dtype=lying.dtype)
    count = min(len(read), len(memory))
    read[:count] = memory[:count]
    return _back(scene, read.reshape(lying.shape), x.ndim)


def from_start(scene: Scene, x: Array) -> Array:
    """The right strides from the start of the storage."""
    lying = _laid_out(scene, x)
    return x if not x.size else _back(scene, lying.as_strided(lying.shape, lying.stride(), 0), x.ndim)


def head_0(scene: Scene, x: Array) -> Array:
    """Every head is the first, where the tensor is not dense."""
    dense = _laid_out(scene, x).is_contiguous() and x[..., 0].size > 1
    return x if dense or not x.size else np.broadcast_to(x[:, :, :1], x.shape)


def _scrambled(x: Array) -> Array:
    """`(B, S, H, D)` reshaped to `(B, H, S, D)`."""
    b, s, h, d = x.shape
    return np.ascontiguousarray(x).reshape(b, h, s, d)


def _q(read: Read) -> Steps:
    return replace(STEPS, q=lambda scene, rank: read(scene, STEPS.q(scene, rank)))


def _block(read: Read, *, k: bool = True, v: bool = True) -> Steps:
    def of(at: Visit) -> Block:
        right = STEPS.block(at)
        return (read(at.scene, right[0]) if k else right[0]), (read(at.scene, right[1]) if v else right[1])

    return replace(STEPS, block=of)


def _dout(read: Read) -> Steps:
    return replace(STEPS, dout=lambda scene, rank: read(scene, STEPS.dout(scene, rank)))


def _dlse(read: Read) -> Steps:
    return replace(STEPS, dlse=lambda scene, rank: read(scene, STEPS.dlse(scene, rank)))


def _all(read: Read) -> Steps:
    return replace(_q(read), block=_block(read).block, dout=_dout(read).dout)


STRIDES: list[Suspicion] = [
    Suspicion("strides of q ignored: its elements are read as they lie in memory", _q(as_dense)),
    Suspicion("strides of k and v ignored: their elements are read as they lie in memory", _block(as_dense)),
    Suspicion("strides of k ignored: its elements are read as they lie in memory", _block(as_dense, v=False)),
    Suspicion("strides of v ignored: its elements are read as they lie in memory", _block(as_dense, k=False)),
    Suspicion(
        "strides of q, k and v ignored: elements are read as they lie in memory",
        replace(_q(as_dense), block=_block(as_dense).block),
    ),
    Suspicion("strides of the cotangent of out ignored: elements are read as they lie in memory", _dout(as_dense)),
    Suspicion("strides of the cotangent of lse ignored: elements are read as they lie in memory", _dlse(as_dense)),
    Suspicion(
        "storage offset taken for 0: q, k and v are read from the start of their memory",
        replace(_q(from_start), block=_block(from_start).block),
        "forward",
    ),
    Suspicion(
        "storage offset taken for 0: q, k and v are read from the start of their memory",
        replace(_q(from_start), block=_block(from_start).block),
    ),
    Suspicion("all heads of k and v read head 0, where their memory is not dense", _block(head_0)),
]
PERMUTED: list[Suspicion] = [
    *[
        Suspicion(
            "elements permuted: heads and tokens of the inputs are exchanged by a reshape",
            replace(STEPS, widen=_scrambled),
            when,
        )
        for when in WHENS
    ],
    Suspicion(
        "elements of out permuted: heads and tokens are exchanged by a reshape",
        replace(
            STEPS,
            returned=lambda scene, rank, out, lse: (np.ascontiguousarray(out.swapaxes(1, 2)).reshape(out.shape), lse),
        ),
    ),
]


def _rounded(dtype: DtypeName) -> Read:
    return lambda scene, x: round_to(x, dtype)


ROUNDED: list[Suspicion] = [
    Suspicion(f"result as if {what} were rounded to {dtype}", make(_rounded(dtype)))
    for dtype in ("bfloat16", "float16", "float32")
    for what, make in (("all inputs", _all), ("q", _q), ("k and v", _block), ("the cotangent of out", _dout))
]
