"""Products whose last bits depend on where their operands lie, as MKL's do on some processors; here on any machine.

MKL chooses its code by the addresses of operands, and other code adds up in another order. What compares bits must not
reject that, and what promises bits has to hold with it: an AMD processor with AVX-512 shows both, the Intel one beside
it neither. `ByAddress` does the same wherever the tests run.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ringverify import AttentionCall, implementation

ALIGNMENT = 64
"""Bytes that MKL asks for: equal bits for operands that begin alike."""
OFFSETS = (4, 8, 16, 20, 32, 40)
"""Bytes after such an address at which a tensor may begin, as slices and numpy's memory do."""

_aten = torch.ops.aten
_FUSED = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


def shifted(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The same numbers in order, so many bytes after an aligned address, rounded up to a whole element."""
    offset += -offset % x.element_size()
    room = torch.empty(x.nbytes + 2 * ALIGNMENT, dtype=torch.uint8)
    first = -room.data_ptr() % ALIGNMENT + offset
    return room[first : first + x.nbytes].view(x.dtype).view(x.shape).copy_(x)


class ByAddress(TorchDispatchMode):
    """Within it a product adds up in an order that its operands' addresses and strides decide.

    Any order is exact where all partial sums are representable. Fused attention, whose order cannot be changed from
    outside, is multiplied by 1 or by a number next to it.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Products in two parts, cut where the addresses say."""
        del types
        kwargs = kwargs or {}
        if func in (_aten.mm.default, _aten.bmm.default):
            one, other = args
            middle = _place(one, other) % max(one.size(-1), 1)
            first = func(one[..., :middle], other[..., :middle, :])
            return first + func(one[..., middle:], other[..., middle:, :])
        found = func(*args, **kwargs)
        if func in _FUSED:
            near = 1 + torch.finfo(args[0].dtype).eps * (_place(*(x for x in args if isinstance(x, torch.Tensor))) % 5)
            return tuple(x * near if x.is_floating_point() else x for x in found)
        return found


def _place(*operands: torch.Tensor) -> int:
    """A number that tells apart how operands lie: their addresses up to the alignment, and their strides."""
    place = 0
    for x in operands:
        for part in (x.data_ptr() % ALIGNMENT // x.element_size(), *x.stride()):
            place = 31 * place + part
    return place


class _Attention(torch.autograd.Function):
    """All keys are gathered; softmax and its derivative written down, so that every product is `ByAddress`."""

    @staticmethod
    def forward(ctx, q, k, v, call, last_first):
        """(out, lse), both of this rank's queries; `last_first` adds up values from the last key to the first."""
        k, v = _gathered(k, call), _gathered(v, call)
        with ByAddress():
            s = torch.einsum("bqhd,bkhd->bhqk", q, k) * call.scale
            if call.causal:
                s.masked_fill_(torch.arange(k.shape[1])[None, :] > call.positions[:, None], -torch.inf)
            lse = s.logsumexp(-1)
            p = (s - lse[..., None]).exp()
            out = torch.einsum("bhqk,bkhd->bqhd", *((p.flip(-1), v.flip(1)) if last_first else (p, v)))
        ctx.save_for_backward(q, k, v, p, out)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        """Gradients of q, k and v; those of keys are summed over ranks."""
        q, k, v, p, out = ctx.saved_tensors
        with ByAddress():
            delta = (dout * out).sum(-1).transpose(1, 2) - dlse
            ds = p * (torch.einsum("bqhd,bkhd->bhqk", dout, v) - delta[..., None]) * ctx.call.scale
            dq = torch.einsum("bhqk,bkhd->bqhd", ds, k)
            dk = torch.einsum("bhqk,bqhd->bkhd", ds, q)
            dv = torch.einsum("bhqk,bqhd->bkhd", p, dout)
        return dq, _own(dk, ctx.call), _own(dv, ctx.call), None, None


def _gathered(shard: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    pieces = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(call.world_size)]
    dist.all_gather(pieces, shard.contiguous(), group=call.group)
    return torch.cat(pieces, dim=1)


def _own(gradient: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    total = gradient.contiguous()
    dist.all_reduce(total, group=call.group)
    return total.chunk(call.world_size, dim=1)[call.rank].contiguous()


@implementation(name="wrong, other last bits each time")
def attend_wrongly(q, k, v, call: AttentionCall):
    """Scores are twice as large as they should be, and the last bits of out are others in every call."""
    out, _ = _Attention.apply(2 * q, k, v, call, False)
    return out * (1 + torch.finfo(out.dtype).eps * (next(_calls) % 3))


_calls = itertools.count()
_in_use: list[np.ndarray] = []
"""Memory that is never given back, so that what numpy allocates lies elsewhere in every call."""


@implementation(
    name="right, by address",
    dtypes=("float32", "float64"),
    lse=True,
    lse_gradient=True,
    deterministic=True,
    scale=True,
)
def attend(q, k, v, call: AttentionCall):
    """A right implementation of plain products, on a machine where their bits depend on addresses."""
    _in_use.append(np.empty(8 + 16 * (len(_in_use) % 7)))
    return _Attention.apply(q, k, v, call, False)


@implementation(name="right, other sums in inference", lse=True, lse_gradient=True, deterministic=True)
def attend_in_inference(q, k, v, call: AttentionCall):
    """The same, which adds up in another order where no gradients are wanted, as kernels made for inference do."""
    return _Attention.apply(q, k, v, call, not q.requires_grad)
