"""Exact selection, isolation and the invariants: each finds what it is for, and none rejects what is right."""

from __future__ import annotations

import re
from types import SimpleNamespace

import lenses
import numpy as np
import pytest
import right
from hunts import hunted

from ringverify.implementation import Implementation
from ringverify.properties.property import undefined

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
        (lenses.nan_in_the_last_row, "invariants", ("undefined", "out")),
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


def test_where_nan_breaks_an_identity_the_message_names_nan_and_its_rows():
    """The row of NaN is one of the rows of all heads; the identity that it breaks is not what is wrong."""
    shown = hunted(lenses.nan_in_the_last_row, "invariants", 10).counterexample
    assert shown is not None
    assert re.fullmatch(r"out has NaN in \d+ of \d+ rows, on rank \d", shown.violation.summary)


@pytest.mark.parametrize("property", ["modes", "world_size_invariance"])
def test_nan_in_the_same_places_is_no_difference(property):
    """It is the oracle's business."""
    assert hunted(lenses.nan_in_the_last_row, property, 10).counterexample is None
    assert hunted(lenses.nan_in_the_last_row, "forward", 10).counterexample is not None


@pytest.mark.parametrize("property", ["modes", "world_size_invariance", "invariants"])
def test_results_that_are_wrong_alike_but_for_rounding_are_no_difference(property):
    """A row that should be empty, or see one key, sums over many: its rounding is not bounded by the right row's."""
    assert hunted(lenses.never_masks, property, 60).counterexample is None
    assert hunted(lenses.never_masks, "forward", 10).counterexample is not None


def test_nan_in_one_mode_alone_is_a_difference_that_names_it():
    """Training has none."""
    shown = hunted(lenses.nan_without_gradients, "modes", 10).counterexample
    assert shown is not None
    assert ": it has NaN in 1 of 1 rows, on rank 0, that of training numbers alone" in shown.violation.summary


def test_undefined_values_are_counted_by_rows_and_an_empty_row_is_none():
    """The lse of a row without keys is -inf; infinities of out, and +inf of lse, are told apart from NaN."""
    nan, inf = float("nan"), float("inf")
    one = SimpleNamespace(
        out=np.array([[[[1.0, nan]], [[inf, nan]], [[1.0, 2.0]]]]), lse=np.array([[[0.0, -inf, nan]]])
    )
    other = SimpleNamespace(out=np.ones((1, 1, 1, 2)), lse=np.array([[[inf]]]))
    empty = SimpleNamespace(out=np.zeros((1, 0, 1, 2)), lse=np.array([[[-inf]]]))
    assert undefined(SimpleNamespace(ranks=[one, other]), "out") == "NaN and infinities in 2 of 4 rows, on rank 0"
    assert undefined(SimpleNamespace(ranks=[one, other]), "lse") == "NaN and infinities in 2 of 4 rows, on ranks 0, 1"
    assert undefined(SimpleNamespace(ranks=[empty]), "out") == undefined(SimpleNamespace(ranks=[empty]), "lse") == ""
