"""What an implementation takes at short lengths, and what it will take at the length that is asked for."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from ringref.intervals import parts
from ringref.problem import Problem

QUADRATIC = 3.0
"""Twice the length doubles what is linear and quadruples what is quadratic: this is between."""
LEAST_BYTES = 8 << 20
"""Differences of peaks below this are of the allocator's making."""


class Point(NamedTuple):
    """A run at a short length.

    Attributes:
        problem: what was computed.
        inside: seconds in the implementation.
        verifying: seconds of verification.
        peak: bytes in the implementation, of all ranks on this machine, or of a rank's GPU; `None` if unknown.
    """

    problem: Problem
    inside: float
    verifying: float
    peak: int | None


@dataclasses.dataclass(frozen=True)
class Growth:
    """Runs at short lengths, the shortest first, each twice as long as the one before."""

    points: tuple[Point, ...]

    def seconds_at(self, problem: Problem) -> tuple[float, float] | None:
        """Return about how long implementation and verification take, in proportion to pairs and to positions."""
        if not self.points:
            return None
        last = self.points[-1]
        pairs = pairs_of(problem) / max(pairs_of(last.problem), 1)
        return last.inside * pairs, last.verifying * problem.nq / last.problem.nq

    def bytes_at(self, problem: Problem) -> int | None:
        """Return the peak that is to be expected; `None` where too little is known.

        It is a line through the last two peaks: over the positions, or, where differences of peaks grow as those of
        score matrices do, over the pairs that are attended, or over all pairs if peaks outgrow these.
        """
        if len(self.points) < 3:
            return None
        peaks = [one.peak for one in self.points[-3:]]
        if any(peak is None for peak in peaks):
            return None
        a, b, c = (float(peak or 0) for peak in peaks)
        sizes: list[float] = [one.problem.nq for one in self.points[-3:]]
        if b - a > LEAST_BYTES and c - b > QUADRATIC * (b - a):
            attended = [float(pairs_of(one.problem)) for one in self.points[-3:]]
            if attended[2] - attended[1] > QUADRATIC * (attended[1] - attended[0]):
                sizes, size = attended, float(pairs_of(problem))
            else:
                sizes, size = [one**2 for one in sizes], float(problem.nq) ** 2
        else:
            size = float(problem.nq)
        return int(c + max(c - b, 0.0) / (sizes[2] - sizes[1]) * (size - sizes[2]))


def pairs_of(problem: Problem) -> int:
    """Return how many pairs of a query and a key are attended, with multiplicity, in all heads."""
    found = 0
    for b, h in np.ndindex(problem.batch, problem.heads):
        for part in parts(problem, b, h):
            found += int(np.maximum(part.last - part.first, 0).sum())
    return found
