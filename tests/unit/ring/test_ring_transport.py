"""Which operations each rank starts in a group, in order: NCCL wants all of its ranks in the first one."""

import pytest
import torch
import torch.distributed as dist
from by_tile import inputs_of
from on_ranks import WORLD, run_on_ranks

from ringref.problem import Problem
from ringverify.ring import transport
from ringverify.ring.transport import Transport, needs_all_ranks_first

APART = Problem(query_length=9, heads=2, head_dim=4, documents=(0, 3, 9), causal=True)
"""On three ranks the first one, whose keys nobody else attends, sends and receives nothing."""
FEW = Problem(query_length=2, heads=2, head_dim=4, causal=True)
"""On three ranks the last one has no tokens, and is not on the way of any."""


def noted(monkeypatch, names):
    """By rank the names of functions of `torch.distributed` that its transport called, in order."""
    by_rank = {}

    def noting(name, function):
        def call(*arguments, **keywords):
            by_rank.setdefault(dist.get_rank(), []).append(name)
            return function(*arguments, **keywords)

        return call

    for name in names:
        monkeypatch.setattr(transport.dist, name, noting(name, getattr(dist, name)))
    return by_rank


@pytest.fixture
def started(monkeypatch):
    """As with NCCL; by rank what was started."""
    monkeypatch.setattr(transport, "needs_all_ranks_first", lambda group, device: True)
    return noted(monkeypatch, ("all_reduce", "isend", "irecv"))


@pytest.mark.parametrize("problem", [APART, FEW], ids=["documents", "fewer tokens than ranks"])
def test_all_ranks_take_part_in_the_first_operation_of_a_group(started, problem):
    """One collective on each, before any message and not again; some rank has no message at all."""
    run_on_ranks(problem, inputs_of(problem), "contiguous", 3)
    assert sorted(started) == [0, 1, 2]
    for first, *others in started.values():
        assert first == "all_reduce"
        assert "all_reduce" not in others
    messages = [len(names) - 1 for names in started.values()]
    assert min(messages) == 0 < max(messages)


def test_a_group_is_connected_once_on_each_device_and_each_group_for_itself(started):
    """Whoever makes a transport of it; a world of one has nobody to meet."""

    def program(_):
        group, alone = dist.new_group([0, 1]), dist.new_group([dist.get_rank()])
        for one in (None, group, None, group):
            Transport(one, dist.get_rank(), 2, "p2p", torch.device("cpu")).start([], [])()
        Transport(alone, 0, 1, "p2p", torch.device("cpu")).start([], [])()

    run = WORLD.run(program, None, world_size=2, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    assert started == {0: ["all_reduce"] * 2, 1: ["all_reduce"] * 2}


def test_only_nccl_needs_it(monkeypatch):
    """Not on CPU, and not gloo, whatever other device types the group has a backend for."""
    monkeypatch.setattr(dist, "get_backend_config", {1: "cpu:gloo,cuda:nccl", 2: "cpu:gloo,cuda:gloo"}.get)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert [needs_all_ranks_first(group, device) for group in (1, 2) for device in (cpu, cuda)] == [
        False, True, False, False,
    ]  # fmt: skip


@pytest.fixture
def posted(monkeypatch):
    """By rank what was posted, a name each."""
    return noted(monkeypatch, ("isend", "irecv"))


def test_what_arrives_is_posted_before_what_is_sent_is_there(posted):
    """With plain send and receive nothing is: ranks would wait in another order."""

    def program(name):
        rank = dist.get_rank()
        arriving = torch.zeros(2)
        start = Transport(None, rank, 2, name, torch.device("cpu")).expect([(arriving, 1 - rank)])
        before = list(posted.get(rank, []))
        start([(torch.full((2,), 1.0 + rank), 1 - rank)])()
        return before, arriving.tolist()

    for name, early in (("p2p", ["irecv"]), ("blocking", [])):
        posted.clear()
        run = WORLD.run(program, name, world_size=2, seed=0, deadline=20)
        assert run.failure is None, run.failure.detail
        assert list(run.results) == [(early, [2.0, 2.0]), (early, [1.0, 1.0])]


@pytest.mark.parametrize("size", [2, 3])
def test_no_rank_posts_a_receive_late_where_queries_are_replicated(posted, size):
    """Of two, rank 0 combines for both: rank 1 asks for the result when its own part has gone. Of more, all ask first.

    Forward and backward, in which each piece travels twice round all ranks but one.
    """
    problem = Problem(query_length=5, key_length=9, heads=2, head_dim=4)
    run_on_ranks(problem, inputs_of(problem), "replicated_query", size)
    if size == 2:
        assert posted == {0: ["irecv", "isend"] * 2, 1: ["isend", "irecv"] * 2}
    else:
        hops = ["irecv", *["irecv", "isend"] * 3, "isend"]
        assert posted == dict.fromkeys(range(3), hops * 2)
