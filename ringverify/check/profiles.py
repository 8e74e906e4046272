"""What the suites are to Hypothesis: a profile each, that nothing outside can change.

A profile that is in force in the process, of the project under test or of Hypothesis itself on a CI machine, has no
say here: the same seed draws the same cases everywhere. The example database is the folder of cases: JSON that can be
replayed, one file a failure, and true whatever becomes of the strategies; so Hypothesis keeps none of its own.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, configuration, settings

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
