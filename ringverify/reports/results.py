"""The events of one report or several as what they say: implementations, and what became of each property of each."""

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
    outcomes_of,
)
from ringverify.reports.jsonl import ReportError, read_report
from ringverify.reports.story import shown
from ringverify.words import legible

VERDICTS: tuple[ImplementationVerdict, ...] = ("violations", "inconclusive", "conformant")
"""Of an implementation, the one that decides for several first."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A report to read.

    Attributes:
        path: its file.
        label: put behind the names of its implementations, to tell them from those of another report.
    """

    path: Path
    label: str | None = None

    @classmethod
    def of(cls, text: str) -> Source:
        """From `FILE` or `LABEL=FILE`."""
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
        name: as it is shown, its label included.
        verdict: the event of its verdict.
        header: the header of the run.
        outcomes: its properties by id, in the order in which they were tried.
        exchange: the event of what it exchanges, if that was asked for.
    """

    name: str
    verdict: ImplementationEvent
    header: HeaderEvent
    outcomes: dict[str, PropertyOutcome]
    exchange: ExchangeEvent | None = None

    @property
    def where(self) -> str:
        """Of a pass: in which world it is one, and where it was not tried. Empty for other verdicts."""
        return self.verdict.reached + self.verdict.not_reached

    @property
    def counts(self) -> dict[Kind, int]:
        """How many of its properties came to what, those that any came to."""
        kinds = [outcome.verdict.kind for outcome in self.outcomes.values()]
        return {kind: kinds.count(kind) for kind in typing.get_args(Kind) if kind in kinds}

    @property
    def examples(self) -> int:
        """Cases that were tried, of all properties."""
        return sum(outcome.verdict.examples for outcome in self.outcomes.values())

    @property
    def failures(self) -> list[PropertyOutcome]:
        """Properties that are violated, known ones last."""
        failed = [outcome for outcome in self.outcomes.values() if outcome.verdict.verdict == "fail"]
        return sorted(failed, key=lambda outcome: outcome.verdict.kind == "known")


@dataclasses.dataclass(frozen=True)
class Results:
    """All that was told.

    Attributes:
        implementations: in the order of the reports.
        properties: ids of all properties that were tried on any, in an order that is that of every run.
        headers: of the runs, equal ones once.
        unexpected: lines on known violations that are gone.
    """

    implementations: tuple[ImplementationResult, ...]
    properties: tuple[str, ...]
    headers: tuple[HeaderEvent, ...]
    unexpected: tuple[str, ...] = ()

    @property
    def verdict(self) -> ImplementationVerdict:
        """Of all together."""
        seen = {one.verdict.verdict for one in self.implementations}
        return next((verdict for verdict in VERDICTS if verdict in seen), "inconclusive")


def read_results(sources: Sequence[Source]) -> Results:
    """What the reports of these files say together.

    Raises:
        ReportError: a file is not a whole report, or two of them tell of implementations of one name.
    """
    for place, source in enumerate(sources):
        if any(source.path.resolve() == earlier.path.resolve() for earlier in sources[:place]):
            raise ReportError(f"{source.path} is named twice: once is enough")
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
    """What the events of one run say.

    Raises:
        ReportError: they do not fit together.
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
    (header,) = (event for event in events if isinstance(event, HeaderEvent))
    implementations = tuple(
        ImplementationResult(_named(name, label), verdict, header, outcomes.get(name, {}), exchanges.get(name))
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
    """One order of all names: what is new to an order comes behind its predecessor there."""
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
