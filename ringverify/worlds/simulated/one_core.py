"""One core for the ranks of a run: only one of them runs at a time, and its turn passes many times in a millisecond.

On one core that takes 3 µs, where waking another core takes 30 (two threads that open each other's locks, on a virtual
machine): with short blocks that is a fifth of a run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def started_here() -> Iterator[None]:
    """Let threads that are started in this context run on the core that the calling thread is on, if the system can.

    Not where torch computes with several threads: those that ranks start would share the core too.
    """
    core = _core()
    if core is None or torch.get_num_threads() > 1 or sys.platform != "linux":
        yield
        return
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
    except OSError:  # a container may forbid it
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _core() -> int | None:
    """The core that the calling thread is on; `None` where nobody says."""
    ask = _sched_getcpu()
    core = -1 if ask is None else ask()
    return None if core < 0 else core


@functools.cache
def _sched_getcpu() -> Callable[[], int] | None:
    return getattr(ctypes.CDLL(None), "sched_getcpu", None) if sys.platform == "linux" else None
