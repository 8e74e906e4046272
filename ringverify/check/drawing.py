"""Drawing cases of a property, the same ones for the same seed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

import hypothesis
from hypothesis.strategies import SearchStrategy

from ringverify.cases.case import Case
from ringverify.check.profiles import profile
from ringverify.implementation import Capabilities
from ringverify.properties.property import Property
from ringverify.properties.suites import Suite


def visit_cases(
    property: Property,
    capabilities: Capabilities,
    examples: int,
    seed: int,
    visit: Callable[[Case], None],
    suite: Suite,
) -> None:
    """Hand so many cases of a property to `visit`, one after another."""
    source = property.cases(capabilities)
    if isinstance(source, list):
        for case in random.Random(seed).sample(source, min(examples, len(source))):
            visit(case)
    else:
        # Properties draw apart from one another, or what one of them misses all would.
        _draw(source, examples, seed + zlib.crc32(property.id.encode()), visit, suite)


def drawn(property: Property, capabilities: Capabilities, examples: int) -> list[Case]:
    """The first cases of a property that a quick suite would try, those that do not apply to it left out."""
    found: list[Case] = []
    visit_cases(property, capabilities, examples, 0, found.append, "quick")
    return [case for case in found if property.applies(case, capabilities)]


def _draw(
    strategy: SearchStrategy[Case], examples: int, seed: int, visit: Callable[[Case], None], suite: Suite
) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(profile(suite), max_examples=examples)
    @hypothesis.given(strategy)
    def example(case: Case) -> None:
        visit(case)

    example()
