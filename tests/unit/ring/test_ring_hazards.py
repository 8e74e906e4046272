"""No buffer is read before it has arrived, nor written while it is being sent.

The simulated world copies a message when it is posted, so a ring with one buffer too few would pass there. Here every
message is watched from post to wait, as if the transport were as late as it may be.
"""

import functools

import pytest
import torch
import torch.distributed as dist

from ringref.problem import Problem
from ringref.sharding import SHARDINGS, key_positions, query_positions
from ringverify.implementation import AttentionCall
from ringverify.ring.neighbours import Neighbours, all_reduce, rotate
from ringverify.ring.ring import ring_attention
from ringverify.worlds.simulated import SimulatedWorld


class Watched:
    """A send and a receive in flight: what leaves must stay as it was, what arrives is NaN until it is waited for."""

    def __init__(self, works, send, receive):
        self.works, self.send, self.receive = works, send, receive
        assert not overlap(send, receive), "a message is sent from the buffer that the next one arrives in"
        self.sent = send.clone()
        receive.fill_(torch.nan)

    def wait(self):
        assert torch.equal(self.send, self.sent), "what is being sent was written to"
        assert bool(self.receive.isnan().all()), "a buffer was written to before its message arrived"
        for work in self.works:
            work.wait()


def overlap(first, second):
    """Whether two flat tensors share a byte."""
    starts = [x.data_ptr() for x in (first, second)]
    ends = [start + x.nbytes for start, x in zip(starts, (first, second), strict=True)]
    return max(starts) < min(ends)


@pytest.fixture
def watched(monkeypatch):
    """Every hop of every ring in this test is watched."""
    post = Neighbours.post

    def post_watched(self, send, receive):
        return [Watched(post(self, send, receive), send, receive)]

    monkeypatch.setattr(Neighbours, "post", post_watched)


def run(program, world_size, seed=0):
    """What a program returns on each rank."""
    finished = SimulatedWorld().run(lambda _: program(), None, world_size=world_size, seed=seed, deadline=20)
    assert finished.failure is None, f"{finished.failure.message}\n{finished.failure.detail}"
    return finished.results


def neighbours():
    """Those of this rank in the whole world."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return Neighbours(dist.group.WORLD, rank, size, (rank - 1) % size, (rank + 1) % size)


def attended(problem, sharding):
    """This rank's results and gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    queries = torch.from_numpy(query_positions(sharding, problem.nq, size)[rank])
    keys = torch.from_numpy(key_positions(sharding, problem.nk, size)[rank])
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, problem.nq, problem.heads, problem.head_dim, generator=generator)
    leaves = [q[:, queries].requires_grad_(), k[:, keys].requires_grad_(), v[:, keys].requires_grad_()]
    call = AttentionCall(dist.group.WORLD, rank, size, problem, sharding, queries, keys)
    out, lse = ring_attention(*leaves, call)
    return out.detach(), *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("length", [3, 13])
def test_messages_in_flight_are_left_alone(watched, sharding, world_size, length):
    """Forward and backward; nothing of the NaN that stands in the buffers comes out."""
    problem = Problem(query_length=length, heads=2, head_dim=3, causal=True)
    for results in run(functools.partial(attended, problem, sharding), world_size):
        assert all(bool(torch.isfinite(result).all()) for result in results)


@pytest.mark.parametrize("numels", [(4,), (3, 2), (2, 0, 1), (0, 0, 0), (1, 4, 0, 2, 3)])
def test_every_block_comes_by_once_own_first(watched, numels):
    """In the order rank, rank - 1, …; blocks of every length, the empty one included."""

    def program():
        rank = dist.get_rank()
        own = torch.full((numels[rank],), float(rank))
        return [(owner, block.clone()) for owner, block in rotate(neighbours(), own, numels)]

    size = len(numels)
    for rank, visits in enumerate(run(program, size)):
        assert [owner for owner, _ in visits] == [(rank - hop) % size for hop in range(size)]
        assert all(torch.equal(block, torch.full((numels[owner],), float(owner))) for owner, block in visits)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [0, 1, 4, 11])
def test_all_reduce_sums_every_row_and_leaves_its_input_alone(watched, world_size, rows):
    """More ranks than rows included; integers, so that the order of the sum does not show."""

    def program():
        own = torch.arange(rows * 2, dtype=torch.float32).view(rows, 2) * 10 ** dist.get_rank()
        before = own.clone()
        total = all_reduce(neighbours(), own, torch.add)
        assert torch.equal(own, before)
        return total

    expected = torch.arange(rows * 2, dtype=torch.float32).view(rows, 2) * sum(10**rank for rank in range(world_size))
    assert all(torch.equal(total, expected) for total in run(program, world_size))
