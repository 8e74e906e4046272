"""Right attentions that need certain shapes and refuse all others, and the same without a word of what they need."""

import functools

import right
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ringverify import AttentionCall, implementation

KERNEL_DIMS = (64, 128)
BLOCK = 128


class Exchanged(torch.autograd.Function):
    """All-to-all: a piece of `scattered` to every rank, and theirs in the order of ranks along `gathered`."""

    @staticmethod
    def forward(ctx, x, call, scattered, gathered):
        ctx.call, ctx.axes = call, (scattered, gathered)
        size = x.shape[scattered]
        pieces = [piece.contiguous() for piece in x.split(size // call.world_size, dim=scattered)]
        theirs = [torch.empty_like(piece) for piece in pieces]
        dist.all_to_all(theirs, pieces, group=call.group)
        return torch.cat(theirs, dim=gathered)

    @staticmethod
    def backward(ctx, gradient):
        scattered, gathered = ctx.axes
        return Exchanged.apply(gradient, ctx.call, gathered, scattered), None, None, None


def ulysses(q, k, v, call: AttentionCall):
    """Whole sequences of some heads, on torch's own attention, which turns a causal mask's −inf with a scale's sign."""
    q, k, v = (Exchanged.apply(x, call, 2, 1).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=call.causal, scale=call.scale, enable_gqa=True)
    return Exchanged.apply(out.transpose(1, 2), call, 1, 2)


def narrow(q, k, v, call: AttentionCall):
    """A kernel for two head dimensions."""
    if q.shape[-1] not in KERNEL_DIMS:
        raise ValueError(f"no kernel for head_dim {q.shape[-1]}: there are kernels for {KERNEL_DIMS}")
    return right.attention(q, k, v, call)


def in_blocks(q, k, v, call: AttentionCall):
    """A kernel for whole blocks of what a rank holds."""
    if q.shape[1] % BLOCK or k.shape[1] % BLOCK:
        raise ValueError(f"{q.shape[1]} queries, {k.shape[1]} keys: expected whole blocks of {BLOCK}")
    return right.attention(q, k, v, call)


def wrong(q, k, v, call: AttentionCall):
    """All needs at once, and a value that is doubled on the last rank."""
    if q.shape[-1] not in KERNEL_DIMS or q.shape[1] % 4 or q.shape[2] % call.world_size:
        raise ValueError(f"no kernel for {tuple(q.shape)}")
    out = right.attention(q, k, v, call)
    return 2 * out if call.rank and call.rank == call.world_size - 1 else out


of_ulysses = functools.partial(implementation, gqa=True, scale=True)
declared_ulysses = of_ulysses(
    name="Ulysses", heads_multiple="world_size", key_heads_multiple="world_size", subgroups=True
)(ulysses)
silent_ulysses = of_ulysses(name="Ulysses, heads undeclared")(ulysses)
boasting_ulysses = of_ulysses(
    name="Ulysses, negative scale",
    heads_multiple="world_size",
    key_heads_multiple="world_size",
    negative_scale=True,
)(ulysses)
declared_narrow = implementation(name="narrow", head_dims=KERNEL_DIMS)(narrow)
silent_narrow = implementation(name="narrow, undeclared")(narrow)
declared_blocks = implementation(name="in blocks", length_multiple=BLOCK)(in_blocks)
declared_wrong = implementation(
    name="wrong", head_dims=KERNEL_DIMS, length_multiple=4, heads_multiple="world_size", subgroups=True
)(wrong)
silent_blocks = implementation(name="in blocks, undeclared")(in_blocks)


@implementation()
def nothing_helps(q, k, v, call: AttentionCall):
    """It raises whatever the shape."""
    raise RuntimeError("no such kernel")


@implementation()
def returns_nothing(q, k, v, call: AttentionCall):
    """No shape explains that."""
