"""The adapters of yunchang: what each variant computes is what the package computes, on the CPU kernels.

A few examples of each; what the package gets wrong is known, and found.
"""

from __future__ import annotations

import pytest
import torch
from hunts import hunted, loaded

from ringverify.targets import BUILT_IN

pytestmark = pytest.mark.timeout(120)

VARIANTS = [name for name in BUILT_IN if name.startswith("peer:yunchang-")]
ON_TORCH = [name for name in VARIANTS if name.startswith("peer:yunchang-torch-")]
RAISES = "peer:yunchang-hybrid-packed"
ON_FLASH_ATTN = [name for name in VARIANTS if name not in (*ON_TORCH, RAISES)]
ROUNDS_DQ = ("peer:yunchang-ring", "peer:yunchang-hybrid")
"""Whose backward returns dq in bfloat16, whatever the dtype of q."""


@pytest.mark.parametrize("target", ON_FLASH_ATTN)
@pytest.mark.by_day(1)
def test_values_and_gradients_are_right_on_flash_attn(target: str) -> None:
    """Of grouped heads, any scale, softcap and any number of ranks that is declared."""
    for property, examples in (("forward", 8), ("gradients", 12)):
        assert hunted(loaded(target), property, examples).counterexample is None


@pytest.mark.parametrize("target", [*ROUNDS_DQ, "peer:yunchang-zigzag", "peer:yunchang-ulysses"])
@pytest.mark.by_day(1)
def test_dq_of_float16_is_rounded_to_bfloat16_by_the_plain_ring(target: str) -> None:
    """A known fault of the package, which the others show to be none of the stand-in."""
    found = hunted(loaded(target), "precision", 8).counterexample
    assert (None if found is None else found.violation.reason) == (("precision", "dq") if target in ROUNDS_DQ else None)


@pytest.mark.parametrize("target", ON_TORCH)
@pytest.mark.by_day(1)
def test_out_is_wrong_on_torch(target: str) -> None:
    """Known faults of the package: log-sum-exps of 0 or in the input dtype, and a ring within Ulysses."""
    found = hunted(loaded(target), "forward", 20).counterexample
    assert found is not None
    assert found.violation.finding is not None
    assert found.violation.finding.tensor == "out"
    assert found.case.world_size > 1


def test_packing_raises_for_a_misspelt_method() -> None:
    """A known fault of the package."""
    found = hunted(loaded(RAISES), "forward", 1).counterexample
    assert found is not None
    assert "continous" in found.violation.summary


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_the_layouts_of_both_at_once_are_those_of_the_package(ranks: int) -> None:
    """Zigzag and striped over the rings, then in order over the ranks of one, as its README extracts them."""
    loaded(VARIANTS[0])
    from ringverify.peers import yunchang as adapter

    whole, rings = torch.arange(4 * ranks), ranks // adapter.ULYSSES_DEGREE
    pieces = whole.chunk(2 * rings)
    for rank, (zigzag, striped) in enumerate(
        zip(adapter.usp_zigzag(4 * ranks, ranks), adapter.usp_striped(4 * ranks, ranks), strict=True)
    ):
        ring, within = divmod(rank, adapter.ULYSSES_DEGREE)
        assert torch.equal(zigzag, (pieces[ring], pieces[2 * rings - 1 - ring])[within])
        assert torch.equal(striped, whole[ring::rings].chunk(adapter.ULYSSES_DEGREE)[within])
