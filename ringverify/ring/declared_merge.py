"""The step in which our implementations merge partial results as the suite sees it, under the name `merge:ring`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringverify.merge_contract import merge
from ringverify.ring.accumulate import merge_

if TYPE_CHECKING:
    import torch


@merge(name="merge:ring", out_layout="bhsd", lse_layout="bhs", dtypes=("float64", "float32"), in_place=True, nan=True)
def merge_in_place(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    """Into the first; see `ringverify.ring.accumulate`."""
    merge_(out_a, lse_a, out_b, lse_b)
