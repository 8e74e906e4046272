"""A small transformer with context parallelism, right and with the faults that people report, for `ringverify reach`.

ringverify reach docs/examples/reach_models.py:ring
ringverify reach docs/examples/reach_models.py:shard_only
"""

import torch
from torch import nn
from torch.nn import functional

import ringverify
from ringverify.ring import RingAttention

VOCABULARY, CHANNELS, HEADS, LAYERS = 50, 32, 4, 2


def rotated(x, positions):
    """Queries or keys with rotary positions."""
    rates = 100 ** -torch.linspace(0, 1, x.shape[-1] // 2, dtype=x.dtype)
    angles = (positions[:, None] * rates)[:, None]
    left, right = x.chunk(2, -1)
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1)


class Layer(nn.Module):
    """Attention and a perceptron, each after a norm and beside a residual connection."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList([nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)])
        self.to_qkv, self.to_out = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.perceptron = nn.Sequential(nn.Linear(CHANNELS, 64), nn.GELU(), nn.Linear(64, CHANNELS))

    def forward(self, x, positions):
        q, k, v = self.to_qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.to_out(self.attend(rotated(q, positions), rotated(k, positions), v).flatten(2))
        return x + self.perceptron(self.norms[1](x))


class Model(nn.Module):
    """This rank's tokens and their positions to logits."""

    def __init__(self, attend, layers=LAYERS):
        super().__init__()
        self.embed, self.to_logits = nn.Embedding(VOCABULARY, CHANNELS), nn.Linear(CHANNELS, VOCABULARY)
        self.layers = nn.ModuleList([Layer(attend) for _ in range(layers)])

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.to_logits(x)


@ringverify.model(causal=True, sharding="zigzag")
def ring(group):
    """Right: attention over the ring."""
    return Model(RingAttention(group=group, causal=True, sharding="zigzag"))


@ringverify.model(causal=True, sharding="zigzag", length=256)
def ring_of_four_layers(group):
    """Right: twice as deep, on four times as many tokens."""
    return Model(RingAttention(group=group, causal=True, sharding="zigzag"), layers=4)


def plain(q, k, v, causal=True):
    """Attention as before, which knows nothing of other ranks."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


@ringverify.model(causal=True)
def shard_only(group):
    """Wrong: nobody replaced the attention."""
    return Model(plain)


@ringverify.model(causal=True)
def mask_dropped(group):
    """Wrong: the mask does not reach the ring."""
    return Model(RingAttention(group=group, causal=group.size() == 1))


@ringverify.model(causal=True, documents=(0, 20, 50, 64))
def documents_dropped(group):
    """Wrong: packed documents do not reach the ring."""
    documents = [0, 20, 50, 64] if group.size() == 1 else None
    attend = RingAttention(group=group, causal=True)
    return Model(lambda q, k, v: attend(q, k, v, documents=documents))


class Counting(Model):
    """Counts from the rank's own first token."""

    def forward(self, tokens):
        return super().forward(tokens, torch.arange(tokens.shape[1]))


@ringverify.model(causal=True)
def local_positions(group):
    """Wrong: rotary positions count from the rank's own first token."""
    return Counting(RingAttention(group=group, causal=True))


class WithLoss(Model):
    """Logits, and the mean loss over this rank's labels."""

    def forward(self, tokens, positions, labels):
        logits = super().forward(tokens, positions)
        return logits, functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@ringverify.model(causal=True, loss="mean")
def mean_of_means(group):
    """Wrong: each rank averages over its own labels, of which some have more, and training averages over ranks."""
    return WithLoss(RingAttention(group=group, causal=True))
