"""Standard input, output and error, which some daemons, CI services and `<&-` in a shell leave closed."""

from __future__ import annotations

import os
import sys


def keep_standard_files() -> None:
    """Open what is closed of them: the next file or pipe would have its number, and be lost where a rank starts."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it has the lowest number that is free


def keep_standard_streams() -> None:
    """The same for a command, which can write then what nobody reads; Python leaves such streams out."""
    keep_standard_files()
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
