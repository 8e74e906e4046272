"""Exact selection, isolation and the invariants: each finds what it is for, and none rejects what is right."""

from __future__ import annotations

import lenses
import pytest
import right
from hunts import hunted

from ringverify.implementation import Implementation

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize(
    ("attend", "property", "reason"),
    [
        (lenses.padding_leaks, "isolation", ("value", "out")),
        (lenses.sees_ahead, "isolation", ("moves", "out")),
        (lenses.sees_ahead, "exact_selection", ("inexact", "out")),
        (lenses.half_of_dv, "exact_selection", ("inexact", "dv")),
        (lenses.values_in_scores, "invariants", ("linear", "out")),
        (lenses.half_of_dv, "invariants", ("adjoint",)),
        (lenses.shift_matters, "invariants", ("shift", "out")),
    ],
    ids=lambda one: one.name if isinstance(one, Implementation) else str(one),
)
@pytest.mark.by_day(4)
def test_a_lens_finds_what_it_is_for_and_shrinks_it(attend, property, reason):
    """With the reason that names it, on at most two ranks and four tokens."""
    shown = hunted(attend, property, 60).counterexample
    assert shown is not None
    assert shown.violation.reason == reason
    assert shown.repeats
    assert shown.case.world_size <= 2
    assert max(shown.case.problem.nq, shown.case.problem.nk) <= 4


def test_what_padding_holds_is_the_business_of_isolation_alone():
    """A leak of 0 times NaN passes `forward`, whose padding is finite."""
    assert hunted(lenses.padding_leaks, "forward", 60).counterexample is None


@pytest.mark.parametrize("property", ["exact_selection", "isolation", "invariants"])
@pytest.mark.parametrize("attend", [right.attend, lenses.padding_cleared, lenses.in_float16], ids=lambda one: one.name)
@pytest.mark.by_day(1)
def test_what_is_right_passes_every_lens(attend, property):
    """No false alarm on a plain gathered attention."""
    assert hunted(attend, property, 60).counterexample is None
