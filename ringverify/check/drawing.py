"""Draw the cases of a property: the same ones for the same seed, on every machine.

The choices are uniform and independent (`ringverify.cases.choices`): Hypothesis and its profiles, of the project under
test or of Hypothesis itself on CI, have no part in them. Failures are kept in the folder of cases, as JSON files that
can be replayed and stay valid when the strategies change.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from ringverify.cases.case import Case
from ringverify.cases.choices import SeededChoices
from ringverify.implementation import Capabilities
from ringverify.properties.property import Property

DRAWS = 10
"""Cases drawn for each that is asked for, at most: some cannot test the property."""


def drawn(property: Property, capabilities: Capabilities, examples: int, seed: int = 0) -> list[Case]:
    """Return up to `examples` cases that can test a property."""
    return list(draws(property, capabilities, examples, seed))


def draws(property: Property, capabilities: Capabilities, examples: int, seed: int = 0) -> Iterator[Case]:
    """Yield the cases of `drawn`, each drawn when it is asked for."""
    source = property.cases(capabilities)

    def applies(case: Case) -> bool:
        return property.applies(case, capabilities)

    if isinstance(source, Sequence):  # of cases that apply
        return iter(random.Random(seed).sample(source, min(examples, len(source))))
    # Choices of its own for each property: with one seed for all, what one property's cases miss, all would miss.
    choices = SeededChoices(f"{seed}:{property.id}")
    tests = filter(applies, (source(choices) for _ in range(DRAWS * examples)))
    return itertools.islice(tests, examples)
