"""What compares bits does not reject a right implementation because its numbers lay elsewhere in memory.

`by_address` multiplies as MKL does on some processors, where the bits of a product depend on the addresses of its
operands; what numpy and torch allocate lies elsewhere in every run.
"""

from __future__ import annotations

import dataclasses

import by_address
import pytest
from hunts import hunted

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.comparing import worst
from ringverify.cases.running import Runner
from ringverify.check.repeating import same_failure
from ringverify.properties.property import Judgement, Violation
from ringverify.worlds.simulated import SimulatedWorld

COMPARE_BITS = ("determinism", "exact_selection", "invariants", "inputs_untouched", "reentrancy")
"""Properties in which bits of two runs, or of a run and an integer, are compared."""


@pytest.mark.parametrize("property", [*COMPARE_BITS, "strided_inputs", "world_size_invariance", "hazards"])
@pytest.mark.by_day(3)
def test_products_that_depend_on_addresses_break_no_property(property):
    """Sums in another order at other addresses are right, and inputs lie alike in every run of a case."""
    hunt = hunted(by_address.attend, property, 15)
    assert hunt.counterexample is None, hunt.counterexample.violation
    assert hunt.examples > 10


def test_a_path_of_its_own_for_inference_is_not_taken_for_what_is_not_linear():
    """Runs whose bits are compared go the same way: both with gradients, or both without."""
    hunt = hunted(by_address.attend_in_inference, "invariants", 15)
    assert hunt.counterexample is None, hunt.counterexample.violation


@pytest.mark.nightly
def test_a_failure_repeats_although_its_last_bits_do_not():
    """And so it is explained: what a race leaves would be further apart than rounding."""
    shown = hunted(by_address.attend_wrongly, "forward", 15, explain=True).counterexample
    assert shown is not None
    assert shown.repeats
    assert shown.diagnosis.where is not None


def failed(**changes) -> Judgement:
    """The judgement of a case that fails on one element, with other bits than any other run's."""
    case = Case(problem=Problem(query_length=6, heads=2, head_dim=4), world_size=2)
    runner = Runner(by_address.attend_wrongly, SimulatedWorld())
    _, finding = worst(case, runner.capabilities, runner.run(case, gradients=False), ("out",))
    assert finding is not None
    finding = dataclasses.replace(finding, **changes)
    return Judgement(2.0, Violation(("value", finding.tensor), finding.rank, "wrong", "", finding), str(changes))


def test_a_failure_is_the_same_up_to_rounding_on_the_same_element():
    """The edges of that: another rank, element or tensor, a number further off, a NaN, a run that passes."""
    one = failed(actual=1.0, allowed=0.25, rank=1, index=(0, 1, 1, 2))
    for other in ({}, {"actual": 1.5}, {"actual": 0.5}):
        assert same_failure(one, failed(**{"actual": 1.0, "allowed": 0.25, "rank": 1, "index": (0, 1, 1, 2)} | other))
    for other in ({"actual": 1.75}, {"actual": float("nan")}, {"rank": 0}, {"index": (0, 1, 1, 3)}, {"tensor": "lse"}):
        changed = failed(**{"actual": 1.0, "allowed": 0.25, "rank": 1, "index": (0, 1, 1, 2)} | other)
        assert not same_failure(one, changed), other
    assert same_failure(failed(actual=float("nan")), failed(actual=float("nan"), error=0.0))
    assert same_failure(one, dataclasses.replace(one))
    assert not same_failure(one, Judgement(0.0, None))
