"""Messages between ranks of the simulated world."""

import pytest
import torch
import torch.distributed as dist
from simulated_runs import WORLD, failure, results

pytestmark = pytest.mark.timeout(30)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def numbers(*shape: int, start: float = 0) -> torch.Tensor:
    """Consecutive numbers, so that no two elements are alike."""
    return (torch.arange(torch.Size(shape).numel()) + start).reshape(shape).float()


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_ring_over_isend_and_irecv_brings_every_block_to_every_rank(world_size):
    """After h hops, rank r holds the block of rank r - h, for every world size."""

    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        block, seen = numbers(2, 3, start=100 * rank), []
        for _ in range(size):
            seen.append(block)
            arriving = torch.empty_like(block)
            sending = dist.isend(block, (rank + 1) % size)
            dist.irecv(arriving, (rank - 1) % size).wait()
            sending.wait()
            block = arriving
        return seen

    for rank, seen in enumerate(results(program, world_size)):
        for hop, block in enumerate(seen):
            assert torch.equal(block, numbers(2, 3, start=100 * ((rank - hop) % world_size)))


@pytest.mark.parametrize("world_size", [2, 5])
def test_a_batch_of_sends_and_receives_exchanges_both_neighbours(world_size):
    """`batch_isend_irecv` in both directions at once, with tags apart, whatever the order in the list."""

    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        right, left = torch.empty(3), torch.empty(3)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, left, (rank - 1) % size, tag=1),
                dist.P2POp(dist.irecv, right, (rank + 1) % size, tag=2),
                dist.P2POp(dist.isend, numbers(3, start=10 * rank), (rank + 1) % size, tag=1),
                dist.P2POp(dist.isend, numbers(3, start=10 * rank + 5), (rank - 1) % size, tag=2),
            ]
        )
        assert len(works) == 4
        for work in works:
            work.wait()
        return left, right

    for rank, (left, right) in enumerate(results(program, world_size)):
        assert torch.equal(left, numbers(3, start=10 * ((rank - 1) % world_size)))
        assert torch.equal(right, numbers(3, start=10 * ((rank + 1) % world_size) + 5))


def test_blocking_send_and_receive_pass_a_tensor_on():
    """`send` and `recv`; `recv` returns the sender's rank."""

    def program():
        rank = dist.get_rank()
        buffer = torch.empty(4)
        if rank:
            assert dist.recv(buffer, rank - 1) == rank - 1
        else:
            buffer = numbers(4)
        if rank < 2:
            dist.send(buffer + 1, rank + 1)
        return buffer

    assert [buffer.tolist() for buffer in results(program, 3)] == [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]


def test_a_receive_takes_the_message_of_its_tag():
    """Two messages with different tags, received in the other order."""

    def program():
        if dist.get_rank() == 0:
            dist.send(numbers(2), 1, tag=7)
            dist.send(numbers(2, start=5), 1, tag=3)
            return None
        three, seven = torch.empty(2), torch.empty(2)
        dist.recv(three, 0, tag=3)
        dist.recv(seven, 0, tag=7)
        return three.tolist(), seven.tolist()

    assert results(program, 2)[1] == ([5, 6], [0, 1])


@pytest.mark.parametrize("seed", range(4))
def test_messages_of_one_pair_and_tag_arrive_in_order(seed):
    """Ten messages, and receives posted before and after they are sent."""

    def program():
        if dist.get_rank() == 0:
            for at in range(10):
                dist.isend(torch.tensor([at]), 1)
            return None
        buffers = [torch.empty(1, dtype=torch.int64) for _ in range(10)]
        for work in reversed([dist.irecv(buffer, 0) for buffer in buffers]):
            work.wait()
        return [buffer.item() for buffer in buffers]

    assert results(program, 2, seed=seed)[1] == list(range(10))


def test_a_send_copies_its_data_when_it_is_posted():
    """Overwriting a tensor after its send does not change the message."""

    def program():
        if dist.get_rank() == 0:
            tensor = numbers(3)
            work = dist.isend(tensor, 1)
            tensor.fill_(-1)
            work.wait()
            return None
        buffer = torch.empty(3)
        dist.recv(buffer, 0)
        return buffer.tolist()

    assert results(program, 2)[1] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(3))
def test_a_receive_writes_nothing_before_it_is_waited_for(seed):
    """Who forgets to wait reads the old contents, on every schedule."""

    def program():
        rank = dist.get_rank()
        buffer = torch.full((2,), -1.0)
        work = dist.irecv(buffer, 1 - rank)
        dist.isend(numbers(2), 1 - rank)
        dist.barrier()
        before = buffer.tolist()
        work.wait()
        return before, buffer.tolist()

    assert results(program, 2, seed=seed) == [([-1, -1], [0, 1])] * 2


@pytest.mark.parametrize("seed", range(4))
def test_a_receive_from_anyone_takes_what_was_sent_first(seed):
    """`src=None`: every sender is received once, and named."""

    def program():
        rank = dist.get_rank()
        if rank:
            dist.send(torch.tensor([float(rank)]), 0)
            return None
        heard = []
        for _ in range(3):
            buffer = torch.empty(1)
            heard.append((dist.recv(buffer), buffer.item()))
        work = dist.irecv(torch.empty(1), group_src=2)
        assert not work.is_completed()
        return heard

    run = WORLD.run(lambda _: program(), None, world_size=4, seed=seed, deadline=20)
    assert sorted(run.results[0]) == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_a_receive_from_anyone_takes_the_oldest_message(order):
    """Senders that follow one another, before the receive is posted."""

    def program():
        for sender in order:
            if dist.get_rank() == sender:
                dist.send(torch.empty(1), 0)
            dist.barrier()
        if dist.get_rank() == 0:
            return tuple(dist.recv(torch.empty(1)) for _ in order)
        return None

    assert results(program, 4)[0] == order


def test_different_seeds_let_different_senders_be_first():
    """The order in which anyone's messages arrive is the seed's."""

    def program():
        if dist.get_rank():
            dist.send(torch.empty(1), 0)
            return None
        return tuple(dist.recv(torch.empty(1)) for _ in range(3))

    assert len({results(program, 4, seed=seed)[0] for seed in range(30)}) == 6


@pytest.mark.parametrize("ranks", [[1, 2], [0, 2], [1, 3]])
def test_ranks_of_a_message_are_global_unless_they_are_said_to_be_of_the_group(ranks):
    """`src` and `dst` are global ranks on an offset or strided group; `group_src` and `group_dst` are the group's."""

    def program():
        group = dist.new_group(ranks)
        rank = dist.get_rank()
        if rank not in ranks:
            return None
        place, size = dist.get_rank(group), dist.get_world_size(group)
        by_global, by_group = torch.empty(2), torch.empty(2)
        other = ranks[1 - place]
        dist.isend(numbers(2, start=10 * rank), other, group=group)
        assert dist.recv(by_global, other, group=group) == other
        dist.isend(numbers(2, start=10 * rank + 5), group=group, group_dst=1 - place)
        dist.irecv(by_group, group=group, group_src=1 - place).wait()
        return place, size, by_global.tolist(), by_group.tolist()

    found = results(program, 4)
    for place, rank in enumerate(ranks):
        other = ranks[1 - place]
        assert found[rank] == (place, 2, [10 * other, 10 * other + 1], [10 * other + 5, 10 * other + 6])


def test_a_group_rank_given_as_a_global_rank_is_refused():
    """Rank 0 is not in the group {1, 2}; torch says so."""

    def program():
        group = dist.new_group([1, 2])
        if dist.get_rank() == 1:
            dist.send(torch.empty(1), 0, group=group)
        elif dist.get_rank() == 2:
            dist.recv(torch.empty(1), 1, group=group)

    assert "rank 1 raised ValueError: Global rank 0 is not part of group" in failure(program, 3).message


def test_messages_of_two_groups_do_not_mix():
    """The same pair and tag on the world and on a group of the same ranks."""

    def program():
        group = dist.new_group([0, 1])
        if dist.get_rank() == 0:
            dist.isend(numbers(2), 1, group=group)
            dist.isend(numbers(2, start=5), 1)
            return None
        on_world, on_group = torch.empty(2), torch.empty(2)
        dist.recv(on_world, 0)
        dist.recv(on_group, 0, group=group)
        return on_world.tolist(), on_group.tolist()

    assert results(program, 2)[1] == ([5, 6], [0, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_message_keeps_every_bit_in_every_dtype(dtype):
    """All dtypes travel."""

    def program():
        tensor = (numbers(2, 3) - 2).to(dtype)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
            return tensor
        buffer = torch.zeros(2, 3).to(dtype)
        dist.recv(buffer, 0)
        return buffer

    sent, received = results(program, 2)
    assert sent.dtype == received.dtype == dtype
    assert torch.equal(sent.view(torch.uint8), received.view(torch.uint8))


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), ()])
def test_tensors_of_no_element_and_of_no_dimension_are_messages(shape):
    """An empty message is waited for like any other."""

    def program():
        rank = dist.get_rank()
        buffer = torch.full(shape, -1.0)
        work = dist.irecv(buffer, 1 - rank)
        dist.send(torch.full(shape, float(rank)), 1 - rank)
        work.wait()
        return buffer

    for rank, buffer in enumerate(results(program, 2)):
        assert torch.equal(buffer, torch.full(shape, 1.0 - rank))


def test_a_message_of_the_same_bytes_in_another_shape_or_dtype_is_received_as_bytes():
    """As transports do: the bytes are the message."""

    def program():
        if dist.get_rank() == 0:
            dist.send(numbers(2, 3), 1)
            dist.send(torch.tensor([1.0, 2.0]), 1)
            return None
        six, bits = torch.empty(6), torch.empty(2, dtype=torch.int32)
        dist.recv(six, 0)
        dist.recv(bits, 0)
        return six.tolist(), bits.view(torch.float32).tolist()

    assert results(program, 2)[1] == ([0, 1, 2, 3, 4, 5], [1.0, 2.0])


@pytest.mark.parametrize("size", [2, 4])
def test_a_message_that_does_not_fit_names_both_ranks_and_both_shapes(size):
    """Shorter and longer than the buffer."""

    def program():
        if dist.get_rank() == 0:
            dist.send(torch.empty(3), 1, tag=4)
        else:
            dist.recv(torch.empty(size), 0, tag=4)

    found = failure(program, 2)
    assert (found.kind, found.rank) == ("raised", 1)
    assert found.message == (
        f"rank 1 raised RuntimeError: rank 1 receives into [{size}] float32 ({4 * size} bytes), tag 4, "
        "but rank 0 sent [3] float32 (12 bytes)"
    )


@pytest.mark.parametrize("sender", [True, False])
def test_a_tensor_that_is_not_contiguous_is_refused_as_gloo_refuses_it(sender):
    """Neither sent nor received into."""

    def program():
        strided = torch.empty(3, 2).t()
        if dist.get_rank() == 0:
            dist.isend(strided if sender else torch.empty(6), 1)
        else:
            dist.irecv(torch.empty(6) if sender else strided, 0).wait()

    found = failure(program, 2)
    wanted = "RuntimeError: input tensor has to be contiguous: [2, 3] float32 with strides [1, 2]: pass .contiguous()"
    assert wanted in found.message


def test_a_view_into_a_larger_tensor_receives_in_its_place():
    """An offset, contiguous view; the rest is left alone."""

    def program():
        if dist.get_rank() == 0:
            dist.send(numbers(4, 2)[1:3], 1)
            return None
        whole = torch.full((5, 2), -1.0)
        dist.recv(whole[2:4], 0)
        return whole.tolist()

    assert results(program, 2)[1] == [[-1, -1], [-1, -1], [2, 3], [4, 5], [-1, -1]]


def test_a_receive_may_be_polled_until_it_is_complete():
    """`is_completed` lets the others run; when it says yes, the data is there without a wait."""

    def program():
        if dist.get_rank() == 1:
            dist.barrier()
            dist.send(numbers(2), 0)
            return None
        buffer = torch.full((2,), -1.0)
        work = dist.irecv(buffer, 1)
        before = work.is_completed()
        dist.barrier()
        while not work.is_completed():
            pass
        return before, buffer.tolist(), work.is_success()

    assert results(program, 2)[0] == (False, [0, 1], True)


def test_object_lists_travel():
    """`send_object_list` and `recv_object_list`."""

    def program():
        if dist.get_rank() == 0:
            dist.send_object_list([{"a": 1}, "text"], 1)
            return None
        objects = [None, None]
        dist.recv_object_list(objects, 0)
        return objects

    assert results(program, 2)[1] == [{"a": 1}, "text"]


def test_what_was_never_received_is_kept_for_whoever_asks():
    """A message without a receive and a receive without a message, with their ends, and none in the next run."""

    def program(argument):
        group = dist.new_group([1, 2])
        if dist.get_rank() == 1:
            dist.send(torch.empty(2, 3), 2, group=group, tag=9)
        if dist.get_rank() == 0:
            dist.irecv(torch.empty(4, dtype=torch.int64))

    run = WORLD.run(program, None, world_size=3, seed=0, deadline=20)
    assert run.failure is None
    assert [one.describe() for one in run.unreceived] == [
        "a receive that got no message: from any rank to rank 0, tag 0, group [0, 1, 2], [4] int64",
        "a message that nobody received: from rank 1 to rank 2, tag 9, group [1, 2], [2, 3] float32",
    ]
    assert WORLD.run(lambda _: None, None, world_size=3, seed=0, deadline=20).unreceived == ()


def test_a_rank_that_does_not_exist_cannot_be_sent_to():
    """The group and the rank are named."""

    def program():
        dist.isend(torch.empty(1), 5)

    assert "group rank 5 is not in group [0, 1] of 2 ranks" in failure(program, 2).message
