"""The events of one report or several as what they say: implementations, and what became of each property of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ringverify.reports.jsonl import Event, ReportError, presentable, read_report
from ringverify.words import legible

Kind = Literal["pass", "fail", "known", "unsupported", "inconclusive"]
"""What became of a property; `known` is a `fail` that a baseline knows."""

VERDICTS = ("violations", "inconclusive", "conformant")
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
class Outcome:
    """What became of one property of one implementation.

    Attributes:
        told: the event of the property.
        counterexample: the event of the smallest case that violates it, if one does.
    """

    told: Event
    counterexample: Event | None = None

    @property
    def id(self) -> str:
        """Of the property."""
        return str(self.told["property"])

    @property
    def kind(self) -> Kind:
        """Its verdict, with known violations apart."""
        kind: Kind = "known" if "known" in self.told else self.told["verdict"]
        return kind


def where_text(told: Event) -> tuple[str, str]:
    """In which world an implementation passed, and where it was not tried: to follow a verdict; empty for other ones.

    Args:
        told: the event of its verdict; in older reports it does not say where it was not tried.
    """
    if told["verdict"] != "conformant" or "world" not in told:
        return "", ""
    elsewhere = told.get("not_run_in", ())
    return f" in the {told['world']} world", f"; not run on {' and '.join(elsewhere)}" if elsewhere else ""


@dataclasses.dataclass(frozen=True)
class Checked:
    """One implementation of one run.

    Attributes:
        name: as it is shown, its label included.
        told: the event of its verdict.
        header: the header of the run.
        outcomes: its properties by id, in the order in which they were tried.
        exchange: the event of what it exchanges, if that was asked for.
    """

    name: str
    told: Event
    header: Event
    outcomes: dict[str, Outcome]
    exchange: Event | None = None

    @property
    def verdict(self) -> str:
        """`conformant`, `violations` or `inconclusive`."""
        return str(self.told["verdict"])

    @property
    def where(self) -> str:
        """Of a pass: in which world it is one, and where it was not tried. Empty for other verdicts."""
        return "".join(where_text(self.told))

    @property
    def counts(self) -> dict[Kind, int]:
        """How many of its properties came to what, those that any came to."""
        kinds = [outcome.kind for outcome in self.outcomes.values()]
        order: tuple[Kind, ...] = ("pass", "fail", "known", "unsupported", "inconclusive")
        return {kind: kinds.count(kind) for kind in order if kind in kinds}

    @property
    def failures(self) -> list[Outcome]:
        """Properties that are violated, known ones last."""
        failed = [outcome for outcome in self.outcomes.values() if outcome.told["verdict"] == "fail"]
        return sorted(failed, key=lambda outcome: outcome.kind == "known")


@dataclasses.dataclass(frozen=True)
class Results:
    """All that was told.

    Attributes:
        implementations: in the order of the reports.
        properties: ids of all properties that were tried on any, in an order that is that of every run.
        headers: of the runs, equal ones once.
        unexpected: lines on known violations that are gone.
    """

    implementations: tuple[Checked, ...]
    properties: tuple[str, ...]
    headers: tuple[Event, ...]
    unexpected: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Of all together."""
        seen = {one.verdict for one in self.implementations}
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
        for name in dict.fromkeys(
            _named(event, source.label) for event in events if event["event"] == "implementation"
        ):
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
    events = [presentable(event) for event in events]
    where, label = ("the events", None) if source is None else (f"report {source.path}", source.label)
    outcomes: dict[str, dict[str, Outcome]] = {}
    verdicts: dict[str, Event] = {}
    exchanges: dict[str, Event] = {}
    for event in events:
        match event["event"]:
            case "property":
                mine = outcomes.setdefault(event["implementation"], {})
                if event["property"] in mine:
                    raise ReportError(f"{where}: two verdicts on {event['property']} of {event['implementation']!r}")
                mine[event["property"]] = Outcome(event)
            case "counterexample":
                mine = outcomes.get(event["implementation"], {})
                outcome = mine.get(event["property"])
                if outcome is None or outcome.told["verdict"] != "fail":
                    raise ReportError(
                        f"{where}: a counterexample to {event['property']} of {event['implementation']!r}, "
                        "which is not said to fail"
                    )
                mine[event["property"]] = dataclasses.replace(outcome, counterexample=event)
            case "implementation":
                if event["implementation"] in verdicts:
                    raise ReportError(f"{where}: two implementations are named {event['implementation']!r}")
                verdicts[event["implementation"]] = event
            case "exchange":
                exchanges[event["implementation"]] = event
    for name in outcomes:
        if name not in verdicts:
            raise ReportError(f"{where}: no verdict on {name!r}")
    implementations = tuple(
        Checked(_named(told, label), told, events[0], outcomes.get(name, {}), exchanges.get(name))
        for name, told in verdicts.items()
    )
    order = _merged([list(mine) for mine in outcomes.values()])
    return Results(implementations, order, (events[0],), tuple(events[-1].get("unexpected", ())))


def _joined(results: Sequence[Results]) -> Results:
    headers: list[Event] = []
    for result in results:
        headers += [header for header in result.headers if header not in headers]
    return Results(
        tuple(one for result in results for one in result.implementations),
        _merged([list(result.properties) for result in results]),
        tuple(headers),
        tuple(line for result in results for line in result.unexpected),
    )


def _named(told: Event, label: str | None) -> str:
    name = told["implementation"] if label is None else f"{told['implementation']} ({label})"
    return legible(name)


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
