"""The adapters of ring-flash-attn: what each variant computes is what the package computes, on the CPU kernels.

A few examples of each; what the package gets wrong is known, and found.
"""

from __future__ import annotations

import sys

import pytest
from hunts import hunted, loaded

from ringverify.targets import BUILT_IN

pytestmark = pytest.mark.timeout(120)

VARIANTS = [name for name in BUILT_IN if name.startswith("peer:ring-flash-attn")]
ROUNDS_DQ = ("peer:ring-flash-attn-ring", "peer:ring-flash-attn-ring-varlen")
"""Whose backward returns dq in bfloat16, whatever the dtype of q."""


@pytest.mark.parametrize("target", VARIANTS)
@pytest.mark.by_day(1)
def test_values_and_gradients_are_right(target: str) -> None:
    """Out, log-sum-exp and gradients, of grouped heads, any scale and any number of ranks."""
    for property, examples in (("lse", 10), ("gradients", 15)):
        assert hunted(loaded(target), property, examples).counterexample is None


@pytest.mark.parametrize("target", VARIANTS)
@pytest.mark.by_day(1)
def test_dq_of_float16_is_rounded_to_bfloat16_by_two_of_them(target: str) -> None:
    """A known fault of the package, which the others show to be none of the stand-in."""
    found = hunted(loaded(target), "precision", 8).counterexample
    assert (None if found is None else found.violation.reason) == (("precision", "dq") if target in ROUNDS_DQ else None)


def test_the_stand_in_is_gone_once_the_package_is_imported() -> None:
    """Neither flash_attn nor the package itself stays behind, half of them ours."""
    hunted(loaded(VARIANTS[0]), "forward", 1)
    assert not {name.partition(".")[0] for name in sys.modules} & {"flash_attn", "ring_flash_attn"}
