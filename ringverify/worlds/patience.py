"""How long a run may take: seconds in which its ranks computed or waited for one another, not for a processor.

On a machine with other work to do, a rank that wants to go on may stand in line for a processor ten times as long as it
computes. That is nothing the implementation did, so it does not count against its deadline.

Linux counts it for every thread, in nanoseconds: the second number of `/proc/PID/task/TID/schedstat` (see
Documentation/scheduler/sched-stats.rst of its sources). Where that cannot be read, every second counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

SLICE = 0.5
"""Seconds after which a wait looks again at how much of it counts."""

LEAST_COUNTED = 0.1
"""The part of a second that counts in any case: on no machine does a run that never ends last more than ten times as
long as its deadline."""


def queued(process: int) -> float:
    """Seconds that the threads of a process have waited for a processor since they began; 0 where nobody knows."""
    total = 0
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/schedstat", "rb", 0) as counted:
                total += int(counted.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0  # the process has ended, or this is another system
    return total / 1e9


class Patience:
    """What is left of a deadline.

    Args:
        seconds: the deadline.
        processes: those whose threads do the work. Of several the one counts that waits longest for a processor: on it
            wait the others.
        queued: how long a process has waited for a processor.
        clock: seconds.
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
        """Seconds that are left, 0 or fewer if there are none."""
        now = self._clock()
        waited = 0.0
        for process, before in self._seen.items():
            self._seen[process] = self._queued(process)
            waited = max(waited, self._seen[process] - before)
        passed, self._at = now - self._at, now
        self._left -= max(passed - waited, LEAST_COUNTED * passed)
        return self._left

    def slice(self) -> float:
        """Seconds to wait before it is asked again, 0 if nothing is left."""
        return max(0.0, min(self.left(), SLICE))
