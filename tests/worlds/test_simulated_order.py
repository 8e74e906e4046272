"""Which rank runs when: the seed decides, and decides the same again."""

import pytest
import torch
import torch.distributed as dist

from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(30)


def trace(seed: int, world_size: int = 4):
    """Everything that happens in a program of messages, collectives, a group and backward, and what it returns."""
    events, order = [], []

    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return around(tensor, 1)

        @staticmethod
        def backward(ctx, gradient):
            return around(gradient, -1)

    def around(tensor, step):
        rank, size = dist.get_rank(), dist.get_world_size()
        order.append(rank)
        arriving = torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor.contiguous(), (rank + step) % size),
                dist.P2POp(dist.irecv, arriving, (rank - step) % size),
            ]
        )
        for work in works:
            work.wait()
        return arriving

    def program(_):
        rank = dist.get_rank()
        leaf = (torch.arange(3.0) / 7 + rank).requires_grad_()
        block = leaf
        for _ in range(2):
            block = Shift.apply(block * 1.1)
        block.sum().backward()
        heard = torch.zeros(1)
        if rank:
            dist.send(torch.tensor([rank / 3]), 0, tag=1)
        else:
            for _ in range(dist.get_world_size() - 1):
                dist.recv(buffer := torch.empty(1), tag=1)
                heard = heard * 0.7 + buffer
        group = dist.new_group([0, 2])
        if rank in (0, 2):
            dist.all_reduce(heard, group=group)
        order.append(rank)
        return leaf.grad.tolist(), heard.item()

    def observe(event):
        events.append((event.moment, event.operation.rank, event.operation.describe()))

    world = SimulatedWorld(observe=observe)
    run = world.run(program, None, world_size=world_size, seed=seed, deadline=20)
    assert run.failure is None, run.failure.detail
    return run.results, order, events


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_the_same_seed_repeats_everything_in_the_same_order(seed):
    """Every post, every finish, every line of the program, every bit of the result."""
    first = trace(seed)
    for _ in range(4):
        assert trace(seed) == first


def test_different_seeds_interleave_ranks_differently():
    """Of twenty seeds, all orders differ, and the values that depend on the order differ too."""
    traces = [trace(seed) for seed in range(20)]
    assert len({tuple(order) for _, order, _ in traces}) == 20
    assert len({run[0][1] for run, _, _ in traces}) > 3
    assert len({str([gradient for gradient, _ in run]) for run, _, _ in traces}) == 1


def test_only_one_rank_runs_at_a_time():
    """Nobody enters a stretch without communication while another is in one."""
    inside, worst = [0], [0]

    def program(_):
        for _ in range(20):
            inside[0] += 1
            worst[0] = max(worst[0], inside[0])
            sum(range(2000))
            inside[0] -= 1
            dist.isend(torch.empty(1), (dist.get_rank() + 1) % 4)
            dist.recv(torch.empty(1), (dist.get_rank() - 1) % 4)

    assert SimulatedWorld().run(program, None, world_size=4, seed=3, deadline=20).failure is None
    assert worst[0] == 1


def test_a_failure_repeats_as_well():
    """Which of two ranks raises first is the seed's."""

    def program(_):
        dist.barrier()
        dist.isend(torch.empty(1), 0)
        raise ValueError(f"from {dist.get_rank()}")

    def message(seed):
        return SimulatedWorld().run(program, None, world_size=4, seed=seed, deadline=20).failure.message

    messages = [message(seed) for seed in range(12)]
    assert messages == [message(seed) for seed in range(12)]
    assert len(set(messages)) > 1


def test_an_observer_sees_every_operation_posted_and_finished():
    """The one place that all operations pass."""
    events = []

    def program(_):
        rank = dist.get_rank()
        if rank == 0:
            dist.send(torch.empty(1), 1, tag=2)
        else:
            dist.recv(torch.empty(1), 0, tag=2)
        dist.barrier()

    SimulatedWorld(observe=events.append).run(program, None, world_size=2, seed=0, deadline=20)
    seen = [(event.moment, event.operation.rank, event.operation.describe().split(" of ")[0]) for event in events]
    for moment in ("posted", "finished"):
        assert (moment, 0, "a send to rank 1, tag 2") in seen
        assert (moment, 1, "a receive from rank 0, tag 2") in seen
        assert {(moment, rank, "barrier #0") for rank in range(2)} <= set(seen)
    assert len(seen) == 8
