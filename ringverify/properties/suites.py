"""The suites: how many cases each tries. Importing this module does not import torch."""

from __future__ import annotations

from typing import Literal, get_args

Suite = Literal["smoke", "quick", "full", "nightly"]
SUITES: tuple[Suite, ...] = get_args(Suite)
"""Names of the suites, the one with the fewest cases first."""

SCALE = "scale"
"""The suite that tries one long case; `ringverify.scale` is its loop."""

SMOKE_EXAMPLES = 10
"""Largest number of cases of a property in the smoke suite. Most faults break most cases, so a few show them."""

TIMES: dict[Suite, int] = {"quick": 1, "full": 10, "nightly": 100}
"""Number of cases in a suite, as a multiple of those in the quick suite."""
