"""What is claimed of memory is held to the peaks of a run and of one that is half as long."""

from __future__ import annotations

import dataclasses

import pytest

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.check.options import Options
from ringverify.check.planning import planned
from ringverify.properties.memory import MEMORY
from ringverify.properties.property import Judgement
from ringverify.reports.progress import HIDDEN
from ringverify.ring.declared import ring
from ringverify.scale import memory as memory_at_length
from ringverify.scale.memory import _at_length, _no_verdict, memory
from ringverify.scale.trials import Trials
from ringverify.worlds.processes import torchrun
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


def test_under_torchrun_the_figure_says_that_it_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the peak that was seen, and the way to a verdict; a short run has a verdict in a simulated world anyway."""
    trials = trials_with("streaming", {CASE: 3 * GIB})
    assert list(_no_verdict(trials, [CASE])) == []
    monkeypatch.setattr(torchrun, "placement", lambda: object())
    assert _at_length(trials, CASE) is None
    assert list(_no_verdict(trials, [CASE, CASE.replace(query_length=1 << 12)])) == [
        "the peak of a rank at 131,072 positions is 3072 MiB, which decides nothing under torchrun, whose processes "
        "keep what earlier runs held; --world gloo without torchrun holds it to the claim"
    ]


def test_a_length_that_is_too_short_to_decide_is_no_accusation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a pass: it is inconclusive, and says of what."""
    undecided = dataclasses.replace(MEMORY, judge=lambda *_: Judgement(0.0, None, applies=False))
    monkeypatch.setattr(memory_at_length, "MEMORY", undecided)
    event = memory(trials_with("streaming", {}), [CASE.replace(query_length=1 << 12)]).outcome.verdict
    assert event.verdict == "inconclusive"
    assert event.reason is not None
    assert event.reason.startswith("too short to decide: 8 ranks n=2048 ")


def test_where_a_pattern_decides_it_is_no_verdict() -> None:
    """Under a window, and where two ranks are too few to be compared with one."""
    window = CASE.replace(window=(4095, 0))
    assert _at_length(trials_with("streaming", {}), window) is None
    assert _at_length(trials_with("sharded", {}), CASE.replace(world_size=2)) is None
