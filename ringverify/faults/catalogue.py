"""Every mutant by id, and every cause.

`ringverify.faults.catalogue.MUTANTS["A1"].implementation` is also `ringverify.faults.catalogue:A1`.
"""

from __future__ import annotations

from ringverify.faults import (
    communication,
    dilation,
    documents,
    gradients,
    incremental,
    masking,
    merging,
    modes,
    positions,
    precision,
    scores,
    sinks,
    state,
    tensors,
)
from ringverify.faults.fault import Cause, Mutant
from ringverify.implementation import Implementation

GROUPS = (
    merging,
    masking,
    positions,
    scores,
    dilation,
    tensors,
    communication,
    gradients,
    precision,
    state,
    modes,
    sinks,
    incremental,
    documents,
)
"""The files of faults; of causes that explain the same numbers and are as common, that of the earlier comes first."""


def place(id: str) -> tuple[bool, str, int, str]:
    """Sort key of a mutant's id: A2b comes after A2a and before A10, and what no report tells of comes last."""
    return id[0] == "O", id[0], int(id[1:].rstrip("abcde")), id


def _all() -> dict[str, Mutant]:
    found: dict[str, Mutant] = {}
    for module in GROUPS:
        for name, mutant in module.FAULTS.mutants.items():
            if name in found:
                raise ValueError(f"two mutants are called {name!r}")
            found[name] = mutant
    return {id: found[id] for id in sorted(found, key=place)}


MUTANTS: dict[str, Mutant] = _all()
"""By id, in the order of the reports, those that no report tells of last."""

CAUSES: tuple[Cause, ...] = (
    *positions.MISUNDERSTOOD.causes,
    *(cause for group in GROUPS for cause in group.FAULTS.causes),
)
"""Every fault that numbers show."""


def __getattr__(name: str) -> Implementation:
    """Return a mutant's implementation as an attribute of this module, so that a target can name it by its id."""
    if name in MUTANTS:
        return MUTANTS[name].implementation
    raise AttributeError(f"no mutant {name!r}; `ringverify list mutants` names them")
