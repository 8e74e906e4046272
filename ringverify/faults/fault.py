"""A fault: one known way to be wrong, written once as steps of the ring that are replaced.

It is caught (a mutant that the suite has to kill), recognised (a cause, whose steps have to give the numbers of a
counterexample) and told (its title, its story, its sentence). A fault that returns right values, or only an exception,
has no cause; a cause that no report tells of has no mutant.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from ringverify.faults.place import Here
from ringverify.faults.ring import EVERYTHING, STEPS, Steps, ring_of
from ringverify.implementation import Capabilities, Implementation

FaultKind = Literal[
    "value", "failure", "precision", "isolation", "state", "determinism", "group", "hazard", "progress", "memory",
    "traffic",
]  # fmt: skip
"""What goes wrong: a result; an exception or a hang on legal input; a result by rounding alone; a result by what the
mask excludes; a result, or an input, by what was called before; the same bits; a result on a subgroup; a buffer in
flight; messages on a transport that does not buffer; a claim about memory; a claim about messages."""

When = Literal["always", "forward", "backward"]
WHENS: tuple[When, ...] = ("always", "backward", "forward")
"""In which direction a fault is there."""


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
        ring: steps of the ring, or the function, of which it is made.
        when: in which direction the steps are those.
    """

    id: str
    title: str
    story: str
    source: str
    kind: FaultKind
    implementation: Implementation
    ring: Steps | Callable[..., Any]
    when: When


@dataclasses.dataclass(frozen=True)
class Cause:
    """A fault as the cause of numbers that are wrong.

    Attributes:
        says: the fault, as a sentence without its full stop.
        steps: the ring with this fault.
        when: in which direction the fault is there.
        more: the end of the sentence, if this is a variant of the fault that the sentence without it names.
        narrow: whether it concerns some blocks only, and is tried after what concerns all.
        advice: what to try first, as a sentence without its full stop; empty where nothing is known.
        overflows: whether it shows only in the dtype in which sums are kept, because a number is too large for it.
    """

    says: str
    steps: Steps
    when: When = "always"
    more: str = ""
    narrow: bool = False
    advice: str = ""
    overflows: bool = False


@functools.cache
def on_blocks(steps: Steps, *, others: bool) -> Steps:
    """Restrict a fault of the mask to blocks from other ranks, or to the rank's own block."""

    def pattern(now: Steps, here: Here, hop: int, owner: int) -> torch.Tensor:
        chosen = steps if (owner != here.rank) == others else STEPS
        return chosen.pattern(chosen, here, hop, owner)

    return replace(steps, pattern=pattern)


@dataclasses.dataclass
class Faults:
    """The faults of one file.

    Attributes:
        mutants: by id, in the order in which they were added.
        causes: the plainest first.
    """

    mutants: dict[str, Mutant] = dataclasses.field(default_factory=dict)
    causes: list[Cause] = dataclasses.field(default_factory=list)

    def add(
        self,
        id: str,
        title: str,
        *,
        story: str,
        source: str = "by operator",
        kind: FaultKind = "value",
        ring: Steps | Callable[..., Any],
        when: When = "always",
        claims: Capabilities = EVERYTHING,
        cause: str = "",
        also: Sequence[When] = (),
        masks: bool = False,
        overflows: bool = False,
    ) -> Implementation:
        """Add a mutant, made of steps or a plug-in function, and return it as an implementation.

        Args:
            id: as of `Mutant`.
            title: likewise.
            story: likewise.
            source: likewise.
            kind: likewise.
            ring: steps of the ring, or a function of the plug-in contract.
            when: in which direction the steps are those.
            claims: what the mutant declares.
            cause: the sentence by which the fault is recognised; empty for one that numbers do not show.
            also: other directions in which the same steps are a cause.
            masks: whether it is looked for in each direction, and on other ranks' blocks or on the own block alone.
            overflows: as of `Cause`.

        Raises:
            ValueError: there is one of that id.
        """
        if id in self.mutants:
            raise ValueError(f"two mutants are called {id!r}")
        if isinstance(ring, Steps):
            function = ring_of(STEPS if when == "backward" else ring, STEPS if when == "forward" else ring)
        else:
            function = ring
        implementation = Implementation(function, f"mutant:{id}", claims)
        self.mutants[id] = Mutant(id, title, story, source, kind, implementation, ring, when)
        if cause and isinstance(ring, Steps) and masks:
            self.mask(cause, ring)
        elif cause and isinstance(ring, Steps):
            self.cause(cause, ring, when, *also, overflows=overflows)
        return implementation

    def cause(
        self,
        says: str,
        steps: Steps,
        *whens: When,
        more: str = "",
        advice: str = "",
        narrow: bool = False,
        overflows: bool = False,
    ) -> None:
        """Add a cause, in each of these directions; throughout, if none is named."""
        self.causes += [Cause(says, steps, when, more, narrow, advice, overflows) for when in whens or ("always",)]

    def mask(self, says: str, steps: Steps, *, advice: str = "") -> None:
        """Add a fault of the mask as a cause: on all blocks and on some only, each in either direction and in both."""

        self.cause(says, steps, *WHENS, advice=advice)
        for others, more in ((True, " on blocks from other ranks"), (False, " on the own block")):
            self.cause(says, on_blocks(steps, others=others), *WHENS, more=more, advice=advice, narrow=True)
