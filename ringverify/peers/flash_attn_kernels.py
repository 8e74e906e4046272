"""What the CUDA kernels of flash-attn 2.8.3 compute, in PyTorch on a CPU: code built on them runs without a GPU.

No code of flash-attn is used, and none of the oracle's or of our ring's: this is written from its sources (2.8.3:
`csrc/flash_attn/flash_api.cpp`, `src/flash_fwd_kernel.h`, `src/flash_bwd_kernel.h`, `src/softmax.h`, `src/mask.h`) and
follows them where a caller can tell the difference:

- float16 and bfloat16 only, head_dim a multiple of 8 up to 256, query heads a multiple of the key heads; anything else
  is refused with the kernels' own messages;
- causal and windows are aligned to the bottom right corner, window ends inclusive, a negative end unbounded;
- scores, running sums and log-sum-exps are float32; unnormalised weights are rounded to the input dtype before they are
  multiplied with the values, and in backward the normalised weights and the gradients of the scores are rounded so,
  too; each result is rounded once;
- a query without keys has out 0 and a log-sum-exp of **plus** infinity, and so has every query where there is no key;
- the row maximum is taken before the scale, so that a negative scale turns masked scores into +inf, as it does there;
- masked weights are 0 and are multiplied with their values: 0 times NaN is NaN within a tile, and here a whole sequence
  is one tile;
- backward reads the log-sum-exps as dense memory, whatever strides they came with, and writes into the buffers it is
  handed; dk and dv of grouped heads are rounded for each query head before they are summed.

Differences that a caller cannot rely on: the order of summation; `max_seqlen`, which sizes a grid of tiles in the CUDA
kernels, is not used here. Dropout and ALiBi are refused.

Legend of shape suffixes: N sequence, H heads, D head_dim; q and k say whose.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

HEAD_MULTIPLE = 8
"""head_dim has to be a multiple of this."""
ROW_MULTIPLE = 128
"""Rows of a tile; the rows of the row sums (`softmax_d`) are padded to a multiple of it."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, window: tuple[int, int], softcap: float
) -> tuple[Tensor, Tensor]:
    """Return out `(B, Nq, H, D)` in q's dtype and the float32 log-sum-exps `(B, H, Nq)` of `(B, N, H, D)` inputs.

    Raises:
        RuntimeError: the kernels refuse the inputs.
    """
    batch, queries = q.shape[:2]
    _check(q, k, v)
    _refuse(k.shape != v.shape or k.shape[0] != batch or k.shape[3] != q.shape[3], "k and v do not fit q")
    out = torch.empty_like(q)
    lse = torch.empty((batch, q.shape[2], queries), dtype=torch.float32, device=q.device)
    for b in range(batch):
        out_b, lse_b = _forward_one(q[b], k[b], v[b], scale, causal, window, softcap)
        out[b], lse[b] = out_b, lse_b
    return out, lse


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return out `(total_q, H, D)` and lse `(H, total_q)` of packed sequences; rows of no sequence are not written.

    Raises:
        RuntimeError: the kernels refuse the inputs.
    """
    _check(q, k, v)
    sequences = _sequences(cu_seqlens_q, cu_seqlens_k)
    out = torch.empty_like(q)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    for rows, keys in sequences:
        out[rows], lse[:, rows] = _forward_one(q[rows], k[keys], v[keys], scale, causal, window, softcap)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """Write dq, dk and dv; return the row sums of dout * out `(B, H, Nq rounded up to 128)` in float32.

    Raises:
        RuntimeError: the kernels refuse the inputs.
    """
    batch, queries, heads = q.shape[:3]
    _check(q, k, v, out, dout, dq, dk, dv)
    for written, like, name in ((dq, q, "dq"), (dk, k, "dk"), (dv, v, "dv"), (out, q, "out"), (dout, q, "dout")):
        _refuse(written.shape != like.shape, f"{name} must have shape {tuple(like.shape)}")
    lse = _dense(lse, (batch, heads, queries))
    row_sums = lse.new_empty((batch, heads, -(-queries // ROW_MULTIPLE) * ROW_MULTIPLE))
    for b in range(batch):
        found = _backward_one(dout[b], q[b], k[b], v[b], out[b], lse[b], scale, causal, window, softcap)
        dq[b], dk[b], dv[b], row_sums[b, :, :queries] = found
    return row_sums


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """Write dq, dk and dv where there are sequences; return the row sums `(H, total_q + 128 * sequences)`.

    Raises:
        RuntimeError: the kernels refuse the inputs.
    """
    _check(q, k, v, out, dout, dq, dk, dv)
    for written, like, name in ((dq, q, "dq"), (dk, k, "dk"), (dv, v, "dv"), (out, q, "out"), (dout, q, "dout")):
        _refuse(written.shape != like.shape, f"{name} must have shape {tuple(like.shape)}")
    sequences = _sequences(cu_seqlens_q, cu_seqlens_k)
    lse = _dense(lse, (q.shape[1], q.shape[0]))
    row_sums = lse.new_empty((q.shape[1], q.shape[0] + ROW_MULTIPLE * len(sequences)))
    for number, (rows, keys) in enumerate(sequences):
        found = _backward_one(
            dout[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], scale, causal, window, softcap
        )
        start = rows.start + ROW_MULTIPLE * number
        dq[rows], dk[keys], dv[keys], row_sums[:, start : start + rows.stop - rows.start] = found
    return row_sums


def _forward_one(
    q_NHD: Tensor,
    k_NHD: Tensor,
    v_NHD: Tensor,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """out `(Nq, H, D)` and lse `(H, Nq)` of one sequence."""
    group = q_NHD.shape[1] // k_NHD.shape[1]
    if k_NHD.shape[0] == 0:
        nothing = torch.full((q_NHD.shape[1], q_NHD.shape[0]), torch.inf, device=q_NHD.device)
        return torch.zeros_like(q_NHD), nothing
    s_HNN, factor = _scores(q_NHD, k_NHD, group, scale, causal, window, softcap)
    top = s_HNN.amax(dim=-1, keepdim=True)
    weights = torch.exp(s_HNN * factor - torch.where(top == -torch.inf, 0.0, top * factor))
    total = weights.sum(dim=-1, keepdim=True)
    unusable = (total == 0) | total.isnan()
    out = (weights.to(q_NHD.dtype).float() @ _by_head(v_NHD, group)) * torch.where(unusable, 1.0, 1.0 / total)
    lse = torch.where(unusable, torch.inf, top * factor + torch.log(total))
    return out.to(q_NHD.dtype).transpose(0, 1), lse[..., 0]


def _backward_one(
    dout_NHD: Tensor,
    q_NHD: Tensor,
    k_NHD: Tensor,
    v_NHD: Tensor,
    out_NHD: Tensor,
    lse_HN: Tensor,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk and dv of one sequence, and the row sums of dout * out `(H, Nq)`."""
    group, dtype = q_NHD.shape[1] // k_NHD.shape[1], q_NHD.dtype
    dout_HND, q_HND, k_HND = _by_head(dout_NHD), _by_head(q_NHD), _by_head(k_NHD, group)
    row_sums = (dout_HND * _by_head(out_NHD)).sum(dim=-1)
    if 0 in (q_NHD.shape[0], k_NHD.shape[0]):
        return torch.zeros_like(q_NHD), torch.zeros_like(k_NHD), torch.zeros_like(v_NHD), row_sums
    s_HNN, factor = _scores(q_NHD, k_NHD, group, scale, causal, window, softcap)
    lse_HN1 = torch.where(lse_HN == -torch.inf, 0.0, lse_HN)[..., None]
    p = torch.exp(s_HNN * factor - lse_HN1)
    ds = p * (dout_HND @ _by_head(v_NHD, group).mT - row_sums[..., None])
    slope = scale
    if softcap > 0:
        ds, slope = ds * torch.where(s_HNN == -torch.inf, 0.0, (1 - s_HNN**2) * scale), 1.0
    p, ds = p.to(dtype).float(), ds.to(dtype).float()
    dq = (ds @ k_HND * slope).to(dtype).transpose(0, 1)
    dk, dv = (ds.mT @ q_HND * slope).to(dtype), (p.mT @ dout_HND).to(dtype)
    return dq, _summed(dk, group), _summed(dv, group), row_sums


def _scores(
    q_NHD: Tensor,
    k_NHD: Tensor,
    group: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, float]:
    """Masked scores `(H, Nq, Nk)` before their last factor, and that factor: the scale, or the softcap."""
    s = _by_head(q_NHD) @ _by_head(k_NHD, group).mT
    if softcap > 0:
        s = torch.tanh(s * (scale / softcap))
    queries, keys = s.shape[-2:]
    left, right = window[0], 0 if causal else window[1]
    diagonal = torch.arange(queries, device=s.device)[:, None] + keys - queries
    key = torch.arange(keys, device=s.device)
    if right >= 0:
        s = s.masked_fill(key > diagonal + right, -torch.inf)
    if left >= 0:
        s = s.masked_fill(key < diagonal - left, -torch.inf)
    return s, softcap if softcap > 0 else scale


def _by_head(tensor_NHD: Tensor, group: int = 1) -> Tensor:
    """(N, H, D) as float32 (H * group, N, D): each key head once for every query head that reads it."""
    return tensor_NHD.float().transpose(0, 1).repeat_interleave(group, dim=0)


def _summed(tensor_HND: Tensor, group: int) -> Tensor:
    """(H * group, N, D) back to (N, H, D), query heads of a key head summed in float32 and rounded."""
    heads, keys, dim = tensor_HND.shape
    grouped = tensor_HND.reshape(heads // group, group, keys, dim)
    return grouped.float().sum(dim=1).to(tensor_HND.dtype).transpose(0, 1)


def _dense(lse: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Read the memory that starts at the tensor's first number as a dense tensor of a shape, whatever its strides."""
    _refuse(lse.dtype != torch.float32 or lse.numel() != torch.Size(shape).numel(), "softmax_lse does not fit q")
    strides = torch.empty(shape, device="meta").stride()
    return lse.as_strided(shape, strides, lse.storage_offset())


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """Return the query rows and the key rows of each sequence, as slices."""
    for name, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _refuse(lengths.dtype != torch.int32, f"{name} must have dtype int32")
        _refuse(not lengths.is_contiguous(), f"{name} must be contiguous")
    _refuse(cu_seqlens_q.numel() < 2, "batch size must be positive")
    _refuse(cu_seqlens_q.shape != cu_seqlens_k.shape, f"cu_seqlens_k must have shape {tuple(cu_seqlens_q.shape)}")
    rows, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    cut = zip(rows[:-1], rows[1:], keys[:-1], keys[1:], strict=True)
    return [(slice(first, last), slice(start, stop)) for first, last, start, stop in cut]


def _check(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> None:
    """Refuse what the kernels refuse of any tensor, with their messages."""
    _refuse(q.dtype not in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    for tensor in (k, v, *others):
        _refuse(tensor.dtype != q.dtype, "query, key, value, their gradients and out must have the same dtype")
    for tensor in (q, k, v, *others):
        _refuse(tensor.numel() > 0 and tensor.stride(-1) != 1, "Input tensor must have contiguous last dimension")
    dim = q.shape[-1]
    _refuse(q.dim() == 4 and q.shape[0] == 0, "batch size must be positive")
    _refuse(dim > 256, "FlashAttention forward only supports head dimension at most 256")
    _refuse(dim % HEAD_MULTIPLE != 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
    _refuse(q.shape[-2] % k.shape[-2] != 0, "Number of heads in key/value must divide number of heads in query")


def _refuse(wrong: bool, why: str) -> None:
    if wrong:
        raise RuntimeError(why)
