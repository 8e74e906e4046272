"""All properties, in the order in which they are checked and reported."""

from __future__ import annotations

from collections.abc import Iterable

from ringverify.errors import UsageError, instead
from ringverify.properties.adversity import DETERMINISM, HAZARDS, PROGRESS
from ringverify.properties.balance import BALANCE
from ringverify.properties.buffers import INPUTS_UNTOUCHED, STRIDED_INPUTS
from ringverify.properties.chunk_boundaries import CHUNK_BOUNDARIES
from ringverify.properties.exact_selection import EXACT_SELECTION
from ringverify.properties.extremes import DTYPES, MASKED_ROWS, OVERFLOW
from ringverify.properties.incremental import INCREMENTAL
from ringverify.properties.invariants import INVARIANTS
from ringverify.properties.isolation import ISOLATION
from ringverify.properties.memory import MEMORY
from ringverify.properties.modes import MODES
from ringverify.properties.precision import PRECISION
from ringverify.properties.property import Property
from ringverify.properties.reentrancy import REENTRANCY
from ringverify.properties.subgroups import SUBGROUPS
from ringverify.properties.traffic import TRAFFIC
from ringverify.properties.uninitialised import UNINITIALISED
from ringverify.properties.values import FORWARD, GRADIENTS_OF_LSE, GRADIENTS_OF_OUT, LSE
from ringverify.properties.world_size_invariance import WORLD_SIZE_INVARIANCE

PROPERTIES: dict[str, Property] = {
    property.id: property
    for property in (
        FORWARD,
        LSE,
        GRADIENTS_OF_OUT,
        GRADIENTS_OF_LSE,
        MASKED_ROWS,
        OVERFLOW,
        DTYPES,
        PRECISION,
        CHUNK_BOUNDARIES,
        WORLD_SIZE_INVARIANCE,
        EXACT_SELECTION,
        INVARIANTS,
        ISOLATION,
        INPUTS_UNTOUCHED,
        STRIDED_INPUTS,
        UNINITIALISED,
        REENTRANCY,
        MODES,
        SUBGROUPS,
        HAZARDS,
        PROGRESS,
        TRAFFIC,
        MEMORY,
        BALANCE,
        INCREMENTAL,
        DETERMINISM,
    )
}


def select(only: Iterable[str] | None, skip: Iterable[str]) -> list[Property]:
    """Return the properties named by `only` (all, if `None`) without those named by `skip`, in catalogue order.

    Raises:
        UsageError: a name is unknown, or nothing is left.
    """
    skipped = set(skip)
    wanted = set(PROPERTIES if only is None else only)
    for name in sorted(wanted | skipped):
        if name not in PROPERTIES:
            raise UsageError(f"unknown property {name!r}{instead(name, PROPERTIES)}")
    chosen = [property for name, property in PROPERTIES.items() if name in wanted - skipped]
    if not chosen:
        raise UsageError("no property is left to check: --skip names all that are selected; remove a name from --skip")
    return chosen
