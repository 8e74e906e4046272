"""Tiny models for `ringverify reach`: right ones, wrong ones in one known way each, and some that it refuses."""

# ruff: noqa: D103  # names say what is right or wrong

import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional

import ringverify

VOCABULARY, WIDTH, LENGTH = 11, 8, 24
DOCUMENTS = (0, 5, 16, 24)


def attention(q, k, v, mask):
    """Attention `(B, n, C)` where the mask lets through."""
    scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


class Tiny(nn.Module):
    """Two layers with learned positions. `allowed` makes the mask from the positions of queries and of keys."""

    def __init__(self, group, allowed, gathers=True, detached=False):
        super().__init__()
        self.group, self.allowed, self.detached = group, allowed, detached
        self.gathers = gathers and group.size() > 1
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def gathered(self, x):
        """What all ranks hold, in the order of ranks."""
        return all_gather_tensor_autograd(x.detach() if self.detached else x, 1, self.group) if self.gathers else x

    def forward(self, tokens, positions):
        return self.computed(tokens, positions)

    def computed(self, tokens, positions, counted=None):
        """Logits; `counted` are the positions that the model believes in, if they are others."""
        x = self.embed(tokens) + self.places(positions if counted is None else counted)
        keys_at = self.gathered(positions[None])[0] if self.gathers else positions
        for layer in self.layers:
            q, k, v = layer(functional.layer_norm(x, (WIDTH,))).chunk(3, -1)
            k, v = self.gathered(torch.cat([k, v], -1)).chunk(2, -1)
            x = x + attention(q, k, v, self.allowed(positions, keys_at))
        return self.out(x)


def causal(i, j):
    """Earlier tokens and one's own."""
    return j <= i[:, None]


def everything(i, j):
    """All tokens."""
    return torch.ones(len(i), len(j), dtype=torch.bool)


def within(left):
    """Causal with a window."""
    return lambda i, j: (j <= i[:, None]) & (j >= i[:, None] - left)


def in_documents(i, j):
    """Causal within documents."""
    document = torch.bucketize(torch.arange(LENGTH), torch.tensor(DOCUMENTS), right=True)
    return causal(i, j) & (document[i][:, None] == document[j])


def declared(**more):
    """A causal model of 24 tokens on two ranks."""
    return ringverify.model(**{"causal": True, "length": LENGTH, "ranks": 2, **more})


# -- right


@declared()
def right(group):
    return Tiny(group, causal)


@declared(sharding="striped", ranks=3)
def right_striped(group):
    return Tiny(group, causal)


def backwards(length, ranks):
    """A sharding of one's own: the last tokens on the first rank."""
    return [list(range(length))[::-1][rank::ranks] for rank in range(ranks)]


@declared(sharding=backwards)
def right_in_a_sharding_of_its_own(group):
    return Tiny(group, causal)


@declared(window=(3, 0), layers=2)
def right_window(group):
    return Tiny(group, within(3))


def plain(group):
    """Not decorated."""
    return Tiny(group, causal)


@declared()
def coupled(group):
    """Sequences of a batch depend on one another."""
    model = Tiny(group, causal)

    class Coupled(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens, positions):
            out = self.model(tokens, positions)
            return out + out.mean(0, keepdim=True)

    return Coupled()


class WithLoss(Tiny):
    """Also returns the loss, as `reduction` says."""

    reduction = "mean"

    def forward(self, tokens, positions, labels):
        logits = super().forward(tokens, positions)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)
        return {"logits": logits, "loss": loss}


class Summed(WithLoss):
    reduction = "sum"


@declared(loss="sum")
def right_loss(group):
    return Summed(group, causal)


# -- wrong


@declared()
def shard_only(group):
    return Tiny(group, causal, gathers=False)


class Layer(nn.Module):
    """A layer of `Tiny` as a module of its own, which gathers or does not."""

    def __init__(self, model, gathers):
        super().__init__()
        self.project, self.allowed = nn.Linear(WIDTH, 3 * WIDTH), model.allowed
        self.gathered = model.gathered if gathers else lambda x: x

    def forward(self, x, positions):
        q, k, v = self.project(functional.layer_norm(x, (WIDTH,))).chunk(3, -1)
        k, v = self.gathered(torch.cat([k, v], -1)).chunk(2, -1)
        keys_at = self.gathered(positions[None].float())[0].long()
        return x + attention(q, k, v, self.allowed(positions, keys_at))


class OfLayers(Tiny):
    """The same model, some of whose layers gather."""

    def __init__(self, group, gathers):
        super().__init__(group, causal)
        self.layers = nn.ModuleList([Layer(self, one) for one in gathers])

    def computed(self, tokens, positions, counted=None):
        x = self.embed(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, positions)
        return self.out(x)


@declared()
def right_of_layers(group):
    return OfLayers(group, (True, True, True))


@declared()
def one_layer_local(group):
    return OfLayers(group, (True, group.size() == 1, True))


@declared()
def mask_dropped(group):
    return Tiny(group, causal if group.size() == 1 else everything)


@declared(documents=DOCUMENTS)
def documents_dropped(group):
    return Tiny(group, in_documents if group.size() == 1 else causal)


@declared(window=(3, 0), layers=2)
def window_dropped(group):
    return Tiny(group, within(3) if group.size() == 1 else causal)


@declared(window=(3, 0), layers=2)
def window_too_short(group):
    return Tiny(group, within(3 if group.size() == 1 else 2))


@declared()
def mask_of_the_rank(group):
    """As `is_causal=True` does with gathered keys."""
    return Tiny(group, lambda i, j: causal(torch.arange(len(i)), torch.arange(len(j))))


@declared()
def mask_of_zigzag(group):
    zigzag = torch.tensor([*range(6), *range(18, 24), *range(6, 18)])
    place = torch.zeros(LENGTH, dtype=torch.long).scatter(0, torch.arange(LENGTH), zigzag)
    return Tiny(group, causal if group.size() == 1 else lambda i, j: causal(place[i], place[j]))


class CountsByArange(Tiny):
    def forward(self, tokens, positions):
        return self.computed(tokens, positions, torch.arange(tokens.shape[1]))


class CountsBySlice(Tiny):
    def forward(self, tokens, positions):
        return self.computed(tokens, positions, torch.arange(64)[None, : tokens.shape[1]][0])


@declared()
def positions_by_arange(group):
    return CountsByArange(group, causal)


@declared()
def positions_by_slice(group):
    return CountsBySlice(group, causal)


@declared()
def values_off(group):
    """Wrong on the last rank only, in no known way."""
    model = Tiny(group, causal)

    class Off(Tiny):
        def forward(self, tokens, positions):
            out = self.computed(tokens, positions)
            return out * (1.01 if group.size() > 1 and group.rank() == group.size() - 1 else 1.0)

    off = Off(group, causal)
    off.load_state_dict(model.state_dict())
    return off


@declared(loss="mean")
def mean_of_means(group):
    return WithLoss(group, causal)


class Shifts(WithLoss):
    def forward(self, tokens, positions, labels):
        logits = Tiny.forward(self, tokens, positions)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return logits, loss


@declared(loss="sum")
def labels_shifted(group):
    return Shifts(group, causal)


@declared(gradients="whole")
def gradients_not_added_up(group):
    return Tiny(group, causal)


@declared()
def gradients_detached(group):
    return Tiny(group, causal, detached=group.size() > 1)


def with_gradients_times(group, factor):
    model = Tiny(group, causal)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * factor)
    return model


@declared()
def gradients_twice(group):
    return with_gradients_times(group, group.size())


@declared()
def gradients_averaged(group):
    return with_gradients_times(group, 1 / group.size())


@declared(whole=True)
def everywhere(group):
    """Every rank computes everything."""
    return Tiny(group, causal, gathers=False)


@declared()
def never_causal(group):
    return Tiny(group, everything)


def plain_shard_only(group):
    return Tiny(group, causal, gathers=False)


def plain_without_mask(group):
    return Tiny(group, causal if group.size() == 1 else everything)


class WithNaN(Tiny):
    """Its outputs are NaN at some positions."""

    def __init__(self, group, where):
        super().__init__(group, causal)
        self.where = where

    def forward(self, tokens, positions):
        return self.computed(tokens, positions).masked_fill(self.where(positions)[:, None], torch.nan)


@declared()
def nan_everywhere(group):
    return WithNaN(group, lambda positions: positions >= 0)


@declared()
def nan_in_a_row(group):
    return WithNaN(group, lambda positions: positions == 3)


@declared()
def nan_on_a_rank(group):
    """As where a softmax has nothing to add up."""
    return WithNaN(group, lambda positions: (positions >= 20) & (group.size() > 1))


class BlockByBlock(Tiny):
    """Merges the blocks of ranks by their log-sum-exps, as if every block had a key for every query."""

    def forward(self, tokens, positions):
        x = self.embed(tokens) + self.places(positions)
        for layer in self.layers:
            q, k, v = layer(functional.layer_norm(x, (WIDTH,))).chunk(3, -1)
            blocks = zip(*(self.gathered(one).chunk(self.group.size(), 1) for one in (k, v)), strict=True)
            out, lse, first = 0.0, torch.tensor(-torch.inf), 0
            for k, v in blocks:
                allowed = self.allowed(positions, torch.arange(first, first := first + k.shape[1]))
                scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(~allowed, -torch.inf)
                block, total = scores.softmax(-1) @ v, torch.logsumexp(scores, -1, keepdim=True)
                merged = torch.logaddexp(lse, total)
                out, lse = out * (lse - merged).exp() + block * (total - merged).exp(), merged
            x = x + out
        return self.out(x)


@declared()
def nan_in_an_empty_block(group):
    """A softmax of no keys: rank 0's queries attend nothing of rank 1."""
    return BlockByBlock(group, causal)


@declared()
def nan_that_was_sent(group):
    """It begins on rank 1, and reaches rank 0 with the keys."""
    model = Tiny(group, causal)
    gathered = model.gathered

    def broken(x):
        return gathered(x * torch.inf * 0 if group.size() > 1 and group.rank() == 1 and x.is_floating_point() else x)

    model.gathered = broken
    return model


@declared()
def infinite_logits(group):
    """Of a token that is never to be drawn: the same in one process."""

    class Masked(Tiny):
        def forward(self, tokens, positions):
            out = self.computed(tokens, positions)
            return torch.cat([torch.full_like(out[..., :1], -torch.inf), out[..., 1:]], -1)

    return Masked(group, causal)


@declared()
def raises_on_one_rank(group):
    model = Tiny(group, causal)

    def run(tokens, positions):
        if group.rank() == 1:
            raise RuntimeError("no such shard")
        return model.computed(tokens, positions)

    model.forward = run
    return model


@declared()
def waits_for_nobody(group):
    model = Tiny(group, causal)

    def run(tokens, positions):
        if group.rank() == 1:
            dist.recv(torch.empty(1), 0)
        return model.computed(tokens, positions)

    model.forward = run
    return model


@declared()
def never_returns(group):
    model = Tiny(group, causal)

    def run(tokens, positions):
        while group.rank() == 1:
            time.sleep(0.01)
        return model.computed(tokens, positions)

    model.forward = run
    return model


# -- refused


@declared()
def dropout_on(group):
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.1))


class Normalised(Tiny):
    """Its logits are normalised over the batch."""

    def __init__(self, group, **how):
        super().__init__(group, causal)
        self.norm = nn.BatchNorm1d(VOCABULARY, **how)

    def forward(self, tokens, positions):
        return self.norm(self.computed(tokens, positions).transpose(1, 2)).transpose(1, 2)


@declared()
def batch_norm(group):
    return Normalised(group)


@declared()
def batch_norm_without_averages(group):
    return Normalised(group, track_running_stats=False).eval()


@declared()
def right_batch_norm(group):
    return Normalised(group).eval()


class Random(Tiny):
    def forward(self, tokens, positions):
        return functional.dropout(super().forward(tokens, positions), 0.5)


@declared()
def random_numbers(group):
    return Random(group, causal)


class Counts(Tiny):
    calls = 0

    def forward(self, tokens, positions):
        self.calls += 1
        return super().forward(tokens, positions) + self.calls


@declared()
def not_deterministic(group):
    return Counts(group, causal)


@declared()
def python_random(group):
    model = Tiny(group, causal)
    model.forward = lambda tokens, positions: model.computed(tokens, positions) + random.random()
    return model


@declared()
def says_it_needs_a_gpu(group):
    raise RuntimeError("FlashAttention only supports CUDA tensors")


@declared()
def needs_a_gpu(group):
    return Tiny(group, causal).cuda()


class Pooled(Tiny):
    def forward(self, tokens, positions):
        return super().forward(tokens, positions).mean(1)


@declared()
def not_per_token(group):
    return Pooled(group, causal)


@declared(vocabulary=VOCABULARY)
def no_numbers(group):
    return lambda tokens: tokens


@declared(loss="mean")
def no_labels(group):
    return Tiny(group, causal)


@declared(loss="mean")
def no_loss(group):
    model = Tiny(group, causal)
    model.forward = lambda tokens, positions, labels: model.computed(tokens, positions)
    return model


@declared()
def no_embedding(group):
    return nn.Linear(3, 3)


@declared()
def builder_raises(group):
    raise RuntimeError("no checkpoint")


@declared()
def builds_a_number(group):
    return 3


@declared()
def other_weights(group):
    torch.manual_seed(group.rank() + group.size())
    return Tiny(group, causal)


def takes_nothing():
    return None


NUMBER = 7
