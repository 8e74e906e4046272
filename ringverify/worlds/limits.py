"""The limits of a machine that a world, or a rank, may meet: which one it was, and what could be done about it.

None of them says anything about an implementation. Importing this module does not import torch.
"""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from typing import Literal

from ringverify.worlds.exceptions import name_of, text_of
from ringverify.worlds.foreign_text import system_error_in

Limit = Literal["memory", "processes", "threads", "file descriptors", "disk"]
"""What a machine may have too little of."""

_OF_ERRNO: dict[int, Limit] = {
    errno.ENOMEM: "memory",
    errno.EMFILE: "file descriptors",
    errno.ENFILE: "file descriptors",
    errno.ENOSPC: "disk",
    errno.EDQUOT: "disk",
}
_SHARES: dict[Limit, int] = {"memory": 1 << 23, "file descriptors": 4}
"""The least that a rank takes of each as a process, in bytes and in the tool; of the others it takes one."""


def limit_of(error: BaseException, *, starting: bool = False) -> Limit | None:
    """The limit that an exception tells of, if it tells of one.

    Args:
        error: the exception.
        starting: it was raised where a process or a thread was started, and nowhere else could EAGAIN come from.
    """
    kind = type(error)  # `isinstance` asks the exception, which may have something else to say
    if issubclass(kind, MemoryError) or name_of(error) == "OutOfMemoryError":  # torch's own
        return "memory"
    if issubclass(kind, OSError):
        number: int | None = OSError.__dict__["errno"].__get__(error)
        return "processes" if starting and number == errno.EAGAIN else _OF_ERRNO.get(number or 0)
    if not issubclass(kind, (RuntimeError, ImportError)):
        return None
    return limit_in(text_of(error) or "", starting=starting)


def limit_in(text: str, *, starting: bool = False) -> Limit | None:
    """The limit that words of torch or of a library tell of; `starting` as in `limit_of`."""
    told = system_error_in(text, (*_OF_ERRNO, *([errno.EAGAIN] if starting else [])))
    return "threads" if told == errno.EAGAIN else _OF_ERRNO.get(told or 0)


def sentence(limit: Limit) -> str:
    """That a limit was met, how far it goes here, and what to do."""
    far = "" if limit == "memory" else _far(limit)  # what is free now was not, or was too little, then
    return f"this machine is out of {limit}{f' ({far})' if far else ''}"


def _far(limit: Limit) -> str:
    match limit:
        case "disk":
            return "where temporary files go: TMPDIR"
        case "memory":
            free = _available()
            return "" if free is None else f"{free >> 20} MiB are available"
    most = _most(limit)
    return "" if most is None else f"{most} at most: ulimit -{'n' if limit == 'file descriptors' else 'u'}"


def too_many(ranks: int, *limits: Limit) -> str | None:
    """Why so many ranks cannot be had on this machine, whatever they run; `None` if they may be.

    Args:
        ranks: how many are wanted.
        limits: those that ranks of their kind use up.
    """
    for limit in limits:
        most, needed = _available() if limit == "memory" else _most(limit), ranks * _SHARES.get(limit, 1)
        if most is not None and needed > most:
            shown = f"{needed >> 20} MiB of memory" if limit == "memory" else f"{needed} {limit}"
            return f"{ranks} ranks need at least {shown}, and {_far(limit)}"
    return None


def _most(limit: Limit) -> int | None:
    """How many of something this process may have, as far as is known."""
    kind = resource.RLIMIT_NOFILE if limit == "file descriptors" else resource.RLIMIT_NPROC
    soft, _ = resource.getrlimit(kind)
    found = [] if soft == resource.RLIM_INFINITY else [soft]
    if limit != "file descriptors":
        files = ("/proc/sys/kernel/threads-max", "/proc/sys/kernel/pid_max", "/sys/fs/cgroup/pids.max")
        found += [number for file in files if (number := _number(file)) is not None]
    return min(found, default=None)


def _number(file: str) -> int | None:
    try:
        return int(Path(file).read_text())
    except (OSError, ValueError):
        return None


def _available() -> int | None:
    """Bytes of memory that are free, or would be if they were asked for."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
