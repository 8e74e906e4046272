"""A mutant, and those of one file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from ringverify.faults.ring import EVERYTHING, Steps, ring_of
from ringverify.implementation import Capabilities, Implementation

FaultKind = Literal[
    "value", "failure", "precision", "isolation", "state", "determinism", "group", "hazard", "progress", "memory",
    "traffic",
]  # fmt: skip
"""What goes wrong: a result; an exception or a hang on legal input; a result by rounding alone; a result by what the
mask excludes; a result, or an input, by what was called before; the same bits; a result on a subgroup; a buffer in
flight; messages on a transport that does not buffer; a claim about memory; a claim about messages."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A ring broken on purpose, in one known way.

    Attributes:
        id: of the report it comes from, with a letter where there are several; `O…` for those that no report tells of.
        title: a few words.
        story: what is wrong, and what exposes it.
        source: where it was reported, or "by operator".
        kind: what goes wrong.
        implementation: the mutant; it claims what the original would.
    """

    id: str
    title: str
    story: str
    source: str
    kind: FaultKind
    implementation: Implementation


@dataclasses.dataclass
class Faults:
    """The mutants of one file, by id.

    Attributes:
        mutants: in the order in which they were added.
    """

    mutants: dict[str, Mutant] = dataclasses.field(default_factory=dict)

    def add(
        self,
        id: str,
        title: str,
        *,
        story: str,
        source: str = "by operator",
        kind: FaultKind = "value",
        ring: Steps | Callable[..., Any],
        claims: Capabilities = EVERYTHING,
    ) -> Implementation:
        """Add a mutant, made of steps or a plug-in function, and return it as an implementation.

        Raises:
            ValueError: there is one of that id.
        """
        if id in self.mutants:
            raise ValueError(f"two mutants are called {id!r}")
        function = ring_of(ring) if isinstance(ring, Steps) else ring
        implementation = Implementation(function, f"mutant:{id}", claims)
        self.mutants[id] = Mutant(id, title, story, source, kind, implementation)
        return implementation
