"""Measure sides in turn, round by round, and form medians, quartiles and ratios of their times.

A shared machine is faster in one minute than in the next. So the sides take turns, A B C A B C …, and a ratio is formed
within each round, from neighbours in time; what is reported is the median of these ratios, not the ratio of medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ringverify.bench.sides import Side

LEAST_SECONDS = 0.2
"""A turn repeats its call for about this long, estimated from a first call: a single short call is noisy."""
MOST_CALLS = 20
"""Most calls of a turn."""
PASSES = ("forward", "backward", "both")


class Seconds(NamedTuple):
    """Seconds of one call on all ranks, from the first rank's beginning to the last one's end."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward


Take = Callable[[Side, int], Sequence[Seconds]]
"""Runs a side's call so many times, and returns how long each call took."""


def interleaved(sides: Sequence[Side], take: Take, rounds: int, step: Callable[[], None]) -> dict[str, list[Seconds]]:
    """Measure every side in every round: the median time of its turn's calls, by the side's name.

    Args:
        sides: in the order in which they take turns.
        take: runs a side's call.
        rounds: rounds that are measured; one round before them is not.
        step: called when a side has had its turn.
    """
    calls: dict[str, int] = {}
    for side in sides:
        seconds = take(side, 1)[0]
        if seconds.both < LEAST_SECONDS:  # a first call finds caches cold, which matters to short calls
            seconds = take(side, 1)[0]
        calls[side.name] = max(1, min(MOST_CALLS, round(LEAST_SECONDS / max(seconds.both, 1e-9))))
        step()
    found: dict[str, list[Seconds]] = {side.name: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            taken = take(side, calls[side.name])
            typical = (statistics.median(getattr(one, name) for one in taken) for name in Seconds._fields)
            found[side.name].append(Seconds(*typical))
            step()
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles."""
    if len(values) == 1:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def of_pass(samples: Sequence[Seconds], name: str) -> list[float]:
    """Return the seconds of one pass, round by round."""
    return [getattr(sample, name) for sample in samples]


def ratios(samples: Sequence[Seconds], against: Sequence[Seconds], name: str) -> list[float]:
    """Return a side's time divided by another's, round by round."""
    return [a / b for a, b in zip(of_pass(samples, name), of_pass(against, name), strict=True)]


def rows(found: Mapping[str, Sequence[Seconds]], plain: str, floors: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each side: the spreads of its times and of its ratios.

    Args:
        found: every side's time in every round.
        plain: name of the side that all are compared with.
        floors: by a side's name, the name of the side that is its floor.
    """
    made = []
    for side, samples in found.items():
        row: dict[str, Any] = {"side": side}
        for name in PASSES:
            times = of_pass(samples, name)
            row[name] = {"seconds": spread(times), "rounds": times}
            if plain in found:
                row[name]["to_plain"] = spread(ratios(samples, found[plain], name))
            if floors.get(side) in found:
                row[name]["to_floor"] = spread(ratios(samples, found[floors[side]], name))
        made.append(row)
    return made
