"""A transformer of two layers, small enough for float64: the same for one process and for the ranks of a ring.

Shape letters: B batch, S tokens of this rank, C channels, H query heads, K key heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY, CHANNELS, HEADS, KEY_HEADS, LONGEST = 13, 16, 4, 2, 64

Attend = Callable[..., torch.Tensor]


def local_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """Causal attention of one process, by torch alone: what the ring has to equal."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def rotated(x_BSHD: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: pairs of channels turned by angles that the positions give."""
    half = x_BSHD.size(-1) // 2
    rates = 100.0 ** -(torch.arange(half, dtype=x_BSHD.dtype) / half)
    angles_SHD = (positions[:, None] * rates)[:, None]
    first, second = x_BSHD[..., :half], x_BSHD[..., half:]
    cos, sin = angles_SHD.cos(), angles_SHD.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and beside a residual connection."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norm = nn.LayerNorm(CHANNELS)
        self.to_qkv = nn.Linear(CHANNELS, CHANNELS + 2 * CHANNELS * KEY_HEADS // HEADS, bias=False)
        self.to_out = nn.Linear(CHANNELS, CHANNELS)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, 2 * CHANNELS), nn.GELU(), nn.Linear(2 * CHANNELS, CHANNELS)
        )

    def forward(self, x_BSC: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        qkv = self.to_qkv(self.norm(x_BSC)).unflatten(-1, (HEADS + 2 * KEY_HEADS, CHANNELS // HEADS))
        q, k, v = qkv.split([HEADS, KEY_HEADS, KEY_HEADS], dim=2)
        q, k = rotated(q, positions), rotated(k, positions)
        out_BSHD = self.attend(q, k, v, query_length=length, key_length=length)
        x_BSC = x_BSC + self.to_out(out_BSHD.flatten(2))
        return x_BSC + self.perceptron(x_BSC)


class Model(nn.Module):
    """Tokens to logits, with rotary and learned positions.

    Args:
        attend: attention of q, k and v, given the length over all ranks.
        layers: how many.
        reentrant: how layers are checkpointed; `None` keeps all activations.
    """

    def __init__(self, attend: Attend, *, layers: int = 2, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.tokens = nn.Embedding(VOCABULARY, CHANNELS)
        self.places = nn.Embedding(LONGEST, CHANNELS)
        self.layers = nn.ModuleList([Layer(attend) for _ in range(layers)])
        self.to_logits = nn.Linear(CHANNELS, VOCABULARY)

    def forward(self, tokens_BS: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        x_BSC = self.tokens(tokens_BS) + self.places(positions)
        for layer in self.layers:
            if self.reentrant is None:
                x_BSC = layer(x_BSC, positions, length)
            else:
                x_BSC = checkpoint(layer, x_BSC, positions, length, use_reentrant=self.reentrant)
        return self.to_logits(x_BSC)


def build(attend: Attend, **options: Any) -> Model:
    """The same weights every time, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Model(attend, **options).double()


def batch(sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their labels, `(B, N)` each, the same every time."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(VOCABULARY, (sequences, length + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def summed_loss(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """Cross entropy, summed over tokens: a mean over ranks that hold unequally many would be another number."""
    return functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")
