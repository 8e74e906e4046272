"""Shards and back: every element comes home, in every sharding, at every small length, and its gradient with it."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringref.sharding import SHARDINGS, balancer
from ringverify.ring import position_ids, shard, unshard, unshard_from
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(60)

WORLD_SIZES = range(1, 9)


def backwards(length, world_size):
    """A sharding of one's own: rank r holds every world_size-th position from the end, the last one first."""
    return [list(range(length - 1 - rank, -1, -world_size)) for rank in range(world_size)]


EVERY_SHARDING = (*SHARDINGS, backwards)


def on_ranks(program, world_size):
    """What `program()` returns on each rank of a simulated world."""
    run = SimulatedWorld().run(lambda _: program(), None, world_size=world_size, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    return run.results


@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize("sharding", EVERY_SHARDING)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_shards_put_together_are_the_whole(sharding, world_size, of):
    """Lengths 0 to 3W + 1: nothing divides anything, and ranks may hold nothing."""
    for length in range(3 * world_size + 2):
        whole = torch.arange(2 * length * 3).view(2, length, 3)
        place = {"sharding": sharding, "world_size": world_size, "of": of}
        shards = [shard(whole, rank=rank, **place) for rank in range(world_size)]
        ids = [position_ids(length, rank=rank, **place) for rank in range(world_size)]
        assert all(torch.equal(part, whole[:, held]) for part, held in zip(shards, ids, strict=True))
        assert torch.equal(unshard_from(shards, sharding=sharding, of=of), whole)
        if sharding == "replicated_query" and of == "queries":
            assert all(torch.equal(part, whole) for part in shards)
        else:
            assert sum(part.size(1) for part in shards) == length


@pytest.mark.parametrize("sharding", EVERY_SHARDING)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_every_rank_gathers_the_whole(sharding, world_size):
    """Over a process group; in any dtype, along any dimension."""
    lengths = sorted({0, 1, world_size - 1, world_size, 2 * world_size + 1, 3 * world_size + 1})

    def program():
        for length in lengths:
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
                whole = (torch.arange(2 * 3 * length).view(2, 3, length) * 37 % 101).to(dtype)
                part = shard(whole, sharding=sharding, dim=-1)
                gathered = unshard(part, length=length, sharding=sharding, dim=-1)
                assert gathered.dtype == dtype
                assert torch.equal(gathered, whole)
        return True

    assert on_ranks(program, world_size) == (True,) * world_size


@pytest.mark.parametrize("sharding", EVERY_SHARDING)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("replicated_loss", [False, True])
def test_the_adjoint_of_a_gather_is_a_sum_over_ranks(sharding, world_size, replicated_loss):
    """⟨A x, y⟩ = ⟨x, Aᵀ y⟩ in small integers, which are exact: summed over ranks, or counted once."""
    if sharding == "replicated_query":
        replicated_loss = True  # each rank's queries are whole, and so the same loss counts once

    def program(length):
        rank = dist.get_rank()
        x = torch.randint(-5, 6, (2, length, 3), generator=torch.Generator().manual_seed(length)).double()
        seed = 7 if replicated_loss else 7 + rank
        y = torch.randint(-5, 6, (2, length, 3), generator=torch.Generator().manual_seed(seed)).double()
        part = shard(x, sharding=sharding).requires_grad_()
        whole = unshard(part, length=length, sharding=sharding, replicated_loss=replicated_loss)
        whole.backward(y)
        return (whole * y).sum().item(), (part.detach() * part.grad).sum().item()

    for length in range(2 * world_size + 2):
        sides = on_ranks(lambda length=length: program(length), world_size)
        ours, theirs = zip(*sides, strict=True)
        if sharding == "replicated_query":
            assert ours == theirs
        elif replicated_loss:
            assert set(ours) == {sum(theirs)}
        else:
            assert sum(ours) == sum(theirs)


def test_half_precision_gradients_are_summed_in_float32():
    """256 + 1 + … is 256 in bfloat16, whatever the order; rounded once, it is not."""

    def program():
        part = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
        whole = unshard(part, length=5)
        whole.backward(torch.full((1, 5), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16))
        return part.grad.item()

    assert on_ranks(program, 5) == (260.0,) * 5


def test_a_gather_is_differentiated_once():
    """A second derivative raises, instead of silently being zero."""

    def program():
        part = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
        whole = unshard(part, length=2)
        (gradient,) = torch.autograd.grad((whole**2).sum(), part, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()
        return True

    assert on_ranks(program, 2) == (True, True)


def test_shards_of_views_are_those_of_copies():
    """Transposed and expanded tensors are gathered as what they show, not as what lies in memory."""

    def program():
        rank = dist.get_rank()
        transposed = torch.arange(6.0).view(3, 2).t() + 10 * rank  # (2, 3)
        expanded = torch.tensor([[1.0 + rank]]).expand(2, 3)
        gathered = unshard(transposed, length=6), unshard(expanded, length=6)
        first = torch.arange(6.0).view(3, 2).t()
        assert torch.equal(gathered[0], torch.cat([first, first + 10], dim=1))
        assert torch.equal(gathered[1], torch.tensor([[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]]).expand(2, 6))
        return True

    assert on_ranks(program, 2) == (True, True)


def test_a_mesh_and_its_group_mean_the_same_ranks():
    """Two rings of two in a world of four, named by a dimension of a mesh: rank and size are those within the ring."""

    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
        ring = mesh["sequence"]
        whole = torch.arange(5.0)[None] + 100 * mesh["data"].get_local_rank()
        part = shard(whole, sharding="zigzag", group=ring)
        assert torch.equal(part, shard(whole, sharding="zigzag", group=ring.get_group()))
        assert torch.equal(unshard(part, length=5, sharding="zigzag", group=ring), whole)
        with pytest.raises(ValueError, match=r"DeviceMesh of 2 dimensions \('data', 'sequence'\)"):
            shard(whole, group=mesh)
        return position_ids(5, sharding="zigzag", group=ring).tolist()

    assert on_ranks(program, 4) == ([0, 1, 4], [2, 3], [0, 1, 4], [2, 3])


def test_without_torch_distributed_this_process_is_alone():
    """One rank holds everything, and nothing is sent."""
    whole = torch.arange(6.0).view(1, 6)
    for sharding in EVERY_SHARDING:
        part = shard(whole, sharding=sharding)
        assert torch.equal(unshard(part, length=6, sharding=sharding), whole)


def test_position_ids_count_from_the_start_of_their_document():
    """Packed sequences: positions of a shard are [0, 3, 4, 7], not counted on, and not 0 … n − 1."""
    ids = [position_ids(8, sharding="zigzag", rank=rank, world_size=2, documents=[0, 3, 3, 7]) for rank in (0, 1)]
    assert [held.tolist() for held in ids] == [[0, 1, 3, 0], [2, 0, 1, 2]]
    late = position_ids(4, rank=0, world_size=1, documents=torch.tensor([2, 3]))
    assert late.tolist() == [0, 1, 0, 0]
    assert late.dtype == torch.int64


@balancer
def long_first(documents, world_size):
    """Documents by length, the longest first, cut in shards that differ by one."""
    found = sorted(pairwise(documents), key=lambda one: one[0] - one[1])
    order = torch.tensor([position for start, end in found for position in range(start, end)], dtype=torch.int64)
    return list(order.tensor_split(world_size))


@pytest.mark.parametrize("sharding", ["zigzag_documents", long_first], ids=["ours", "a balancer"])
def test_shards_by_documents_put_together_are_the_whole(sharding):
    """In one process and over a group, with gradients; positions and positions in documents lie as tokens do."""
    documents, whole = (0, 1, 9, 9, 13), torch.arange(15.0)[None]  # two positions lie in none
    settings = {"sharding": sharding, "documents": documents}
    shards = [shard(whole, rank=rank, world_size=3, **settings) for rank in range(3)]
    assert sorted(len(part[0]) for part in shards) == [5, 5, 5]
    assert torch.equal(unshard_from(shards, **settings), whole)
    starts = torch.tensor([0, *[1] * 8, *[9] * 4, 13, 13])
    for rank, part in enumerate(shards):
        held = part[0].long()
        ids = position_ids(15, rank=rank, world_size=3, **settings)
        assert torch.equal(ids, held - starts[held])

    def program():
        x = whole.clone().requires_grad_()
        back = unshard(shard(x, **settings), length=15, **settings)
        (gradient,) = torch.autograd.grad(back.square().sum(), x)
        return torch.equal(back, whole), gradient

    found = on_ranks(program, 3)
    assert all(same for same, _ in found)
    assert torch.equal(sum(gradient for _, gradient in found), 6 * whole)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: shard(x, rank=2, world_size=2), "rank=2: expected 0 to 1"),
        (lambda x: shard(x, rank=0, world_size=0), "world_size=0: expected at least 1"),
        (lambda x: shard(x, rank=0), "rank=0, world_size=None: give both"),
        (lambda x: shard(x, rank=0, world_size=1, group=object()), "and a group: give one or the other"),
        (lambda x: shard(x, group=object()), "torch.distributed is not initialised"),
        (lambda x: shard(x, dim=3), r"dim=3 of a tensor of shape \(2, 5, 1\)"),
        (lambda x: shard(x, sharding="zickzack"), "sharding='zickzack': expected one of contiguous, zigzag"),
        (lambda x: shard(x, of="values"), "of='values': expected 'queries' or 'keys'"),
        (lambda x: unshard(x, length=6), "shard of 5 positions along dim=1: rank 0 of 1 holds 6 of length=6"),
        (lambda x: unshard(x, length=-1), "length=-1: expected at least 0"),
        (lambda x: unshard(x, length=5.0), r"length=5\.0: expected an integer"),
        (lambda x: unshard_from([]), r"shards=\[\]: expected one a rank"),
        (lambda x: unshard_from([x[:, :2], x]), r"shards of \[2, 5\] positions .* the ranks hold \[4, 3\]"),
        (lambda x: position_ids(4, documents=[0, 5]), re.escape("documents=[0, 5]: expected cumulative lengths")),
        (
            lambda x: shard(x, sharding="zigzag_documents"),
            re.escape("zigzag_documents depends on documents: give those of the attention, or documents=(0, 5)"),
        ),
        (lambda x: shard(x, sharding=long_first), "sharding long_first depends on documents"),
        (lambda x: shard(x, sharding="zigzag_documents", documents=(0, 6)), re.escape("non-decreasing within [0, 5]")),
        (lambda x: position_ids(4, documents=[2, 1]), re.escape("non-decreasing within [0, 4]")),
    ],
)
def test_what_cannot_be_is_named_with_its_value(call, words):
    """One line: the value, what was expected, the way out."""
    with pytest.raises(ValueError, match=words) as raised:
        call(torch.zeros(2, 5, 1))
    assert "\n" not in str(raised.value)


def test_a_process_outside_the_group_is_told():
    """It holds no shard, and would otherwise wait for ranks that never answer."""

    def program():
        group = dist.new_group([0])
        if dist.get_rank() == 0:
            return shard(torch.zeros(1, 4), group=group).size(1)
        with pytest.raises(ValueError, match="not in the group"):
            shard(torch.zeros(1, 4), group=group)
        return -1

    assert on_ranks(program, 2) == (4, -1)
