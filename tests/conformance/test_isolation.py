"""Isolation means padding: NaN is asked of nobody where ordinary numbers lie, unless it declares `poison_safe`."""

from __future__ import annotations

import dataclasses

import pytest
import skipping
from hunts import hunted

from ringverify.cases.running import Runner
from ringverify.check.hunting import hunt
from ringverify.properties.catalogue import PROPERTIES
from ringverify.ring.declared import allgather, ring
from ringverify.vectors.catalogue import STORIES
from ringverify.vectors.trying import Trial, trial
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("property", ["forward", "masked_rows", "isolation", "chunk_boundaries"])
@pytest.mark.by_day(1)
def test_a_dilated_ring_that_multiplies_by_0_what_it_skips_is_right(property):
    """Positions that a dilation or a window skips hold ordinary numbers; its padding is cleared."""
    found = hunted(skipping.times_zero, property, 60)
    assert found.counterexample is None
    assert found.examples == 60


def test_as_many_cases_put_a_property_to_the_test_as_are_asked_for():
    """What is drawn without a key that could leak, or a future, is not one of them."""
    assert hunted(ring, "isolation", 10).examples == 10
    never = dataclasses.replace(PROPERTIES["isolation"], applies=lambda case, capabilities: False)
    assert hunt(never, Runner(ring, SimulatedWorld()), examples=3, seed=0, progress=lambda done: None).examples == 0


def test_padding_that_is_multiplied_by_0_is_found():
    """The same ring without the clearing: the smallest case has a key length and no NaN but there."""
    shown = hunted(skipping.times_zero_of_padding, "isolation", 120).counterexample
    assert shown is not None
    assert shown.case.values == "poisoned"
    assert shown.case.problem.key_lengths is not None
    assert hunted(skipping.times_zero_of_padding, "forward", 60).counterexample is None


@pytest.mark.nightly
def test_a_claim_of_poison_safety_is_held_to_it():
    """Who declares it and multiplies by 0 fails with NaN in what is skipped; who clears that passes."""
    shown = hunted(skipping.called_safe, "isolation", 120).counterexample
    assert shown is not None
    assert shown.case.values == "poisoned_skips"
    assert hunted(skipping.cleared, "isolation", 120).counterexample is None


@pytest.mark.parametrize("attend", [ring, allgather], ids=lambda one: one.name)
@pytest.mark.by_day(1)
def test_our_own_declare_that_they_are_safe_and_are(attend):
    """Both keep their words under every constraint."""
    assert attend.capabilities.poison_safe
    assert hunted(attend, "isolation", 30).counterexample is None


@pytest.mark.parametrize(
    ("id", "safe", "asked"),
    [
        ("V119", False, True),
        ("V120", False, True),
        ("V121", False, False),
        ("V122", False, False),
        ("V122", True, True),
    ],
)
def test_golden_vectors_follow_the_same_rule(id, safe, asked):
    """NaN in padding is asked of all, NaN in what a window or a dilation skips of those that declare `poison_safe`."""
    capabilities = dataclasses.replace(ring.capabilities, poison_safe=safe)
    found = trial(STORIES[id], STORIES[id].layouts[0], capabilities)
    assert isinstance(found, Trial) == asked
    assert asked or str(found) == "poison_safe is not declared"
