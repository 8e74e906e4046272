"""All hypotheses in the order in which they are tried: of two that explain the same case, the earlier is named."""

from __future__ import annotations

from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.misunderstood import MISUNDERSTOOD
from ringverify.diagnosis.narrowing import NARROWED, SUMMED
from ringverify.faults.catalogue import CAUSES

HYPOTHESES: tuple[Hypothesis, ...] = tuple(
    sorted(
        (*MISUNDERSTOOD, *(Hypothesis(**vars(cause)) for cause in CAUSES), *SUMMED, *NARROWED),
        key=lambda found: (found.when != "always", found.narrow),
    )
)
"""Faults of both directions come before faults of one direction, and faults of all blocks before faults of some."""
