"""Faults that need length are found by the suite `scale`, and by no case of an ordinary length."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from at_length import reports

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.faults.length import AT_LENGTH
from ringverify.faults.ring import PLAIN
from ringverify.worlds.simulated.world import SimulatedWorld

MANY_RANKS = ("far_block_lost", "far_block_twice", "small_tiles_dropped")
BY_DAY = ("mask_off_by_one", "lse_in_bfloat16")


def case_of(name: str, length: int) -> Case:
    """A causal problem of one head, with a window where the fault is one of windows."""
    window = (300, 0) if name == "window_forgets" else None
    size = 16 if name in MANY_RANKS else 2
    problem = Problem(query_length=length, head_dim=32, causal=True, window=window)
    return Case(problem=problem, world_size=size, sharding="zigzag", cotangent="both")


def wrong(target: str, case: Case) -> set[str]:
    """The results that some rank found wrong."""
    return {one.tensor for report in reports(target, case) for one in report.differences}


@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in AT_LENGTH]
)
def test_it_is_found_where_it_begins_and_equals_the_plain_ring_before(name: str) -> None:
    """Of 2,048 positions every row is verified; at 200 positions the results have the bits of the right ring."""
    target = f"ringverify.faults.length:{name}"
    assert wrong(target, case_of(name, 2048))
    short, runs = case_of(name, 200), []
    case = dataclasses.replace(short, world_size=min(short.world_size, 8))
    for implementation in (AT_LENGTH[name].implementation, PLAIN):
        runs.append(Runner(implementation, SimulatedWorld(), deadline=60.0).run(case, gradients=True).ranks)
    for one, right in zip(*runs, strict=True):
        for tensor in ("out", "lse", "dq", "dk", "dv"):
            assert torch.equal(torch.from_numpy(getattr(one, tensor)), torch.from_numpy(getattr(right, tensor)))


def test_the_block_that_is_lost_is_named() -> None:
    """Where one rank's keys explain the worst row, the finding says whose, with which hop, and what happened."""
    case = case_of("far_block_lost", 512)
    found = [
        (rank, one)
        for rank, report in enumerate(reports("ringverify.faults.length:far_block_lost", case))
        for one in report.differences
        if one.owner is not None
    ]
    assert found
    for rank, one in found:
        assert (one.owner, one.hop, one.what) == ((rank - 9) % 16, 9, "missing")
        assert one.ranges[0][0] <= one.ranges[0][1]
