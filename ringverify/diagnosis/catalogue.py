"""All hypotheses in the order in which they are tried: of two that explain the same case, the earlier comes first."""

from __future__ import annotations

from ringverify.diagnosis.filling import FILLED
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.merging_branches import MERGED_BRANCHES
from ringverify.diagnosis.misunderstood import MISUNDERSTOOD
from ringverify.diagnosis.narrowing import NARROWED, SUMMED
from ringverify.diagnosis.neighbours import NEIGHBOURS
from ringverify.diagnosis.rearranging import REARRANGED
from ringverify.diagnosis.rounding_digits import ROUNDED
from ringverify.diagnosis.substituting import SUBSTITUTED
from ringverify.faults import positions
from ringverify.faults.catalogue import CAUSES, MUTANTS
from ringverify.faults.reports import OPERATOR

_DECLARED = {found.says for found in (*MISUNDERSTOOD, *positions.MISUNDERSTOOD.causes)}
_REPORTED = {mutant.fault.says for mutant in MUTANTS.values() if mutant.source != OPERATOR}


def _place(found: Hypothesis) -> tuple[bool, bool, int]:
    common = 0 if found.says in _DECLARED else 1 if found.says in _REPORTED else 2
    return found.when != "always", found.narrow, common


HYPOTHESES: tuple[Hypothesis, ...] = tuple(
    sorted(
        (
            *MISUNDERSTOOD,
            *(Hypothesis(**vars(cause)) for cause in CAUSES),
            *REARRANGED,
            *FILLED,
            *MERGED_BRANCHES,
            *SUBSTITUTED,
            *NEIGHBOURS,
            *SUMMED,
            *NARROWED,
            *ROUNDED,
        ),
        key=_place,
    )
)
"""Faults of both directions come before faults of one direction, faults of all blocks before faults of some; then what
may be only declared wrongly, faults that were reported, and all others."""
