"""Which of the four methods computes a call, and that what they have in common is there in each of them."""

import inspect

import pytest

from ringref.problem import Problem
from ringverify.ring.allgather import AllGather
from ringverify.ring.method import Method, method_of
from ringverify.ring.one_process import OneProcess
from ringverify.ring.passes import KVRing
from ringverify.ring.plan.plan import make_plan
from ringverify.ring.replicated import ReplicatedQueries

WHOLE, PIECES = Problem(query_length=8), Problem(query_length=8, documents=(0, 4, 8))


@pytest.mark.parametrize(
    ("name", "problem", "sharding", "world_size", "kind"),
    [
        ("ring", WHOLE, "contiguous", 2, KVRing),
        ("allgather", WHOLE, "contiguous", 2, AllGather),
        ("ring", WHOLE, "replicated_query", 2, ReplicatedQueries),
        ("allgather", WHOLE, "replicated_query", 2, ReplicatedQueries),
        *((name, PIECES, "contiguous", 2, OneProcess) for name in ("ring", "allgather", "local")),
        *((name, WHOLE, sharding, 1, OneProcess) for name in ("ring", "allgather", "local")
          for sharding in ("zigzag", "replicated_query")),
    ],
)  # fmt: skip
def test_a_method_is_what_was_asked_for_as_far_as_there_is_anything_to_exchange(
    name, problem, sharding, world_size, kind
):
    """On one rank, or where no query needs the keys of another rank, nothing is sent whatever was asked for."""
    for rank in range(world_size):
        assert type(method_of(name, make_plan(problem, sharding, world_size, rank))) is kind


@pytest.mark.parametrize("kind", [KVRing, AllGather, ReplicatedQueries, OneProcess])
def test_all_methods_are_called_alike(kind):
    """Their passes take what the interface says."""
    for name in ("forward", "backward"):
        assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(Method, name))
