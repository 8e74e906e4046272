"""The part of `xformers.ops` that dilated-attention-pytorch calls, in PyTorch on a CPU.

xformers 0.0.21, the newest that the package takes, is built for another torch. This follows its documentation of
`memory_efficient_attention`: inputs `(batch, sequence, heads, head_dim)`; softmax scale `head_dim ** -0.5`;
`LowerTriangularMask` is causal from the top left; out in the query's dtype, differentiable by autograd. A query without
keys has out 0.

Differences: dropout is refused, and `op`, which chooses a kernel, makes no difference.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from ringverify.peers.dense import attention, causal_mask
from ringverify.peers.package import replaced

Tensor = torch.Tensor
AttentionOp = Any


class LowerTriangularMask:
    """Causal mask, aligned to the top left corner."""


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: LowerTriangularMask | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AttentionOp | None = None,
) -> Tensor:
    """Attention on one device.

    Raises:
        NotImplementedError: dropout, or a bias other than `LowerTriangularMask`, is asked for.
    """
    del op
    if p or not (attn_bias is None or isinstance(attn_bias, LowerTriangularMask)):
        raise NotImplementedError("the CPU stand-in of xformers has no dropout and no bias but LowerTriangularMask")
    mask = None
    if attn_bias is not None:
        mask = causal_mask(*(torch.arange(x.shape[1], device=x.device) for x in (query, key)))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attention(q, k, v, mask=mask, scale=q.shape[-1] ** -0.5 if scale is None else scale).transpose(1, 2)


def standing_in() -> AbstractContextManager[None]:
    """Return a context in which `import xformers.ops` finds this module, whatever is installed."""
    package, ops = ModuleType("xformers"), sys.modules[__name__]
    vars(package).update(__path__=[], ops=ops)
    return replaced({"xformers": package, "xformers.ops": ops})
