"""What came of a property and of a run, and how that reads. Importing this module does not import torch."""

from __future__ import annotations

import dataclasses

from ringverify.events import (
    CounterexampleEvent,
    Event,
    HeaderEvent,
    ImplementationEvent,
    Known,
    PropertyOutcome,
    outcomes_of,
)
from ringverify.words import legible


@dataclasses.dataclass(frozen=True)
class PropertyResult:
    """What came of one property of one implementation.

    Attributes:
        implementation: its name.
        property: id of the property.
        verdict: `pass`, `fail`, `unsupported` or `inconclusive`.
        examples: how many cases were tried.
        seconds: how long that took.
        margin: largest error over the error allowed; `None` where nothing numeric was compared.
        reason: why it is unsupported or inconclusive, or what cut it short.
        known: reason and link of a violation that the baseline knows.
        unexpected: what to say where it passes and the baseline has it violated.
        counterexample: the event that tells of the smallest case found, if one was.
    """

    implementation: str
    property: str
    verdict: str
    examples: int
    seconds: float
    margin: float | None
    reason: str | None = None
    known: Known | None = None
    unexpected: str | None = None
    counterexample: CounterexampleEvent | None = None

    @classmethod
    def of(cls, outcome: PropertyOutcome) -> PropertyResult:
        """From the events that tell of it."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "counterexample"]
        return cls(**{name: getattr(outcome.verdict, name) for name in names}, counterexample=outcome.counterexample)

    def is_new_violation(self) -> bool:
        """Whether it is violated in a way that no baseline knows."""
        return self.verdict == "fail" and self.known is None

    def describe(self, *, verbose: bool = False) -> str:
        """What is to be said of it: of a violation all that `ringverify check` says, of the rest a line."""
        name = f"{self.implementation}: {self.property}"
        if self.unexpected is not None:
            return legible(f"{name}: {self.unexpected}")
        if self.counterexample is None:
            return legible(f"{name}: {self.verdict}: {self.reason or f'{self.examples} examples'}")
        from ringverify.reports.terminal import counterexample_text

        summary, *rest = counterexample_text(self.counterexample, verbose=verbose).splitlines()
        return "\n".join([f"{legible(name)}: {summary.strip()}", *rest])


@dataclasses.dataclass(frozen=True)
class ConformanceResult:
    """What came of a run on one implementation.

    Attributes:
        implementation: its name.
        verdict: `conformant`, `violations` or `inconclusive`.
        world: where its ranks ran.
        device: of the tensors.
        suite: smoke, quick, full or nightly.
        seed: what decided which cases were tried.
        properties: what came of each property, by id.
        events: all that was told, as in a report.
    """

    implementation: str
    verdict: str
    world: str
    device: str
    suite: str
    seed: int
    properties: dict[str, PropertyResult]
    events: list[Event] = dataclasses.field(repr=False)

    @classmethod
    def of(cls, events: list[Event]) -> ConformanceResult:
        """From the events of a run on one implementation."""
        (header,) = [event for event in events if isinstance(event, HeaderEvent)]
        (told,) = [event for event in events if isinstance(event, ImplementationEvent)]
        outcomes = outcomes_of(events).get(told.implementation, {})
        return cls(
            implementation=told.implementation,
            verdict=told.verdict,
            world=told.world or "",
            device=header.device,
            suite=header.suite,
            seed=header.seed,
            properties={id: PropertyResult.of(outcome) for id, outcome in outcomes.items()},
            events=events,
        )

    @property
    def elsewhere(self) -> str:
        """Of a pass: where it was not tried."""
        (told,) = [event for event in self.events if isinstance(event, ImplementationEvent)]
        return told.not_reached

    def describe(self, *, verbose: bool = False) -> str:
        """The verdict, and all that is to be said of violations and of what could not be tried, or only in part."""
        counts: dict[str, int] = {}
        for one in self.properties.values():
            counts[one.verdict] = counts.get(one.verdict, 0) + 1
        first = (
            f"{self.implementation}: {self.verdict}: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())} "
            f"({self.world} world{self.elsewhere}, {self.device}, suite {self.suite}, seed {self.seed})"
        )
        lines = [legible(first)]
        for one in self.properties.values():
            cut_short = one.verdict == "pass" and one.reason is not None
            nothing_else = one.verdict == "unsupported" and self.verdict == "inconclusive"
            if cut_short or nothing_else or one.verdict in ("fail", "inconclusive") or one.unexpected is not None:
                lines.append(one.describe(verbose=verbose))
        return "\n".join(lines)


class ConformanceError(AssertionError):
    """An implementation violates what must hold; the message has the counterexample and how to replay it.

    Attributes:
        result: what came of the property, or of the whole run.
    """

    def __init__(self, result: PropertyResult | ConformanceResult, *, verbose: bool = False) -> None:
        super().__init__(result.describe(verbose=verbose))
        self.result = result


ConformanceError.__module__ = "ringverify"  # where people find it, and what they read in a traceback
