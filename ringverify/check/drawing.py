"""Drawing cases of a property, the same ones for the same seed, wherever that happens.

A suite is a profile of Hypothesis that nothing outside can change: one that is in force in the process, of the project
under test or of Hypothesis itself on a CI machine, has no say here. The example database is the folder of cases: JSON
that can be replayed, one file a failure, and true whatever becomes of the strategies; so Hypothesis keeps none of its
own.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, configuration, settings
from hypothesis.strategies import SearchStrategy

from ringverify.cases.case import Case
from ringverify.implementation import Capabilities
from ringverify.properties.property import Property
from ringverify.properties.suites import SUITES, Suite
from ringverify.worlds.processes.server import CACHE

NAME = "ringverify-{}"
"""How Hypothesis knows a profile: apart from those that a project may have under the plain names."""


def profile(suite: Suite) -> settings:
    """The settings under which a suite draws cases; how many, each property says."""
    return settings.get_profile(NAME.format(suite))


def _register(suite: Suite) -> None:
    settings.register_profile(
        NAME.format(suite),
        settings.get_profile("default"),
        derandomize=False,  # the seed decides: 0, or the one that is told
        phases=[Phase.generate],  # shrinking is ours, and so is trying again what failed before
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
    )


for _suite in SUITES:
    _register(_suite)


def visit_cases(
    property: Property,
    capabilities: Capabilities,
    examples: int,
    seed: int,
    visit: Callable[[Case], None],
    suite: Suite,
) -> None:
    """Hand so many cases that put a property to the test to `visit`, one after another; fewer, if no more are found."""
    source = property.cases(capabilities)

    def applies(case: Case) -> bool:
        return property.applies(case, capabilities)

    if isinstance(source, list):
        tests = list(filter(applies, source))
        for case in random.Random(seed).sample(tests, min(examples, len(tests))):
            visit(case)
    else:
        # Properties draw apart from one another, or what one of them misses all would.
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):
            _draw(source.filter(applies), examples, seed + zlib.crc32(property.id.encode()), visit, suite)


def drawn(property: Property, capabilities: Capabilities, examples: int) -> list[Case]:
    """The first cases of a property that a quick suite would try."""
    found: list[Case] = []
    visit_cases(property, capabilities, examples, 0, found.append, "quick")
    return found


def _draw(
    strategy: SearchStrategy[Case], examples: int, seed: int, visit: Callable[[Case], None], suite: Suite
) -> None:
    @hypothesis.seed(seed)
    @settings(profile(suite), max_examples=examples)
    @hypothesis.given(strategy)
    def example(case: Case) -> None:
        visit(case)

    example()


@contextlib.contextmanager
def home_of_our_own() -> Iterator[None]:
    """Hypothesis keeps a cache under the current directory, which is the user's: here it would go to a temporary one.

    Hypothesis makes it when it needs it; of a run that is killed the fork server removes it.
    """
    before = getattr(configuration, "__hypothesis_home_directory", None)
    configuration.set_hypothesis_home_dir(Path(CACHE))
    try:
        yield
    finally:
        configuration.set_hypothesis_home_dir(before)
        shutil.rmtree(CACHE, ignore_errors=True)
