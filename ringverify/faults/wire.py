"""Messages of the plain ring: send to the right, receive from the left, both posted together, one hop at a time.

A buffer that receives is new and holds zeros, so that whoever reads it too early reads the same on every run. Empty
tensors are not sent; both sides know their size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ringverify.faults.place import Block, Here

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Posted(NamedTuple):
    """A hop in flight: the handles to wait for, and the buffers of the block that arrives."""

    works: list[dist.Work]
    arriving: Block


def owner(here: Here, hop: int) -> int:
    """Return the rank whose block is here after so many hops."""
    return (here.rank - hop) % here.size


def right(here: Here) -> int:
    """Return the rank of the group to which this one sends."""
    return (here.rank + 1) % here.size


def left(here: Here) -> int:
    """Return the rank of the group from which this one receives."""
    return (here.rank - 1) % here.size


def peer(here: Here, rank: int) -> int:
    """Return the global rank of a rank of the group, by which point-to-point calls name it."""
    return dist.get_global_rank(here.group, rank)


def group(here: Here) -> ProcessGroup:
    """Return the process group on which messages are sent."""
    return here.group


def buffers(here: Here, like: Block, rank: int) -> Block:
    """Allocate buffers for the block of a rank."""
    k, v = here.block_shapes(rank)
    return Block(like.k.new_zeros(k), like.v.new_zeros(v))


def post(here: Here, to: int, source: int, group: ProcessGroup, leaving: Block, arriving: Block) -> Posted:
    """Start sending one block and receiving another.

    Args:
        here: this rank.
        to: whom to send to, in the world's numbering.
        source: from whom to receive, likewise.
        group: on which the messages travel.
        leaving: what is sent.
        arriving: where to receive.
    """
    messages = [dist.P2POp(dist.isend, x, to, group) for x in leaving if x.numel()]
    messages += [dist.P2POp(dist.irecv, x, source, group) for x in arriving if x.numel()]
    return Posted(dist.batch_isend_irecv(messages) if messages else [], arriving)


def arrive(posted: Posted) -> Block:
    """Wait for a hop and return the block that it brought."""
    for work in posted.works:
        work.wait()
    return posted.arriving


def outgoing(k: torch.Tensor, v: torch.Tensor) -> Block:
    """Return copies of this rank's keys and values to be sent: nothing is received into the inputs."""
    return Block(*(x.detach().clone(memory_format=torch.contiguous_format) for x in (k, v)))


def gather_partials(here: Here, rows: torch.Tensor) -> list[torch.Tensor]:
    """Gather a tensor that has one shape on all ranks, in rank order."""
    everyone = [torch.empty_like(rows) for _ in range(here.size)]
    dist.all_gather(everyone, rows, group=here.group)
    return everyone


def add_up(here: Here, rows: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks of a tensor that has one shape on all ranks."""
    total = rows.clone()
    dist.all_reduce(total, group=here.group)
    return total
