"""Every hypothesis there is, the plainest first: of two that explain the same, the earlier is named."""

from __future__ import annotations

from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.misunderstood import MISUNDERSTOOD
from ringverify.diagnosis.narrowing import NARROWED, SUMMED
from ringverify.faults.catalogue import CAUSES, RARE

UNCOMMON: tuple[Hypothesis, ...] = tuple(Hypothesis.of(cause) for cause in RARE)
"""What is tried where none of the others explains a case."""

HYPOTHESES: tuple[Hypothesis, ...] = tuple(
    sorted(
        (*MISUNDERSTOOD, *(Hypothesis.of(cause) for cause in CAUSES), *SUMMED, *NARROWED),
        key=lambda found: (found.when != "always", found.narrow),
    )
)
"""What holds throughout before what holds in one direction, on all blocks before on some."""
