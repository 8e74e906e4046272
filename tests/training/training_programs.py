"""What the ranks of the training tests run: one forward and backward of the model, wrapped as a framework would."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training_model import Attend, batch, build, local_attention, summed_loss

from ringverify.ring import RingAttention, position_ids, shard, unshard

SEQUENCES = 4


@dataclasses.dataclass(frozen=True)
class Setup:
    """How the model is trained.

    Attributes:
        wrapper: what adds up gradients: this program itself, DDP or FSDP2.
        rings: how many rings the world consists of; each has its share of the batch.
        length: tokens of a sequence.
        reentrant: kind of activation checkpointing, `None` for none.
        compiled: backend of `torch.compile`, `None` for eager.
        layers: of the model.
        settings: of `RingAttention`.
    """

    wrapper: Literal["plain", "ddp", "fsdp"] = "plain"
    rings: int = 1
    length: int = 11
    reentrant: bool | None = None
    compiled: str | None = None
    layers: int = 2
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


Result = tuple[float, dict[str, np.ndarray]]
"""The mean loss over all tokens, and its gradient for each parameter."""


def alone(setup: Setup, dtype: torch.dtype) -> Result:
    """One process and torch's own attention."""
    model = build(local_attention, layers=setup.layers).to(dtype)
    tokens, labels = batch(SEQUENCES, setup.length)
    loss = summed_loss(model(tokens, position_ids(setup.length), setup.length), labels) / tokens.numel()
    loss.backward()
    return loss.item(), {name: p.grad.double().numpy() for name, p in model.named_parameters()}


def in_a_ring(setup: Setup) -> Result:
    """The ranks of this world together; every rank returns the same."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (setup.rings, world_size // setup.rings), mesh_dim_names=("data", "sequence"))
    ring = mesh["sequence"]
    attend = RingAttention(group=ring, causal=True, **setup.settings)
    model, compute = _wrapped(build(attend, layers=setup.layers, reentrant=setup.reentrant), setup)

    place = {"sharding": attend.settings["sharding"], "group": ring}
    tokens, labels = batch(SEQUENCES, setup.length)
    share = slice(mesh["data"].get_local_rank(), None, setup.rings)
    logits = compute(shard(tokens[share], **place), position_ids(setup.length, **place), setup.length)
    loss = summed_loss(logits, shard(labels[share], **place)) / tokens.numel()
    # The loss is a sum over ranks, and so is its gradient; DDP and FSDP take the mean over ranks.
    (loss if setup.wrapper == "plain" else loss * world_size).backward()

    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item(), {name: _whole(p.grad, setup).numpy() for name, p in model.named_parameters()}


class Wave(nn.Module):
    """Attention between two elementwise operations: the least that a compiler has something to do with."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x_BSHD: torch.Tensor) -> torch.Tensor:
        y = x_BSHD.sin()
        return self.attend(y, y, y) * x_BSHD


def wave(dtype: torch.dtype) -> Result:
    """One process and torch's own attention."""
    return _wave_step(Wave(local_attention), dtype)


def wave_by_inductor(_: None) -> Result:
    """The ranks of this world together, elementwise operations compiled to machine code."""
    return _wave_step(torch.compile(Wave(RingAttention(group=dist.group.WORLD, causal=True)), backend="inductor"))


def _wave_step(compute: nn.Module, dtype: torch.dtype = torch.float64) -> Result:
    length = 6
    x = torch.randn(2, length, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)
    part = shard(x).requires_grad_()
    out = unshard(compute(part), length=length, replicated_loss=True)
    loss = (out**2).sum()
    loss.backward()
    return loss.item(), {"x": unshard(part.grad, length=length).double().numpy()}


def _wrapped(model: nn.Module, setup: Setup) -> tuple[nn.Module, nn.Module]:
    """The module that names the parameters, and the one to call."""
    compute = model
    match setup.wrapper:
        case "ddp":
            compute = DistributedDataParallel(model)
        case "fsdp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            compute = fully_shard(model, mesh=mesh)
    if setup.compiled is not None:
        torch._dynamo.reset()
        compute = torch.compile(compute, backend=setup.compiled)
    return model, compute


def _whole(grad: torch.Tensor, setup: Setup) -> torch.Tensor:
    if isinstance(grad, DTensor):
        return grad.full_tensor()
    if setup.wrapper == "plain":
        dist.all_reduce(grad)
    return grad
