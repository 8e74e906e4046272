"""Dilated attention, heads split among the branches, over all-gathered keys; weights are multiplied by 0/1 masks."""

import torch
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from ringverify import AttentionCall, implementation


def head_masks(branches, heads, positions, length):
    """(H, S, length) of 0 and 1: head h runs one branch."""
    keys, masks = torch.arange(length), []
    each, more = divmod(heads, len(branches))
    for number, (segment, rate) in enumerate(branches):
        offset = number % rate
        same = (positions[:, None] // segment) == (keys[None, :] // segment)
        covered_q = (positions % segment) % rate == offset
        covered_k = (keys % segment) % rate == offset
        mask = same & covered_q[:, None] & covered_k[None, :]
        masks += [mask] * (each + (number < more))
    return torch.stack(masks)


def dilated_attention(q, k, v, group, positions, causal, scale, branches=None):
    k, v = (all_gather_tensor_autograd(x[None].contiguous(), 2, group)[0] for x in (k, v))
    length, heads = k.shape[1], q.shape[2]
    if branches is None:
        mask = torch.ones(heads, positions.numel(), length, dtype=torch.bool)
    else:
        mask = head_masks(branches, heads, positions, length)
    if causal:
        mask = mask & (torch.arange(length) <= positions[:, None])
    mask = mask.to(q.dtype)
    s = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    top = s.detach().masked_fill(mask == 0, torch.finfo(s.dtype).min).amax(-1, keepdim=True)
    top = torch.where(mask.sum(-1, keepdim=True) > 0, top, s.detach().amax(-1, keepdim=True))
    weights = (s - top).masked_fill(mask == 0, 0.0).exp() * mask
    total = weights.sum(-1, keepdim=True)
    weights = weights / (total + (total == 0))  # a query that no branch covers has no weights, and out 0
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@implementation(
    sharding="contiguous",
    causal="both",
    dtypes=("float32", "float64"),
    dilation=("split",),
    value_dim=True,
    scale=True,
    subgroups=True,
)
def attend(q, k, v, call: AttentionCall):
    branches = call.dilation.branches if call.dilation is not None else None
    return dilated_attention(q, k, v, call.group, call.positions, call.causal, call.scale, branches)
