"""Two roundings at once, and one of the forward beside what the backward rounds, are told by digits."""

from dataclasses import replace

import pytest
import torch
from mechanisms import case_of, explaining, seen

from ringverify.diagnosis.rounding_digits import ROUNDED, TWICE, rounding
from ringverify.faults.merging import online
from ringverify.faults.ring import EVERYTHING, STEPS, ring_of
from ringverify.implementation import Capabilities, Implementation

CASES = [case_of(size=size, query_length=6 * size, head_dim=8, dtype="bfloat16", seed=size) for size in (2, 3)]


def of(sentence):
    """The steps of the one rounding that is called so."""
    return next(one.steps for one in ROUNDED if one.sentence() == sentence)


OUT, SCORES = (
    "out is rounded to the input dtype after every hop",
    "scores are rounded to the input dtype before the softmax",
)
DQ = "dq is rounded to the input dtype after every hop"


def test_two_roundings_of_the_forward_are_told_where_neither_of_them_explains_the_digits():
    """Both in one sentence."""
    both = replace(of(OUT), capped=of(SCORES).capped)
    scenes, _ = seen(Implementation(ring_of(both), "twice", EVERYTHING), CASES, gradients=False)
    assert explaining(ROUNDED, scenes) == []
    assert f"{OUT}, and {SCORES}" in explaining(TWICE, scenes)
    assert f"{OUT}, and {SCORES}" in [one.sentence() for one in rounding(scenes)]


def test_a_rounding_of_the_forward_is_told_whatever_the_backward_rounds():
    """Gradients are rounded more than what is rounded in the forward says."""
    both = replace(of(OUT), add_dq=of(DQ).add_dq)
    scenes, _ = seen(Implementation(ring_of(both), "forward", EVERYTHING), CASES, gradients=True)
    assert OUT in explaining(ROUNDED, scenes)


def in_halves(q, k, v, call):
    """Queries meet keys in 16 bits, and what comes of it is scaled in 32."""
    s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k).float()
    lse = s.logsumexp(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp(), v.float())
    return out.to(q.dtype), lse


def test_products_that_are_rounded_before_they_are_scaled_are_told():
    """They are larger than scores, by the root of the head dimension."""
    declared = Capabilities(world_sizes=(1,), dtypes=("bfloat16",), causal="never", lse=True, gradients=False)
    cases = [case_of(size=1, query_length=n, head_dim=8, dtype="bfloat16", seed=n) for n in (6, 9)]
    scenes, _ = seen(Implementation(in_halves, "halves", declared), cases, gradients=False)
    assert "products of queries and keys are rounded to the input dtype before they are scaled" in explaining(
        ROUNDED, scenes
    )


def test_a_denominator_that_is_kept_and_rescaled_in_16_bits_is_told():
    """Each step of it is rounded, and its logarithm; scores rise from block to block, so that it grows."""

    def narrow(here, x):
        return x.to(here.dtype).to(here.wide)

    steps = online(total=lambda here, x: x.to(here.dtype), rescaled=narrow)
    cases = [replace(case, values="rising_blocks") for case in CASES]
    scenes, _ = seen(Implementation(ring_of(steps), "denominator", EVERYTHING), [*CASES, *cases], gradients=True)
    says = "the running sum of exponentials is kept in the input dtype, and rescaled in it, and its logarithm is taken "
    assert f"{says}in it" in [one.sentence() for one in rounding(scenes)]
    plain, _ = seen(Implementation(ring_of(online(total=narrow)), "plain", EVERYTHING), cases, gradients=True)
    assert f"{says}in it" not in [one.sentence() for one in rounding(plain)]


@pytest.mark.nightly
def test_dq_that_is_rounded_before_its_scale_is_told():
    """It is rounded twice, which a scale that is a power of two does not show."""

    def sum_queries(steps, here, dq):
        whole = STEPS.sum_queries(steps, here, dq) / steps.scale(here)
        return whole.to(here.dtype).to(here.wide) * steps.scale(here)

    implementation = Implementation(ring_of(replace(STEPS, sum_queries=sum_queries)), "scaled", EVERYTHING)
    scenes, _ = seen(implementation, CASES, gradients=True)
    says = "dq is rounded to the input dtype before it is multiplied by the scale, and after"
    assert says in [one.sentence() for one in rounding(scenes)]
    plain, _ = seen(implementation, [case.replace(head_dim=4) for case in CASES], gradients=True)
    assert says not in [one.sentence() for one in rounding(plain)]


def test_of_right_digits_nothing_is_said():
    """No pair of roundings shows."""
    scenes, _ = seen(Implementation(ring_of(STEPS), "right", EVERYTHING), CASES, gradients=False)
    assert rounding(scenes) == []
