"""Divide the time budget of a run among its properties. Importing this module does not import torch."""

from __future__ import annotations

import dataclasses
import time


@dataclasses.dataclass(frozen=True)
class Share:
    """The time that one property has; times are those of `time.monotonic()`, in seconds.

    Attributes:
        until: end of the property's own share; no further case is started after it.
        end: end of the whole run's time; until then, a property without any example so far may still start one.
    """

    until: float
    end: float

    @property
    def late(self) -> float:
        """Latest start of explaining a counterexample: that may use half of the time left to the other properties."""
        return self.until if self.until == self.end else self.until + (self.end - self.until) / 2


ENDLESS = Share(until=float("inf"), end=float("inf"))


class Budget:
    """Divides the remaining time evenly among the properties still to be tried.

    Time that a property does not use goes to those after it; time that it overruns is taken from them evenly.

    Args:
        seconds: time for the whole run, from now; `None` is no limit.
        properties: number of properties to be tried.
    """

    def __init__(self, seconds: float | None, properties: int) -> None:
        self._end = ENDLESS.end if seconds is None else time.monotonic() + seconds
        self._left = properties

    def share(self, side_by_side: int = 1) -> Share:
        """Return the share of the next property, which starts now beside others, at most so many at a time."""
        now, among = time.monotonic(), max(1.0, self._left / side_by_side)
        self._left -= 1
        return Share(until=now + max(0.0, self._end - now) / among, end=self._end)
