"""Collectives of the simulated world: each one's value, on data where no two elements are alike."""

import operator
from functools import reduce as fold

import pytest
import torch
import torch.distributed as dist
from simulated_runs import failure, results

pytestmark = [pytest.mark.timeout(30), pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")]


def own(*shape: int, rank: int | None = None) -> torch.Tensor:
    """This rank's data: consecutive numbers from 100 times the rank."""
    rank = dist.get_rank() if rank is None else rank
    return (torch.arange(torch.Size(shape).numel()) + 100 * rank).reshape(shape).float()


def everyone(world_size: int, *shape: int) -> list[torch.Tensor]:
    """The data of all ranks."""
    return [own(*shape, rank=rank) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_all_gather_collects_every_rank_in_order(world_size):
    """As a list, concatenated, stacked, and as objects."""

    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        pieces = [torch.empty(2, 3) for _ in range(size)]
        dist.all_gather(pieces, own(2, 3))
        concatenated, stacked = torch.empty(2 * size, 3), torch.empty(size, 2, 3)
        dist.all_gather_into_tensor(concatenated, own(2, 3))
        dist.all_gather_into_tensor(stacked, own(2, 3))
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
        return pieces, concatenated, stacked, objects

    expected = everyone(world_size, 2, 3)
    for pieces, concatenated, stacked, objects in results(program, world_size):
        assert torch.equal(torch.stack(pieces), torch.stack(expected))
        assert torch.equal(concatenated, torch.cat(expected))
        assert torch.equal(stacked, torch.stack(expected))
        assert objects == [{"rank": rank, "text": "x" * rank} for rank in range(world_size)]


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("SUM", torch.add),
        ("PRODUCT", torch.mul),
        ("MAX", torch.maximum),
        ("MIN", torch.minimum),
        ("BAND", operator.and_),
        ("BOR", operator.or_),
        ("BXOR", operator.xor),
    ],
)
def test_all_reduce_folds_with_each_operator(name, meaning):
    """On int64, where every operator has a meaning."""

    def data(rank: int) -> torch.Tensor:
        return torch.tensor([[3, 5], [6 + rank, 9 - rank]]) * (rank + 1)

    def program():
        tensor = data(dist.get_rank())
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        return tensor

    expected = fold(meaning, [data(rank) for rank in range(3)])
    assert all(torch.equal(tensor, expected) for tensor in results(program, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_an_average_divides_the_sum(dtype):
    """In floating point, complex included."""

    def program():
        tensor = own(4).to(dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG if not dtype.is_complex else dist.ReduceOp.SUM)
        return tensor

    expected = (own(4, rank=0) + own(4, rank=1)).to(dtype) / (1 if dtype.is_complex else 2)
    assert all(torch.equal(tensor, expected) for tensor in results(program, 2))


def test_an_average_of_integers_is_refused_as_gloo_refuses_it():
    """Nothing is rounded behind anybody's back."""

    def program():
        dist.all_reduce(torch.tensor([1, 2]), op=dist.ReduceOp.AVG)

    assert "all_reduce(AVG) #0 of group [0, 1]: result type Float can't be cast" in failure(program, 2).message


def test_a_sum_of_booleans_is_an_or():
    """And a product an and."""

    def program():
        some, every = torch.tensor([dist.get_rank() == 0, False]), torch.tensor([dist.get_rank() == 0, True])
        dist.all_reduce(some)
        dist.all_reduce(every, op=dist.ReduceOp.PRODUCT)
        return some.tolist(), every.tolist()

    assert results(program, 2) == [([True, False], [False, True])] * 2


def test_sums_in_low_precision_are_added_in_the_order_of_ranks():
    """So a run repeats: 256 + 1 + 1 in bfloat16 is 256, and 1 + 1 + 256 is 258."""

    def program(values):
        tensor = torch.tensor([values[dist.get_rank()]], dtype=torch.bfloat16)
        dist.all_reduce(tensor)
        return tensor.item()

    assert results(lambda: program([256.0, 1.0, 1.0]), 3) == [256.0] * 3
    assert results(lambda: program([1.0, 1.0, 256.0]), 3) == [258.0] * 3


def test_reduce_gives_the_sum_to_its_root_and_leaves_the_others_alone():
    """Root 1 of 3."""

    def program():
        tensor = own(3)
        dist.reduce(tensor, 1)
        return tensor

    found = results(program, 3)
    assert torch.equal(found[1], sum(everyone(3, 3)))
    assert torch.equal(found[0], own(3, rank=0))
    assert torch.equal(found[2], own(3, rank=2))


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(world_size):
    """From a list, from a concatenation, from a stack; and the largest instead of the sum."""

    def program():
        size = dist.get_world_size()
        listed, joined, stacked, largest = (torch.empty(2, 3) for _ in range(4))
        dist.reduce_scatter(listed, [own(2, 3) + 7 * at for at in range(size)])
        dist.reduce_scatter_tensor(joined, own(2 * size, 3))
        dist.reduce_scatter_tensor(stacked, own(size, 2, 3))
        dist.reduce_scatter_tensor(largest, own(2 * size, 3), op=dist.ReduceOp.MAX)
        return listed, joined, stacked, largest

    total = sum(everyone(world_size, world_size, 2, 3))
    for rank, (listed, joined, stacked, largest) in enumerate(results(program, world_size)):
        assert torch.equal(listed, sum(one + 7 * rank for one in everyone(world_size, 2, 3)))
        assert torch.equal(joined, total[rank])
        assert torch.equal(stacked, total[rank])
        assert torch.equal(largest, own(world_size, 2, 3, rank=world_size - 1)[rank])


def test_broadcast_overwrites_with_the_roots_data():
    """Tensors and objects, by global rank and by group rank."""

    def program():
        tensor, again = own(2, 2), own(2, 2)
        dist.broadcast(tensor, 2)
        dist.broadcast(again, group_src=1)
        objects = [dist.get_rank(), "x" * (3 + dist.get_rank())]
        dist.broadcast_object_list(objects, src=1)
        return tensor, again, objects

    for tensor, again, objects in results(program, 3):
        assert torch.equal(tensor, own(2, 2, rank=2))
        assert torch.equal(again, own(2, 2, rank=1))
        assert objects == [1, "xxxx"]


def test_gather_and_scatter_have_a_root():
    """Gather to 1, scatter from 2; objects too."""

    def program():
        rank = dist.get_rank()
        pieces = [torch.empty(2) for _ in range(3)] if rank == 1 else None
        dist.gather(own(2), pieces, dst=1)
        mine = torch.empty(2)
        dist.scatter(mine, [own(2) + 10 * at for at in range(3)] if rank == 2 else None, src=2)
        objects = [None] * 3 if rank == 0 else None
        dist.gather_object(f"from {rank}", objects)
        given = [None]
        dist.scatter_object_list(given, ["a", "b", "c"] if rank == 0 else None)
        return pieces, mine, objects, given

    found = results(program, 3)
    assert torch.equal(torch.stack(found[1][0]), torch.stack(everyone(3, 2)))
    for rank in range(3):
        assert torch.equal(found[rank][1], own(2, rank=2) + 10 * rank)
        assert found[rank][3] == ["abc"[rank]]
    assert found[0][2] == ["from 0", "from 1", "from 2"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_to_all_transposes_ranks_and_pieces(world_size):
    """As lists, of different shapes, and as one tensor in equal parts."""

    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        received = [torch.empty(rank + 1, at + 1) for at in range(size)]
        dist.all_to_all(received, [own(at + 1, rank + 1) + 10 * at for at in range(size)])
        single = torch.empty(2 * size, 3)
        dist.all_to_all_single(single, own(2 * size, 3))
        return received, single

    for rank, (received, single) in enumerate(results(program, world_size)):
        for source in range(world_size):
            assert torch.equal(received[source], own(rank + 1, source + 1, rank=source) + 10 * rank)
            part = own(world_size, 2, 3, rank=source)[rank]
            assert torch.equal(single[2 * source : 2 * source + 2], part)


def test_all_to_all_single_follows_its_split_sizes():
    """Uneven, with nothing between some pairs; sizes count rows."""
    sizes = [[1, 0, 3], [2, 2, 0], [0, 1, 1]]

    def program():
        rank = dist.get_rank()
        arriving = [row[rank] for row in sizes]
        output = torch.empty(sum(arriving), 2)
        dist.all_to_all_single(output, own(sum(sizes[rank]), 2), arriving, sizes[rank])
        return output

    for rank, output in enumerate(results(program, 3)):
        parts = [own(sum(sizes[at]), 2, rank=at).split(sizes[at])[rank] for at in range(3)]
        assert torch.equal(output, torch.cat(parts))


def test_collectives_of_nothing_are_collectives():
    """Zero-element tensors are gathered, reduced and exchanged; all ranks take part."""

    def program():
        nothing = torch.empty(0, 3)
        gathered = torch.empty(0, 3)
        dist.all_gather_into_tensor(gathered, nothing)
        dist.all_reduce(nothing)
        dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
        dist.all_to_all_single(torch.empty(0), torch.empty(0))
        dist.broadcast(nothing, 0)
        return gathered.shape

    assert results(program, 3) == [(0, 3)] * 3


def test_tensors_that_are_not_contiguous_are_reduced_and_gathered_by_element():
    """What gloo does right with strides is right here too."""

    def program():
        reduced = own(3, 2).t()
        dist.all_reduce(reduced)
        pieces = [torch.empty(3, 2).t() for _ in range(2)]
        dist.all_gather(pieces, own(3, 2).t())
        joined = torch.empty(3, 4).t()
        dist.all_gather_into_tensor(joined, own(3, 2).t())
        sent = own(3, 2).t()
        dist.broadcast(sent, 0)
        return reduced, pieces, joined, sent

    expected = [one.t() for one in everyone(2, 3, 2)]
    for reduced, pieces, joined, sent in results(program, 2):
        assert torch.equal(reduced, sum(expected))
        assert torch.equal(torch.stack(pieces), torch.stack(expected))
        assert torch.equal(joined, torch.cat(expected))
        assert torch.equal(sent, expected[0])


@pytest.mark.parametrize("at_output", [True, False])
def test_all_to_all_single_wants_contiguous_tensors(at_output):
    """Gloo refuses the input and silently scrambles the output; both are refused here."""

    def program():
        strided, plain = torch.empty(3, 2).t(), torch.empty(2, 3)
        dist.all_to_all_single(*((strided, plain) if at_output else (plain, strided)))

    said = "gloo silently moves the wrong elements" if at_output else "ValueError: Tensors must be contiguous"
    assert said in failure(program, 2).message


def test_a_barrier_lets_nobody_pass_before_all_have_come():
    """On every schedule; `monitored_barrier` too."""

    def program():
        came.append("before")
        dist.barrier()
        came.append("between")
        dist.monitored_barrier()
        came.append("after")

    for seed in range(5):
        came: list[str] = []
        results(program, 4, seed=seed)
        assert came == ["before"] * 4 + ["between"] * 4 + ["after"] * 4


def test_handles_of_asynchronous_collectives_can_be_waited_for_in_any_order():
    """`wait`, `is_completed`, `get_future`; nothing is written before."""

    def program():
        first, second = own(2), own(2)
        works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, op=dist.ReduceOp.MAX, async_op=True)]
        future = works[1].get_future()
        chained = future.then(lambda done: done.value()[0] + 1)
        unwritten = torch.equal(first, own(2)), torch.equal(second, own(2))
        assert works[1].wait()
        assert works[0].wait()
        assert works[0].is_completed()
        return unwritten, first, second, chained.wait(), future.wait(), works[0].get_future().wait(), works[0].result()

    total, largest = sum(everyone(3, 2)), own(2, rank=2)
    for unwritten, first, second, chained, future, other, result in results(program, 3):
        assert unwritten == (True, True)
        assert torch.equal(first, total)
        assert torch.equal(second, largest)
        assert torch.equal(chained, largest + 1)
        assert torch.equal(future[0], largest)
        assert torch.equal(other[0], total)
        assert torch.equal(result[0], total)


def test_a_future_that_is_waited_for_lets_the_others_run():
    """Without a wait on the handle before."""

    def program():
        tensor = own(2)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * 2).wait(), tensor

    for doubled, tensor in results(program, 3):
        assert torch.equal(tensor, sum(everyone(3, 2)))
        assert torch.equal(doubled, 2 * tensor)


def test_inputs_are_copied_when_a_collective_is_posted():
    """Overwriting the input of an asynchronous gather changes nothing."""

    def program():
        tensor, gathered = own(2), torch.empty(4)
        work = dist.all_gather_into_tensor(gathered, tensor, async_op=True)
        tensor.fill_(-1)
        work.wait()
        return gathered

    assert all(torch.equal(gathered, torch.cat(everyone(2, 2))) for gathered in results(program, 2))


def test_coalesced_collectives_are_those_of_their_parts():
    """torch's coalescing manager, and `all_reduce_coalesced`."""

    def program():
        from torch.distributed.distributed_c10d import _coalescing_manager

        one, two = own(2), own(3)
        with _coalescing_manager():
            dist.all_reduce(one)
            dist.all_reduce(two)
        gathered = [torch.empty(4), torch.empty(6)]
        with _coalescing_manager(async_ops=True) as works:
            for output, tensor in zip(gathered, (own(2), own(3)), strict=True):
                dist.all_gather_into_tensor(output, tensor)
        works.wait()
        scattered = [torch.empty(1), torch.empty(2)]
        with _coalescing_manager():
            for output, tensor in zip(scattered, (own(2), own(4)), strict=True):
                dist.reduce_scatter_tensor(output, tensor)
        three, four = own(2), own(2)
        dist.all_reduce_coalesced([three, four])
        return one, two, gathered, scattered, three

    for rank, (one, two, gathered, scattered, three) in enumerate(results(program, 2)):
        assert torch.equal(one, sum(everyone(2, 2)))
        assert torch.equal(two, sum(everyone(2, 3)))
        assert torch.equal(gathered[0], torch.cat(everyone(2, 2)))
        assert torch.equal(gathered[1], torch.cat(everyone(2, 3)))
        assert torch.equal(scattered[0], sum(everyone(2, 2))[rank : rank + 1])
        assert torch.equal(scattered[1], sum(everyone(2, 4))[2 * rank : 2 * rank + 2])
        assert torch.equal(three, one)


def test_ranks_with_tensors_of_different_sizes_are_told_all_sizes():
    """The collective, its group, and every rank's shape."""

    def program():
        dist.all_reduce(torch.empty(2 + dist.get_rank()))

    found = failure(program, 2)
    assert found.kind == "raised"
    assert (
        "RuntimeError: all_reduce(SUM) #0 of group [0, 1]: ranks bring tensors of different sizes or dtypes: "
        "group rank 0 has [2] float32, group rank 1 has [3] float32"
    ) in found.message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dist.all_gather([torch.empty(3), torch.empty(4)], torch.empty(3)), "an output is [4] float32"),
        (lambda: dist.all_gather([torch.empty(3)], torch.empty(3)), "1 entries for a group of 2"),
        (lambda: dist.all_gather_into_tensor(torch.empty(5), torch.empty(3)), "the input is [3] float32 on each of 2"),
        (lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.empty(5)), "the output is [3] float32 on each of 2"),
        (lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3)), "cannot be cut in 2 equal parts"),
        (lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3), [1, 2], [1, 1]), "do not add up to [3]"),
        (lambda: dist.scatter(torch.empty(1), [torch.empty(1)] if dist.get_rank() == 0 else None), "1 entries"),
    ],
)
def test_a_call_with_sizes_that_cannot_be_right_is_refused_at_once(call, message):
    """Where gloo refuses, and where a documented size is needed."""
    found = failure(call, 2)
    assert found.kind == "raised"
    assert message in found.message


def test_pieces_of_an_all_to_all_that_do_not_fit_are_an_error():
    """One rank sends two rows where the other has room for one."""

    def program():
        sizes = [1, 2] if dist.get_rank() == 0 else [2, 1]
        dist.all_to_all_single(torch.empty(3), torch.empty(3), [2, 1], sizes)

    assert "all_to_all_single: rank 0 has [2] float32 for what it receives, [1] float32" in failure(program, 2).message
