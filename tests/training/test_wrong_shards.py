"""A shard of the wrong shape on one rank: with `check_shards=True` all ranks raise, and none is left waiting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from wrong_shards import WRONG, refused

from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(90)

PLENTY = 30.0
"""Seconds; a rank that waits for one that has raised would wait for longer."""


@pytest.fixture(scope="module")
def gloo() -> Iterator[GlooWorld]:
    """Real processes, kept warm from test to test."""
    world = GlooWorld()
    yield world
    world.close()


def said(world: Any, kind: str, *, lengths: bool = True, autocast: bool = False, **settings: Any) -> str:
    """What every rank says, which is the same."""
    run = world.run(refused, (kind, lengths, settings, autocast), world_size=2, seed=0, deadline=PLENTY)
    assert run.failure is None, run.failure.detail
    assert len(set(run.results)) == 1, run.results
    assert "\n" not in run.results[0]
    return str(run.results[0])


WORDS = {
    "a row short in q": "rank 1 refuses: q has shape (2, 3, 4, 6) on rank 1 of 2: expected (2, 4, 4, 6)",
    "a row short in v": "rank 1 refuses: v has shape (2, 3, 2, 6) on rank 1 of 2: expected (2, 4, 2, 6)",
    "another dtype in k": "rank 1 refuses: k is torch.float64 on rank 1: expected float32",
    "another dtype in all": "dtype is float32 on rank 0 and float64 on rank 1",
    "another batch in v": "rank 1 refuses: v has shape (1, 4, 2, 6) on rank 1 of 2: expected (2, 4, 2, 6)",
    "another batch in all": "batch is 2 on rank 0 and 1 on rank 1",
    "fewer heads in q": "rank 1 refuses: heads=3, key_heads=2: key_heads must divide heads",
    "fewer key heads": "key_heads is 2 on rank 0 and 1 on rank 1",
    "another value_dim": "value_dim is 6 on rank 0 and 4 on rank 1",
    "no batch": "rank 1 refuses: q has shape (4, 4, 6): expected (batch, sequence, heads, head_dim)",
}
"""Of some kinds, what is said."""


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_shard_on_one_rank_is_refused_on_all(kind: str, lengths: bool) -> None:
    """Every kind, named with its rank, where lengths are given and where they are inferred."""
    message = said(SimulatedWorld(), kind, lengths=lengths)
    assert message.startswith("the ranks do not make the same call: ")
    if lengths:
        assert WORDS.get(kind, "rank 1") in message


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize("kind", WRONG)
def test_it_is_refused_between_processes(gloo: GlooWorld, kind: str, method: str) -> None:
    """Over gloo, with a deadline, by every method."""
    assert "rank 1" in said(gloo, kind, method=method)


@pytest.mark.parametrize("lengths", [True, False])
def test_ranks_that_differ_in_autocast_are_refused(gloo: GlooWorld, lengths: bool) -> None:
    """One would send half as many bytes as the other expects."""
    for world in (SimulatedWorld(), gloo):
        message = said(world, "nothing", lengths=lengths, autocast=True)
        assert "autocast is off on rank 0 and torch.bfloat16 on rank 1" in message


def test_settings_of_the_engine_are_heard_of_too(gloo: GlooWorld) -> None:
    """A kernel that does not know the call, on all ranks: each says why, and the call is not made."""
    assert said(gloo, "nothing", kernel="flash").startswith("kernel='flash': expected auto")


def test_shards_that_are_right_are_computed(gloo: GlooWorld) -> None:
    """The gate can open."""
    for world in (SimulatedWorld(), gloo):
        assert said(world, "nothing") == "computed"
