"""What is claimed of memory is held to the peaks of a run and of one that is half as long."""

from __future__ import annotations

import dataclasses

import pytest

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.check.options import Options
from ringverify.check.planning import planned
from ringverify.reports.progress import HIDDEN
from ringverify.ring.declared import ring
from ringverify.scale.memory import _at_length
from ringverify.scale.trials import Trials
from ringverify.worlds.simulated.world import SimulatedWorld

GIB = 1 << 30
CASE = Case(problem=Problem(query_length=1 << 17, causal=True, head_dim=64), sharding="zigzag", world_size=8)


def trials_with(claim: str, peaks: dict[Case, int]) -> Trials:
    """Runs whose peaks are known."""
    declared = dataclasses.replace(ring, capabilities=dataclasses.replace(ring.capabilities, memory=claim))
    plan = planned("ring", declared, world="simulated", world_sizes=None, crew=None)
    trials = Trials(plan, SimulatedWorld(), Options(), HIDDEN)
    trials.peaks = dict(peaks)
    return trials


@pytest.mark.parametrize(
    ("claim", "half", "times", "violated"),
    [
        ("streaming", CASE.replace(query_length=1 << 16), 2.1, False),
        ("streaming", CASE.replace(query_length=1 << 16), 2.2, True),
        ("sharded", CASE.replace(query_length=1 << 16, world_size=4), 1.05, False),
        ("sharded", CASE.replace(query_length=1 << 16, world_size=4), 1.2, True),
    ],
)
def test_peaks_are_held_to_the_claim(claim: str, half: Case, times: float, *, violated: bool) -> None:
    """Twice as much for twice the positions of a rank; no more for twice the ranks."""
    held = _at_length(trials_with(claim, {CASE: int(times * GIB), half: GIB}), CASE)
    assert held is not None
    assert (held.violation is not None) == violated
    assert (held.margin > 1) == violated


def test_where_a_pattern_decides_it_is_no_verdict() -> None:
    """Under a window, and where two ranks are too few to be compared with one."""
    window = CASE.replace(window=(4095, 0))
    assert _at_length(trials_with("streaming", {}), window) is None
    assert _at_length(trials_with("sharded", {}), CASE.replace(world_size=2)) is None
