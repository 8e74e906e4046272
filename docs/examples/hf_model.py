"""A Hugging Face model with random weights on the ranks of a ring, by a context around it, and in one process.

    python docs/examples/hf_model.py                              starts its own four ranks
    torchrun --nproc-per-node 4 docs/examples/hf_model.py         uses those that it is given

Each rank gives the model its shard of the tokens. Shown is how far logits and parameter gradients lie from those of one
process, and, for comparison, how far one process lies from the same weights in float64: both are rounding.
"""

import argparse
import copy
import itertools
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from ringverify.ring import position_ids, ring_sdpa, shard, unshard

BATCH, LENGTH, VOCABULARY = 2, 61, 50  # 61 tokens: a ring of 4 does not have to divide them


def build(dtype):
    """A small Llama with grouped-query attention; the same weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(dtype)


def text():
    """Tokens and the next ones, the same on every rank."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def summed_loss(logits, labels):
    """A rank's part of the mean over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (BATCH * LENGTH)


def alone(model):
    """Logits and parameter gradients of one process."""
    tokens, labels = text()
    logits = model(input_ids=tokens).logits
    summed_loss(logits, labels).backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


def in_a_ring(model, sharding):
    """The same from shards; whole on every rank."""
    tokens, labels = (shard(x, sharding=sharding) for x in text())
    with ring_sdpa(sharding=sharding, length=LENGTH):
        logits = model(
            input_ids=tokens,
            position_ids=position_ids(LENGTH, sharding=sharding)[None],
            attention_mask=torch.ones_like(tokens),  # without it, a shard of two pieces looks like packed documents
        ).logits
    summed_loss(logits, labels).backward()
    gradients = [p.grad.float() for p in model.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)  # the loss is a sum over ranks, and so is its gradient
    return [unshard(logits.detach(), length=LENGTH, sharding=sharding), *gradients]


def off(found, expected):
    """Relative difference of the logits, and the largest of any parameter's gradient, in the norm."""
    logits, *gradients = (
        ((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected, strict=True)
    )
    return logits, max(gradients)


def run(rank, options, store=None):
    """One rank of the ring; the first one reports."""
    torch.set_num_threads(1)
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    for dtype, sharding in itertools.product((torch.float32, torch.bfloat16), ("contiguous", "zigzag")):
        model = build(dtype)
        one = alone(copy.deepcopy(model))
        exact = alone(copy.deepcopy(model).double())
        logits, gradients = off(in_a_ring(model, sharding), one)
        by_rounding = off(one, exact)
        if dist.get_rank() == 0:
            name = str(dtype).removeprefix("torch.")
            print(f"{name} {sharding} {dist.get_world_size()} ranks: logits {logits:.1e}, gradients {gradients:.1e}")
            print(f"{name} one process, rounding: logits {by_rounding[0]:.1e}, gradients {by_rounding[1]:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="how many to start, without torchrun")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), options)
    else:
        with tempfile.TemporaryDirectory() as directory:
            # Forked, so that transformers is imported once; no thread has been started yet.
            arguments = (options, f"{directory}/store")
            torch.multiprocessing.start_processes(run, arguments, nprocs=options.ranks, start_method="fork")
