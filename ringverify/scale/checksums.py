"""Sums of results with a sign for each number, of some rows and of blocks of rows: a long answer in a few kilobytes.

The signs are drawn, so what is missing, moved or exchanged changes a sum, and errors of rounding do not add up in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringref.problem import Problem
from ringref.rounding import signed_sum_bound
from ringverify.events import TensorName
from ringverify.scale.numbers import Positions, words

Float = NDArray[np.float64]

RESULTS: tuple[TensorName, ...] = ("out", "lse", "dq", "dk", "dv")
BLOCK = 1024
"""Rows of a block."""


class GoldenSums(NamedTuple):
    """What the sums have to be.

    Attributes:
        rows: positions of the rows that are summed on their own, ascending.
        expected: by result, the sums of these rows and then of the blocks of all rows.
        allowed: the error allowed in each of them.
    """

    rows: tuple[int, ...]
    expected: dict[TensorName, Float]
    allowed: dict[TensorName, Float]


class Checksums:
    """The sums of one run, as far as rows were added; heads of a position are added up.

    Args:
        seed: decides the signs.
        problem: what was computed; the elements of its batch are added up.
        rows: positions of the rows that are summed on their own.

    Attributes:
        values: by result, sums of these rows and then of the blocks.
    """

    def __init__(self, seed: int, problem: Problem, rows: Sequence[int]) -> None:
        self._seed, self._rows = seed, np.array(rows, dtype=np.int64)
        blocks = -(-max(problem.nq, problem.nk) // BLOCK)
        self.values, self._squares, self._sizes = (
            {name: np.zeros(len(rows) + blocks) for name in RESULTS} for _ in range(3)
        )

    def add(self, name: TensorName, head: int, at: Positions, values: Float, allowed: Float | None = None) -> None:
        """Add rows of a head `(n, width)`, and the errors allowed in them, if they are known."""
        signs = 1.0 - 2 * (words(self._seed, f"sign {name} {head}", at, values.shape[1]) % 2)
        self._sum(self.values[name], at, (signs * values).sum(axis=-1))
        if allowed is not None:
            self._sum(self._squares[name], at, (allowed**2).sum(axis=-1))
            self._sum(self._sizes[name], at, allowed.sum(axis=-1))

    def _sum(self, sums: Float, at: Positions, terms: Float) -> None:
        np.add.at(sums, len(self._rows) + at // BLOCK, terms)
        chosen = np.isin(at, self._rows)
        np.add.at(sums, np.searchsorted(self._rows, at[chosen]), terms[chosen])

    def allowed(self, name: TensorName) -> Float:
        """Return the error allowed in each sum of a result."""
        return signed_sum_bound(self._squares[name], self._sizes[name])

    def names(self, name: TensorName) -> list[str]:
        """Return what each sum of a result is, in words."""
        blocks = range(len(self.values[name]) - len(self._rows))
        return [f"the signed sum of {name} at position {row}" for row in self._rows] + [
            f"the signed sum of {name} at positions {BLOCK * block} to {BLOCK * (block + 1) - 1}" for block in blocks
        ]
