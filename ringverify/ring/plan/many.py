"""Many runs of one step at once, as arrays that broadcast: what `runs` and `regions` say of two, for whole matrices.

A plan is one rank's, but who sends what depends on all ranks, so a few questions are asked of every pair of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringref.problem import Problem
from ringverify.ring.plan.regions import band
from ringverify.ring.plan.runs import RowRun

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Many(NamedTuple):
    """Runs of one step.

    Attributes:
        first: position of the first entry of each.
        size: how many entries; none if it is not positive.
        step: from one position to the next.
    """

    first: Ints
    size: Ints
    step: int | Ints

    @property
    def last(self) -> Ints:
        """Position of the last entry of each."""
        return self.first + self.step * (self.size - 1)

    def at(self, index: Ints | Bools | tuple[slice | None, ...]) -> Many:
        """Some of these runs, or all with further axes; the step is one for all."""
        return Many(self.first[index], self.size[index], self.step)

    def within(self, low: int | Ints, high: int | Ints) -> Many:
        """Of each run the entries with `low <= position < high`."""
        skipped = np.maximum(-((self.first - low) // self.step), 0)
        stop = np.minimum(-((self.first - high) // self.step), self.size)
        return Many(self.first + self.step * skipped, stop - skipped, self.step)

    def thinned(self, modulus: Ints, residue: Ints) -> Many:
        """Of each run the entries with `position % modulus == residue % modulus`."""
        common = np.gcd(self.step, modulus)
        by = modulus // common
        distance = residue - self.first
        skipped = distance // common * _inverse(self.step // common, by) % by
        size = np.where(distance % common == 0, -((skipped - self.size) // by), 0)
        return Many(self.first + self.step * skipped, size, self.step * by)


def _inverse(numbers: Ints, moduli: Ints) -> Ints:
    """What each number has to be multiplied with to be 1, by its modulus, or 0 where that is 1."""
    pairs = zip(numbers.ravel().tolist(), moduli.ravel().tolist(), strict=True)
    return np.array([pow(number, -1, modulus) for number, modulus in pairs]).reshape(numbers.shape)


def many(held: Sequence[tuple[RowRun, ...]], step: int) -> tuple[Ints, Many]:
    """All runs of all ranks, and the rank of each."""
    found = [(rank, run.first, run.size) for rank, of in enumerate(held) for run in of]
    ranks, first, size = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return ranks, Many(first, size, step)


def met(problem: Problem, queries: Many, keys: Many) -> tuple[Ints, Ints]:
    """The first and the last entry of some keys that some queries attend, as far as a band says; none if they cross.

    All differences of two positions are congruent modulo the step, so that what lies between is attended as well.
    """
    left, right = band(problem)
    ahead = queries.first + problem.diagonal - keys.first
    first: Ints = np.zeros_like(ahead)
    last = np.where(queries.size > 0, keys.size - 1, -1)
    low = None if left is None else -((-left - ahead) // keys.step)
    high = None if right is None else (right + ahead) // keys.step
    if low is not None:
        first = np.maximum(first, low)
    if high is not None:
        last = np.minimum(last, queries.size - 1 + high)
    if low is not None and high is not None:
        last = np.where(low <= high, last, -1)
    return first, last
