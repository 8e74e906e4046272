"""Ranks that give the same numbers again: which code MKL multiplies matrices with.

Left alone, MKL chooses by processor and by the addresses of operands, and other code has other last bits. Under
`MKL_CBWR=COMPATIBLE` it takes the code that every processor has, wherever operands lie. It looks once, at its first
product, so the variable has to be set before. docs/worlds.md says what that costs, and what it leaves open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

VARIABLE = "MKL_CBWR"
MODE = "COMPATIBLE"


def mode() -> str:
    """The mode that a rank's process is given: what the user has set, or else the one that every processor has."""
    return os.environ.get(VARIABLE, MODE)


@contextlib.contextmanager
def as_in_a_rank() -> Iterator[None]:
    """Set the mode for this process and what it starts. Too late, without any effect here, after its first product."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = mode()
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
