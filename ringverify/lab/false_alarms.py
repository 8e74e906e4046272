"""Run the suite on correct implementations that look wrong: every violation that it reports is a false alarm."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from ringverify.cases.running import Runner
from ringverify.check.hunting import hunt
from ringverify.errors import Inconclusive
from ringverify.lab.killing import Effort, side_by_side
from ringverify.lab.variants import VARIANTS
from ringverify.properties.catalogue import PROPERTIES
from ringverify.targets import load
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.world import WorldUnavailable

DEADLINE = 30.0
"""Seconds for one run: long, so that a busy machine causes no false alarm."""


@dataclasses.dataclass(frozen=True)
class Alarm:
    """A violation that the suite reports of a correct implementation.

    Attributes:
        name: the implementation's.
        property: its id.
        case: the case in words.
        summary: what is said to be wrong.
    """

    name: str
    property: str
    case: str
    summary: str


@dataclasses.dataclass(frozen=True)
class Acquittal:
    """Results of the suite on one correct implementation.

    Attributes:
        name: the variant's id, or a built-in name.
        examples: how many cases were tried, by property; properties that do not apply are absent.
        margin: largest error over error allowed, by property.
        alarms: the false alarms.
    """

    name: str
    examples: dict[str, int]
    margin: dict[str, float]
    alarms: tuple[Alarm, ...]


CORRECT: dict[str, str] = {
    **{one.implementation.name: f"ringverify.lab.variants:{name}" for name, one in VARIANTS.items()},
    "plain ring": "ringverify.faults.ring:PLAIN",
    "ring": "ring",
    "allgather": "allgather",
}
"""Targets by name: every variant, the plain ring from which mutants are made, and the built-in implementations."""


def acquittals(names: Sequence[str], effort: Effort) -> Iterator[Acquittal]:
    """Yield the results of each implementation, with `effort.most` examples in all, divided as in the quick suite."""
    yield from side_by_side(functools.partial(_tried, effort), names, effort.jobs)


def _tried(effort: Effort, name: str) -> Acquittal:
    """Try one implementation; one process runs its ranks for all properties.

    Raises:
        Inconclusive: the world could not be set up, or the machine gave up.
    """
    target = CORRECT[name]
    implementation = load(target)
    applicable = [
        PROPERTIES[id] for id in effort.properties if PROPERTIES[id].unsupported(implementation.capabilities) is None
    ]
    quick = sum(property.examples for property in applicable)
    examples, margin, alarms = {}, {}, []
    with contextlib.closing(ContainedWorld()) as world:
        runner = Runner(implementation, world, target=target, deadline=DEADLINE)
        for property in applicable:
            share = property.examples if effort.most is None else -(-property.examples * effort.most // quick)
            try:
                found = hunt(
                    property, runner.for_another_property(), examples=share, seed=effort.seed, progress=lambda _: None
                )
            except WorldUnavailable as error:
                raise Inconclusive(str(error)) from None
            examples[property.id], margin[property.id] = found.examples, round(found.margin, 3)
            if (shown := found.counterexample) is not None:
                alarms.append(Alarm(name, property.id, shown.case.describe(), shown.violation.summary))
    return Acquittal(name, examples, margin, tuple(alarms))
