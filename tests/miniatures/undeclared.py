"""Gathered attention as people write it, right in float32, in bfloat16 by pipelines of three kinds, and wrong ones."""

from __future__ import annotations

import torch
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from ringverify import implementation

DECLARED = {"sharding": "contiguous", "causal": "both", "dtypes": ("float32", "bfloat16")}
NARROW = {**DECLARED, "dtypes": ("bfloat16",)}


def gathered(k, v, call):
    """All keys and values; the backward sums their gradients over ranks in the dtype that they have."""
    return all_gather_tensor_autograd(torch.stack([k, v]), 2, call.group)


def later(k, call):
    """Which keys come after which queries."""
    return torch.arange(k.shape[1]) > call.positions[:, None]


def formula(q, k, v, call, scale):
    """Attention in the dtype of its inputs."""
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    if call.causal:
        scores = scores.masked_fill(later(k, call), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)


def eager(q, k, v, call):
    """Scores, weights and sums in the input dtype."""
    return formula(q, *gathered(k, v, call), call, call.scale)


def widened(q, k, v, call):
    """All in float32, but the keys' gradients, which are summed over ranks as the keys were gathered."""
    gathered_k, gathered_v = gathered(k, v, call)
    return formula(q.float(), gathered_k.float(), gathered_v.float(), call, call.scale).to(q.dtype)


def fused(q, k, v, call):
    """The kernel of torch, which rounds weights to the input dtype."""
    k, v = gathered(k, v, call)
    mask = ~later(k, call) if call.causal else None
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)


def wrong_scale(q, k, v, call):
    """Eager, with a scale for another head_dim, in bfloat16 alone."""
    scale = call.scale if q.dtype == torch.float32 else (q.shape[-1] + 4) ** -0.5
    return formula(q, *gathered(k, v, call), call, scale)


def always_wrong_scale(q, k, v, call):
    """Eager, with a scale for another head_dim."""
    return formula(q, *gathered(k, v, call), call, (q.shape[-1] + 4) ** -0.5)


def last_key_unseen(q, k, v, call):
    """Eager, and the last key is seen by nobody but where it is the only one."""
    k, v = gathered(k, v, call)
    count = max(1, k.shape[1] - 1)
    return formula(q, k[:, :count], v[:, :count], call, call.scale)


EAGER, WIDENED, FUSED, WRONG_SCALE, ALWAYS_WRONG_SCALE, LAST_KEY_UNSEEN = (
    implementation(name=each.__name__, **DECLARED)(each)
    for each in (eager, widened, fused, wrong_scale, always_wrong_scale, last_key_unseen)
)
