"""A variant, and the shelf on which a file puts its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ringverify.implementation import Capabilities, Implementation
from ringverify.mutants.plain import EVERYTHING, Steps, ring_of


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
class Row:
    """The variants of one file, by id.

    Attributes:
        variants: in the order in which they were put.
    """

    variants: dict[str, Variant] = dataclasses.field(default_factory=dict)

    def put(
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
