"""Who is in the ring: a group, a mesh or nobody else; and what is no ring is refused before anything is computed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import WORLD
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringverify.ring.attention import ring_attention
from ringverify.ring.group import Ring
from ringverify.ring.shards import position_ids

pytestmark = pytest.mark.timeout(60)


def on_ranks(program, world_size):
    """What `program()` returns on each rank of a simulated world."""
    run = WORLD.run(lambda _: program(), None, world_size=world_size, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    return run.results


def refused(group):
    """What a call and a shard of that group say, which has to be the same line."""
    with pytest.raises(ValueError, match="group") as of_call:
        ring_attention(*(torch.zeros(1, 4, 1, 8) for _ in range(3)), group=group)
    with pytest.raises(ValueError, match="group") as of_shard:
        position_ids(4, group=group)
    assert str(of_call.value) == str(of_shard.value)
    assert "\n" not in str(of_call.value)
    return str(of_call.value)


def test_a_rank_knows_its_place_in_a_group_and_in_a_mesh():
    """Within the group, not within the world; the default group without one."""

    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))["sequence"]
        rings = Ring.of(mesh), Ring.of(mesh.get_group()), Ring.of(None)
        return [(ring.rank, ring.world_size) for ring in rings]

    assert on_ranks(program, 4) == tuple([(r % 2, 2), (r % 2, 2), (r, 4)] for r in range(4))


def test_a_process_alone_is_a_ring_of_one():
    """Where torch.distributed is not initialised, and no group is named."""
    assert Ring.of(None) == (None, 0, 1)


def test_who_is_not_in_a_mesh_or_a_group_is_told_so():
    """In the same words; its members are not disturbed."""

    def program():
        mesh, group = DeviceMesh("cpu", [0, 1]), dist.new_group([0, 1])
        if dist.get_rank() < 2:
            return [Ring.of(one).world_size for one in (mesh, group)]
        return [refused(mesh), refused(group)]

    *members, outside = on_ranks(program, 3)
    assert members == [[2, 2], [2, 2]]
    assert outside == ["this process is not in the group: only its ranks hold shards and call ring_attention"] * 2


def test_a_group_does_not_outlive_torch_distributed():
    """As a world of one it would compute attention to this rank's own keys, and nobody would notice."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        group = mesh.get_group()
        assert Ring.of(group)[1:] == Ring.of(mesh)[1:] == (0, 1)
    finally:
        dist.destroy_process_group()
    for one in (group, mesh):
        assert refused(one).startswith("a group was given, but torch.distributed is not initialised, or not any more")
