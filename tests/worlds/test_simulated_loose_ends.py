"""Hazards of what is not waited for, not received, mismatched or out of its group; correct programs have none."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from simulated_runs import WORLD
from torch.utils.flop_counter import FlopCounterMode
from watched_runs import everywhere, line, other, short, unwatched, watched, zeroes_what_it_sends

from ringverify.worlds.watch.hazards import Hazard, only_group
from ringverify.worlds.world import Conditions

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::FutureWarning")]


# -- operations that nobody waits for, messages that nobody takes ------------------------------------------------------


@pytest.mark.parametrize("transport", ["buffered", "rendezvous"])
def test_an_operation_that_is_never_waited_for_is_named_with_the_line_that_posted_it(transport):
    """A send, a receive and a collective; not what was seen to be complete, nor what waits by itself."""

    def program():
        blocking = torch.ones(2)
        dist.all_reduce(blocking)
        seen = dist.all_reduce(blocking, async_op=True)
        while not seen.is_completed():
            pass
        if dist.get_rank():
            dist.isend(torch.ones(2), 0)  # send
            dist.send(torch.ones(2), 0)
            dist.barrier(async_op=True)  # barrier
        else:
            works = [dist.irecv(torch.empty(2), 1) for _ in range(2)]
            works.append(dist.barrier(async_op=True))
            for work in works:
                work.wait()

    run = watched(program, conditions=Conditions(transport))
    send, barrier = line(program, "send"), line(program, "barrier")
    assert run.hazards == (
        Hazard(
            "not_waited", 1, "send to rank 0, tag 0", send, send,
            f"rank 1 never waited for its send to rank 0, tag 0, posted at {short(send)}",
        ),
        Hazard(
            "not_waited", 1, "barrier #2 of group [0, 1]", barrier, barrier,
            f"rank 1 never waited for its barrier #2 of group [0, 1], posted at {short(barrier)}",
        ),
    )  # fmt: skip


def test_messages_that_nobody_received_and_receives_that_nothing_met_are_named():
    """With the line that posted them."""

    def program():
        if dist.get_rank():
            dist.isend(torch.ones(2), 0, tag=7).wait()  # sent
        else:
            return dist.irecv(torch.ones(2), 1, tag=8)  # received
        return None

    run = WORLD.run(lambda _: program() and None, None, world_size=2, seed=0, deadline=20, watch=True)
    sent, received = line(program, "sent"), line(program, "received")
    assert [(hazard.kind, hazard.rank, hazard.place, hazard.message) for hazard in run.hazards] == [
        ("not_waited", 0, received, f"rank 0 never waited for its receive from rank 1, tag 8, posted at "
         f"{short(received)}"),
        ("not_received", 1, sent, f"nobody received rank 1's send to rank 0, tag 7, posted at {short(sent)}"),
        ("not_received", 0, received, f"rank 0's receive from rank 1, tag 8 got no message, posted at "
         f"{short(received)}"),
    ]  # fmt: skip


def test_a_run_that_fails_tells_what_it_saw_and_nothing_of_what_was_left_undone():
    """A rank that raises in the middle has not waited for anything; that is not its mistake."""

    def program():
        block = torch.ones(2)
        dist.isend(block, other())
        block.zero_()
        raise ValueError

    run = unwatched(program, watch=True)
    assert run.failure is not None
    assert [hazard.kind for hazard in run.hazards] == ["send_changed"]


# -- the two sides disagree --------------------------------------------------------------------------------------------


def test_dtypes_that_differ_are_named_although_the_bytes_agree():
    """With the lines of both sides; a shape is no part of a message."""

    def program():
        if dist.get_rank():
            dist.send(torch.zeros(4, 2), 0)
            dist.send(torch.zeros(2), 0)  # sent
        else:
            dist.recv(torch.zeros(8), 1)
            dist.recv(torch.zeros(2, dtype=torch.int32), 1)  # received

    sent, received = line(program, "sent"), line(program, "received")
    (found,) = watched(program).hazards
    assert found == Hazard(
        "mismatch", 0, "receive from rank 1, tag 0", received, sent,
        f"rank 0 receives [2] int32 with its receive from rank 1, tag 0 (at {short(received)}), but rank 1 sent "
        f"[2] float32 (at {short(sent)})",
    )  # fmt: skip


def test_messages_that_are_received_in_another_order_are_said_to_be():
    """Keys for values and values for keys; where they do not even fit, the run has failed as well."""

    def program(values):
        keys, works = torch.zeros(4, 2), []
        if dist.get_rank():
            works += [dist.isend(one, 0) for one in (keys, values)]
        else:
            works += [dist.irecv(one, 1) for one in (values, keys)]
        for work in works:
            work.wait()

    for size in (8, 9):
        run = unwatched(lambda size=size: program(torch.zeros(size)), watch=True)
        assert (run.failure is None) == (size == 8)
        assert [hazard.message.split(": ")[1] for hazard in run.hazards] == [
            "both sides have the same messages in a different order"
        ] * 2


CALLS = {
    "all_reduce": lambda one: dist.all_reduce(one),
    "broadcast": lambda one: dist.broadcast(one, 0),
    "all_gather": lambda one: dist.all_gather([torch.empty_like(one) for _ in range(3)], one),
    "scatter": lambda one: dist.scatter(one, [torch.zeros(6)] * 3 if dist.get_rank() == 0 else None),
}
"""One tensor of each rank; a scatter brings six numbers a rank."""


@pytest.mark.parametrize("name", list(CALLS))
def test_shapes_of_as_many_elements_are_nobodys_mistake(name):
    """Rank 1 has six elements in two rows, the others in one."""
    assert not watched(lambda: CALLS[name](torch.zeros(2, 3) if dist.get_rank() == 1 else torch.zeros(6)), 3).hazards


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broadcast", "brings [6] int32 to broadcast(from 0) #0 of group [0, 1, 2]"),
        ("all_gather", "brings [6] int32 to all_gather #0 of group [0, 1, 2]"),
        ("scatter", "takes [6] int32 out of scatter(from 0) #0 of group [0, 1, 2]"),
    ],
)
def test_ranks_that_bring_other_dtypes_to_one_collective_are_named(name, message):
    """Rank 1 has as many bytes of integers."""

    def program():
        CALLS[name](torch.zeros(6, dtype=torch.int32 if dist.get_rank() == 1 else torch.float32))

    (hazard,) = unwatched(program, 3, watch=True).hazards
    assert (hazard.kind, hazard.rank) == ("mismatch", 1)
    assert hazard.message.startswith(f"rank 1 {message} (at ")
    assert "but rank 0 brings [6] float32 (at " in hazard.message


def test_pieces_of_an_all_to_all_are_compared_by_pairs():
    """Rank 0 has integers; rows for a column, and pieces of other lengths, are nobody's mistake."""

    def program(dtype):
        rank = dist.get_rank()
        outputs = [torch.empty(rank + 1), torch.empty(rank + 1, 3) if rank else torch.empty(3)]
        inputs = [torch.zeros(1), torch.zeros(2)] if not rank else [torch.zeros(3, 1), torch.zeros(2, 3)]
        if not rank:
            outputs, inputs = ([one.to(dtype) for one in pieces] for pieces in (outputs, inputs))
        dist.all_to_all(outputs, inputs)

    assert not watched(lambda: program(torch.float32)).hazards
    first, second = unwatched(lambda: program(torch.int32), watch=True).hazards
    assert "rank 0 takes [3] int32 out of all_to_all #0" in first.message
    assert "rank 1 brings [3, 1] float32" in first.message
    assert "rank 1 takes [2] float32 out of all_to_all #0" in second.message


# -- the wrong group ---------------------------------------------------------------------------------------------------


def test_communication_outside_the_group_that_is_the_ring_is_named():
    """On the default group, and on another; groups within the ring, and making new ones, are allowed."""

    def program():
        rank = dist.get_rank()
        ring, pair = dist.new_group([1, 2, 3]), dist.new_group([0, 1])
        if rank == 1:
            with only_group(ring):
                dist.send(torch.ones(1), 2)  # default
                dist.all_reduce(torch.ones(1), group=pair)  # pair
                dist.barrier(group=ring)
        elif rank == 2:
            dist.recv(torch.ones(1), 1)
            with only_group(ring):
                within = dist.new_group([2, 3], use_local_synchronization=True)
                dist.barrier(group=within)
                dist.barrier(group=ring)
        elif rank == 3:
            dist.barrier(group=dist.new_group([2, 3], use_local_synchronization=True))
            dist.barrier(group=ring)
        else:
            dist.all_reduce(torch.ones(1), group=pair)

    default, pair = line(program, "default"), line(program, "pair")
    assert watched(program, 4).hazards == (
        Hazard(
            "wrong_group", 1, "send to rank 2, tag 0", default, default,
            f"rank 1 uses the default group where the ring is the group [1, 2, 3], for its send to rank 2, tag 0, "
            f"at {short(default)}",
        ),
        Hazard(
            "wrong_group", 1, "all_reduce(SUM) #0 of group [0, 1]", pair, pair,
            f"rank 1 uses the group [0, 1] where the ring is the group [1, 2, 3], for its all_reduce(SUM) #0 of group "
            f"[0, 1], at {short(pair)}",
        ),
    )  # fmt: skip


def test_only_group_does_nothing_unwatched_and_ends_where_it_ends():
    """In a run that is not watched, outside any run, and after the block."""

    def program():
        ring = dist.new_group([1])
        if dist.get_rank() == 1:
            with only_group(ring):
                dist.barrier(group=ring)
        dist.barrier()

    assert watched(program).hazards == ()
    assert unwatched(program).failure is None
    with only_group(None):
        pass


# -- no false alarms ---------------------------------------------------------------------------------------------------


def exchanges_without_fault():
    """All that is allowed while messages are under way, and looks like what is not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    table = torch.arange(40.0).reshape(5, 8) + 100 * rank
    table.requires_grad_()
    block = table.detach()[1]
    arriving = torch.zeros(4, 8)
    works = [
        dist.isend(block, right, tag=1),
        dist.isend(block, right, tag=2),  # the same memory twice
        dist.irecv(arriving[1], left, tag=1),
        dist.irecv(arriving[3], left, tag=2),
    ]
    # What is being sent may be read, and its neighbours written.
    loss = (table * table.sum(0)).sum() + block.clone().sum()
    loss.backward()
    with torch.no_grad():
        table[2:] += 1
        table.data[0].zero_()
    # What is being received may be looked at, not into.
    shapes = arriving[1].shape, arriving.view(2, 2, 8).stride(), arriving.T.detach().is_contiguous()
    fresh = torch.empty_like(arriving), torch.zeros_like(arriving[3]), arriving.new_ones(3)
    # Rows in between belong to nobody.
    arriving[0] = 5
    arriving[torch.tensor([0, 2])] = 6
    picked = arriving.index_select(0, torch.tensor([2])).sum() + arriving[::2].sum()
    del block
    for work in works:
        work.wait()
    assert arriving[1].equal(arriving[3])
    arriving.zero_()
    return shapes, fresh, picked, table.grad


def collectives_without_fault():
    """Collectives of torch's own making and by hand, in place, in columns, and into slices of their input."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.full((3,), float(rank))
    work = dist.all_reduce(total, async_op=True)
    whole = torch.empty(size, 3)
    gathering = dist.all_gather(list(whole.T.reshape(3, size).unbind(1)), torch.ones(3), async_op=True)
    columns = torch.empty(2, 2 * size)
    parts = [columns[:, at::size] for at in range(size)]
    gathering_columns = dist.all_gather(parts, torch.ones(2, 2), async_op=True)
    whole.view(-1)
    for one in (work, gathering, gathering_columns):
        one.wait()
    in_place = torch.empty(size, 2)
    in_place[rank] = rank
    dist.all_gather_into_tensor(in_place, in_place[rank])
    x = torch.ones(size * 2, requires_grad=True)
    gathered = functional.all_gather_tensor_autograd(x * 2, 0, dist.group.WORLD)
    scattered = functional.reduce_scatter_tensor(x.detach(), "sum", 0, dist.group.WORLD)
    reduced = functional.all_reduce(gathered.detach(), "sum", dist.group.WORLD)
    (grad,) = torch.autograd.grad((gathered * gathered).sum() + 0 * (reduced.sum() + scattered.sum()), x)
    uneven = torch.ones(size * (rank + 1), 2)
    sizes = [at + 1 for at in range(size)]
    dist.all_to_all_single(torch.empty(sum(sizes), 2), uneven, sizes, [rank + 1] * size)
    dist.barrier()
    return total, in_place, grad


def waits_in_other_ways():
    """By asking, through a future, in blocking calls, under a mode of its own, and in inference mode."""
    rank, right, left = dist.get_rank(), other(), other()
    block, arriving = torch.ones(4), torch.empty(4)
    sending, receiving = dist.isend(block, right), dist.irecv(arriving, left)
    while not receiving.is_completed():
        pass
    total = arriving.sum()
    sending.get_future().wait()
    block.zero_()
    with FlopCounterMode(display=False), torch.inference_mode():
        sending, receiving = dist.isend(torch.ones(4), right), dist.irecv(arriving, left)
        squared = torch.ones(3, 3) @ torch.ones(3, 3)
        sending.wait()
        receiving.wait()
        total = total + arriving.sum()
    sending, receiving = dist.isend(torch.ones(4), right), dist.irecv(arriving, left)
    with FlopCounterMode(display=False):
        sending.wait()
        receiving.wait()
    if rank:
        dist.send(arriving, 0)
        dist.recv(arriving, 0)
    else:
        dist.recv(arriving, 1)
        dist.send(arriving, 1)
    return total, squared


@pytest.mark.parametrize(
    ("program", "world_size"),
    [*((exchanges_without_fault, size) for size in (2, 3)), *((collectives_without_fault, size) for size in (1, 2, 3))],
)
def test_correct_programs_have_no_hazards(program, world_size):
    """Whatever the schedule, the transport and the delays, and with memory counted as well."""
    for seed, conditions in everywhere():
        for watch in (True, "memory"):
            run = watched(program, world_size, seed=seed, conditions=conditions, watch=watch)
            assert [hazard.message for hazard in run.hazards] == []


def test_every_way_of_waiting_counts():
    """Whatever the schedule, the transport and the delays, and with memory counted as well."""
    for seed, conditions in everywhere():
        for watch in (True, "memory"):
            run = watched(waits_in_other_ways, 2, seed=seed, conditions=conditions, watch=watch)
            assert [hazard.message for hazard in run.hazards] == []


def test_a_watched_run_leaves_no_mode_behind_and_repeats_itself():
    """Not on the thread of the caller; and hazards come in the same order each time."""
    for conditions in (None, Conditions("rendezvous", "some")):
        runs = [watched(zeroes_what_it_sends, seed=3, conditions=conditions) for _ in range(2)]
        assert runs[0].hazards == runs[1].hazards
        assert runs[0].traffic == runs[1].traffic
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_an_unwatched_run_reports_nothing():
    """Neither hazards nor traffic nor memory."""
    run = unwatched(zeroes_what_it_sends)
    assert (run.hazards, run.traffic, run.memory) == ((), None, ())
