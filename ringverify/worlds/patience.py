"""Deadlines that leave out the time in which ranks queued for a processor.

On a loaded machine a rank that is ready to run may queue for a processor ten times as long as it computes. That is not
the implementation's doing, so it does not count against its deadline.

Linux counts this time for every thread, in nanoseconds: the second number of `/proc/PID/task/TID/schedstat` (see
Documentation/scheduler/sched-stats.rst of its sources). Where that cannot be read, every second counts.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable

SLICE = 0.5
"""Seconds between two looks at how much of a deadline is left."""

JUST = 0.01
"""Seconds after a look, or after the beginning, for which there is no other: a look reads a file for each thread."""

LEAST_COUNTED = 0.1
"""Fraction of elapsed time that always counts: a run that never ends is ended after ten times its deadline."""

ADDITIONS = 100_000
"""Additions of integers by which the speed of a processor is told."""

QUICK = 0.003
"""Seconds that they take on a quick one, with Python 3.11."""

SLOWEST = 3.0
"""Longer work takes as long on slower processors too."""


def queued(process: int) -> float:
    """Return the seconds that a process's threads have queued for a processor since they began; 0 if unknown."""
    total = 0
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/schedstat", "rb", 0) as counted:
                total += int(counted.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0  # the process has ended, or this is another system
    return total / 1e9


def worked(process: int) -> float:
    """Return the processor time of a process in seconds, that of threads which have ended included; 0 if unknown."""
    try:
        with open(f"/proc/{process}/stat", "rb", 0) as counted:
            user, system = counted.read().rpartition(b")")[2].split()[11:13]
    except (OSError, ValueError):
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Patience:
    """The time that is left of a deadline.

    Args:
        seconds: the deadline.
        processes: ids of the processes that do the work. The queueing time of the one that queued longest is left
            out, since the others wait for it.
        queued: returns the seconds that a process has queued for a processor.
        clock: returns seconds.
    """

    def __init__(
        self,
        seconds: float,
        processes: Iterable[int],
        *,
        queued: Callable[[int], float] = queued,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left = seconds
        self._queued, self._clock = queued, clock
        self._seen = {process: queued(process) for process in processes}
        self._at = clock()

    def left(self) -> float:
        """Return the seconds that are left, 0 or fewer once the deadline has passed."""
        now = self._clock()
        if now - self._at < JUST:
            return self._left
        waited = 0.0
        for process, before in self._seen.items():
            self._seen[process] = self._queued(process)
            waited = max(waited, self._seen[process] - before)
        passed, self._at = now - self._at, now
        self._left -= max(passed - waited, LEAST_COUNTED * passed)
        return self._left

    def slice(self) -> float:
        """Return the seconds to wait before the next look, 0 once the deadline has passed."""
        return max(0.0, min(self.left(), SLICE))


@functools.cache
def slowness() -> float:
    """Return how many times as long as on a quick processor work takes here, from 1 to `SLOWEST`."""
    times = []
    for _ in range(3):
        begun, total = time.process_time(), 0
        for number in range(ADDITIONS):
            total += number
        times.append(time.process_time() - begun)
    return min(max(1.0, statistics.median(times) / QUICK), SLOWEST)


class WorkLimit:
    """The processor time that is left for work in this process and in others, so that a busy machine does as much.

    Args:
        seconds: the processor time, of a quick processor: a slow one does as much, in more of it.
        processes: returns the ids of the others that work for this one.
        wall: seconds of the wall clock that end it too: a process that waits takes no processor time.
    """

    def __init__(
        self, seconds: float, processes: Callable[[], Iterable[int]] = lambda: (), *, wall: float = math.inf
    ) -> None:
        self._processes = processes
        self._until, self._wall = self._worked() + seconds, time.monotonic() + wall

    def _worked(self) -> float:
        return (time.process_time() + sum(map(worked, self._processes()))) / slowness()

    def left(self) -> float:
        """Return the seconds that are left, of a quick processor; 0 or fewer once they are used up."""
        return min(self._until - self._worked(), self._wall - time.monotonic())
