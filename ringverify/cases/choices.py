"""Where the choices behind a case come from: a seed, or Hypothesis.

`ringverify check` makes its choices with a seeded generator, uniformly and independently. Hypothesis' own repeat what
it drew before and prefer small things, which helps its shrinking: one seed had 3 cases of cross lengths in 120, another
2 of key lengths, and every eighth case twice; and it takes constants from the source of imported modules, so that a
seed would give other cases after an edit of the code under test.

In a user's test the same makers draw from Hypothesis, see `ringverify.strategies`, which can then shrink, aim and
remember.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Choices(Protocol):
    """Makes the choices of a case, one after another."""

    def among(self, options: Sequence[T]) -> T:
        """Choose one of the options, of which there is at least one, the simplest first."""
        ...

    def integer(self, least: int, most: int) -> int:
        """Choose an integer; both ends are included, and smaller ones are simpler."""
        ...


Maker = Callable[[Choices], T]
"""Makes something, a case above all, of choices."""


class SeededChoices:
    """Uniform and independent choices, the same for the same seed on every machine."""

    def __init__(self, seed: int | str) -> None:
        generator = random.Random(seed)
        self.among = generator.choice
        self.integer = generator.randint
