"""Rows that stand in the place of others, or are multiplied, are told without a rule for which."""

from dataclasses import replace

import torch
from mechanisms import case_of, explaining, seen

from ringverify.diagnosis import displaced
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.ring import EVERYTHING, STEPS, returning, ring_of
from ringverify.implementation import Implementation

CASES = [case_of(size=size, query_length=5 * size, head_dim=4, seed=size) for size in (2, 3)]


def test_rows_that_stand_in_the_place_of_others_are_told():
    """The first two of a rank exchanged with the next two, the last one without results."""

    def moved(here, out, lse):
        order = torch.tensor([2, 3, 0, 1])
        out, lse = (
            torch.cat([out[:, order], 0 * out[:, 4:]], 1),
            torch.cat([lse[..., order], lse[..., 4:] - torch.inf], 2),
        )
        return out, lse

    scenes, _ = seen(Implementation(ring_of(returning(moved)), "moved", EVERYTHING), CASES, gradients=False)
    (says,) = explaining(displaced.hypotheses(scenes), scenes)
    assert says == (
        "rows of out and lse are right, and stand in other places: on 2 ranks, that of query 2 stands at query 0 and "
        "that of query 3 stands at query 1, and more"
    )


def test_rows_that_are_multiplied_by_powers_of_the_number_of_ranks_are_told():
    """Those of the first tile twice, those of the second once."""

    def summed(here, dq, dk, dv):
        times = torch.tensor([2, 2, 1, 1, 0])
        return dq * (float(here.size) ** times)[:, None, None], dk, dv

    steps = replace(STEPS, returned_gradients=summed)
    scenes, _ = seen(Implementation(ring_of(steps), "summed", EVERYTHING), CASES, gradients=True)
    (says,) = explaining(displaced.hypotheses(scenes), scenes)
    assert says.startswith("rows of dq are right but for a power of the number of ranks, which differs by row (1 to 2)")


def test_rows_that_are_none_of_the_right_ones_are_not_told_so():
    """And of a right case, and of one that is too large to tell, nothing is contradicted."""

    def half(here, out, lse):
        return 0.5 * out, lse

    scenes, _ = seen(Implementation(ring_of(returning(half)), "half", EVERYTHING), CASES, gradients=False)
    assert wrong_tensors(scenes[0]) == ("out",)
    assert list(displaced.hypotheses(scenes)) == []
    right, _ = seen(Implementation(ring_of(STEPS), "right", EVERYTHING), CASES, gradients=False)
    assert displaced._displaced(("out", "lse"), right[0]) == []
    assert displaced._displaced(("out",), scenes[0]) is None


def test_rows_without_results_are_none_of_others():
    """Where queries in no document have none either."""

    def lost(here, out, lse):
        return torch.cat([out[:, :2], 0 * out[:, 2:]], 1), torch.cat([lse[..., :2], lse[..., 2:] - torch.inf], 2)

    cases = [one.replace(documents=(0, one.problem.nq - 1)) for one in CASES]
    scenes, _ = seen(Implementation(ring_of(returning(lost)), "lost", EVERYTHING), cases, gradients=False)
    assert all(map(wrong_tensors, scenes))
    assert list(displaced.hypotheses(scenes)) == []
