"""Three faults of one line each."""

import torch
from right import Gathered, attention, scores

from ringverify import AttentionCall, implementation


@implementation(name="wrong scale")
def wrong_scale(q, k, v, call: AttentionCall):
    """The softmax scale counts one dimension too many."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    scale = (call.problem.head_dim + 1) ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores(q, k, call, scale).softmax(-1), v)


@implementation(name="dropped key")
def dropped_key(q, k, v, call: AttentionCall):
    """The last key is never attended, except by a query that has no other."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    found = scores(q, k, call, call.scale)
    if k.shape[1] > 1:
        found = torch.cat([found[..., :-1], torch.full_like(found[..., -1:], float("-inf"))], dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", found.softmax(-1), v)


class Swapped(torch.autograd.Function):
    """Nothing on the way there; on the way back dK and dV change places."""

    @staticmethod
    def forward(ctx, k, v):
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx, dk, dv):
        return dv, dk


@implementation(name="swapped gradients")
def swapped_gradients(q, k, v, call: AttentionCall):
    """Right output; dK and dV swapped."""
    k, v = Swapped.apply(k, v)
    return attention(q, k, v, call)
