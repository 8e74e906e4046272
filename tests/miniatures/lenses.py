"""Gathered attention with one step spoiled, each the business of one lens; forward only unless it is about dv."""

import torch
from right import Gathered

from ringverify import AttentionCall, implementation


def weights(q, k, call, *, ahead=0, bias=0.0):
    """Softmax weights, each query seeing `ahead` positions too many under a causal mask."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * call.scale + bias
    keys = torch.arange(k.shape[1])
    if call.causal:
        s = s.masked_fill(keys > call.positions[:, None] + ahead, float("-inf"))
    if call.key_lengths is not None:
        padding = keys >= torch.tensor(call.key_lengths)[:, None, None, None]
        s = s.masked_fill(padding, float("-inf"))
    return (s - s.amax(-1, keepdim=True)).softmax(-1).nan_to_num(0.0)


def out_of(p, v):
    """Weights times values."""
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


@implementation(name="padding leaks", gradients=False, key_lengths=True)
def padding_leaks(q, k, v, call: AttentionCall):
    """B14: a weight of 0 times whatever the padding holds."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    return out_of(weights(q, k.nan_to_num(0.0), call), v)


@implementation(name="padding cleared", gradients=False, key_lengths=True)
def padding_cleared(q, k, v, call: AttentionCall):
    """The same with the padding set to 0 first."""
    k, v = Gathered.apply(k, call).nan_to_num(0.0), Gathered.apply(v, call).nan_to_num(0.0)
    return out_of(weights(q, k, call), v)


@implementation(name="right in float16", gradients=False, dtypes=("float16",))
def in_float16(q, k, v, call: AttentionCall):
    """Float32 inside, rounded once to a dtype in which small numbers have few digits."""
    k, v = Gathered.apply(k, call).float(), Gathered.apply(v, call).float()
    return out_of(weights(q.float(), k, call), v).to(q.dtype)


class Coarse(torch.autograd.Function):
    """The identity, whose gradient is rounded to bfloat16."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().to(gradient.dtype)


@implementation(name="rounds dq", dtypes=("float16",), reduces="input")
def rounds_dq(q, k, v, call: AttentionCall):
    """A detour that a mean over many elements tells best: most of them are within what float16 may be off."""
    k, v = Gathered.apply(k, call).float(), Gathered.apply(v, call).float()
    return out_of(weights(Coarse.apply(q).float(), k, call), v).to(q.dtype)


@implementation(name="sees ahead", gradients=False, causal="always", scale=True)
def sees_ahead(q, k, v, call: AttentionCall):
    """A causal mask that is off by one."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    return out_of(weights(q, k, call, ahead=1), v)


@implementation(name="never masks", documents=True)
def never_masks(q, k, v, call: AttentionCall):
    """Each rank adds up its blocks in an order of its own, so that single ranks round differently."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    s = torch.einsum("bqhd,bkhd->bhqk", q, k.roll(call.rank + call.world_size, 1)) * call.scale
    return out_of(s.softmax(-1), v.roll(call.rank + call.world_size, 1))


@implementation(name="values in scores", gradients=False)
def values_in_scores(q, k, v, call: AttentionCall):
    """A hair of the values' size gets into the scores."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    return out_of(weights(q, k, call, bias=1e-3 * v.sum(dim=-1).permute(0, 2, 1)[:, :, None]), v)


@implementation(name="half of dv")
def half_of_dv(q, k, v, call: AttentionCall):
    """Only half of the values' gradient is kept."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    return out_of(weights(q, k, call), v / 2 + v.detach() / 2)


@implementation(name="shift matters", gradients=False)
def shift_matters(q, k, v, call: AttentionCall):
    """Scores pass through a saturating function that the problem does not ask for."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * call.scale
    s = 10 * torch.tanh(s / 10)
    if call.causal:
        s = s.masked_fill(torch.arange(k.shape[1]) > call.positions[:, None], float("-inf"))
    return out_of(s.softmax(-1), v)


@implementation(name="NaN in the last row", gradients=False)
def nan_in_the_last_row(q, k, v, call: AttentionCall):
    """In every mode, on the rank that holds the last position."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    return out_of(weights(q, k, call), v).masked_fill((call.positions == k.shape[1] - 1)[:, None, None], float("nan"))


@implementation(name="NaN without gradients")
def nan_without_gradients(q, k, v, call: AttentionCall):
    """In inference alone."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    out = out_of(weights(q, k, call), v)
    return out if torch.is_grad_enabled() else torch.full_like(out, float("nan"))
