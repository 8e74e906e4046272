"""What properties say: why they do not apply, and what a rank did that was not claimed of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ringref.problem import Problem
from ringverify import implementation
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.errors import UsageError
from ringverify.implementation import Capabilities
from ringverify.properties.catalogue import PROPERTIES, select
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(60)

REASONS = [
    ("lse", Capabilities(), "lse=True is not declared"),
    ("gradients", Capabilities(gradients=False), "gradients=False is declared"),
    ("lse_gradient", Capabilities(), "lse_gradient=True is not declared"),
    ("subgroups", Capabilities(), "subgroups=True is not declared"),
    ("determinism", Capabilities(), "deterministic=True is not declared"),
    ("traffic", Capabilities(), 'traffic="neighbours" is not declared'),
    ("memory", Capabilities(), 'neither memory="sharded" nor memory="streaming" is declared'),
    (
        "memory",
        Capabilities(memory="sharded", world_sizes=(1, 2, 4)),
        "needs two declared world sizes, 3 and 6 or 4 and 8; declared: 1, 2, 4",
    ),
    (
        "exact_selection",
        Capabilities(head_dims=(32, 64), length_multiple=128),
        "needs a head_dim of at least the number of keys: the largest possible head_dim is 64, the smallest possible "
        "number of keys 128",
    ),
    (
        "isolation",
        Capabilities(causal="never", window=True),
        "needs a declared mask that excludes keys: causal, documents or key_lengths, or dilation or window with "
        "poison_safe=True",
    ),
]


@pytest.mark.parametrize(("property", "declared", "reason"), REASONS)
def test_a_property_that_does_not_apply_names_what_is_not_declared(property, declared, reason):
    """As it has to be declared, word for word."""
    assert PROPERTIES[property].unsupported(declared) == reason


@pytest.mark.parametrize(
    ("property", "declared"),
    [
        ("lse", Capabilities(lse=True)),
        ("lse_gradient", Capabilities(lse=True, lse_gradient=True)),
        ("subgroups", Capabilities(subgroups=True)),
        ("determinism", Capabilities(deterministic=True)),
        ("traffic", Capabilities(traffic="neighbours")),
        ("memory", Capabilities(memory="streaming", world_sizes=(3, 6))),
        ("exact_selection", Capabilities(head_dims=(32, 128), length_multiple=128)),
        ("isolation", Capabilities(causal="never", window=True, poison_safe=True)),
    ],
)
def test_a_property_applies_where_that_is_declared(property, declared):
    """What the messages above ask for is enough."""
    assert PROPERTIES[property].unsupported(declared) is None


@pytest.mark.parametrize("only", [["forward", "lse"], None])
def test_a_selection_of_nothing_says_what_leaves_nothing(only):
    """True with `--only` and without it."""
    with pytest.raises(UsageError, match=r"^no property is left to check: --skip names all that are selected; "):
        select(only, PROPERTIES)


def summary_of(send, world_size: int) -> str:
    """What `traffic` says of ranks that send tensors of so many numbers to other ranks: {(from, to): numbers}."""

    @implementation(causal="never", gradients=False, traffic="neighbours")
    def attend(q, k, v, call):
        for (source, target), numbers in send.items():
            if call.rank == source:
                dist.send(torch.zeros(numbers), target)
            if call.rank == target:
                dist.recv(torch.zeros(numbers), source)
        return torch.zeros_like(q)

    case = Case(problem=Problem(query_length=5, heads=1, head_dim=4), world_size=world_size)
    violation = PROPERTIES["traffic"].judge(case, Runner(attend, SimulatedWorld())).violation
    return "" if violation is None else violation.summary


def test_ranks_that_are_no_neighbours_are_named():
    """One of them or several."""
    assert summary_of({(0, 1): 1, (4, 0): 1}, 5) == ""
    assert summary_of({(2, 0): 1}, 5) == "rank 0 exchanges with rank 2, which is not its neighbour in the ring"
    assert (
        summary_of({(0, 2): 1, (0, 3): 1}, 5)
        == "rank 0 exchanges with ranks 2 and 3, which are not its neighbours in the ring"
    )


def test_a_rank_that_sends_too_much_is_told_what_is_enough():
    """On two ranks: the KV block of three positions, 4 + 4 numbers each, is 96 bytes."""
    assert summary_of({(0, 1): 24}, 2) == ""
    summary = summary_of({(0, 1): 25}, 2)
    assert summary == "rank 0 sends 100 bytes; passing all KV blocks round the ring takes at most 96"
