"""The suites: how many cases each tries. Importing this module does not import torch."""

from __future__ import annotations

from typing import Literal, get_args

Suite = Literal["smoke", "quick", "full", "nightly"]
SUITES: tuple[Suite, ...] = get_args(Suite)
"""Names of the suites, the one with the fewest cases first."""

SCALE = "scale"
"""The suite that tries one long case; `ringverify.scale` is its loop."""

Method = Literal["every_row", "sampled_rows", "identities"]
METHODS: dict[str, str] = {
    "every_row": "every row equals the oracle's, on queries and keys from codebooks",
    "sampled_rows": "sampled rows, and all gradients of keys through them, equal the oracle's on ordinary inputs",
    "identities": "sums of out and gradients over all rows agree with one another and the inputs, on ordinary inputs",
}
"""The properties that this suite alone has, and what must hold."""

SMOKE_EXAMPLES = 10
"""Largest number of cases of a property in the smoke suite. Most faults break most cases, so a few show them."""

TIMES: dict[Suite, int] = {"quick": 1, "full": 10, "nightly": 100}
"""Number of cases in a suite, as a multiple of those in the quick suite."""
