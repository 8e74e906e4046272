"""What compares bits does not reject a right implementation because its numbers lay elsewhere in memory.

`by_address` multiplies as MKL does on some processors, where the bits of a product depend on the addresses of its
operands; what numpy and torch allocate lies elsewhere in every run.
"""

from __future__ import annotations

import by_address
import pytest

from ringverify.cases.running import Runner
from ringverify.check.hunting import Hunt, hunt
from ringverify.implementation import Implementation
from ringverify.properties.catalogue import PROPERTIES
from ringverify.worlds.simulated import SimulatedWorld

COMPARE_BITS = ("determinism", "exact_selection", "invariants", "inputs_untouched", "reentrancy")
"""Properties in which bits of two runs, or of a run and an integer, are compared."""


def hunted(attend: Implementation, property: str, examples: int = 15) -> Hunt:
    """What is found of one property."""
    return hunt(
        PROPERTIES[property],
        Runner(attend, SimulatedWorld()),
        examples=examples,
        seed=0,
        until=float("inf"),
        progress=lambda done: None,
    )


@pytest.mark.parametrize("property", [*COMPARE_BITS, "strided_inputs", "world_size_invariance", "hazards"])
def test_products_that_depend_on_addresses_break_no_property(property):
    """Sums in another order at other addresses are right, and inputs lie alike in every run of a case."""
    hunt = hunted(by_address.attend, property)
    assert hunt.counterexample is None, hunt.counterexample.violation
    assert hunt.examples > 10


def test_a_path_of_its_own_for_inference_is_not_taken_for_what_is_not_linear():
    """Runs whose bits are compared go the same way: both with gradients, or both without."""
    hunt = hunted(by_address.attend_in_inference, "invariants")
    assert hunt.counterexample is None, hunt.counterexample.violation
