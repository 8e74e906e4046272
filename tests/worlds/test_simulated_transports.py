"""Unfriendly transports: sends that wait for their receives, and messages that are late."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from simulated_runs import WORLD
from watched_runs import CONDITIONS, everywhere, unwatched, watched

from ringverify.worlds.world import Conditions

pytestmark = pytest.mark.timeout(60)

RENDEZVOUS = Conditions("rendezvous")


def neighbours():
    """Rank, right neighbour, left neighbour."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, (rank + 1) % size, (rank - 1) % size


def sends_first():
    """A ring of blocking calls, everyone sending first."""
    rank, right, left = neighbours()
    arriving = torch.empty(1)
    dist.send(torch.full((1,), float(rank)), right)
    dist.recv(arriving, left)
    return arriving.item()


def even_ranks_send_first():
    """The same in an order that works anywhere."""
    rank, right, left = neighbours()
    arriving = torch.empty(1)
    block = torch.full((1,), float(rank))
    if rank % 2 == 0:
        dist.send(block, right)
        dist.recv(arriving, left)
    else:
        dist.recv(arriving, left)
        dist.send(block, right)
    return arriving.item()


def posts_both():
    """A ring that posts its send and its receive together, and passes a block all the way round."""
    rank, right, left = neighbours()
    block = torch.full((2,), float(rank))
    for _ in range(dist.get_world_size() - 1):
        arriving = torch.empty_like(block)
        both = [dist.P2POp(dist.isend, block, right), dist.P2POp(dist.irecv, arriving, left)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        block = arriving
    return block[0].item()


# -- rendezvous --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_a_ring_in_which_everyone_sends_first_works_only_while_the_transport_buffers(world_size):
    """Under rendezvous it is a deadlock, named at once, with every rank's send."""
    for seed in range(5):
        assert watched(sends_first, world_size, seed=seed).results == tuple(
            float((rank - 1) % world_size) for rank in range(world_size)
        )
        began = time.perf_counter()
        run = unwatched(sends_first, world_size, seed=seed, conditions=RENDEZVOUS, watch=True)
        assert run.failure is not None
        assert run.failure.kind == "deadlock"
        assert run.failure.message == "deadlock: " + "; ".join(
            f"rank {rank} waits for a send to rank {(rank + 1) % world_size}, tag 0" for rank in range(world_size)
        )
        assert time.perf_counter() - began < 10
        assert run.hazards == ()


@pytest.mark.parametrize("program", [even_ranks_send_first, posts_both])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_correct_rings_pass_on_every_transport(program, world_size):
    """Sends in turns, or sends and receives together, whatever is late."""
    expected = watched(program, world_size).results
    for seed, conditions in everywhere():
        run = watched(program, world_size, seed=seed, conditions=conditions)
        assert run.results == expected
        assert run.hazards == ()
        assert run.unreceived == ()


def test_a_send_is_complete_when_its_receive_is_posted_and_not_before():
    """Under rendezvous; on a buffered transport it is complete at once."""

    def program():
        if dist.get_rank():
            sending = dist.isend(torch.ones(1), 0, tag=1)
            before = sending.is_completed()
            dist.recv(torch.empty(1), 0, tag=2)  # which is sent after the receive has been posted
            after = sending.is_completed()
            return before, after
        arriving = torch.empty(1)
        receiving = dist.irecv(arriving, 1, tag=1)
        dist.send(torch.ones(1), 1, tag=2)
        receiving.wait()
        return arriving.item()

    befores = set()
    for seed in range(8):
        _, (before, after) = watched(program, seed=seed, conditions=RENDEZVOUS).results
        befores.add(before)
        assert after
        assert watched(program, seed=seed).results[1] == (True, True)
    assert False in befores


@pytest.mark.parametrize("conditions", CONDITIONS)
@pytest.mark.parametrize("call", [dist.isend, dist.irecv, dist.recv])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_message_to_oneself_is_refused_as_gloo_refuses_it(call, conditions, world_size):
    """Whatever the transport, whatever the number of ranks; also in a batch, where NCCL takes it."""

    def plainly():
        call(torch.ones(1), dist.get_rank())

    def in_a_batch():
        direction = dist.isend if call is dist.isend else dist.irecv
        dist.batch_isend_irecv([dist.P2POp(direction, torch.ones(1), dist.get_rank())])

    for program in (plainly, in_a_batch):
        failure = unwatched(program, world_size, conditions=conditions).failure
        assert failure is not None
        assert failure.refusal == "a message to itself"
        assert "gloo refuses that" in failure.message


def test_ranks_that_wait_for_different_things_are_all_named():
    """A receive that nothing meets, a barrier that one rank has skipped, ranks that have returned, whatever is late."""

    def program():
        rank = dist.get_rank()
        for _ in range(3):
            dist.barrier()
        if rank == 1:
            dist.isend(torch.ones(1), 2, tag=5).wait()
            dist.barrier()
        elif rank == 2:
            dist.recv(torch.ones(1), 1, tag=5)
            dist.recv(torch.ones(1), 1, tag=0)

    for seed, conditions in everywhere():
        began = time.perf_counter()
        failure = unwatched(program, 4, seed=seed, conditions=conditions).failure
        assert time.perf_counter() - began < 10
        assert failure is not None
        assert failure.message == (
            "deadlock: rank 0 has returned; "
            "rank 1 waits for barrier #3 of group [0, 1, 2, 3] (3 of 4 ranks missing: 0, 2, 3); "
            "rank 2 waits for a receive from rank 1, tag 0; rank 3 has returned"
        )


# -- delays ------------------------------------------------------------------------------------------------------------


def two_channels():
    """Rank 0 sends three messages on two tags; rank 1 notes the order in which it sees them complete."""
    if dist.get_rank() == 0:
        works = [dist.isend(torch.full((1,), float(at)), 1, tag=tag) for at, tag in enumerate((1, 2, 1))]
        for work in works:
            work.wait()
        return None
    buffers = [torch.empty(1) for _ in range(3)]
    waiting = {
        at: dist.irecv(buffer, 0, tag=tag) for at, (buffer, tag) in enumerate(zip(buffers, (1, 2, 1), strict=True))
    }
    order = []
    while waiting:
        for at, work in list(waiting.items()):
            if work.is_completed():
                order.append(at)
                del waiting[at]
    return order, [buffer.item() for buffer in buffers]


def test_a_late_message_is_overtaken_by_other_tags_and_never_by_its_own():
    """Message 0 is late, and so is message 2 behind it; message 1 is not."""

    def program():
        if dist.get_rank() == 0:
            works = [dist.isend(torch.full((1,), float(at)), 1, tag=tag) for at, tag in enumerate((1, 2, 1))]
            for work in works:
                work.wait()
            return None
        buffers = [torch.empty(1) for _ in range(3)]
        first, other, second = (dist.irecv(buffer, 0, tag=tag) for buffer, tag in zip(buffers, (1, 2, 1), strict=True))
        other.wait()
        before = first.is_completed(), second.is_completed()
        second.wait()
        return before, first.is_completed(), [buffer.item() for buffer in buffers]

    for seed in range(6):
        for transport in ("buffered", "rendezvous"):
            run = watched(program, seed=seed, conditions=Conditions(transport, (0,)))
            assert run.results[1] == ((False, False), True, [0.0, 1.0, 2.0])
            assert run.delayed == (0,)


def test_messages_are_late_in_every_order_that_channels_allow():
    """Over seeds: all three are late; the second of a channel never comes before the first."""
    orders = {
        tuple(watched(two_channels, seed=seed, conditions=Conditions(delayed=(0, 1, 2))).results[1][0])
        for seed in range(30)
    }
    assert orders == {order for order in itertools.permutations(range(3)) if order.index(0) < order.index(2)}


def test_a_receive_from_anyone_takes_what_arrives_and_not_what_is_late():
    """Rank 1's message has the lower number and is late: rank 2's arrives first."""

    def program():
        if dist.get_rank() == 1:
            work = dist.isend(torch.ones(1), 0)
            dist.send(torch.ones(1), 2)
            work.wait()
            return None
        if dist.get_rank() == 2:
            dist.recv(torch.empty(1), 1)
            dist.send(torch.full((1,), 2.0), 0)
            return None
        arriving, order = torch.empty(1), []
        for _ in range(2):
            dist.recv(arriving)
            order.append(arriving.item())
        return order

    for seed in range(6):
        assert watched(program, 3, seed=seed, conditions=Conditions(delayed=(0,))).results[0] == [2.0, 1.0]


def test_some_messages_are_about_half_and_can_be_named_again_one_by_one():
    """The same seed holds the same ones back; naming them gives the same run; any part of them can be tried."""

    def program():
        rank, right, left = neighbours()
        seen = []
        for at in range(8):
            arriving = torch.empty(1)
            work = dist.irecv(arriving, left)
            dist.isend(torch.full((1,), float(10 * at + rank)), right).wait()
            while not work.is_completed():
                seen.append(at)
            seen.append(arriving.item())
        return seen

    for seed in range(3):
        runs = [watched(program, 3, seed=seed, conditions=Conditions(delayed="some")) for _ in range(2)]
        assert runs[0].results == runs[1].results
        assert runs[0].delayed == runs[1].delayed
        assert 5 <= len(runs[0].delayed) <= 19
        named = watched(program, 3, seed=seed, conditions=Conditions(delayed=runs[0].delayed))
        assert named.results == runs[0].results
        assert named.delayed == runs[0].delayed
        for part in (runs[0].delayed[:3], runs[0].delayed[1:2], ()):
            assert watched(program, 3, seed=seed, conditions=Conditions(delayed=part)).delayed == part
    assert len({watched(program, 3, seed=seed, conditions=Conditions(delayed="some")).delayed for seed in range(6)}) > 1


def test_a_late_message_that_is_never_needed_still_arrives():
    """Everything late meets its receive in the end, and what has none is told as usual."""

    def program():
        if dist.get_rank():
            dist.isend(torch.ones(1), 0)
            dist.isend(torch.ones(2), 0, tag=3)
            return None
        return dist.irecv(torch.empty(1), 1)

    run = unwatched(lambda: program() and None, conditions=Conditions(delayed=(0, 1)))
    assert [one.describe() for one in run.unreceived] == [
        "a message that nobody received: from rank 1 to rank 0, tag 3, group [0, 1], [2] float32"
    ]


def test_a_blocking_send_that_is_late_does_not_wait_for_ever():
    """On a buffered transport it completes when nobody else can go on, receive or no receive."""

    def program():
        if dist.get_rank():
            dist.send(torch.ones(1), 0)
            dist.send(torch.ones(1), 0)
            dist.barrier()
        else:
            dist.barrier()
            arriving = torch.empty(1)
            dist.recv(arriving, 1)
            dist.recv(arriving, 1)

    for seed in range(4):
        watched(program, seed=seed, conditions=Conditions(delayed=(0, 1)))


def test_a_message_that_does_not_exist_is_not_late():
    """A number past the last one."""
    assert watched(posts_both, 2, conditions=Conditions(delayed=(1, 99))).delayed == (1,)


# -- at the door -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"transport": "eager"}, 'transport is \'eager\'; it is "buffered" or "rendezvous"'),
        ({"delayed": "all"}, "delayed is 'all'; it is \"some\" or a tuple of message numbers from 0"),
        ({"delayed": [1]}, 'delayed is [1]; it is "some" or a tuple of message numbers from 0'),
        ({"delayed": (-1,)}, 'delayed is (-1,); it is "some" or a tuple of message numbers from 0'),
    ],
)
def test_impossible_conditions_are_refused_with_what_was_given(conditions, message):
    """Before any rank runs."""
    with pytest.raises(ValueError, match="it is") as refused:
        Conditions(**conditions)
    assert str(refused.value) == message


def test_conditions_are_data():
    """They compare, hash and show what they are, so that a case can hold them."""
    assert Conditions() == Conditions("buffered", ())
    assert len({*CONDITIONS, *CONDITIONS}) == len(CONDITIONS)
    assert repr(Conditions("rendezvous", (3,))) == "Conditions(transport='rendezvous', delayed=(3,))"
    assert WORLD.run(lambda _: 1, None, world_size=1, seed=0, deadline=5, conditions=None).delayed == ()
