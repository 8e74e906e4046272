"""Machine limits that a world or a rank may reach: which limit it was, and what can be done about it.

Reaching a limit says nothing about the implementation. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import resource
from pathlib import Path
from typing import Literal

from ringverify.worlds.exceptions import name_of, text_of
from ringverify.worlds.foreign_text import system_error_in

Limit = Literal["memory", "processes", "threads", "file descriptors", "disk"]
"""A resource that a machine can run out of."""

_OF_ERRNO: dict[int, Limit] = {
    errno.ENOMEM: "memory",
    errno.EMFILE: "file descriptors",
    errno.ENFILE: "file descriptors",
    errno.ENOSPC: "disk",
    errno.EDQUOT: "disk",
}
_SHARES: dict[Limit, int] = {"memory": 1 << 23, "file descriptors": 4}
"""The least that one rank's process uses: bytes of memory, and file descriptors in the tool. Other limits: one each."""


def limit_of(error: BaseException, *, starting: bool = False) -> Limit | None:
    """Return the machine limit that an exception reports, or `None`.

    Args:
        error: the exception.
        starting: it was raised while a process or a thread was started, the only case in which EAGAIN is a limit.
    """
    kind = type(error)  # `isinstance` would ask the exception's own `__class__`
    if issubclass(kind, MemoryError) or name_of(error) == "OutOfMemoryError":  # torch's own
        return "memory"
    if issubclass(kind, OSError):
        number: int | None = OSError.__dict__["errno"].__get__(error)
        return "processes" if starting and number == errno.EAGAIN else _OF_ERRNO.get(number or 0)
    if not issubclass(kind, (RuntimeError, ImportError)):
        return None
    return limit_in(text_of(error) or "", starting=starting)


def limit_in(text: str, *, starting: bool = False) -> Limit | None:
    """Return the limit that an error text of torch or of a library names, or `None`; `starting` as in `limit_of`."""
    told = system_error_in(text, (*_OF_ERRNO, *([errno.EAGAIN] if starting else [])))
    return "threads" if told == errno.EAGAIN else _OF_ERRNO.get(told or 0)


def sentence(limit: Limit) -> str:
    """Say which limit was reached, its value on this machine, and which setting changes it."""
    far = "" if limit == "memory" else _far(limit)  # the memory that is free now is not what was free then
    return f"this machine is out of {limit}{f' ({far})' if far else ''}"


def _far(limit: Limit) -> str:
    match limit:
        case "disk":
            return "temporary files go to TMPDIR"
        case "memory":
            free = available_memory()
            return "" if free is None else f"{free >> 20} MiB are available"
    most = _most(limit)
    return "" if most is None else f"the limit is {most}: ulimit -{'n' if limit == 'file descriptors' else 'u'}"


def too_many(ranks: int, *limits: Limit) -> str | None:
    """Say why this machine cannot hold so many ranks, whatever they run; `None` if it may.

    Args:
        ranks: number of ranks wanted.
        limits: the limits that ranks of this kind count against.
    """
    for limit in limits:
        most, needed = available_memory() if limit == "memory" else _most(limit), ranks * _SHARES.get(limit, 1)
        if most is not None and needed > most:
            shown = f"{needed >> 20} MiB of memory" if limit == "memory" else f"{needed} {limit}"
            return f"{ranks} ranks need at least {shown}, and {_far(limit)}"
    return None


def available_memory() -> int | None:
    """Return the bytes of memory that the system calls available; `None` if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _most(limit: Limit) -> int | None:
    """Return the most file descriptors, processes or threads that this process may have; `None` if unknown."""
    kind = resource.RLIMIT_NOFILE if limit == "file descriptors" else resource.RLIMIT_NPROC
    soft, _ = resource.getrlimit(kind)
    found = [] if soft == resource.RLIM_INFINITY else [soft]
    if limit != "file descriptors":
        files = ("/proc/sys/kernel/threads-max", "/proc/sys/kernel/pid_max", "/sys/fs/cgroup/pids.max")
        found += [number for file in files if (number := _number(file)) is not None]
    return min(found, default=None)


@functools.cache  # asked before each run of a simulated world
def _number(file: str) -> int | None:
    try:
        return int(Path(file).read_text())
    except (OSError, ValueError):
        return None


QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The processor time that a container may use: "max 100000", or microseconds in each period of so many."""


def cores() -> int:
    """Return the number of processor cores that this process may use: one in a worker of pytest-xdist."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return 1
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = QUOTA.read_text().split()
        found = min(found, math.ceil(int(quota) / int(period)))
    return max(1, found)
