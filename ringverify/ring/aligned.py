"""Where tensors that kernels read begin in memory.

The libraries that multiply matrices choose their code by address: MKL's products of the same numbers have other last
bits where an operand begins 4 bytes later, unless `MKL_CBWR` fixes the code. They promise equal bits for equal
alignment. torch allocates at multiples of 64 bytes, so all that a call makes itself lies alike each time, and so do
slices of it; only what it is given may begin anywhere.
"""

from __future__ import annotations

import torch

ALIGNMENT = 64
"""Bytes: that of torch's own allocations, and what MKL asks for."""
LARGE = 1 << 20
"""Bytes of a cache from which on a copy would take longer than a token's messages."""


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in order and at a multiple of 64 bytes: `x` itself where it lies so, as fresh tensors do.

    An axis of size 1 may have any stride and `x` still be contiguous; it gets the stride of fresh tensors as well.
    """
    x = x.contiguous()
    if x.data_ptr() % ALIGNMENT:
        return x.clone(memory_format=torch.contiguous_format)
    if min(x.shape, default=2) > 1:
        return x
    step = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if stride != step:
            return x.flatten().view(x.shape)
        step *= max(size, 1)
    return x


def where_it_lies(x: torch.Tensor) -> torch.Tensor:
    """`x` itself if it is large, whatever lies between its rows, and `aligned` otherwise.

    For keys that few queries attend: a copy of a cache takes as long as reading it. Each row has to be in order and at
    a multiple of 64 bytes. Bits may then depend on the strides, which libraries that multiply matrices look at too.
    """
    apart = (stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1)
    in_place = x.stride(-1) == 1 and not any(number * x.itemsize % ALIGNMENT for number in apart)
    return x if in_place and x.nbytes >= LARGE and not x.data_ptr() % ALIGNMENT else aligned(x)
