"""A variant, which is a correct implementation that looks wrong, and the table of variants that a module fills."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ringverify.faults.ring import EVERYTHING, Steps, ring_of
from ringverify.implementation import Capabilities, Implementation


@dataclasses.dataclass(frozen=True)
class Variant:
    """A correct implementation that looks wrong.

    Attributes:
        id: the variant's name.
        story: what is unusual about it, and why it is right.
        implementation: the implementation.
    """

    id: str
    story: str
    implementation: Implementation


@dataclasses.dataclass
class Variants:
    """The variants of one module, by id.

    Attributes:
        variants: the variants by id, in the order in which they were added.
    """

    variants: dict[str, Variant] = dataclasses.field(default_factory=dict)

    def add(
        self,
        id: str,
        story: str,
        ring: Steps | Callable[..., Any],
        claims: Capabilities = EVERYTHING,
    ) -> Implementation:
        """Add a variant, given as the steps of a ring or as a plug-in function, and return its implementation."""
        function = ring_of(ring) if isinstance(ring, Steps) else ring
        implementation = Implementation(function, f"variant:{id}", claims)
        self.variants[id] = Variant(id, story, implementation)
        return implementation
