"""Correct, and they look wrong: every variant by id. The suite must pass them."""

from __future__ import annotations

from ringverify.mutants import variants_of_arithmetic, variants_of_transport
from ringverify.mutants.variant import Variant

VARIANTS: dict[str, Variant] = {**variants_of_transport.ROW.variants, **variants_of_arithmetic.ROW.variants}
"""By id."""
