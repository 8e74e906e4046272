"""The shrunk case fails for the reason for which the first one did, where an implementation has two faults."""

import dataclasses

import pytest
from hunts import hunted

from ringverify.cases.running import Runner
from ringverify.check.explaining import judged
from ringverify.faults.ring import PLAIN
from ringverify.implementation import Implementation
from ringverify.properties.catalogue import PROPERTIES
from ringverify.worlds.simulated import SimulatedWorld

LINE = 5
"""Positions from which one fault takes over from the other."""


def _wrong_values(*results):
    return tuple(2 * result for result in results)


def _raises(*results):
    raise ValueError(f"{len(results)} results refused")


def _wrong_lse(out, lse):
    return out, lse + 1


def two_faults(below, above):
    """The plain ring with one fault for short sequences and another for long ones."""

    def attend(q, k, v, call):
        results = PLAIN.function(q, k, v, call)
        return (below if call.problem.nq < LINE else above)(*results)

    capabilities = dataclasses.replace(PLAIN.capabilities, sharding="contiguous", cross_lengths=False, dilation=())
    return Implementation(attend, "two faults", capabilities)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("below", "above", "reason"),
    [
        (_wrong_values, _raises, "raised"),
        (_raises, _wrong_values, "out"),
        (_wrong_lse, _wrong_values, "out"),
    ],
)
@pytest.mark.by_day(1)
def test_shrinking_does_not_slip_into_another_fault(below, above, reason):
    """A short case fails too, and is smaller, but for another reason."""
    attend = two_faults(below, above)
    found = hunted(attend, "forward", 200, seed=6).counterexample
    first = judged(PROPERTIES["forward"], found.first, Runner(attend, SimulatedWorld())).violation
    assert found.first.problem.nq >= LINE
    assert found.case.problem.nq == LINE
    assert reason in first.reason
    assert first.reason in (found.violation.reason, *found.violation.also)
