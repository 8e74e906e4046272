"""Correct, and they look wrong: every variant by id. The suite must pass them."""

from __future__ import annotations

from ringverify.implementation import Implementation
from ringverify.lab import variants_of_arithmetic, variants_of_transport
from ringverify.lab.variant import Variant

VARIANTS: dict[str, Variant] = {**variants_of_transport.ROWS.variants, **variants_of_arithmetic.ROWS.variants}
"""By id."""


def __getattr__(name: str) -> Implementation:
    """A variant's implementation as an attribute of this module, so that a target can name it by its id alone."""
    if name in VARIANTS:
        return VARIANTS[name].implementation
    raise AttributeError(f"no variant {name!r}; there are {', '.join(VARIANTS)}")
