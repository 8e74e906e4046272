"""Hazards: each is seen whatever the schedule, named by rank, operation and line; correct programs have none."""

import pytest
import torch
import torch.distributed as dist
from watched_runs import by_rank, everywhere, line, other, short, watched, zeroes_what_it_sends

from ringverify.worlds.watch.hazards import Hazard

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::FutureWarning")]


def changes_what_it_sends_through_numpy():
    """Writes to the memory of a send where torch does not see it."""
    block, arriving = torch.arange(6.0), torch.empty(6)
    sending = dist.isend(block, other())  # post
    block.numpy()[2] = -1
    dist.recv(arriving, other())
    sending.wait()  # act
    return arriving


class ChangesInBackward(torch.autograd.Function):
    """Reuses the buffer of a send in the middle of a backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        block, arriving = grad.clone(), torch.empty_like(grad)
        sending = dist.isend(block, other())  # post
        torch.mul(arriving.fill_(1), 3, out=block)  # act
        dist.recv(arriving, other())
        sending.wait()
        return arriving


def changes_in_backward():
    """A backward pass."""
    x = torch.arange(6.0, requires_grad=True)
    (grad,) = torch.autograd.grad(ChangesInBackward.apply(x), x, torch.arange(6.0))
    return grad


@pytest.mark.parametrize(
    ("program", "source", "at"),
    [
        (zeroes_what_it_sends, zeroes_what_it_sends, "at"),
        (changes_what_it_sends_through_numpy, changes_what_it_sends_through_numpy, "found at"),
        (changes_in_backward, ChangesInBackward.backward, "at"),
    ],
    ids=["through a view", "through numpy", "in a backward pass"],
)
def test_a_send_whose_buffer_changes_is_named_with_both_lines(program, source, at):
    """By either rank and on every transport; the values that arrive are right all the same."""
    post, act = line(source, "post"), line(source, "act")
    for seed, conditions in everywhere():
        run = watched(program, seed=seed, conditions=conditions)
        assert all(torch.equal(result, torch.arange(6.0)) for result in run.results)
        for rank in range(2):
            operation = f"send to rank {1 - rank}, tag 0"
            message = (
                f"rank {rank} changed the buffer of its {operation} (posted at {short(post)}) before it completed, "
                f"{at} {short(act)}"
            )
            assert by_rank(run, rank) == [Hazard("send_changed", rank, operation, act, post, message)]


def test_what_an_asynchronous_collective_reads_must_not_change():
    """The input of an `all_gather`."""

    def program():
        block, gathered = torch.ones(3), [torch.empty(3) for _ in range(2)]
        work = dist.all_gather(gathered, block, async_op=True)  # post
        block += 1  # act
        work.wait()

    run = watched(program)
    assert [hazard.message for hazard in by_rank(run, 1)] == [
        f"rank 1 changed the buffer of its all_gather #0 of group [0, 1] (posted at {short(line(program, 'post'))}) "
        f"before it completed, at {short(line(program, 'act'))}"
    ]


# -- a receive's buffer is touched before the receive completes --------------------------------------------------------


def receives(touch):
    """A program that does something to what it receives, too early."""

    def program():
        block, whole = torch.arange(6.0), torch.zeros(3, 6)
        arriving = whole[1]
        works = [dist.isend(block, other()), dist.irecv(arriving, other(), tag=0)]  # post
        touch(whole, arriving)
        for work in works:
            work.wait()
        return arriving

    return program


def reads_it(whole, arriving):
    """Reads the buffer itself."""
    return arriving.sum()  # act


def reads_it_in_passing(whole, arriving):
    """Reads memory of which the buffer is a part, inside a list."""
    return torch.cat([torch.ones(2, 6), whole.T.T])  # act


def asks_whether_it_is_there(whole, arriving):
    """Reads one element."""
    return arriving[3].item() > 0  # act


def writes_to_it(whole, arriving):
    """Writes, and does not read."""
    arriving.fill_(1)  # act


def reads_and_writes_it(whole, arriving):
    """Both in one operation: told once, as writing."""
    whole.add_(1)  # act


@pytest.mark.parametrize("touch", [reads_it, reads_it_in_passing, asks_whether_it_is_there])
def test_a_buffer_that_is_read_before_its_message_came_is_named_with_both_lines(touch):
    """Even if the message has arrived by then: nobody has waited for it."""
    program = receives(touch)
    post, act = line(program, "post"), line(touch, "act")
    for seed, conditions in everywhere():
        run = watched(program, seed=seed, conditions=conditions)
        for rank in range(2):
            operation = f"receive from rank {1 - rank}, tag 0"
            message = (
                f"rank {rank} read the buffer of its {operation} (posted at {short(post)}) before it completed, "
                f"at {short(act)}"
            )
            assert by_rank(run, rank) == [Hazard("receive_read", rank, operation, act, post, message)]


@pytest.mark.parametrize("touch", [writes_to_it, reads_and_writes_it])
def test_a_buffer_that_is_written_before_its_message_came_is_named_with_both_lines(touch):
    """The message would win or lose, as the transport has it."""
    program = receives(touch)
    post, act = line(program, "post"), line(touch, "act")
    run = watched(program)
    for rank in range(2):
        operation = f"receive from rank {1 - rank}, tag 0"
        message = (
            f"rank {rank} wrote to the buffer of its {operation} (posted at {short(post)}) before it completed, "
            f"at {short(act)}"
        )
        assert by_rank(run, rank) == [Hazard("receive_changed", rank, operation, act, post, message)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_a_buffer_written_through_numpy_or_by_pointer_is_found_when_its_receive_is_waited_for(dtype):
    """The poison in it is gone."""

    def program():
        arriving = torch.zeros(4, dtype=dtype)
        works = [dist.isend(torch.ones(4, dtype=dtype), other()), dist.irecv(arriving, other())]
        arriving.view(torch.uint8).numpy()[:] = 0
        for work in works:
            work.wait()  # act
        return arriving

    run = watched(program)
    assert all(torch.equal(result, torch.ones(4, dtype=dtype)) for result in run.results)
    assert [(hazard.kind, hazard.place) for hazard in by_rank(run, 0)] == [("receive_changed", line(program, "act"))]


def test_what_is_read_too_early_is_poison():
    """NaN in floating point, a number far from zero in integers, so that results are wrong too."""

    def program():
        buffers = [torch.zeros(3, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.int64, torch.int32)]
        works = [dist.irecv(buffer, other(), tag=at) for at, buffer in enumerate(buffers)]
        early = [buffer.tolist() for buffer in buffers]  # a list is made without asking torch
        works += [dist.isend(torch.ones_like(buffer), other(), tag=at) for at, buffer in enumerate(buffers)]
        for work in works:
            work.wait()
        return early

    for floats, halves, *integers in watched(program).results:
        assert all(number != number for number in [*floats, *halves])
        assert all(number < -(10**9) for numbers in integers for number in numbers)


# -- buffers in flight overlap -----------------------------------------------------------------------------------------


def receives_into_what_it_sends():
    """A ring with one buffer, on rank 1."""
    block = torch.ones(6)
    arriving = block[2:] if dist.get_rank() else torch.empty(4)
    works = [dist.isend(block[:4], other())]  # first
    works.append(dist.irecv(arriving, other()))  # second
    for work in works:
        work.wait()


def test_a_receive_into_memory_that_is_being_sent_is_named_with_both_lines():
    """Whatever the schedule."""
    first, second = (line(receives_into_what_it_sends, mark) for mark in ("first", "second"))
    for seed, conditions in everywhere():
        run = watched(receives_into_what_it_sends, seed=seed, conditions=conditions)
        message = (
            f"rank 1 receives into memory that its send to rank 0, tag 0 (posted at {short(first)}) is still reading, "
            f"with its receive from rank 0, tag 0, at {short(second)}"
        )
        assert run.hazards == (Hazard("overlap", 1, "receive from rank 0, tag 0", second, first, message),)
        assert run.hazards[0].cause == "a buffer is received into while a send of it is in flight"


def test_memory_that_ranks_share_is_named_first():
    """Whatever else seems to be done to it may have been done by the other rank."""
    spare = torch.empty(4)

    def program():
        works = [dist.irecv(spare, other()), dist.isend(torch.ones(4), other())]  # act
        for work in works:
            work.wait()

    place = line(program, "act")
    for seed, conditions in everywhere():
        first, *_ = watched(program, seed=seed, conditions=conditions).hazards
        one, another = first.rank, 1 - first.rank
        assert first.kind == "shared"
        assert first.message == (
            f"rank {one} receives into memory that rank {another}'s receive from rank {one}, tag 0 (posted at "
            f"{short(place)}) is using, with its receive from rank {another}, tag 0, at {short(place)}"
        )
        assert first.cause.endswith("declare processes=True")


def test_memory_that_ranks_only_send_from_may_be_shared():
    """A constant of a module."""
    spare = torch.ones(4)

    def program():
        works = [dist.isend(spare, other()), dist.irecv(torch.empty(4), other())]
        for work in works:
            work.wait()

    assert watched(program).hazards == ()


def test_two_receives_and_a_send_in_one_place_are_named():
    """A receive into memory that awaits another one, and a send of memory that awaits a message."""

    def program():
        block = torch.zeros(4)
        works = [dist.irecv(block, other(), tag=1), dist.irecv(block[:2], other(), tag=2)]
        works += [dist.isend(block[3:], other(), tag=3), dist.irecv(torch.empty(1), other(), tag=3)]
        works += [dist.isend(torch.ones(size), other(), tag=tag) for tag, size in ((1, 4), (2, 2))]
        for work in works:
            work.wait()

    hazards = by_rank(watched(program), 0)
    assert [hazard.cause for hazard in hazards] == [
        "a buffer is received into while a receive into it is in flight",
        "a buffer is sent while a receive into it is in flight",
    ]
    messages = [hazard.message.split(" (")[0] for hazard in hazards]
    assert messages == [
        "rank 0 receives into memory that its receive from rank 1, tag 1",
        "rank 0 sends memory that its receive from rank 1, tag 1",
    ]


def test_a_collective_that_receives_twice_into_the_same_memory_is_named():
    """`[buffer] * world_size`, a list of one tensor."""

    def program():
        dist.all_gather([torch.empty(3)] * 2, torch.ones(3))  # act

    place = line(program, "act")
    message = f"rank 1 receives twice into the same memory with its all_gather #0 of group [0, 1], at {short(place)}"
    assert by_rank(watched(program), 1) == [
        Hazard("overlap", 1, "all_gather #0 of group [0, 1]", place, place, message)
    ]
