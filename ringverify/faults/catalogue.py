"""Every mutant by id, every cause, and the field's reports of which no mutant can be made.

`ringverify.faults.catalogue.MUTANTS["A1"].implementation` is also `ringverify.faults.accumulation:A1`.
"""

from __future__ import annotations

from ringverify.faults import (
    accumulation,
    autograd,
    causes_of_gradients,
    causes_of_masks,
    causes_of_numbers,
    communication,
    dilation,
    layout,
    masking,
    operators,
    operators_of_dtype,
    operators_of_index,
    precision,
    reports,
    shapes,
    state,
    strides,
    unlisted,
    varlen,
)
from ringverify.faults.fault import Cause, Mutant
from ringverify.faults.ring import Steps
from ringverify.implementation import Implementation

GROUPS = (
    accumulation, masking, layout, communication, precision, autograd, shapes, dilation, strides, state, varlen,
    reports, operators, operators_of_index, operators_of_dtype, unlisted,
    causes_of_numbers, causes_of_masks, causes_of_gradients,
)  # fmt: skip


def _all() -> dict[str, Mutant]:
    found: dict[str, Mutant] = {}
    for module in GROUPS:
        for name, mutant in module.FAULTS.mutants.items():
            if name in found:
                raise ValueError(f"two mutants are called {name!r}")
            found[name] = mutant
    return found


MUTANTS: dict[str, Mutant] = _all()
"""By id, in the order of the reports, operators last."""

CAUSES: tuple[Cause, ...] = (
    *causes_of_masks.MISUNDERSTOOD.causes,
    *(cause for group in GROUPS for cause in group.FAULTS.causes),
)
"""Every fault that has a sentence of its own."""

RARE: tuple[Cause, ...] = tuple(
    Cause(one.title, one.ring, one.when)
    for one in MUTANTS.values()
    if one.kind == "value" and isinstance(one.ring, Steps) and all(one.ring is not cause.steps for cause in CAUSES)
)
"""The others that numbers show, by their titles: they are tried where no sentence explains what was seen."""

OUT_OF_SCOPE: dict[str, str] = {
    "B6": "rotary embedding: q and k come already rotated, the semantics have no positions of their own",
    "B7": "rotary embedding of packed sequences: as B6",
    "B11": "attention sinks: the semantics have no extra column",
    "E2": "overflow of int32 offsets: needs 2^31 elements, out of reach of a suite of small cases",
    "F11": "dropout: the semantics have no randomness",
    "R15": "a report of variants over several frameworks, not a fault",
    "R16": "a list of features that were recommended, not a fault",
}
"""Rows of the reports that need what the written semantics lack, and why."""

TOLD_AS = {"R10": "F1b"}
"""Reports of a fault that behaves as another one, and the id of that."""


def __getattr__(name: str) -> Implementation:
    """Return a mutant's implementation as an attribute of this module, so that a target can name it by its id."""
    if name in MUTANTS:
        return MUTANTS[name].implementation
    raise AttributeError(f"no mutant {name!r}; `ringverify list mutants` names them")
