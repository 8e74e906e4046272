"""Groups, meshes, functional collectives and autograd inside ranks of the simulated world."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from simulated_runs import failure, results
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

pytestmark = [pytest.mark.timeout(30), pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")]


def own(*shape: int, rank: int | None = None) -> torch.Tensor:
    """This rank's data: consecutive numbers from 100 times the rank."""
    rank = dist.get_rank() if rank is None else rank
    return (torch.arange(torch.Size(shape).numel()) + 100 * rank).reshape(shape).float()


def hop(tensor: torch.Tensor, step: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Send to the neighbour `step` places on, receive from the one as far back."""
    size, place = dist.get_world_size(group), dist.get_rank(group)
    arriving = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    sending = dist.isend(tensor.contiguous(), group=group, group_dst=(place + step) % size)
    dist.irecv(arriving, group=group, group_src=(place - step) % size).wait()
    sending.wait()
    return arriving


class Shift(torch.autograd.Function):
    """A hop whose gradient travels back."""

    @staticmethod
    def forward(ctx, tensor, step):
        """Pass on."""
        ctx.step = step
        return hop(tensor, step)

    @staticmethod
    def backward(ctx, gradient):
        """Pass back."""
        return Shift.apply(gradient, -ctx.step), None


def test_each_rank_finds_torch_distributed_initialised():
    """Rank, size, backend, and the names of the world."""

    def program():
        assert dist.is_initialized()
        assert dist.is_available()
        assert dist.get_backend() == "gloo"
        assert "cpu:gloo" in dist.get_backend_config()
        assert dist.group.WORLD is not None
        assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(dist.get_world_size()))
        assert dist.get_group_rank(dist.group.WORLD, 1) == dist.get_global_rank(dist.group.WORLD, 1) == 1
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size(), dist.group.WORLD.rank(), dist.group.WORLD.size()

    assert results(program, 3) == [(0, 3, 0, 3), (1, 3, 1, 3), (2, 3, 2, 3)]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("ranks", [[0, 1], [2, 3, 4], [1, 3], [0, 2, 4], [4, 0], [3]])
def test_collectives_and_rings_stay_within_offset_and_strided_groups(ranks, local):
    """Members get the group's answer; the others are told that they are no members."""

    def program():
        group = dist.new_group(ranks, use_local_synchronization=local)
        if dist.get_rank() not in ranks:
            assert group is None or group == dist.GroupMember.NON_GROUP_MEMBER
            assert dist.get_rank(group) == (-1 if group is not None else dist.get_rank())
            return None
        total = own(2)
        dist.all_reduce(total, group=group)
        dist.broadcast(sent := own(2), src=max(ranks), group=group)
        arrived = hop(own(2), 1, group) if len(ranks) > 1 else own(2)  # gloo refuses a message to oneself
        return dist.get_rank(group), dist.get_process_group_ranks(group), total, sent, arrived

    found = results(program, 5)
    members = sorted(ranks)
    for rank in range(5):
        if rank not in ranks:
            assert found[rank] is None
            continue
        place, listed, total, sent, arrived = found[rank]
        assert (place, listed) == (members.index(rank), members)
        assert torch.equal(total, sum(own(2, rank=one) for one in members))
        assert torch.equal(sent, own(2, rank=max(ranks)))
        assert torch.equal(arrived, own(2, rank=members[place - 1]))


def test_two_rings_of_different_lengths_run_side_by_side():
    """Groups {0, 2, 4} and {1, 3}, with as many hops as each has ranks."""

    def program():
        groups = [dist.new_group([0, 2, 4]), dist.new_group([1, 3])]
        group = groups[dist.get_rank() % 2]
        block = own(2)
        for _ in range(dist.get_world_size(group)):
            block = hop(block, 1, group)
        return block

    for seed in range(4):
        for rank, block in enumerate(results(program, 5, seed=seed)):
            assert torch.equal(block, own(2, rank=rank))


def test_a_group_may_be_destroyed_and_made_again():
    """The second has its own counters, and the world goes on."""

    def program():
        for _ in range(2):
            group = dist.new_group([0, 1])
            if dist.get_rank() < 2:
                dist.all_reduce(total := own(1), group=group)
                assert total.item() == 100
                dist.destroy_process_group(group)
        dist.barrier()

    results(program, 3)


def test_subgroups_by_size_and_by_enumeration_are_groups():
    """`new_subgroups` and `new_subgroups_by_enumeration`."""

    def program():
        mine, _ = dist.new_subgroups(2)
        dist.all_reduce(by_size := own(1), group=mine)
        other, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        dist.all_reduce(by_list := own(1), group=other)
        return by_size.item(), by_list.item()

    assert results(program, 4) == [(100, 200), (100, 400), (500, 200), (500, 400)]


def test_a_group_with_another_backends_name_is_a_group_all_the_same():
    """Code that asks for gloo by name, and a group of everyone."""

    def program():
        group = dist.new_group(backend="gloo", group_desc="mine")
        dist.all_reduce(total := own(1), group=group)
        return total.item(), dist.get_backend(group), group.group_desc

    assert results(program, 2) == [(100, "gloo", "mine")] * 2


def test_a_device_mesh_has_a_group_for_each_dimension():
    """A 2 × 3 mesh: rows are consecutive, columns strided; groups, ranks and coordinates are right."""

    def program():
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("data", "ring"))
        row, column = own(1), own(1)
        dist.all_reduce(row, group=mesh.get_group("ring"))
        dist.all_reduce(column, group=mesh["data"].get_group())
        arrived = hop(own(1), 1, mesh.get_group("ring"))
        flat = DeviceMesh("cpu", list(range(6)))
        dist.all_reduce(total := own(1), group=flat.get_group())
        return (
            mesh.get_coordinate(),
            mesh.get_local_rank("ring"),
            row.item(),
            column.item(),
            arrived.item(),
            total.item(),
        )

    for rank, (coordinate, place, row, column, arrived, total) in enumerate(results(program, 6)):
        first = rank // 3 * 3
        assert (list(coordinate), place) == ([rank // 3, rank % 3], rank % 3)
        assert row == 100 * (3 * first + 3)
        assert column == 100 * (2 * (rank % 3) + 3)
        assert arrived == 100 * (first + (rank - 1) % 3)
        assert total == 1500


def test_a_mesh_used_as_a_context_is_one_ranks_own():
    """torch keeps the stack of current meshes; ranks do not see one another's."""

    def program():
        if dist.get_rank() == 0:
            with DeviceMesh("cpu", [0, 1]):
                dist.barrier()
                return dist.barrier()
        mesh = DeviceMesh("cpu", [0, 1])
        dist.barrier()
        with mesh:
            return dist.barrier()

    results(program, 2)


def test_functional_collectives_resolve_the_ranks_own_group():
    """Gather, reduce, reduce-scatter, all-to-all, permute and broadcast, by group and by mesh."""

    def program():
        world, mesh = dist.group.WORLD, init_device_mesh("cpu", (3,))
        gathered = functional.all_gather_tensor(own(2), 0, world)
        reduced = functional.all_reduce(own(2), "sum", world)
        averaged = functional.all_reduce(own(2), "avg", (mesh, 0))
        scattered = functional.reduce_scatter_tensor(own(3, 2), "sum", 0, world)
        exchanged = functional.all_to_all_single(own(3, 2), None, None, world)
        shifted = functional.permute_tensor(own(2), [1, 2, 0], world)
        sent = functional.broadcast(own(2), 1, world)
        several = functional.all_reduce_coalesced([own(1), own(2)], "sum", world)
        every = [gathered, reduced, averaged, scattered, exchanged, shifted, sent, *several]
        return [one.wait() if isinstance(one, functional.AsyncCollectiveTensor) else one for one in every]

    all_of = [own(2, rank=rank) for rank in range(3)]
    total = sum(own(3, 2, rank=rank) for rank in range(3))
    for rank, found in enumerate(results(program, 3)):
        gathered, reduced, averaged, scattered, exchanged, shifted, sent, one, two = found
        assert torch.equal(gathered, torch.cat(all_of))
        assert torch.equal(reduced, sum(all_of))
        assert torch.equal(averaged, sum(all_of) / 3)
        assert torch.equal(scattered, total[rank : rank + 1])
        assert torch.equal(exchanged, torch.stack([own(3, 2, rank=source)[rank] for source in range(3)]))
        assert torch.equal(shifted, all_of[rank - 1])
        assert torch.equal(sent, all_of[1])
        assert torch.equal(one, sum(own(1, rank=rank) for rank in range(3)))
        assert torch.equal(two, sum(all_of))


def test_functional_collectives_carry_gradients():
    """torch's own autograd of a gather is a reduce-scatter, run in backward."""

    def program():
        tensor = own(2).requires_grad_()
        gathered = functional.all_gather_tensor_autograd(tensor, 0, dist.group.WORLD)
        (gathered * own(6)).sum().backward()
        return tensor.grad

    weights = sum(own(3, 2, rank=rank) for rank in range(3))
    for rank, gradient in enumerate(results(program, 3)):
        assert torch.equal(gradient, weights[rank])


def test_differentiable_collectives_of_torch_carry_gradients():
    """`torch.distributed.nn.functional`."""

    def program():
        from torch.distributed.nn import functional as differentiable

        tensor = own(2).requires_grad_()
        total = differentiable.all_reduce(tensor)
        pieces = differentiable.all_gather(tensor)
        (total.sum() * 2 + pieces[0].sum() * 5).backward()
        return total.detach(), torch.stack([piece.detach() for piece in pieces]), tensor.grad

    for rank, (total, pieces, gradient) in enumerate(results(program, 2)):
        assert torch.equal(total, own(2, rank=0) + own(2, rank=1))
        assert torch.equal(pieces, torch.stack([own(2, rank=0), own(2, rank=1)]))
        assert torch.equal(gradient, torch.full((2,), 4.0 + (10.0 if rank == 0 else 0.0)))


@pytest.mark.parametrize("world_size", [2, 4])
def test_backward_communicates_inside_its_rank(world_size):
    """Three hops with a loss at each: the gradient is what one process computes."""

    def program():
        leaf = own(3).requires_grad_()
        block, loss = leaf, torch.zeros(())
        for step in range(3):
            block = Shift.apply(block, 1)
            loss = loss + ((step + 1) * block * block * (dist.get_rank() + 1)).sum()
        loss.backward()
        return leaf.grad

    for rank, gradient in enumerate(results(program, world_size)):
        weight = sum((step + 1) * ((rank + step + 1) % world_size + 1) for step in range(3))
        assert torch.equal(gradient, 2 * weight * own(3, rank=rank))


def test_gradients_of_gradients_communicate_too():
    """Double backward through a hop."""

    def program():
        leaf = own(2).requires_grad_()
        (gradient,) = torch.autograd.grad((Shift.apply(leaf, 1) ** 3).sum(), leaf, create_graph=True)
        gradient.sum().backward()
        return leaf.grad

    for rank, gradient in enumerate(results(program, 3)):
        assert torch.equal(gradient, 6 * own(2, rank=rank))


def test_a_receive_into_a_leaf_and_into_a_saved_tensor_does_not_disturb_autograd():
    """Transports write memory and tell autograd nothing; neither does this one."""

    def program():
        leaf = torch.zeros(2, requires_grad=True)
        dist.broadcast(leaf, 0)
        buffer = own(2)
        scale = torch.ones(2, requires_grad=True)
        product = buffer * scale
        dist.broadcast(buffer, 1)
        product.sum().backward()
        return scale.grad

    found = results(program, 2)
    assert torch.equal(found[0], own(2, rank=1))


def test_ranks_that_make_groups_in_different_orders_do_not_meet():
    """As in processes, groups are matched by the order of their making; here that is a reported deadlock."""

    def program():
        orders = [[[0, 1], [0, 1, 2]], [[0, 1, 2], [0, 1]]]
        made = {len(ranks): dist.new_group(ranks) for ranks in orders[dist.get_rank() % 2]}
        dist.barrier(group=made[3])

    found = failure(program, 3)
    assert found.kind == "deadlock"
    assert "rank 1 waits for new_group([0, 1, 2]) (2 of 3 ranks missing: 0, 2)" in found.message


@pytest.mark.parametrize("local", [False, True])
def test_a_group_that_a_member_does_not_ask_for_is_never_made(local):
    """Gloo's ranks connect when a group is made; whoever is no member need not come."""

    def program(absent):
        if dist.get_rank() != absent:
            dist.new_group([0, 1], use_local_synchronization=local)

    found = failure(partial(program, 0), 3)
    assert (found.kind, found.rank) == ("deadlock", None)
    assert "rank 1 waits for new_group([0, 1]) (1 of 2 ranks missing: 0)" in found.message
    results(partial(program, 2), 3)


def test_a_backend_that_torch_does_not_know_is_refused():
    """As torch refuses it; one that it knows may be asked for where it was not built in, so that code for GPUs runs."""

    def program(backend):
        dist.new_group([0], backend=backend)

    assert (
        failure(partial(program, "nowhere"), 2).message == "rank 0 raised AssertionError: Unknown backend type nowhere"
    )
    results(partial(program, "cpu:gloo,cuda:nccl"), 2)
