"""Rings that pass their blocks on without asking whether there is another rank: alone, a rank sends to itself."""

import os
import socket

import right
import torch
import torch.distributed as dist

from ringverify import AttentionCall, implementation


def passed_round(block, call):
    """The block, after it has been passed to the right as often as there are ranks, in batches."""
    ranks = dist.get_process_group_ranks(call.group)
    block = block.detach().contiguous()
    for _ in ranks:
        arriving = torch.empty_like(block)
        sends = dist.P2POp(dist.isend, block, ranks[(call.rank + 1) % len(ranks)], call.group)
        receives = dist.P2POp(dist.irecv, arriving, ranks[call.rank - 1], call.group)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        block = arriving
    return block


@implementation(name="sends to itself")
def attend(q, k, v, call: AttentionCall):
    """Right wherever the message is delivered."""
    assert torch.equal(passed_round(k, call), k)
    return right.attention(q, k, v, call)


@implementation(name="sends to itself, and drops a rank's keys")
def wrong(q, k, v, call: AttentionCall):
    """The last rank's values are lost."""
    passed_round(k, call)
    return right.attention(q, k, v * (call.rank < max(1, call.world_size - 1)), call)


@implementation(name="sends to itself on every rank")
def always(q, k, v, call: AttentionCall):
    """Whatever the number of ranks."""
    dist.isend(q.detach().contiguous(), dist.get_rank()).wait()
    return right.attention(q, k, v, call)


@implementation(name="gathers into a stack")
def stacked(q, k, v, call: AttentionCall):
    """As torch documents it, as NCCL does it and gloo does not."""
    block = k.detach().contiguous()
    blocks = block.new_empty(call.world_size, *block.shape)
    dist.all_gather_into_tensor(blocks, block, group=call.group)
    assert torch.equal(blocks[call.rank], block)
    return right.attention(q, k, v, call)


@implementation(name="says another thing each time")
def says_a_port(q, k, v, call: AttentionCall):
    """A connection that fails, with the port, the process and the object in its message."""
    if q.shape[2] > 1:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        raise ConnectionError(f"no connection from port {port} of process {os.getpid()}, {object()}")
    return right.attention(q, k, v, call)
