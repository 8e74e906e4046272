"""Wrong merges are caught, every one, and what is wrong is said."""

import pytest
from merges import BROKEN, OTHERWISE, changes_b, needs_contiguous, right, rounds_weights, violated

from ringverify import merge
from ringverify.lab.merge_kills import calls_of
from ringverify.lab.variants_of_merges import broken, by_maximum, in_base_2
from ringverify.merging.case import LN2
from ringverify.merging.faults import FAULTS
from ringverify.merging.judging import cause_of
from ringverify.merging.properties import PROPERTIES

FOUND_BY = {
    "sigmoid": "all_empty",
    "no_shift": "far_apart",
    "log1p": "far_apart",
    "empty_lse_0": "all_empty",
    "empty_counts": "empty_partial",
    "nan_hidden": "nan_seen",
    "detached": "gradients",
    "out_detached": "gradients",
    "equal_lost": "equal_lse",
    "two_only": "n_way",
    "guarded_behind": "empty_gradients",
    "returned_base": "merged_lse",
    "converted": "merged_lse",
    "lse_is_max": "merged_lse",
    "lse_is_first": "merged_lse",
    "lse_is_last": "merged_lse",
    "lse_is_sum": "merged_lse",
}
"""The property that shows a fault best; `merged_out` for the others."""


@pytest.mark.parametrize("id", FAULTS)
def test_a_fault_is_caught_and_named(id):
    """By the property that is about it, with its own sentence as the cause."""
    # Of two partials, the first one alone and all but the last are the same.
    wrong = broken(FAULTS[id], stacked=True) if id in ("last_lost", "two_only") else BROKEN[id]
    (one,) = violated(wrong, only=[FOUND_BY.get(id, "merged_out")])
    property, found = one
    assert found.violation.reason[0] == "value"
    assert cause_of(property, found, wrong.capabilities, calls_of(wrong)) is FAULTS[id]


OTHER_BASE = (
    merge(name="e for 2", base=2)(by_maximum.function),
    merge(name="2 for e", out_layout="thd", lse_layout="ht")(in_base_2.function),
)


@pytest.mark.parametrize("wrong", OTHER_BASE, ids=lambda merge: merge.name)
def test_the_other_base_is_named(wrong):
    """A right merge, but for the base that it declares."""
    found = list(violated(wrong, only=["merged_out", "merged_lse"]))
    assert [cause_of(*one, wrong.capabilities, calls_of(wrong)).id for one in found] == ["base", "base"]


@pytest.mark.parametrize("id", ["given_base", "returned_base", "converted"])
def test_an_lse_of_another_base_is_named_where_base_2_is_declared_too(id):
    """As the cause of a wrong out of three partials too, whose second merge is given it."""

    @merge(base=2)
    def in_two(out_a, lse_a, out_b, lse_b):
        if id == "given_base":
            out, lse = right(out_a, lse_a, out_b, lse_b)
            return out, lse / LN2
        out, lse = right(out_a, lse_a * LN2, out_b, lse_b * LN2)
        return out, lse if id == "returned_base" else lse / LN2**2

    for one in (in_two, BROKEN[id]):
        found = list(violated(one, only=["merged_out", "merged_lse"]))
        assert [cause_of(*each, one.capabilities, calls_of(one)).id for each in found] == [id, id]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tensor", [0, 1], ids=["out", "lse"])
def test_exchanged_axes_are_told_by_the_shape_whatever_lengths_are_drawn_first(tensor, seed):
    """Where tokens and heads are as many, the shape is that expected, and only the values are wrong."""

    @merge()
    def transposed(out_a, lse_a, out_b, lse_b):
        found = list(right(out_a, lse_a, out_b, lse_b))
        found[tensor] = found[tensor].transpose(1, 2)
        return tuple(found)

    for _, found in violated(transposed, only=["merged_out", "merged_lse"], seed=seed):
        assert found.violation.failure.rule == "shape"
        assert f"returned {('out', 'lse')[tensor]} of shape" in found.violation.summary


SAID = {
    "changes_b": ("inputs_untouched", "the merge changed its input lse_b"),
    "into_the_second": ("inputs_untouched", "the merge changed its input out_b, lse_b"),
    "not_in_place": ("merged_out", "returned an out in memory of its own: in_place=True is declared"),
    "needs_contiguous": ("strided_inputs", "in memory, not contiguous"),
    "in_float32": (
        "merged_out",
        "returned out in float32: bfloat16 is expected; another one is declared with out_dtype",
    ),
    "rounds_lse": (
        "merged_lse",
        "returned lse in bfloat16: float32 or wider is expected; another one is",
    ),
    "rounds_weights": ("low_precision", "out is wrong"),
    "transposed_lse": ("merged_lse", 'is expected, lse_layout="bsh"'),
    "out_only": (
        "merged_out",
        "returned a Tensor: (out, lse) is expected; a merge that returns out alone declares lse=False",
    ),
    "three_values": ("merged_out", "returned 3 values: (out, lse) is expected"),
    "lse_detached": ("gradients", "returned an lse that is not attached to the partials by autograd"),
    "raises": ("all_empty", "the merge raised ValueError: nothing to merge"),
}


@pytest.mark.parametrize("wrong", OTHERWISE, ids=lambda merge: merge.name)
def test_what_is_wrong_beside_numbers_is_said(wrong):
    """In the first line that the user sees."""
    property, words = SAID[wrong.name.rpartition(".")[2]]
    (one,) = violated(wrong, only=[property])
    assert words in one[1].violation.summary


def test_a_counterexample_is_as_small_as_its_fault_allows():
    """Two partials of one token, one head and one dimension, where the fault needs no more."""
    (one,) = violated(BROKEN["empty_lse_0"], only=["all_empty"])
    assert one[1].case.describe() == (
        "2 partials batch=1 tokens=1 heads=1 dim=1 float32 values=all_empty memory=contiguous seed=0"
    )


SURELY = {
    "merged_out": BROKEN["mean"],
    "merged_lse": BROKEN["lse_is_max"],
    "equal_lse": broken(FAULTS["equal_lost"], gradients=False),
    "far_apart": BROKEN["log1p"],
    "empty_partial": BROKEN["empty_counts"],
    "all_empty": BROKEN["empty_lse_0"],
    "order": BROKEN["lse_is_first"],
    "grouping": BROKEN["mean"],
    "n_way": broken(FAULTS["two_only"], stacked=True),
    "low_precision": rounds_weights,
    "nan_seen": BROKEN["nan_hidden"],
    "gradients": BROKEN["detached"],
    "empty_gradients": BROKEN["guarded_behind"],
    "inputs_untouched": changes_b,
    "strided_inputs": needs_contiguous,
}
ALONE = {"equal_lse", "all_empty", "low_precision", "nan_seen", "empty_gradients", "inputs_untouched"}
"""Properties without which their fault above would pass."""


@pytest.mark.parametrize("id", PROPERTIES)
@pytest.mark.by_day(5)
def test_every_property_surely_finds_a_fault_and_most_find_one_that_no_other_does(id):
    """With every seed of three, within half of the examples that the quick suite has."""
    wrong, half = SURELY[id], PROPERTIES[id].examples // 2
    for seed in range(3):
        assert list(violated(wrong, only=[id], examples=half, seed=seed)), seed
    if id in ALONE:
        assert [one.id for one, _ in violated(wrong)] == [id]
