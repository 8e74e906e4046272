"""A ring that exists already, with conventions of its own: what adapters of the documents call."""

import torch
from torch.distributed._functional_collectives import all_gather_tensor, all_gather_tensor_autograd


def ring_attention(q, k, v, *, group, causal):
    """Shards in rank order, `(batch, sequence, heads, head_dim)`."""
    n, rank = q.shape[1], torch.distributed.get_rank(group)
    length = n * torch.distributed.get_world_size(group)
    return _attend(q, k, v, torch.arange(length)[rank * n :][:n], torch.arange(length), group, causal)


def ring_attention_at(q, k, v, positions, key_positions, *, group, causal):
    """Shards of any order, whose positions are given."""
    return _attend(q, k, v, positions, all_gather_tensor(key_positions, 0, group), group, causal)


def _attend(q, k, v, positions, key_positions, group, causal):
    k, v = all_gather_tensor_autograd(torch.stack([k, v]), 2, group)
    scores = q.shape[-1] ** -0.5 * torch.einsum("bqhd,bkhd->bhqk", q, k)
    if causal:
        scores = scores.masked_fill(key_positions > positions[:, None], -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)
