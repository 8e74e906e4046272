"""Run the same cases in the simulated world and over gloo, and check that both worlds give the same verdicts.

    python -m ringverify.lab.agreeing [NAME ...] [--expected FILE] [--examples N] [--world-sizes 1,2,3]

tries every implementation, peer and mutant of the project that both worlds can run, and exits with 1 if the worlds
disagree about any. A disagreement counts only if it remains in fresh processes with a longer deadline.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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
"""Properties to try. A mutant with a known killer is tried on that property and on the first of these."""

HASTY, PATIENT = 3.0, 12.0
"""Deadlines in seconds of a run, and of one that settles a disagreement. A hung rank over gloo takes all of it."""

MANY = 60
"""Cases of `hazards` and `progress` after a disagreement; many, because on one rank nothing waits or races."""

WAITS = ("waits",)
WORLD_SIZES = (1, 2, 3)
EXAMPLES = 8


@dataclasses.dataclass(frozen=True)
class Seen:
    """Result of one property in one world.

    Attributes:
        examples: cases tried.
        reason: why the last of them fails, in words that mean the same in both worlds; `None` if no case fails.
        summary: the violation in a line.
        late: whether it fails by passing its deadline, which may be too short for what has to be imported first.
    """

    examples: int
    reason: tuple[str, ...] | None
    summary: str
    late: bool = False


@dataclasses.dataclass(frozen=True)
class Compared:
    """Results of one property of one implementation in both worlds.

    Attributes:
        name: the implementation's target.
        tried: id of the property.
        simulated: the result in the simulated world.
        gloo: the result over gloo.
        beside: if the results disagree, the property by which the implementation is wrong anyway: `hazards` or
            `progress`, which a check over gloo tries in the simulated world, too. They show a race that gloo happens
            to win, or a send that waits for its receive, as all sends do over gloo.
    """

    name: str
    tried: str
    simulated: Seen
    gloo: Seen
    beside: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether no case fails in either world, the same case fails in both, or `beside` explains the difference."""
        return self.beside is not None or (
            (self.simulated.reason is None) == (self.gloo.reason is None)
            and (self.simulated.examples == self.gloo.examples)
        )

    @property
    def alike(self) -> bool:
        """Whether the worlds agree, also about the reason of a failure."""
        return self.agrees and self.simulated.reason == self.gloo.reason


class Comparison:
    """Compares implementations in two worlds, whose processes are kept from one implementation to the next.

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
        """Yield the results of an implementation, one for each property that both worlds can test.

        Raises:
            Inconclusive: the implementation is not installed, or cannot run in both worlds.
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
            raise Inconclusive(f"declares devices {declared.devices}; both worlds are compared on cpu")
        sizes = tuple(size for size in self._sizes if declared.world_sizes is None or size in declared.world_sizes)
        if not sizes:
            raise Inconclusive(f"declares world sizes {declared.world_sizes}, none of {self._sizes}")
        return dataclasses.replace(implementation, capabilities=dataclasses.replace(declared, world_sizes=sizes))

    def _compared(self, implementation: Implementation, target: str, property: Property, deadline: float) -> Compared:
        simulated, gloo = (
            self._seen(implementation, target, property, world, deadline) for world in ("simulated", "gloo")
        )
        return Compared(target, property.id, simulated, gloo)

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
    """Return a reason that both worlds can give: a deadlock in the simulated world is a passed deadline over gloo."""
    return WAITS if reason[0] in ("deadlock", "deadline") else reason


def everything(killers: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return all targets (built in, peers, correct variants, mutants), and the properties to try on each.

    Args:
        killers: a property that is known to kill a mutant, by the mutant's id.
    """
    names = [*targets.BUILT_IN, *(target for target in CORRECT.values() if target not in targets.BUILT_IN)]
    found: dict[str, tuple[str, ...]] = dict.fromkeys(names, ALWAYS)
    for id in MUTANTS:
        found[targets.MUTANT + id] = (killers[id], ALWAYS[0]) if id in killers else ALWAYS
    return found


def line(one: Compared) -> str:
    """Return a comparison as a line of text."""
    if one.alike:
        said = "pass" if one.simulated.reason is None else f"fail: {one.simulated.summary}"
        return f"  same         {one.name:<36}{one.tried:<22}{said}"
    kind = "DISAGREE" if not one.agrees else "other words" if one.beside is None else f"by {one.beside}"
    sides = (f"{name}: {seen.summary or 'pass'}" for name, seen in (("simulated", one.simulated), ("gloo", one.gloo)))
    return f"  {kind:<13}{one.name:<36}{one.tried:<22}{'; '.join(sides)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print a line for each comparison, and return 1 if the worlds disagree about any, else 0."""
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
