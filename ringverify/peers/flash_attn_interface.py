"""The part of flash-attn 2.8.3's Python interface that published rings call, over kernels that run on a CPU.

Names, arguments, defaults and what is returned are those of `flash_attn/flash_attn_interface.py` of 2.8.3, where the
four underscored functions are custom operators. `standing_in` makes packages find this module as `flash_attn`; where
the real one is installed it is left alone, since its kernels refuse tensors of a CPU.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from ringverify.peers import flash_attn_kernels as kernels
from ringverify.peers.package import replaced

Tensor = torch.Tensor

VERSION = "2.8.3"
NAME = "flash_attn"


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _refuse(dropout_p, alibi_slopes, return_softmax)
    q, k, v = (_last_contiguous(x) for x in (q, k, v))
    window = (window_size_left, window_size_right)
    out, lse = kernels.forward(q, k, v, scale=softmax_scale, causal=causal, window=window, softcap=softcap)
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _refuse(dropout_p, alibi_slopes, return_softmax, block_table, leftpad_k, seqused_k, zero_tensors)
    q, k, v = (_last_contiguous(x) for x in (q, k, v))
    window = (window_size_left, window_size_right)
    out, lse = kernels.varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, causal=causal, window=window, softcap=softcap
    )
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    _refuse(dropout_p, alibi_slopes)
    dout, q, k, v, out = (_last_contiguous(x) for x in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty_like(x) if dx is None else dx for dx, x in ((dq, q), (dk, k), (dv, v)))
    window = (window_size_left, window_size_right)
    return kernels.backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv,
        scale=softmax_scale, causal=causal, window=window, softcap=softcap,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    _refuse(dropout_p, alibi_slopes, zero_tensors)
    dout, q, k, v, out = (_last_contiguous(x) for x in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty_like(x) if dx is None else dx for dx, x in ((dq, q), (dk, k), (dv, v)))
    window = (window_size_left, window_size_right)
    return kernels.varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
        scale=softmax_scale, causal=causal, window=window, softcap=softcap,
    )  # fmt: skip


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        causal: bool,
        window: tuple[int, int],
        softcap: float,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]:
        out, lse, _, _ = _flash_attn_forward(q, k, v, 0.0, scale, causal, *window, softcap, None, False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = (0.0, scale, causal, *window, softcap, None, deterministic)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, *ctx.settings)
        return dq, dk, dv, None, None, None, None, None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention on one device, differentiable except for its log-sum-exp; head_dim is padded to a multiple of 8.

    Args:
        q: `(batch, seqlen, nheads, headdim)`, float16 or bfloat16; k and v alike, of as many or fewer heads.
        k: keys.
        v: values.
        dropout_p: only 0 is supported.
        softmax_scale: `headdim ** -0.5` by default.
        causal: aligned to the bottom right corner.
        window_size: `(left, right)`, both inclusive, negative for unbounded.
        softcap: 0 for none.
        alibi_slopes: only `None` is supported.
        deterministic: makes no difference here.
        return_attn_probs: return `(out, lse, an empty tensor)` instead of out.

    Raises:
        RuntimeError: the kernels refuse the inputs.
        NotImplementedError: dropout or ALiBi is asked for.
    """
    _refuse(dropout_p, alibi_slopes)
    dim = q.shape[-1]
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    q, k, v = for_kernels(q, k, v)
    out, lse = _FlashAttention.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        q, k, v, scale, causal, window_size, softcap, deterministic
    )
    out = out[..., :dim]
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def for_kernels(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad head_dim of q, k and v with zeros to a multiple of 8, as the kernels need it."""
    if lacking := -q.shape[-1] % kernels.HEAD_MULTIPLE:
        q, k, v = (torch.nn.functional.pad(x, (0, lacking)) for x in (q, k, v))
    return q, k, v


def standing_in(*packages: str) -> AbstractContextManager[None]:
    """Return a context in which `import flash_attn` finds this module, and `packages` are imported afresh."""
    package, interface = ModuleType(NAME), sys.modules[__name__]
    vars(package).update(
        __path__=[], __version__=VERSION, flash_attn_func=flash_attn_func, flash_attn_interface=interface
    )
    return replaced({NAME: package, f"{NAME}.flash_attn_interface": interface}, *packages)


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _refuse(*unsupported: Any) -> None:
    if any(x is not None and (isinstance(x, Tensor) or bool(x)) for x in unsupported):
        raise NotImplementedError("the CPU stand-in of flash-attn has no dropout, no ALiBi and no paged keys")
