"""A variant, and the variants of a file."""

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
        id: a name.
        story: what is unusual about it, and why it is right.
        implementation: it.
    """

    id: str
    story: str
    implementation: Implementation


@dataclasses.dataclass
class Variants:
    """The variants of one file, by id.

    Attributes:
        variants: in the order in which they were added.
    """

    variants: dict[str, Variant] = dataclasses.field(default_factory=dict)

    def add(
        self,
        id: str,
        story: str,
        ring: Steps | Callable[..., Any],
        claims: Capabilities = EVERYTHING,
    ) -> Implementation:
        """Add a variant, made of steps or a plug-in function, and return it as an implementation."""
        function = ring_of(ring) if isinstance(ring, Steps) else ring
        implementation = Implementation(function, f"variant:{id}", claims)
        self.variants[id] = Variant(id, story, implementation)
        return implementation
