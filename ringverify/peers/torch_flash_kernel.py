"""`aten::_scaled_dot_product_flash_attention` and its backward for CPU tensors, so that code built on them runs there.

torch has these two operators for GPUs only; on a CPU another one, of another name, takes their place. `register` gives
each a CPU kernel, dense and written from their schemas, their meta functions (`torch/_meta_registrations.py`) and the
formula that the GPU kernels share with the paper of FlashAttention:

- out in the dtype of the query; log-sum-exps `(B, H, N)`, natural, in float32;
- softmax scale `D ** -0.5` by default; `is_causal` for as many queries as keys;
- where there is no key, out is 0 and every log-sum-exp **plus** infinity;
- query heads share key heads in equal groups, and dk and dv come back with the heads of k and v;
- sums in float32; for 16-bit inputs the weights, and in backward the gradients of the scores, are rounded to the input
  dtype before the matrix product that follows, and each result is rounded once;
- backward takes out and the log-sum-exps as arguments: the merged ones, where results were merged;
- no dropout, no quantised inputs, no debug mask.

Where the GPU kernels only take float16 and bfloat16, and head_dim padded to a multiple of 8, these also take float32
and any head_dim, so that errors are not hidden by rounding. Negative scales are right here, too.

Legend of shape suffixes: B batch, H heads, N queries, M keys, D head_dim.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

Tensor = torch.Tensor

_Forward = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> _Forward:
    """Return the operator's nine results: out, lse, no offsets, both lengths, unused random states, an empty mask.

    Raises:
        NotImplementedError: dropout, a debug mask, or a causal mask over different lengths is asked for.
    """
    _refuse(dropout_p, return_debug_mask, query, key, is_causal)
    if key.size(2) == 0:
        out, lse = torch.zeros_like(query), query.new_full(query.shape[:3], torch.inf, dtype=torch.float32)
    else:
        scores_BHNM = _scores(query, key, is_causal, scale)
        highest = scores_BHNM.amax(dim=-1, keepdim=True)
        weights = torch.exp(scores_BHNM - highest)
        mass = weights.sum(dim=-1, keepdim=True)
        out = _rounded(weights, query) @ _heads_of(query, value) / mass
        lse = (highest + torch.log(mass)).squeeze(-1)
    states = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out.to(query.dtype), lse, None, None, query.size(2), key.size(2), *states, query.new_empty(0)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, with the weights `exp(scores - logsumexp)`.

    Raises:
        NotImplementedError: dropout, or a causal mask over different lengths is asked for.
    """
    del cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset
    _refuse(dropout_p, False, query, key, is_causal)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    weights_BHNM = torch.exp(_scores(query, key, is_causal, scale) - logsumexp.unsqueeze(-1))
    dout, q = grad_out.float(), query.float()
    dv = _rounded(weights_BHNM, query).mT @ dout
    row_sums = (dout * out.float()).sum(dim=-1, keepdim=True)
    dscores_BHNM = weights_BHNM * (dout @ _heads_of(query, value).mT - row_sums)
    dscores_BHNM = _rounded(dscores_BHNM, query)
    dq = scale * (dscores_BHNM @ _heads_of(query, key))
    dk = scale * (dscores_BHNM.mT @ q)
    return dq.to(query.dtype), _summed(dk, key), _summed(dv, value)


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    scores = query.float() @ _heads_of(query, key).mT * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _heads_of(query: Tensor, shared: Tensor) -> Tensor:
    """Return keys or values in float32, repeated for each query head."""
    return shared.float().repeat_interleave(query.size(1) // shared.size(1), dim=1)


def _summed(gradient: Tensor, shared: Tensor) -> Tensor:
    """Sum a gradient over the query heads of each key head, in the dtype of `shared`."""
    batch, heads, rows, dim = shared.shape
    return gradient.reshape(batch, heads, -1, rows, dim).sum(dim=2).to(shared.dtype)


def _rounded(values: Tensor, query: Tensor) -> Tensor:
    return values.to(query.dtype).float()


def _refuse(dropout_p: float, return_debug_mask: bool, query: Tensor, key: Tensor, is_causal: bool) -> None:
    if dropout_p or return_debug_mask:
        raise NotImplementedError("the CPU stand-in of torch's flash attention has no dropout and no debug mask")
    if is_causal and query.size(2) != key.size(2):
        raise NotImplementedError(
            f"the CPU stand-in of torch's flash attention takes is_causal for equal lengths only, "
            f"not for {query.size(2)} queries and {key.size(2)} keys"
        )


_untyped: Any = torch.library
LIBRARY = _untyped.Library("aten", "IMPL")
"""Keeps the registrations, which end when this object is deleted."""


@functools.cache
def register() -> None:
    """Register these kernels for CPU tensors, for the rest of the process."""
    LIBRARY.impl("_scaled_dot_product_flash_attention", flash_forward, "CPU")
    LIBRARY.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
