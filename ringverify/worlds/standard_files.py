"""Standard input, output and error, which some daemons, CI services and `<&-` in a shell leave closed."""

from __future__ import annotations

import os
import sys


def keep_standard_files() -> None:
    """Open each closed one on the null device.

    Otherwise the next file or pipe would get its number, and be lost when a rank starts.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one


def keep_standard_streams() -> None:
    """Open closed standard files, and the `sys` streams on them that Python has left `None`, so a command can write."""
    keep_standard_files()
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
