"""Matrix products on CPU that have the same bits on every machine: the mode of MKL.

By default MKL chooses its code by processor and by the addresses of operands, and results differ in the last bits. With
`MKL_CBWR=COMPATIBLE` it uses the code that runs on every processor, wherever operands lie. MKL reads the variable once,
at its first product, so it has to be set before. docs/worlds.md says what that costs, and what it leaves open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

VARIABLE = "MKL_CBWR"
MODE = "COMPATIBLE"


def mode() -> str:
    """Return the mode for a rank's process: the value that the user has set, or else `MODE`."""
    return os.environ.get(VARIABLE, MODE)


@contextlib.contextmanager
def as_in_a_rank() -> Iterator[None]:
    """Set the mode for this process and its children. It has no effect here after this process's first product."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = mode()
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
