"""`memory`: a claim about a rank's peak is measured, and a false one is found."""

from __future__ import annotations

import dataclasses
import re

import pytest
import right

from ringverify.cases.running import Runner
from ringverify.check.hunting import hunt
from ringverify.check.searching import Hunt
from ringverify.faults.ring import PLAIN
from ringverify.implementation import Capabilities, Implementation
from ringverify.properties.catalogue import PROPERTIES
from ringverify.ring.declared import allgather, ring
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(60)


def hunted(attend: Implementation, claim: str) -> Hunt:
    """What is found of the claim, the case as found first."""
    claims = dataclasses.replace(attend.capabilities, memory=claim)
    runner = Runner(dataclasses.replace(attend, capabilities=claims), SimulatedWorld())
    return hunt(
        PROPERTIES["memory"],
        runner,
        examples=2,
        seed=0,
        progress=lambda done: None,
        shrinking=False,
    )


def test_the_ring_holds_no_more_in_a_wider_world():
    """Eight ranks cost each what four do; on two there is one hop only, and one buffer less."""
    found = hunted(ring, "sharded")
    assert found.counterexample is None
    assert 0 < found.margin <= 1


@pytest.mark.parametrize("attend", [allgather, right.attend], ids=lambda one: one.name)
def test_what_gathers_everything_grows_with_the_world(attend):
    """Every rank holds all keys: the claim is false, and the largest parts are named with their lines."""
    shown = hunted(attend, "sharded").counterexample
    assert shown is not None
    assert shown.violation.reason == ("grows",)
    assert re.fullmatch(
        r"the peak memory of rank \d on 8 ranks is \d+ bytes, [\d.]+ times the largest peak on 4, at 64 positions per "
        r"rank; at most 1\.05 times is allowed",
        shown.violation.summary,
    )
    assert "bytes: " in shown.violation.detail


def test_the_ring_is_linear_in_the_positions_of_a_rank():
    """Twice of them take at most twice the memory."""
    found = hunted(ring, "streaming")
    assert found.counterexample is None
    assert 0 < found.margin <= 1


def test_a_score_matrix_is_not_streaming():
    """The plain ring forms a block's scores at once: twice the positions a rank take more than twice the memory."""
    shown = hunted(PLAIN, "streaming").counterexample
    assert shown is not None
    assert re.fullmatch(
        r"the peak memory of rank \d of 2 at 2048 positions per rank is \d+ bytes, [\d.]+ times the largest peak at "
        r"1024; at most 2\.1 times is allowed",
        shown.violation.summary,
    )


def with_tile(side, longest=1 << 20):
    """An implementation that has the scores of a tile, of a side that does not depend on the length; it raises on more
    than `longest` positions."""

    def attend(q, k, v, call):
        if q.shape[1] > longest:
            raise RuntimeError("too long")
        rows = min(side, q.shape[1])
        tile = q.new_empty(rows, rows)
        return q.clone() + 0 * tile[0, 0]

    return Implementation(attend, "tiled", Capabilities(gradients=False))


@pytest.mark.parametrize("side", [64, 100, 128, 1000, 1024])
def test_a_tile_of_a_fixed_size_is_linear(side):
    """While it is not full it grows with the positions on both sides, and once it is, not at all."""
    found = hunted(with_tile(side), "streaming")
    assert found.counterexample is None
    assert found.examples == 2
    assert 0 < found.margin <= 1


@pytest.mark.parametrize("side", [2048, 1 << 20])
def test_what_still_grows_at_a_thousand_positions_is_no_tile(side):
    """It has twice as many positions as at the first look and four times as much, and so it is further on."""
    shown = hunted(with_tile(side), "streaming").counterexample
    assert shown is not None
    assert "of 2 at 2048 positions per rank" in shown.violation.summary


def test_what_cannot_be_run_where_tiles_are_full_is_not_accused():
    """Neither of growing nor of raising: the length at which it can be seen does not decide."""
    found = hunted(with_tile(1 << 20, longest=500), "streaming")
    assert found.counterexample is None
    assert found.examples == 0


def test_what_grows_from_nothing_is_a_violation():
    """The small world holds no byte, so no factor can be named."""

    def attend(q, k, v, call):
        return q if call.world_size <= 4 else q.clone()

    shown = hunted(Implementation(attend, "from nothing", Capabilities(gradients=False)), "sharded").counterexample
    assert shown is not None
    assert re.fullmatch(
        r"the peak memory of rank \d on 8 ranks is \d+ bytes, and 0 bytes on 4, at 64 positions per rank; at most "
        r"1\.05 times is allowed",
        shown.violation.summary,
    )
