"""One implementation in two worlds: the same cases, simulated and over gloo, and whether both say the same of them.

    python -m ringverify.lab.agreeing [NAME ...] [--expected FILE] [--examples N] [--world-sizes 1,2,3]

tries every implementation, peer and mutant of the project that both worlds can run, and ends with 1 if they disagree
about one. A disagreement is looked at again in fresh processes and with time to spare before it counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from ringverify import targets
from ringverify.cases.running import Runner
from ringverify.check.hunting import hunt
from ringverify.errors import Inconclusive
from ringverify.faults.catalogue import MUTANTS
from ringverify.implementation import Implementation
from ringverify.lab import expected as expectations
from ringverify.lab.false_alarms import CORRECT
from ringverify.option_types import sizes as world_sizes
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.property import Property
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.world import World, WorldUnavailable

ALWAYS = ("forward", "gradients")
"""Properties that every implementation is tried on; a mutant, on the first and on the one that is known to kill it."""

HASTY, PATIENT = 3.0, 12.0
"""Seconds for one run, and for one that is to settle a disagreement: a rank of gloo that waits does so to the end."""

MANY = 60
"""Cases of what is tried beside: on one rank nothing waits and nothing races."""

WAITS = ("waits",)
WORLD_SIZES = (1, 2, 3)
EXAMPLES = 8


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a hunt in one world came to.

    Attributes:
        examples: cases tried.
        reason: why the last of them fails, in words that mean the same in both worlds; `None` if none does.
        summary: the violation in a line.
        late: whether a simulated run passed its deadline, which may be too short for what has to be imported first.
    """

    examples: int
    reason: tuple[str, ...] | None
    summary: str
    late: bool = False


@dataclasses.dataclass(frozen=True)
class Compared:
    """What two worlds make of one property of one implementation.

    Attributes:
        name: the implementation's target.
        tried: id of the property.
        simulated: what was seen there.
        gloo: what was seen here.
        beside: the property of those that only the simulated world can show, and that a run over gloo tries there, by
            which an implementation about which they disagree is wrong in both: a race that gloo happens to win, or a
            send that waits for its receive as all do over gloo.
    """

    name: str
    tried: str
    simulated: Seen
    gloo: Seen
    beside: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether both hold it for right, or both for wrong on the same case, or both by what is tried beside."""
        return self.beside is not None or (
            (self.simulated.reason is None) == (self.gloo.reason is None)
            and (self.simulated.examples == self.gloo.examples)
        )

    @property
    def alike(self) -> bool:
        """Whether it is also wrong in the same way."""
        return self.agrees and self.simulated.reason == self.gloo.reason


class Comparison:
    """Two worlds, kept warm from one implementation to the next.

    Args:
        examples: cases of each property.
        sizes: world sizes.
        seed: decides which cases.
    """

    def __init__(self, *, examples: int = EXAMPLES, sizes: Sequence[int] = WORLD_SIZES, seed: int = 0) -> None:
        self._examples, self._sizes, self._seed = examples, tuple(sizes), seed
        self._worlds: dict[str, World] = {"simulated": ContainedWorld(), "gloo": GlooWorld()}

    def close(self) -> None:
        """End both worlds; they start again when they are needed again."""
        for world in self._worlds.values():
            world.close()

    def of(self, target: str, properties: Sequence[str]) -> Iterator[Compared]:
        """Try an implementation on the properties that both worlds can show of it.

        Raises:
            Inconclusive: it is not here, or cannot be in both worlds.
        """
        implementation = self._restricted(targets.load(target))
        for id in dict.fromkeys(properties):
            property = PROPERTIES[id]
            if property.simulated_only or property.unsupported(implementation.capabilities) is not None:
                continue
            found = self._compared(implementation, target, property, HASTY)
            if not found.agrees or found.simulated.late:
                self.close()
                found = self._compared(implementation, target, property, PATIENT)
            if not found.agrees:
                found = dataclasses.replace(found, beside=self._beside(implementation, target))
            yield found

    def _beside(self, implementation: Implementation, target: str) -> str | None:
        for id in ("hazards", "progress"):
            seen = self._seen(implementation, target, PROPERTIES[id], "simulated", PATIENT, MANY)
            if seen.reason is not None:
                return id
        return None

    def _restricted(self, implementation: Implementation) -> Implementation:
        declared = implementation.capabilities
        if declared.processes:
            raise Inconclusive("declares processes=True, so the simulated world cannot run it")
        if "cpu" not in declared.devices:
            raise Inconclusive("declares no device that is here")
        sizes = tuple(size for size in self._sizes if declared.world_sizes is None or size in declared.world_sizes)
        if not sizes:
            raise Inconclusive(f"declares world sizes {declared.world_sizes}, none of {self._sizes}")
        return dataclasses.replace(implementation, capabilities=dataclasses.replace(declared, world_sizes=sizes))

    def _compared(self, implementation: Implementation, target: str, property: Property, deadline: float) -> Compared:
        def seen(world: Literal["simulated", "gloo"]) -> Seen:
            return self._seen(implementation, target, property, world, deadline)

        return Compared(target, property.id, seen("simulated"), seen("gloo"))

    def _seen(
        self,
        implementation: Implementation,
        target: str,
        property: Property,
        world: str,
        deadline: float,
        most: int | None = None,
    ) -> Seen:
        runner = Runner(implementation, self._worlds[world], target=target, deadline=deadline)
        try:
            found = hunt(
                property,
                runner,
                examples=min(most or self._examples, property.examples),
                seed=self._seed,
                progress=lambda _: None,
                shrinking=False,
            )
        except WorldUnavailable as error:
            raise Inconclusive(str(error)) from None
        shown = found.counterexample
        if shown is None:
            return Seen(found.examples, None, "")
        reason, summary = shown.violation.reason, shown.violation.summary
        return Seen(found.examples, _in_both_worlds(reason), summary, late=reason[0] == "deadline")


def _in_both_worlds(reason: tuple[str, ...]) -> tuple[str, ...]:
    """A deadlock is what the simulated world knows and a deadline ends over gloo."""
    return WAITS if reason[0] in ("deadlock", "deadline") else reason


def everything(killers: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Targets of all that is built in, of all correct variants, of peers and mutants, and the properties of each.

    Args:
        killers: a property that is known to kill a mutant, by the mutant's id.
    """
    names = [*targets.BUILT_IN, *(target for target in CORRECT.values() if target not in targets.BUILT_IN)]
    found: dict[str, tuple[str, ...]] = dict.fromkeys(names, ALWAYS)
    for id in MUTANTS:
        found[targets.MUTANT + id] = (killers[id], ALWAYS[0]) if id in killers else ALWAYS
    return found


def line(one: Compared) -> str:
    """A comparison for a person."""
    if one.alike:
        said = "pass" if one.simulated.reason is None else f"fail: {one.simulated.summary}"
        return f"  same         {one.name:<36}{one.tried:<22}{said}"
    kind = "DISAGREE" if not one.agrees else "other words" if one.beside is None else f"by {one.beside}"
    sides = (f"{name}: {seen.summary or 'pass'}" for name, seen in (("simulated", one.simulated), ("gloo", one.gloo)))
    return f"  {kind:<13}{one.name:<36}{one.tried:<22}{'; '.join(sides)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, tell line by line, and return 0 if both worlds agree about all, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m ringverify.lab.agreeing", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="targets; all of the project, if there is none")
    parser.add_argument("--expected", type=Path, help="the file of expected kills: names a property for each mutant")
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--world-sizes", type=world_sizes, default=WORLD_SIZES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    killers = {}
    if options.expected is not None:
        killers = {one.mutant: one.property for one in expectations.read(options.expected)}
    wanted = everything(killers)
    comparison = Comparison(examples=options.examples, sizes=options.world_sizes, seed=options.seed)
    counts = dict.fromkeys(("same", "other words", "disagree", "not compared"), 0)
    try:
        for name in options.names or wanted:
            try:
                for one in comparison.of(name, wanted.get(name, ALWAYS)):
                    counts["same" if one.alike else "other words" if one.agrees else "disagree"] += 1
                    print(line(one), flush=True)
            except Inconclusive as error:
                counts["not compared"] += 1
                print(f"  not compared {name:<36}{str(error).splitlines()[0]}", flush=True)
    finally:
        comparison.close()
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    return 1 if counts["disagree"] else 0


if __name__ == "__main__":
    sys.exit(main())
