"""Faults that need length are found by the suite `scale`, and by no case of an ordinary length."""

from __future__ import annotations

import tempfile

import pytest
import torch

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.faults.length import AT_LENGTH
from ringverify.faults.ring import PLAIN
from ringverify.scale.rank import Asked, RankReport, rows_to_sample, verify
from ringverify.worlds.simulated.world import SimulatedWorld

MANY_RANKS = ("far_block_lost", "far_block_twice", "small_tiles_dropped")
BY_DAY = ("mask_off_by_one", "lse_in_bfloat16")


def case_of(name: str, length: int) -> Case:
    """A causal problem of one head, with a window where the fault is one of windows."""
    window = (300, 0) if name == "window_forgets" else None
    size = 16 if name in MANY_RANKS else 2
    problem = Problem(query_length=length, head_dim=32, causal=True, window=window)
    return Case(problem=problem, world_size=size, sharding="zigzag", cotangent="both")


def reports(target: str, case: Case, method: str = "every_row") -> list[RankReport]:
    """What each rank of a simulated world found."""
    sampled = rows_to_sample(case, PLAIN.capabilities, 64)
    with tempfile.TemporaryDirectory() as notes:
        asked = Asked(target, case, method, "cpu", sampled, notes)
        run = SimulatedWorld().run(verify, asked, world_size=case.world_size, seed=0, deadline=200)
    assert run.failure is None, run.failure
    return list(run.results)


def wrong(target: str, case: Case, method: str = "every_row") -> set[str]:
    """The results that some rank found wrong."""
    return {one.tensor for report in reports(target, case, method) for one in report.differences}


@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in AT_LENGTH]
)
def test_it_is_found_where_it_begins_and_equals_the_plain_ring_before(name: str) -> None:
    """Of 2,048 positions every row is verified; at 200 positions the results have the bits of the right ring."""
    target = f"ringverify.faults.length:{name}"
    assert wrong(target, case_of(name, 2048))
    short = case_of(name, 200)
    size = min(short.world_size, 8)
    short = short.replace(query_length=200)
    runs = []
    for implementation in (AT_LENGTH[name].implementation, PLAIN):
        case = Case(problem=short.problem, world_size=size, sharding="zigzag", cotangent="both")
        runs.append(Runner(implementation, SimulatedWorld(), deadline=60.0).run(case, gradients=True).ranks)
    for one, right in zip(*runs, strict=True):
        for tensor in ("out", "lse", "dq", "dk", "dv"):
            assert torch.equal(torch.from_numpy(getattr(one, tensor)), torch.from_numpy(getattr(right, tensor)))
