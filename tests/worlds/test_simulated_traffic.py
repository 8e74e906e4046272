"""Traffic: messages and bytes by rank, hop, operation, peer and group."""

import pytest
import torch
import torch.distributed as dist
from watched_runs import CONDITIONS, everywhere, watched

from ringverify.worlds.watch.traffic import Flow, Traffic

pytestmark = pytest.mark.timeout(60)


def ring(hops):
    """A ring that passes three float64 numbers so many times."""

    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        block = torch.zeros(3, dtype=torch.float64)
        for _ in range(hops):
            arriving = torch.empty_like(block)
            works = [dist.isend(block, (rank + 1) % size), dist.irecv(arriving, (rank - 1) % size)]
            for work in works:
                work.wait()
            block = arriving

    return program


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_ring_has_a_message_out_and_one_in_for_every_rank_and_hop(world_size):
    """Whatever the schedule and the conditions."""
    everyone = tuple(range(world_size))
    for seed, conditions in everywhere():
        traffic = watched(ring(world_size - 1), world_size, seed=seed, conditions=conditions).traffic
        for rank in everyone:
            right, left = (rank + 1) % world_size, (rank - 1) % world_size
            assert traffic.hops(rank) == tuple(
                (
                    Flow(rank, hop, "send", right, everyone, 1, 24, 0),
                    Flow(rank, hop, "receive", left, everyone, 1, 0, 24),
                )
                for hop in range(world_size - 1)
            )
            assert traffic.messages(rank) == world_size - 1
            assert traffic.sent(rank) == traffic.received(rank) == 24 * (world_size - 1)
            assert traffic.peers(rank) == {left, right}
            assert traffic.collectives(rank) == frozenset()


def test_what_is_posted_before_anything_is_waited_for_is_one_hop():
    """Two tensors a hop are two messages; blocking calls are a hop each; asking whether it is complete is waiting."""

    def program():
        other = 1 - dist.get_rank()
        keys, values, keys_there, values_there = torch.ones(2), torch.ones(4), torch.empty(2), torch.empty(4)
        works = [dist.isend(keys, other), dist.isend(values, other)]
        works += [dist.irecv(keys_there, other), dist.irecv(values_there, other)]
        while not works[-1].is_completed():
            pass
        for work in works:
            work.wait()
        if other:
            dist.send(keys, other)
            dist.recv(keys, other)
        else:
            dist.recv(keys, other)
            dist.send(keys, other)

    traffic = watched(program).traffic
    assert [[(flow.operation, flow.messages, flow.sent, flow.received) for flow in hop] for hop in traffic.hops(0)] == [
        [("send", 2, 24, 0), ("receive", 2, 0, 24)],
        [("send", 1, 8, 0)],
        [("receive", 1, 0, 8)],
    ]
    assert traffic.messages(0) == 3


def test_collectives_count_what_a_rank_puts_in_and_takes_out():
    """On the group that they are called on, in hops like messages, under their plain names."""

    def program():
        rank = dist.get_rank()
        pair = dist.new_group([0, 2])
        dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2))
        dist.broadcast(torch.ones(5), 1)
        if rank != 1:
            dist.all_reduce(torch.ones(3, dtype=torch.float16), group=pair)
        dist.barrier()

    traffic = watched(program, 3).traffic
    everyone = (0, 1, 2)
    assert [flow for flow in traffic.flows if flow.rank == 2] == [
        Flow(2, 0, "all_gather", None, everyone, 1, 8, 24),
        Flow(2, 1, "broadcast", None, everyone, 1, 20, 20),
        Flow(2, 2, "all_reduce", None, (0, 2), 1, 6, 6),
        Flow(2, 3, "barrier", None, everyone, 1, 0, 0),
    ]
    root = [flow for flow in traffic.flows if flow.rank == 1]
    assert root[1] == Flow(1, 1, "broadcast", None, everyone, 1, 20, 0)
    assert traffic.collectives(1) == {"all_gather", "broadcast", "barrier"}
    assert traffic.peers(2) == frozenset()


def test_peers_and_collectives_are_those_of_each_rank():
    """On a strided ring inside a world whose other ranks talk too; peers are global ranks."""

    def program(extra):
        rank = dist.get_rank()
        ring = dist.new_group([1, 3, 4])
        if rank in (0, 2):
            dist.isend(torch.ones(1), 2 - rank).wait()
            dist.recv(torch.empty(1), 2 - rank)
        else:
            members = [1, 3, 4]
            place = members.index(rank)
            work = dist.isend(torch.ones(1), members[(place + 1) % 3], group=ring)
            dist.recv(torch.empty(1), members[place - 1], group=ring)
            work.wait()
            dist.barrier(group=ring)
            extra(rank, ring)

    def collective(rank, ring):
        dist.all_reduce(torch.ones(1), group=ring)

    traffic = watched(lambda: program(lambda *_: None), 5).traffic
    assert [traffic.peers(rank) for rank in range(5)] == [{2}, {3, 4}, {0}, {1, 4}, {1, 3}]
    assert [traffic.collectives(rank) for rank in (1, 3, 4)] == [{"barrier"}] * 3
    traffic = watched(lambda: program(collective), 5).traffic
    assert [traffic.collectives(rank) for rank in (1, 3, 4)] == [{"barrier", "all_reduce"}] * 3
    four = watched(ring(1), 4).traffic
    assert [four.peers(rank) for rank in range(4)] == [{1, 3}, {0, 2}, {1, 3}, {0, 2}]


def test_traffic_is_described_by_rank_and_hop():
    """The lines for a verbose report."""

    def program():
        if dist.get_rank():
            dist.send(torch.ones(4), 0)
        else:
            dist.recv(torch.empty(4))
        dist.all_reduce(torch.ones(2))

    assert watched(program).traffic.describe() == [
        "rank 0: 0 messages, 8 bytes out, 24 bytes in",
        "  hop 0: receive from anyone, 16 bytes",
        "  hop 1: all_reduce on [0, 1], 8 bytes out, 8 bytes in",
        "rank 1: 1 message, 24 bytes out, 8 bytes in",
        "  hop 0: send to 0, 16 bytes",
        "  hop 1: all_reduce on [0, 1], 8 bytes out, 8 bytes in",
    ]
    assert Traffic().describe() == []


def test_a_rank_without_messages_has_no_traffic():
    """A world of one."""
    for conditions in CONDITIONS:
        assert watched(ring(0), 1, conditions=conditions).traffic == Traffic()
