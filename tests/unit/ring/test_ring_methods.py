"""Which of the five methods computes a call, and that what they have in common is there in each of them."""

import inspect

import pytest

from ringref.problem import Problem
from ringverify.ring.allgather import AllGather
from ringverify.ring.method import METHODS, Method, method_of
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
        *((name, PIECES, "contiguous", 2, OneProcess) for name in METHODS),
        *((name, WHOLE, sharding, 1, OneProcess) for name in METHODS
          for sharding in ("zigzag", "replicated_query")),
    ],
)  # fmt: skip
def test_a_method_is_what_was_asked_for_as_far_as_there_is_anything_to_exchange(
    name, problem, sharding, world_size, kind
):
    """On one rank, or where no query needs the keys of another rank, nothing is sent whatever was asked for."""
    for rank in range(world_size):
        assert type(method_of(name, make_plan(problem, sharding, world_size, rank))[0]) is kind


@pytest.mark.parametrize(
    ("name", "problem", "sharding", "world_size", "words"),
    [
        (
            "ring",
            WHOLE,
            "contiguous",
            4,
            "pass KV: KV blocks travel at most 3 of 3 hops, 512 bytes in a hop of all ranks; of queries and partial "
            "results 544",
        ),
        (
            "ring",
            WHOLE.replace(causal=True, window=(2, 0)),
            "contiguous",
            4,
            "pass KV: KV blocks travel at most 1 of 3 hops, 512 bytes in a hop of all ranks; of queries and partial "
            "results 544",
        ),
        ("allgather", WHOLE, "contiguous", 4, "every KV block is gathered on every rank"),
        ("ring", WHOLE, "replicated_query", 4, "queries are replicated, and partial results are combined"),
        ("allgather", PIECES, "contiguous", 2, "nothing is sent, no query needs a key of another rank"),
        ("ring", WHOLE, "replicated_query", 1, "nothing is sent, there is one rank"),
    ],
)
def test_what_a_method_exchanges_is_told_and_the_same_on_every_rank(name, problem, sharding, world_size, words):
    """In the terms of the plan: what `explain=True` shows."""
    for rank in range(world_size):
        assert method_of(name, make_plan(problem, sharding, world_size, rank))[1] == words


@pytest.mark.parametrize("kind", [KVRing, AllGather, ReplicatedQueries, OneProcess])
def test_all_methods_are_called_alike(kind):
    """Their passes take what the interface says."""
    for name in ("forward", "backward"):
        assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(Method, name))
