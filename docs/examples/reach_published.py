"""Published context parallelism in small models, right and wrong, for `ringverify reach`.

    ringverify reach docs/examples/reach_published.py:torch_zigzag
    ringverify reach docs/examples/reach_published.py:ring_transformer
    ringverify reach docs/examples/reach_published.py:yunchang_mask_dropped

torch's context parallelism calls the GPU's flash operator; `ringverify.peers` has one for the CPU.
"""

from unittest import mock

import torch
from reach_models import Counting, Model, WithLoss, plain
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import ringverify


def faulty(attention):
    """Declare what people report: a mask dropped, shards only, positions local to the rank, a mean of means.

    `attention(group, causal)` is right on contiguous shards.
    """
    right = ringverify.model(causal=True)
    mean = ringverify.model(causal=True, loss="mean")
    return (
        right(lambda group: Model(attention(group, causal=group.size() == 1))),
        right(lambda group: Model(plain)),
        right(lambda group: Counting(attention(group, causal=True))),
        mean(lambda group: WithLoss(attention(group, causal=True))),
    )


class Flash(nn.Module):
    """The operator that `scaled_dot_product_attention` calls on a GPU; torch's style rotates its keys and values."""

    def __init__(self, causal):
        super().__init__()
        self.causal = causal

    def forward(self, q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal)[0]


def torch_attention(group, causal=True, balanced=False):
    """Attention by torch's context parallelism."""
    from torch.distributed.tensor.experimental import _attention

    import ringverify.peers.torch_context_parallel  # noqa: F401  # registers the operator

    flash = Flash(causal)
    if group.size() > 1:
        style = _attention._ContextParallel(2, _attention._ContextParallel.AttentionType.SDPA)
        flash = style._apply(flash, DeviceMesh.from_group(group, "cpu"))

    def attend(q, k, v):
        _attention.set_rotate_method("alltoall")
        _attention._cp_options.enable_load_balance = balanced
        return flash(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    return attend


@ringverify.model(causal=True, sharding="zigzag")
def torch_zigzag(group):
    """Right: torch's ring with load balancing, for which shards are zigzag."""
    return Model(torch_attention(group, balanced=True))


@ringverify.model(causal=True)
def torch_taken_for_zigzag(group):
    """Wrong: load balancing is torch's default, but the shards are contiguous."""
    return Model(torch_attention(group, balanced=True))


torch_mask_dropped, torch_shard_only, torch_local_positions, torch_mean_of_means = faulty(torch_attention)


def yunchang_attention(group, causal=True):
    """Attention between the all-to-alls of yunchang: sequence to heads, and back."""
    from yunchang.comm.all_to_all import SeqAllToAll4D

    def exchanged(x, scatter, gather):
        return SeqAllToAll4D.apply(group, x, scatter, gather) if group.size() > 1 else x

    return lambda q, k, v: exchanged(plain(*(exchanged(x, 2, 1) for x in (q, k, v)), causal), 1, 2)


@ringverify.model(causal=True)
def yunchang_ulysses(group):
    """Right: each rank has all tokens for some of the heads."""
    return Model(yunchang_attention(group))


(
    yunchang_mask_dropped,
    yunchang_shard_only,
    yunchang_local_positions,
    yunchang_mean_of_means,
) = faulty(yunchang_attention)


@ringverify.model(causal=True, processes=True, whole=True)
def ring_transformer(group, causal=True):
    """The transformer of ring-attention-pytorch: reach and values are right, gradients of dK and dV are not."""
    from ring_attention_pytorch import RingTransformer

    size = 64 // group.size()
    return RingTransformer(
        num_tokens=50, dim=32, depth=2, causal=causal, dim_head=8, heads=4, bucket_size=size // 2, ring_attn=True,
        ring_seq_size=size, use_cuda_kernel=False,
    )  # fmt: skip


@ringverify.model(causal=True, processes=True, whole=True)
def ring_transformer_mask_dropped(group):
    """Wrong: its ring is not causal."""
    return ring_transformer.function(group, causal=group.size() == 1)


@ringverify.model(causal=True, processes=True, whole=True)
def ring_transformer_local_positions(group):
    """Wrong: its rotary positions are not told of the ring."""
    model = ring_transformer(group)
    model.rotary_emb.ring = False
    return model


class WithLossOfOwnPart(nn.Module):
    """Its logits, and the mean loss over this rank's part of the labels."""

    def __init__(self, model, group):
        super().__init__()
        self.model, self.group = model, group

    def forward(self, tokens, labels):
        logits = self.model(tokens)
        own, wanted = (x.chunk(self.group.size(), 1)[self.group.rank()] for x in (logits, labels))
        return logits, functional.cross_entropy(own.flatten(0, 1), wanted.flatten())


@ringverify.model(causal=True, processes=True, whole=True, loss="mean")
def ring_transformer_mean_of_means(group):
    """Wrong: each rank averages over its own part of the labels, of which some have more."""
    return WithLossOfOwnPart(ring_transformer(group), group)


@ringverify.model(causal=True, processes=True, whole=True)
def ring_transformer_shard_only(group):
    """Wrong: it shards and gathers, but its layers do not pass keys and values on."""
    model = ring_transformer(group)
    for attention, _ in model.layers:
        attention.ring_attn = False
    return model


class Flux(nn.Module):
    """The transformer of Flux by diffusers: latents in and out, beside a prompt that is always the same."""

    def __init__(self, group, degree):
        super().__init__()
        from diffusers import ContextParallelConfig, FluxTransformer2DModel

        self.model = FluxTransformer2DModel(
            in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
            joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 6, 6),
        ).eval()  # fmt: skip
        if group.size() > 1 and degree:
            with mock.patch(
                "torch.accelerator.device_count", return_value=1
            ):  # it counts accelerators, and here are none
                self.model.enable_parallelism(config=ContextParallelConfig(**{degree: group.size()}))

    def forward(self, latents):
        batch, length, _ = latents.shape
        places = torch.zeros(length, 3)
        places[:, 1] = torch.arange(length)
        prompt = torch.linspace(-1, 1, 8 * 32).reshape(1, 8, 32).to(latents).expand(batch, -1, -1)
        return self.model(
            hidden_states=latents, encoder_hidden_states=prompt, pooled_projections=prompt[:, 0, :16],
            timestep=torch.full((batch,), 0.5).to(latents), img_ids=places, txt_ids=torch.zeros(8, 3),
            return_dict=False,
        )[0]  # fmt: skip


@ringverify.model(features=8, causal=False, whole=True, processes=True)
def flux_ulysses(group):
    """Right: diffusers' Ulysses."""
    return Flux(group, "ulysses_degree")


@ringverify.model(features=8, causal=False, whole=True, processes=True)
def flux_forgotten(group):
    """Wrong: nobody called `enable_parallelism`, and every rank computes everything."""
    return Flux(group, None)
