"""`determinism` names the rank and the result that differ between two runs, also where only bits differ."""

from __future__ import annotations

import collections

import pytest
import torch

from ringref.problem import Problem
from ringverify import implementation
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.property import Judgement, Violation
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(60)

BITS_ONLY = "; its numbers are equal: only the sign of a zero or the bits of a NaN differ"


def judged(changed, *, lse: bool = False) -> Judgement:
    """`determinism` where `changed(out, lse, rank)` changes zeros and NaN in place, in every run but the first."""
    turns = collections.Counter[int]()

    @implementation(causal="never", gradients=False, deterministic=True, lse=lse)
    def attend(q, k, v, call):
        turns[call.rank] += 1
        out, sums = torch.zeros_like(q), q.new_full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
        if turns[call.rank] > 1:
            changed(out, sums, call.rank)
        return (out, sums) if lse else out

    case = Case(problem=Problem(query_length=6, heads=2, head_dim=4), world_size=3)
    return PROPERTIES["determinism"].judge(case, Runner(attend, SimulatedWorld()))


def broken(judgement: Judgement) -> Violation:
    """The violation, which there is."""
    assert judgement.violation is not None
    return judgement.violation


def test_the_same_bits_again_are_no_violation():
    """The proof that the tests below see what they change."""
    assert judged(lambda out, lse, rank: None).violation is None


@pytest.mark.parametrize("lse", [False, True])
def test_the_sign_of_a_zero_is_named_on_the_rank_that_has_it(lse):
    """With and without an lse, which is then compared too."""

    def changed(out, lse, rank):
        if rank == 2:
            out.neg_()

    violation = broken(judged(changed, lse=lse))
    assert (violation.reason, violation.rank) == (("other_bits", "out"), 2)
    assert violation.summary == (
        f"out on rank 2 has other bits when the same case is run again on schedule 1 (buffered){BITS_ONLY}"
    )


def test_the_bits_of_a_nan_are_named_in_the_result_that_has_them():
    """Another result than the first one, on another rank than the first one."""

    def changed(out, lse, rank):
        if rank == 1:
            lse.neg_()

    violation = broken(judged(changed, lse=True))
    assert (violation.reason, violation.rank) == (("other_bits", "lse"), 1)
    assert violation.summary.endswith(BITS_ONLY)


@pytest.mark.parametrize("lse", [False, True])
def test_another_number_is_named_before_other_bits(lse):
    """The zero of rank 0 differs too, but a number says more."""

    def changed(out, lse, rank):
        out.neg_()
        if rank == 1:
            out += 1

    violation = broken(judged(changed, lse=lse))
    assert (violation.reason, violation.rank) == (("other_bits", "out"), 1)
    assert "only" not in violation.summary
