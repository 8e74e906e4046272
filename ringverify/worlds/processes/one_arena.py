"""One arena of memory for a process whose threads are ranks that take turns: glibc gives each thread one of its own.

A thread that is new for a run begins with an arena whose pages the system has to map anew; in a short run that is a
tenth of the time. Only a process of the tool's own is set so.
"""

from __future__ import annotations

import ctypes
import sys

M_ARENA_MAX = -8
"""The parameter of glibc's `mallopt` that bounds the number of arenas (malloc.h)."""


def share_memory() -> None:
    """Let the threads of this process allocate from one arena from now on, where its C library can."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_ARENA_MAX, 1)
