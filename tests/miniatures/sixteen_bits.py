"""Right implementations for 16 bits that need a declaration: sums over ranks, or all sums, in the input dtype."""

import torch
from right import scores
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from ringverify import AttentionCall, implementation


def gathered(x, call):
    """Keys or values of all ranks; backward, a reduce-scatter in their dtype."""
    return all_gather_tensor_autograd(x[None].contiguous(), 2, call.group)[0]  # so that gradients are contiguous


@implementation(name="SDPA", dtypes=("bfloat16",), probabilities="input", reduces="input")
def sdpa(q, k, v, call: AttentionCall):
    """All-gather and torch's own attention, as most people write it first."""
    q, k, v = (x.transpose(1, 2) for x in (q, gathered(k, call), gathered(v, call)))
    seen = torch.arange(k.shape[2]) <= call.positions[:, None] if call.causal else None
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=call.scale).transpose(1, 2)


@implementation(
    name="SDPA alone", tensor_layout="bhsd", dtypes=("bfloat16",), probabilities="input", world_sizes=(1,), uneven=True
)
def alone(q, k, v, call: AttentionCall):
    """torch's attention on one rank. On a CPU its gradients are sums in bfloat16, of more terms in longer calls."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=call.causal, scale=call.scale)


def wide(q, k, v, call):
    """Attention in float32 on keys that were gathered in bfloat16: nothing but sums over ranks is narrow."""
    k, v = gathered(k, call).float(), gathered(v, call).float()
    p = scores(q.float(), k, call, call.scale).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v).to(q.dtype)


@implementation(name="narrow sums over ranks", dtypes=("bfloat16",), reduces="input", world_sizes=(8,))
def reduced(q, k, v, call: AttentionCall):
    """Declared as it is."""
    return wide(q, k, v, call)


@implementation(name="narrow sums over ranks, undeclared", dtypes=("bfloat16",), world_sizes=(8,))
def reduced_undeclared(q, k, v, call: AttentionCall):
    """The same without a word of it."""
    return wide(q, k, v, call)


@implementation(name="narrow sums", dtypes=("bfloat16", "float16"), accumulates="bfloat16", reduces="input")
def narrow(q, k, v, call: AttentionCall):
    """Everything in the input dtype."""
    k, v = gathered(k, call), gathered(v, call)
    return torch.einsum("bhqk,bkhd->bqhd", scores(q, k, call, call.scale).softmax(-1), v)
