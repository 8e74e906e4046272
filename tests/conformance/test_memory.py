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
        r"the peak memory of rank \d at 128 positions per rank is \d+ bytes, [\d.]+ times the largest peak at 64; at "
        r"most 2\.1 times is allowed",
        shown.violation.summary,
    )


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
