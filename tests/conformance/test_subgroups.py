"""`subgroups` catches what only a ring that is part of a larger world shows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hunts import hunted

from ringverify import implementation

pytestmark = pytest.mark.timeout(60)


def gathered(shard, call, exchange):
    """Every rank's shard, passed round the ring by `exchange(tensor, arriving, call)`."""
    blocks = {call.rank: shard.contiguous()}
    for hop in range(1, call.world_size):
        arriving = torch.empty_like(blocks[call.rank])
        for work in exchange(blocks[(call.rank - hop + 1) % call.world_size], arriving, call):
            work.wait()
        blocks[(call.rank - hop) % call.world_size] = arriving
    return torch.cat([blocks[rank] for rank in range(call.world_size)], dim=1)


def attend_with(exchange):
    """A ring of full attention over the given exchange, forward only."""

    @implementation(causal="never", gradients=False, subgroups=True, name=exchange.__name__)
    def attend(q, k, v, call):
        k, v = gathered(k, call, exchange), gathered(v, call, exchange)
        scores = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)

    return attend


def right(block, arriving, call):
    """Group ranks are named as such."""
    size = call.world_size
    return [
        dist.isend(block, group=call.group, group_dst=(call.rank + 1) % size),
        dist.irecv(arriving, group=call.group, group_src=(call.rank - 1) % size),
    ]


def group_rank_as_global_rank(block, arriving, call):
    """D1: group ranks where global ranks are wanted."""
    size = call.world_size
    return [
        dist.isend(block, (call.rank + 1) % size, group=call.group),
        dist.irecv(arriving, (call.rank - 1) % size, group=call.group),
    ]


def default_group(block, arriving, call):
    """D2: no group is given, so ranks 0 and 1 of the world are talked to, whoever they are."""
    size = call.world_size
    return [dist.isend(block, (call.rank + 1) % size), dist.irecv(arriving, (call.rank - 1) % size)]


def test_a_ring_that_names_group_ranks_as_such_passes():
    """Offset and strided groups of one to four ranks, beside a busy ring of the other ranks."""
    assert hunted(attend_with(right), "subgroups", 30).counterexample is None


@pytest.mark.parametrize("exchange", [group_rank_as_global_rank, default_group])
def test_a_ring_that_mistakes_its_group_is_found_on_two_ranks(exchange):
    """Both pass `forward`, where the group is the world, and fail here, on the smallest ring there is."""
    attend = attend_with(exchange)
    assert hunted(attend, "forward", 30).counterexample is None
    shown = hunted(attend, "subgroups", 30).counterexample
    assert shown is not None
    assert shown.case.world_size == 2
    assert shown.case.group in ("offset", "strided")
    assert shown.violation.reason[0] in ("raised", "deadlock")
