"""What a mutant is said to need is true of further cases, or not, by counting."""

import dataclasses
from pathlib import Path

import pytest

from ringverify.events import Needed
from ringverify.lab import needs_held
from ringverify.lab.expected import read

KILLS = read(Path(__file__).with_name("expected_kills.json"))
CAUSAL = Needed(requires=("causal",), irrelevant=("length",), complete=True)
TRUE = needs_held.Counted(CAUSAL, failing=100, foretold=95, meeting=40, failed=38, turning={"length": 0.1})


@pytest.mark.timeout(240)
def test_a_mutant_needs_what_is_said(monkeypatch):
    """It foretells what the property draws with another seed, and says nothing that these contradict."""
    monkeypatch.setattr(needs_held, "FRESH", 60)
    ((mutant, found),) = needs_held.counted([kill for kill in KILLS if kill.mutant == "B9a"])
    assert mutant == "B9a"
    assert found.needed.requires
    assert 0 < found.foretold == found.failing < 60
    assert 0 < found.failed == found.meeting
    assert found.turning
    assert found.true


@pytest.mark.parametrize(
    "changes",
    [
        {"foretold": 94},
        {"failed": 37},
        {"turning": {"length": 0.0, "window": 0.2}},
        {"needed": dataclasses.replace(CAUSAL, requires=("causal", "certain length"))},
    ],
)
def test_what_few_cases_contradict_is_true_and_more_is_not(changes):
    """Of those that fail, of those that are foretold to, and of those changed in what is said not to matter."""
    assert TRUE.true
    assert not dataclasses.replace(TRUE, **changes).true
