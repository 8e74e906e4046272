"""The adapters of ring-flash-attn: what each variant computes is what the package computes, on the CPU kernels.

A few examples of each; what the package gets wrong is known, and found.
"""

from __future__ import annotations

import sys

import pytest

from ringverify.cases.running import Runner
from ringverify.check.hunting import hunt
from ringverify.check.searching import Hunt
from ringverify.errors import Inconclusive
from ringverify.properties.catalogue import PROPERTIES
from ringverify.targets import BUILT_IN, load
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(120)

VARIANTS = [name for name in BUILT_IN if name.startswith("peer:ring-flash-attn")]
ROUNDS_DQ = ("peer:ring-flash-attn-ring", "peer:ring-flash-attn-ring-varlen")
"""Whose backward returns dq in bfloat16, whatever the dtype of q."""


def hunted(target: str, property: str, examples: int) -> Hunt:
    """What is found of one property, or skipped with the line that says why."""
    try:
        attend = load(target)
    except Inconclusive as error:
        pytest.skip(str(error))
    return hunt(
        PROPERTIES[property],
        Runner(attend, SimulatedWorld()),
        examples=examples,
        seed=0,
        progress=lambda done: None,
    )


@pytest.mark.parametrize("target", VARIANTS)
@pytest.mark.by_day(1)
def test_values_and_gradients_are_right(target: str) -> None:
    """Out, log-sum-exp and gradients, of grouped heads, any scale and any number of ranks."""
    for property, examples in (("lse", 10), ("gradients", 15)):
        assert hunted(target, property, examples).counterexample is None


@pytest.mark.parametrize("target", VARIANTS)
@pytest.mark.by_day(1)
def test_dq_of_float16_is_rounded_to_bfloat16_by_two_of_them(target: str) -> None:
    """A known fault of the package, which the others show to be none of the stand-in."""
    found = hunted(target, "precision", 8).counterexample
    assert (None if found is None else found.violation.reason) == (("precision", "dq") if target in ROUNDS_DQ else None)


def test_the_stand_in_is_gone_once_the_package_is_imported() -> None:
    """Neither flash_attn nor the package itself stays behind, half of them ours."""
    hunted(VARIANTS[0], "forward", 1)
    assert not {name.partition(".")[0] for name in sys.modules} & {"flash_attn", "ring_flash_attn"}
