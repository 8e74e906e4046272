"""All-gather K and V, then scaled_dot_product_attention. Gradients are reduce-scattered in the dtype of the inputs."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringverify import AttentionCall, implementation


class GatherSequence(torch.autograd.Function):
    """(B, S, H, D) to (B, P * S, H, D); the backward pass is a reduce-scatter."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        size = dist.get_world_size(group)
        x = x.transpose(0, 1).contiguous()
        full = torch.empty((size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(full, x, group=group)
        return full.transpose(0, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        size = dist.get_world_size(ctx.group)
        grad = grad.transpose(0, 1).contiguous()
        mine = torch.empty((grad.shape[0] // size, *grad.shape[1:]), dtype=grad.dtype, device=grad.device)
        dist.reduce_scatter_tensor(mine, grad, group=ctx.group)
        return mine.transpose(0, 1), None


def allowed(positions, length, causal, window, documents):
    """A (S, length) mask, True where a query attends a key; None if everywhere."""
    if not causal and window is None and documents is None:
        return None
    i, j = positions[:, None], torch.arange(length, device=positions.device)[None, :]
    mask = torch.ones(positions.numel(), length, dtype=torch.bool, device=positions.device)
    if causal:
        mask &= j <= i
    if window is not None:
        left, right = window
        if left is not None:
            mask &= j >= i - left
        if right is not None:
            mask &= j <= i + right
    if documents is not None:
        ends = torch.as_tensor(documents, device=positions.device)[1:]
        mask &= torch.bucketize(i, ends, right=True) == torch.bucketize(j, ends, right=True)
    return mask


def allgather_attention(q, k, v, group, positions, causal, scale, window=None, documents=None):
    k, v = GatherSequence.apply(k, group), GatherSequence.apply(v, group)
    mask = allowed(positions, k.shape[1], causal, window, documents)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _attend(q, k, v, call):
    return allgather_attention(
        q, k, v, call.group, call.positions, call.causal, call.scale, call.window, call.documents
    )


CLAIMS = dict(
    sharding="contiguous",
    causal="both",
    dtypes=("float32", "bfloat16"),
    gqa=True,
    value_dim=True,
    scale=True,
    window=True,
    subgroups=True,
)


@implementation(name="allgather_sdpa.attend", probabilities="input", reduces="input", **CLAIMS)
def attend(q, k, v, call: AttentionCall):
    """SDPA sums in float32 and rounds P to bfloat16."""
    return _attend(q, k, v, call)


@implementation(name="allgather_sdpa.attend_bf16_sums", probabilities="input", accumulates="bfloat16", **CLAIMS)
def attend_bf16_sums(q, k, v, call: AttentionCall):
    """The same; says that dk and dv are summed over the ranks in bfloat16."""
    return _attend(q, k, v, call)
