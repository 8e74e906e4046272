"""Results of properties, of an implementation and of a run. Importing this module does not import torch."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Literal

from ringverify.events import (
    FooterEvent,
    ImplementationEvent,
    ImplementationVerdict,
    PropertyEvent,
    PropertyOutcome,
    Verdict,
)

ExitCode = Literal[0, 1, 2, 3]
CODES: tuple[ExitCode, ...] = (1, 2, 3)
"""Nonzero exit codes, the one that decides first: a new violation, a baseline out of date, nothing learned."""

ELSEWHERE = ("gloo",)
"""Worlds that a report lists as not run in: gloo, whose ranks are real processes and which every machine has."""

LOADS = "loads"
"""The id reported in place of properties for a target that cannot be checked on this machine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriedProperty:
    """The result of one property of one implementation, and its cost.

    Attributes:
        outcome: the events of the property.
        world: name of the world in which the implementation is checked.
        undeclared: optional features that the implementation does not declare.
        untried: declared features that no example of the property had.
        runs: number of runs of the world.
        seconds_inside: CPU time inside the implementation, over all ranks and runs; of the suite scale, wall time.
    """

    outcome: PropertyOutcome
    world: str
    undeclared: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    runs: int = 0
    seconds_inside: float = 0.0

    @property
    def verdict(self) -> PropertyEvent:
        """The event with the property's verdict."""
        return self.outcome.verdict


@dataclasses.dataclass(frozen=True)
class ImplementationOutcome:
    """The result of one implementation.

    Attributes:
        verdict: `conformant`, `violations` or `inconclusive`; a known violation is a violation.
        exit_code: exit code that it asks for; known violations do not count.
        known: number of known violations.
        unexpected: a message for each property that passes although the baseline lists it as violated.
    """

    verdict: ImplementationVerdict
    exit_code: ExitCode
    known: int
    unexpected: tuple[str, ...]

    @classmethod
    def of(cls, properties: Sequence[PropertyEvent]) -> ImplementationOutcome:
        """Sum up the events of its properties."""
        seen = {event.verdict for event in properties}
        verdict: ImplementationVerdict = "violations" if "fail" in seen else "inconclusive"
        if verdict != "violations" and "inconclusive" not in seen and "pass" in seen:
            verdict = "conformant"
        unexpected = tuple(event.unexpected for event in properties if event.unexpected is not None)
        code: ExitCode = 3 if "inconclusive" in seen or not seen & {"pass", "fail"} else 0
        if unexpected:
            code = 2
        if any(event.is_new_violation() for event in properties):
            code = 1
        return cls(verdict, code, sum(event.known is not None for event in properties), unexpected)

    def without_a_word(self) -> ImplementationOutcome:
        """Return the outcome if an event could not be reported: a new violation stands, all else is inconclusive."""
        if self.exit_code == 1:
            return self
        return dataclasses.replace(self, verdict="inconclusive", exit_code=3)


def implementation_event(
    tried: Sequence[TriedProperty], *, implementation: str, asked: int, seconds: float
) -> ImplementationEvent:
    """Return the event that sums up an implementation.

    Args:
        tried: results of the properties that were tried, at least one.
        implementation: name of the implementation.
        asked: number of properties that were to be tried.
        seconds: wall-clock time of all of them.
    """
    properties = [one.verdict for one in tried]
    seen, outcome = [event.verdict for event in properties], ImplementationOutcome.of(properties)
    worlds = {tried[0].world, *(event.world for event in properties)}
    refuses = sorted({text for event in properties for text in event.gloo_refuses or ()})
    beside = sum(one.runs for one in tried if one.verdict.world is not None)
    return ImplementationEvent(
        implementation=implementation,
        verdict=outcome.verdict,
        world=tried[0].world,
        not_run_in=tuple(name for name in ELSEWHERE if worlds.isdisjoint({name, "external"})),
        gloo_refuses=tuple(refuses) or None,
        undeclared=tried[0].undeclared,
        untried=tuple(name for name in tried[0].untried if all(name in one.untried for one in tried)),
        properties={verdict: seen.count(verdict) for verdict in typing.get_args(Verdict)},
        known=outcome.known,
        not_run=asked - len(seen),
        examples=sum(event.examples for event in properties),
        runs=sum(one.runs for one in tried) - beside,
        simulated_runs=beside or None,
        seconds=round(seconds, 3),
        seconds_inside=round(sum(one.seconds_inside for one in tried), 3),
    )


def unavailable(target: str, reason: str) -> TriedProperty:
    """Return the result of a target that cannot be checked on this machine.

    Args:
        target: the target as it was typed.
        reason: why it cannot be checked, in one line.
    """
    verdict = PropertyEvent(
        implementation=target,
        property=LOADS,
        meaning="what the target needs is on this machine",
        verdict="inconclusive",
        examples=0,
        seconds=0.0,
        margin=None,
        reason=reason,
    )
    return TriedProperty(outcome=PropertyOutcome(verdict), world="none")


def footer_event(
    outcomes: Sequence[ImplementationOutcome], *, baseline: bool, elsewhere: Sequence[str] = ()
) -> FooterEvent:
    """Return the event that ends a run.

    Args:
        outcomes: result of each implementation.
        baseline: whether there is a baseline.
        elsewhere: implementations that the baseline names but this run does not check.
    """
    verdicts, codes = {outcome.verdict for outcome in outcomes}, {outcome.exit_code for outcome in outcomes}
    deciding: tuple[ImplementationVerdict, ...] = ("violations", "inconclusive")
    return FooterEvent(
        verdict=next((verdict for verdict in deciding if verdict in verdicts), "conformant"),
        exit_code=next((code for code in CODES if code in codes), 0),
        known=sum(outcome.known for outcome in outcomes) if baseline else None,
        unexpected=tuple(line for outcome in outcomes for line in outcome.unexpected) if baseline else None,
        elsewhere=tuple(elsewhere) or None if baseline else None,
    )
