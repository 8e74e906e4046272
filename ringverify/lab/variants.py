"""Every variant by id: correct implementations that look wrong, and that the suite must pass."""

from __future__ import annotations

from ringverify.implementation import Implementation
from ringverify.lab import variants_of_arithmetic, variants_of_features, variants_of_transport
from ringverify.lab.variant import Variant

VARIANTS: dict[str, Variant] = {
    **variants_of_transport.ROWS.variants,
    **variants_of_arithmetic.ROWS.variants,
    **variants_of_features.ROWS.variants,
}
"""All variants by id."""


def __getattr__(name: str) -> Implementation:
    """Return a variant's implementation by its id, so that a target can name it as an attribute of this module."""
    if name in VARIANTS:
        return VARIANTS[name].implementation
    raise AttributeError(f"no variant {name!r}; there are {', '.join(VARIANTS)}")
