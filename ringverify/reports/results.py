"""What one or several reports say: their implementations, and the outcome of each property of each of these."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path

from ringverify.events import (
    Event,
    ExchangeEvent,
    FooterEvent,
    HeaderEvent,
    ImplementationEvent,
    ImplementationVerdict,
    Kind,
    PropertyOutcome,
    TriedEvent,
    outcomes_of,
)
from ringverify.reports.jsonl import ReportError, read_report
from ringverify.reports.story import shown
from ringverify.words import legible

VERDICTS: tuple[ImplementationVerdict, ...] = ("violations", "inconclusive", "conformant")
"""Verdicts on an implementation; the first of these that occurs is the verdict on several together."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A report to read.

    Attributes:
        path: its file.
        label: added to the names of its implementations, to tell them from those of another report.
    """

    path: Path
    label: str | None = None

    @classmethod
    def of(cls, text: str) -> Source:
        """Parse `FILE` or `LABEL=FILE`."""
        label, separator, path = text.partition("=")
        if not separator or Path(text).exists():
            return cls(Path(text))
        if not label.strip() or not path:
            raise ReportError(f"{text!r}: expected FILE or LABEL=FILE")
        return cls(Path(path), label.strip())


@dataclasses.dataclass(frozen=True)
class ImplementationResult:
    """What became of one implementation in one run.

    Attributes:
        name: its name as it is shown, with the label.
        verdict: the event of its verdict.
        header: the header of the run.
        outcomes: its properties by id, in the order in which they were tried.
        exchange: the event of its traffic and memory, if that was asked for.
        tried: what its examples were, if the report says so.
    """

    name: str
    verdict: ImplementationEvent
    header: HeaderEvent
    outcomes: dict[str, PropertyOutcome]
    exchange: ExchangeEvent | None = None
    tried: TriedEvent | None = None

    @property
    def where(self) -> str:
        """For a pass, where it is one, where it is none, and how much was not tried; "" for other verdicts."""
        return self.verdict.reached + self.verdict.not_reached

    @property
    def counts(self) -> dict[Kind, int]:
        """How many properties had each outcome, for outcomes that occur."""
        kinds = [outcome.verdict.kind for outcome in self.outcomes.values()]
        return {kind: kinds.count(kind) for kind in typing.get_args(Kind) if kind in kinds}

    @property
    def examples(self) -> int:
        """How many cases were tried, over all properties."""
        return sum(outcome.verdict.examples for outcome in self.outcomes.values())

    @property
    def failures(self) -> list[PropertyOutcome]:
        """The properties that are violated, known violations last."""
        failed = [outcome for outcome in self.outcomes.values() if outcome.verdict.verdict == "fail"]
        return sorted(failed, key=lambda outcome: outcome.verdict.kind == "known")


@dataclasses.dataclass(frozen=True)
class Results:
    """What one or several reports say.

    Attributes:
        implementations: in the order of the reports.
        properties: ids of the properties that were tried on any of them, in an order that follows that of each run.
        headers: headers of the runs, each once.
        unexpected: lines on violations that the baseline knows and that are gone.
    """

    implementations: tuple[ImplementationResult, ...]
    properties: tuple[str, ...]
    headers: tuple[HeaderEvent, ...]
    unexpected: tuple[str, ...] = ()

    @property
    def verdict(self) -> ImplementationVerdict:
        """The verdict on all implementations together."""
        seen = {one.verdict.verdict for one in self.implementations}
        return next((verdict for verdict in VERDICTS if verdict in seen), "inconclusive")


def read_results(sources: Sequence[Source]) -> Results:
    """Read several reports into one result.

    Raises:
        ReportError: a file is named twice or is not a complete report, or two reports have implementations of one name.
    """
    for place, source in enumerate(sources):
        if any(source.path.resolve() == earlier.path.resolve() for earlier in sources[:place]):
            raise ReportError(f"{source.path} is named twice: leave one out")
    reports = [(source, read_report(source.path)) for source in sources]
    found: dict[str, Source] = {}
    for source, events in reports:
        names = (event.implementation for event in events if isinstance(event, ImplementationEvent))
        for name in dict.fromkeys(_named(name, source.label) for name in names):
            if (other := found.setdefault(name, source)) is not source:
                raise ReportError(
                    f"{other.path} and {source.path} both tell of {name!r}: give one a label, "
                    f"{'new' if source.label is None else source.label + '-2'}={source.path}, or leave it out"
                )
    return _joined([results_of(events, source) for source, events in reports])


def results_of(events: Sequence[Event], source: Source | None = None) -> Results:
    """Return what the events of one run say.

    Raises:
        ReportError: the events contradict one another.
    """
    events = [shown(event) for event in events]
    where, label = ("the events", None) if source is None else (f"report {source.path}", source.label)
    try:
        outcomes = outcomes_of(events)
    except ValueError as error:
        raise ReportError(f"{where}: {error}") from None
    verdicts: dict[str, ImplementationEvent] = {}
    for event in events:
        if isinstance(event, ImplementationEvent):
            if event.implementation in verdicts:
                raise ReportError(f"{where}: two implementations are named {event.implementation!r}")
            verdicts[event.implementation] = event
    for name in outcomes:
        if name not in verdicts:
            raise ReportError(f"{where}: no verdict on {name!r}")
    exchanges = {event.implementation: event for event in events if isinstance(event, ExchangeEvent)}
    tried = {event.implementation: event for event in events if isinstance(event, TriedEvent)}
    (header,) = (event for event in events if isinstance(event, HeaderEvent))
    implementations = tuple(
        ImplementationResult(
            _named(name, label), verdict, header, outcomes.get(name, {}), exchanges.get(name), tried.get(name)
        )
        for name, verdict in verdicts.items()
    )
    order = _merged([list(mine) for mine in outcomes.values()])
    unexpected = [line for event in events if isinstance(event, FooterEvent) for line in event.unexpected or ()]
    return Results(implementations, order, (header,), tuple(unexpected))


def _joined(results: Sequence[Results]) -> Results:
    headers: list[HeaderEvent] = []
    for result in results:
        headers += [header for header in result.headers if header not in headers]
    return Results(
        tuple(one for result in results for one in result.implementations),
        _merged([list(result.properties) for result in results]),
        tuple(headers),
        tuple(line for result in results for line in result.unexpected),
    )


def _named(name: str, label: str | None) -> str:
    return legible(name if label is None else f"{name} ({label})")


def _merged(orders: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Merge orders of names into one: a new name is put behind the one that precedes it in its own order."""
    found: list[str] = []
    for order in orders:
        place = 0
        for name in order:
            if name in found:
                place = found.index(name) + 1
            else:
                found.insert(place, name)
                place += 1
    return tuple(found)
