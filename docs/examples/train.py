"""Train a small transformer for 50 steps on the ranks of a ring and in one process: one loss curve, twice.

    python docs/examples/train.py                              starts its own four ranks
    torchrun --nproc-per-node 4 docs/examples/train.py         uses those that it is given

Every token has to name the first one of its sequence, which only one rank of the ring holds. The single process
attends with torch's own `scaled_dot_product_attention`.
"""

import argparse
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ringverify.ring import RingAttention, position_ids, shard

LENGTH, VOCABULARY, CHANNELS, HEADS = 61, 8, 32, 4  # 61 tokens: a ring of 4 does not have to divide them


class Layer(nn.Module):
    """Attention and a perceptron, each after a norm and beside a residual connection."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.norm = nn.LayerNorm(CHANNELS)
        self.to_qkv = nn.Linear(CHANNELS, 3 * CHANNELS, bias=False)
        self.to_out = nn.Linear(CHANNELS, CHANNELS)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, 4 * CHANNELS), nn.GELU(), nn.Linear(4 * CHANNELS, CHANNELS)
        )

    def forward(self, x):
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.to_out(self.attend(q, k, v, query_length=LENGTH, key_length=LENGTH).flatten(2))
        return x + self.perceptron(x)


class Model(nn.Module):
    """Tokens and their positions to logits."""

    def __init__(self, attend):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, CHANNELS), nn.Embedding(LENGTH, CHANNELS)
        self.layers = nn.ModuleList([Layer(attend), Layer(attend)])
        self.to_logits = nn.Linear(CHANNELS, VOCABULARY)

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return self.to_logits(x)


def attend_locally(q, k, v, **_):
    """Causal attention of one process, by torch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def train(steps, group=None, sharding="zigzag", dtype=torch.float64):
    """The loss of each step: on the ranks of a group, or in this process alone."""
    torch.manual_seed(0)
    attend = attend_locally if group is None else RingAttention(group=group, sharding=sharding, causal=True)
    place = {"rank": 0, "world_size": 1} if group is None else {"group": group, "sharding": sharding}
    model = Model(attend).to(dtype)
    ranks = 1 if group is None else group.size()
    compute = model if group is None else DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    positions = position_ids(LENGTH, **place)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (8, LENGTH))  # the same on every rank: they share the seed
        labels = shard(tokens[:, :1].expand_as(tokens), **place)
        logits = compute(shard(tokens, **place), positions)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (8 * LENGTH)
        (loss * ranks).backward()  # the loss is a sum over ranks; DDP takes the mean of their gradients
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if group is not None:
            dist.all_reduce(total, group=group)
        losses.append(total.item())
    return losses


def run(rank, options, store=None):
    """One rank of the ring; the first one also trains alone, and reports."""
    torch.set_num_threads(1)
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    together = train(options.steps, dist.group.WORLD)
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        alone = train(options.steps)
        difference = max(abs(a - b) / a for a, b in zip(alone, together, strict=True))
        print(f"{options.steps} steps: loss {alone[0]:.4f} to {alone[-1]:.4f} in one process")
        print(f"{options.steps} steps: loss {together[0]:.4f} to {together[-1]:.4f} on {ranks} ranks")
        print(f"largest relative difference {difference:.1e}, {difference / torch.finfo(torch.float64).eps:.0f} eps")
        if options.plot:
            draw(alone, together, ranks, options.plot)
    dist.destroy_process_group()


def draw(alone, together, ranks, path):
    """Both curves, and below them what is between them."""
    try:
        from matplotlib import pyplot, rcParams
    except ImportError:
        print("no plot: it needs matplotlib, pip install 'ringverify[plots]'")
        return
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ring", "axes.spines.top": False})
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(6, 4), height_ratios=(3, 1), layout="tight")
    above.plot(alone, label="one process", linewidth=4, alpha=0.4)
    above.plot(together, label=f"{ranks} ranks, zigzag", linestyle="--", color="black", linewidth=1)
    above.set(ylabel="loss")
    above.legend()
    below.plot([abs(a - b) / a for a, b in zip(alone, together, strict=True)], ".", markersize=3)
    below.axhline(torch.finfo(torch.float64).eps, color="gray", linewidth=0.5)
    below.set(ylabel="relative\ndifference", xlabel="step (gray: the eps of float64)", ylim=(0, None))
    figure.savefig(path, metadata={"Date": None} if pathlib.Path(path).suffix == ".svg" else None)
    print(f"drawn to {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4, help="how many to start, without torchrun")
    parser.add_argument("--plot", help="file to draw the curves to")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), options)
    else:
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(run, (options, f"{directory}/store"), nprocs=options.ranks)
