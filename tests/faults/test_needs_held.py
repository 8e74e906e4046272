"""What a mutant is said to need is true of further cases, or not, by counting."""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.diagnosis.when.needs import needs
from ringverify.events import Needed
from ringverify.implementation import Capabilities
from ringverify.lab import needs_held
from ringverify.lab.expected import read

KILLS = read(Path(__file__).with_name("expected_kills.json"))
CAUSAL = Needed(requires=("causal",), irrelevant=("length",), complete=True)
TRUE = needs_held.Counted(CAUSAL, failing=100, foretold=95, meeting=40, failed=38, turning={"length": 0.1})


@pytest.mark.timeout(240)
@pytest.mark.nightly
def test_a_mutant_is_searched_and_what_is_said_of_it_is_counted():
    """As for a user; how much is found out depends on the machine's load, and is not asked here."""
    ((mutant, found),) = needs_held.counted([kill for kill in KILLS if kill.mutant == "B9a"], fresh=60)
    assert mutant == "B9a"
    assert found.needed.requires
    assert 0 < found.foretold <= found.failing < 60
    assert 0 < found.failed <= found.meeting
    assert found.turning


def test_what_is_said_is_held_against_further_cases():
    """True of a planted condition; not if it is left out, nor if what matters is called no matter."""

    def fails(case):
        return case.problem.causal and case.world_size > 1

    declared = Capabilities(sharding=("contiguous",), uneven=True, causal="both", window=True)
    case = Case(problem=Problem(query_length=4, causal=True), world_size=2, values="normal")
    said = needs(case, fails, declared, most_ranks=4)
    fresh = list(itertools.islice(said.exploration.varying.scattered([case], random.Random(5)), 80))
    failing = sum(map(fails, fresh))
    found = needs_held._counted(said, said.exploration, fresh)
    assert 0 < failing < 80
    assert (found.failing, found.foretold, found.meeting, found.failed) == (failing,) * 4
    assert set(found.turning.values()) == {0.0}
    assert found.true
    silent = needs_held._counted(dataclasses.replace(said, requires=()), said.exploration, fresh)
    assert (silent.meeting, silent.failed) == (80, failing)
    assert not silent.true
    said.exploration.outcomes["causal"] = [True]
    wrong = dataclasses.replace(said, requires=(), irrelevant=("causal",))
    assert needs_held._counted(wrong, said.exploration, fresh).turning == {"causal": 1.0}


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
