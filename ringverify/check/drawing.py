"""Draw the cases of a property: the same ones for the same seed, on every machine.

Hypothesis profiles that are active in the process, of the project under test or of Hypothesis itself on CI, have no
effect here. Hypothesis' example database is off: failures are kept in the folder of cases, as JSON files that can be
replayed and stay valid when the strategies change.
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
from ringverify.worlds.processes.server import CACHE

DRAWING = settings(
    settings.get_profile("default"),
    derandomize=False,  # the seed decides: 0, or the one in the report's header
    phases=[Phase.generate],  # shrinking and retrying earlier failures are done in `hunting`
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
    print_blob=False,
)
"""The Hypothesis settings of every property but for the number of examples."""


def visit_cases(
    property: Property,
    capabilities: Capabilities,
    examples: int,
    seed: int,
    visit: Callable[[Case], None],
) -> None:
    """Call `visit` with up to `examples` cases that can test a property, one after another."""
    source = property.cases(capabilities)

    def applies(case: Case) -> bool:
        return property.applies(case, capabilities)

    if isinstance(source, list):
        tests = list(filter(applies, source))
        for case in random.Random(seed).sample(tests, min(examples, len(tests))):
            visit(case)
    else:
        # A seed for each property: with one for all, what one property's cases miss, all would miss.
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):
            _draw(source.filter(applies), examples, seed + zlib.crc32(property.id.encode()), visit)


def drawn(property: Property, capabilities: Capabilities, examples: int) -> list[Case]:
    """Return the first cases of a property that are tried with seed 0."""
    found: list[Case] = []
    visit_cases(property, capabilities, examples, 0, found.append)
    return found


def _draw(strategy: SearchStrategy[Case], examples: int, seed: int, visit: Callable[[Case], None]) -> None:
    @hypothesis.seed(seed)
    @settings(DRAWING, max_examples=examples)
    @hypothesis.given(strategy)
    def example(case: Case) -> None:
        visit(case)

    example()


@contextlib.contextmanager
def home_of_our_own() -> Iterator[None]:
    """Let Hypothesis keep its cache in a temporary folder rather than in the user's current directory.

    The folder is removed at the end, or by the fork server if this process is killed.
    """
    before = getattr(configuration, "__hypothesis_home_directory", None)
    configuration.set_hypothesis_home_dir(Path(CACHE))
    try:
        yield
    finally:
        configuration.set_hypothesis_home_dir(before)
        shutil.rmtree(CACHE, ignore_errors=True)
