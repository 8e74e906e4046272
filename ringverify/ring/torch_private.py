"""Every private interface of torch that the ring uses.

| interface | for what |
|---|---|
| `torch._compile._disable_dynamo` | `torch.compiler.disable` without importing dynamo, which takes seconds |
| `aten::_scaled_dot_product_flash_attention_for_cpu` | fused attention on a CPU that returns and takes lse |
| `aten::_scaled_dot_product_flash_attention` | the same on CUDA devices, in 16 bits |
| `aten::_scaled_dot_product_efficient_attention` | the same on CUDA devices, in 32 bits and with a bias |

Each attention has a `_backward`. The operations of CUDA devices are looked up when they are called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._compile import _disable_dynamo as disable_dynamo

__all__ = [
    "cpu_backward",
    "cpu_forward",
    "cuda_efficient_backward",
    "cuda_efficient_forward",
    "cuda_flash_backward",
    "cuda_flash_forward",
    "disable_dynamo",
]

cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cuda_flash_forward(*arguments: Any, scale: float) -> Any:
    """Flash attention on a CUDA device."""
    return torch.ops.aten._scaled_dot_product_flash_attention(*arguments, scale=scale)


def cuda_flash_backward(*arguments: Any, scale: float) -> Any:
    """The backward pass of flash attention on a CUDA device."""
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*arguments, scale=scale)


def cuda_efficient_forward(*arguments: Any, scale: float) -> Any:
    """Memory-efficient attention on a CUDA device."""
    return torch.ops.aten._scaled_dot_product_efficient_attention(*arguments, scale=scale)


def cuda_efficient_backward(*arguments: Any, scale: float) -> Any:
    """The backward pass of memory-efficient attention on a CUDA device."""
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward(*arguments, scale=scale)
