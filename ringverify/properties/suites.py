"""The suites: how many cases each tries. Importing this module does not import torch."""

from __future__ import annotations

from typing import Literal, get_args

Suite = Literal["smoke", "quick", "full", "nightly"]
SUITES: tuple[Suite, ...] = get_args(Suite)
"""Their names, the shortest first."""

SMOKE_EXAMPLES = 10
"""Cases of each property in the smoke suite, at most. Most faults break most cases, so few are needed to see one."""

TIMES: dict[Suite, int] = {"quick": 1, "full": 10, "nightly": 100}
"""How many times the cases of the quick suite the longer suites try."""


def examples_in(suite: Suite, quick: int) -> int:
    """How many cases a suite tries of a property that has so many in the quick one."""
    return min(quick, SMOKE_EXAMPLES) if suite == "smoke" else quick * TIMES[suite]
