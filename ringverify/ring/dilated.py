"""Dilated attention over a ring as a module, configured the way LongNet-style layers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringref.problem import Dilation, HeadMode, HeadOffset
from ringverify.ring.module import RingAttention


class DilatedRingAttention(RingAttention):
    """Attention in segments, of which a branch of rate r touches every r-th position, over all ranks of a group.

    Ding et al. 2023, *LongNet: scaling transformers to 1,000,000,000 tokens*, arXiv:2307.02486, with the semantics of
    `ringref.problem.Dilation`. Nothing has to divide anything: not the segments the length, not the rates the segments,
    not the ranks either. A rate of r computes and sends an r-th of a segment's keys, and a segment that lies within one
    rank sends nothing.

    Args:
        segment_lengths: one a branch, at least 1.
        dilation_rates: one a branch, at least 1.
        heads: "shared", every head runs every branch and their results are merged by their log-sum-exps, or "split",
            every head runs one branch.
        head_offset: with shared heads, the first position of a segment that a head covers: "cyclic", `h % r`, or
            "block", `h // ceil(H / r)`.
        **settings: those of `RingAttention`; a dilation is not among them.

    Raises:
        ValueError: the lists differ in length or are empty, or a value is out of range; raised on construction.
        TypeError: `dilation` is given as well.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        heads: HeadMode = "shared",
        head_offset: HeadOffset = "cyclic",
        **settings: Any,
    ) -> None:
        if "dilation" in settings:
            raise TypeError("dilation: segment_lengths and dilation_rates are the dilation already; leave it out")
        if len(segment_lengths) != len(dilation_rates):
            raise ValueError(
                f"segment_lengths={list(segment_lengths)} and dilation_rates={list(dilation_rates)}: expected one rate "
                "for each segment length"
            )
        branches = tuple(zip(segment_lengths, dilation_rates, strict=True))
        super().__init__(dilation=Dilation(branches=branches, heads=heads, head_offset=head_offset), **settings)
