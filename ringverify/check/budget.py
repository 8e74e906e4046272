"""The time of a run, shared among its properties. Importing this module does not import torch."""

from __future__ import annotations

import dataclasses
import time


@dataclasses.dataclass(frozen=True)
class Share:
    """The time that one property has, as `time.monotonic()` tells it.

    Attributes:
        until: when its own share ends: no further case is started after it.
        end: when the time of the run ends: until then a property that has had no example yet is given one.
    """

    until: float
    end: float

    @property
    def late(self) -> float:
        """When explaining what was found has to have begun: it may borrow half of what is left for the others."""
        return self.until if self.until == self.end else self.until + (self.end - self.until) / 2


ENDLESS = Share(until=float("inf"), end=float("inf"))


class Budget:
    """Divides what is left of the time evenly among the properties to come.

    What a property leaves of its share passes on to those after it; what it takes beyond it, they lose evenly.

    Args:
        seconds: time for the whole run, from now; `None` is as long as it takes.
        properties: how many properties are going to be tried.
    """

    def __init__(self, seconds: float | None, properties: int) -> None:
        self._end = ENDLESS.end if seconds is None else time.monotonic() + seconds
        self._left = properties

    def share(self) -> Share:
        """The share of the next property, which begins now."""
        now, among = time.monotonic(), max(1, self._left)
        self._left -= 1
        return Share(until=now + max(0.0, self._end - now) / among, end=self._end)
