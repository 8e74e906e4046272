"""A fault: one known way to be wrong, written once as steps of the ring that are replaced, and named by one sentence.

It is caught (a mutant that the suite has to kill), recognised (a cause, whose steps have to give the numbers of a
counterexample) and told (its sentence). A mutant that returns right values, or only an exception, is no cause; a cause
that nobody has reported need not be a mutant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from ringverify.faults import reports
from ringverify.faults.place import Here
from ringverify.faults.ring import BACKWARD, EVERYTHING, FORWARD, STEPS, Steps, ring_of
from ringverify.implementation import Capabilities, Implementation

FaultKind = Literal[
    "value", "failure", "precision", "isolation", "state", "mode", "determinism", "group", "hazard", "progress",
    "memory", "traffic",
]  # fmt: skip
"""What goes wrong: a result; an exception or a hang on legal input; a result by rounding alone; a result by what the
mask excludes; a result, or an input, by what was called before; a result by which gradients are asked for; the same
bits; a result on a subgroup; a buffer in flight; messages on a transport that does not buffer; a claim about memory; a
claim about messages."""

When = Literal["always", "forward", "backward"]
"""In which direction a fault is there."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """A fault as the cause of numbers that are wrong.

    Attributes:
        says: the fault, as a sentence without its full stop; may depend on a failing case.
        steps: the ring with this fault.
        when: whether the fault is in both directions, in the forward only, or in the backward only.
        more: the end of the sentence, if this is a variant of the fault that the sentence without it names.
        narrow: whether the fault concerns some blocks or cases only; it is tried after faults that concern all.
        advice: what to try first, as a sentence without its full stop; may depend on a failing case.
        overflows: whether the fault shows only in the dtype of sums, as a number that is too large for it.
        tile: a number in the sentence that was tried until it fits, such as the size of a tile; 0 if none. The fault
            is not there in shards, or in a head_dim, of at most so many, and is named only if all cases are explained.
    """

    says: str | Callable[[Any], str]
    steps: Steps
    when: When = "always"
    more: str = ""
    narrow: bool = False
    advice: str | Callable[[Any], str] = ""
    overflows: bool = False
    tile: int = 0

    def sentence(self, case: Any = None) -> str:
        """Return the fault as a sentence, with its direction."""
        text = (self.says if isinstance(self.says, str) else self.says(case)) + self.more
        return text if self.when == "always" else f"{text}, in the {self.when} only"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A ring broken on purpose, in one known way.

    Attributes:
        id: of the report it comes from, with a letter where there are several; `O…` for those that no report tells of.
        fault: what is wrong with it.
        kind: what goes wrong.
        implementation: the mutant; it claims what the original would.
    """

    id: str
    fault: Cause
    kind: FaultKind
    implementation: Implementation

    @property
    def sentence(self) -> str:
        """What is wrong."""
        return self.fault.sentence()

    @property
    def source(self) -> str:
        """Where it was reported, or "by operator"."""
        return reports.source(self.id)


def on_blocks(steps: Steps, *, others: bool) -> Steps:
    """Restrict a fault of the mask to blocks from other ranks, or to the rank's own block."""

    def pattern(now: Steps, here: Here, hop: int, owner: int) -> torch.Tensor:
        chosen = steps if (owner != here.rank) == others else STEPS
        return chosen.pattern(chosen, here, hop, owner)

    return replace(steps, pattern=pattern)


def directions(steps: Steps) -> tuple[When, ...]:
    """Return the directions in which steps are different faults: one if only the forward or the backward runs them."""
    one = steps.changed <= BACKWARD or steps.changed <= FORWARD
    return ("always",) if one else ("always", "backward", "forward")


@dataclasses.dataclass
class Faults:
    """The faults of one file.

    Attributes:
        mutants: by id, in the order in which they were added.
        causes: the plainest first.
        named: the causes by their sentences.
    """

    mutants: dict[str, Mutant] = dataclasses.field(default_factory=dict)
    causes: list[Cause] = dataclasses.field(default_factory=list)
    named: dict[str, list[Cause]] = dataclasses.field(default_factory=dict)

    def add(
        self,
        id: str,
        says: str,
        steps: Steps,
        *,
        kind: FaultKind = "value",
        when: When = "always",
        claims: Capabilities = EVERYTHING,
        recognised: bool = True,
        more: str = "",
        narrow: bool = False,
        overflows: bool = False,
        masks: bool = False,
    ) -> None:
        """Add a mutant, and the fault as a cause where numbers show it.

        Args:
            id: as of `Mutant`.
            says: as of `Cause`.
            steps: likewise.
            kind: as of `Mutant`; only a fault of values is a cause.
            when: in which direction the mutant has these steps; a cause is looked for in all.
            claims: what the mutant declares.
            recognised: whether a fault of values is a cause.
            more: as of `Cause`.
            narrow: likewise.
            overflows: likewise.
            masks: as of `cause`.
        """
        if kind == "value" and recognised:
            self.cause(says, steps, more=more, narrow=narrow, overflows=overflows, masks=masks)
        self._mutant(id, Cause(says, steps, when, more), kind, claims)

    def mutant(self, id: str, says: str) -> None:
        """Add a mutant that has the fault of a cause added before; the sentence is the cause's name.

        Raises:
            ValueError: no cause has this name, or several have, so that it does not say which one is meant.
        """
        found = self.named.get(says, [])
        if len(found) != 1:
            raise ValueError(f"mutant {id!r} needs one cause, and {len(found)} are called {says!r}")
        self._mutant(id, found[0], "value", EVERYTHING)

    def _mutant(self, id: str, fault: Cause, kind: FaultKind, claims: Capabilities) -> None:
        if id in self.mutants:
            raise ValueError(f"two mutants are called {id!r}")
        steps, when = fault.steps, fault.when
        function = ring_of(STEPS if when == "backward" else steps, STEPS if when == "forward" else steps)
        self.mutants[id] = Mutant(id, fault, kind, Implementation(function, f"mutant:{id}", claims))

    def cause(
        self,
        says: str,
        steps: Steps,
        *,
        more: str = "",
        narrow: bool = False,
        advice: str = "",
        overflows: bool = False,
        masks: bool = False,
        tile: int = 0,
    ) -> None:
        """Add a fault as a cause, in every direction in which its steps are another fault.

        A fault of the mask (`masks`) is added on blocks from other ranks and on the own block alone, too.
        """
        variants = [(steps, more, narrow)]
        if masks:
            variants += [(on_blocks(steps, others=True), f"{more} on blocks from other ranks", True)]
            variants += [(on_blocks(steps, others=False), f"{more} on the own block", True)]
        for changed, end, some in variants:
            for when in directions(changed):
                cause = Cause(says, changed, when, end, some, advice, overflows, tile)
                self.causes.append(cause)
                self.named.setdefault(cause.sentence(), []).append(cause)
