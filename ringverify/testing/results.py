"""The results of a property and of a run, and their text. Importing this module does not import torch."""

from __future__ import annotations

import dataclasses
from collections import Counter

from ringverify.events import (
    CounterexampleEvent,
    Event,
    HeaderEvent,
    ImplementationEvent,
    Known,
    PropertyOutcome,
    outcomes_of,
)
from ringverify.words import legible, plural


@dataclasses.dataclass(frozen=True)
class PropertyResult:
    """The result of one property of one implementation.

    Attributes:
        implementation: name of the implementation.
        property: id of the property.
        verdict: `pass`, `fail`, `unsupported` or `inconclusive`.
        examples: how many cases were tried.
        seconds: how long that took.
        margin: largest error over the error allowed; `None` where nothing numeric was compared.
        reason: why it is unsupported or inconclusive, or what cut it short.
        known: reason and link of a violation that the baseline lists.
        unexpected: the message if the property passes but the baseline lists it as violated.
        counterexample: the event of the smallest case found that violates the property, if any.
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
        """Build the result from the events of a property."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "counterexample"]
        return cls(**{name: getattr(outcome.verdict, name) for name in names}, counterexample=outcome.counterexample)

    def is_new_violation(self) -> bool:
        """Whether the property is violated and the baseline does not list that."""
        return self.verdict == "fail" and self.known is None

    def describe(self, *, verbose: bool = False) -> str:
        """Describe the result: a violation as `ringverify check` does, anything else in one line."""
        name = f"{self.implementation}: {self.property}"
        if self.unexpected is not None:
            return legible(f"{name}: {self.unexpected}")
        if self.counterexample is None:
            tried = f"{self.examples} {plural('example', self.examples)}"
            return legible(f"{name}: {self.verdict}: {self.reason or tried}")
        from ringverify.reports.terminal import counterexample_text

        summary, *rest = counterexample_text(self.counterexample, verbose=verbose).splitlines()
        return "\n".join([f"{legible(name)}: {summary.strip()}", *rest])


@dataclasses.dataclass(frozen=True)
class ConformanceResult:
    """The result of a run on one implementation.

    Attributes:
        implementation: name of the implementation.
        verdict: `conformant`, `violations` or `inconclusive`.
        world: where its ranks ran.
        device: device of the tensors.
        suite: smoke, quick, full or nightly.
        seed: decided which cases were tried.
        elsewhere: for a pass, a text on where it is none and on features that were not tried; "" for other verdicts.
        properties: the result of each property, by id.
        events: all events of the run, as in a report.
    """

    implementation: str
    verdict: str
    world: str
    device: str
    suite: str
    seed: int
    elsewhere: str
    properties: dict[str, PropertyResult]
    events: list[Event] = dataclasses.field(repr=False)

    @classmethod
    def of(cls, events: list[Event]) -> ConformanceResult:
        """Build the result from the events of a run on one implementation."""
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
            elsewhere=told.not_reached,
            properties={id: PropertyResult.of(outcome) for id, outcome in outcomes.items()},
            events=events,
        )

    def describe(self, *, verbose: bool = False) -> str:
        """Describe the verdict in one line, then each violation and each property that was not, or not fully, tried."""
        counts = Counter(one.verdict for one in self.properties.values())
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
    """An implementation violates a property; the message has the counterexample and how to replay it.

    Attributes:
        result: the result of the property, or of the whole run.
    """

    def __init__(self, result: PropertyResult | ConformanceResult, *, verbose: bool = False) -> None:
        super().__init__(result.describe(verbose=verbose))
        self.result = result


ConformanceError.__module__ = "ringverify"  # where people find it, and what they read in a traceback
