"""Report a check of vectors by the events of `ringverify check`, with a vector in the place of a property.

So whatever reads a report reads this one, too: JUnit has one test per vector, `ringverify report` makes its page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from ringverify.check.options import Options
from ringverify.check.run import header, violation_event
from ringverify.events import CounterexampleEvent, Event, FooterEvent, HeaderEvent, PropertyEvent, Verdict
from ringverify.properties.property import Violation
from ringverify.reports.command import Outputs
from ringverify.reports.jsonl import ReportWriter
from ringverify.reports.results import results_of
from ringverify.reports.story import replay_line
from ringverify.vectors.long import LongVector
from ringverify.vectors.merges import MergeVector
from ringverify.vectors.story import Layout, Story, trial_name

Tell = Callable[[Event], None]
AnyVector = Story | LongVector | MergeVector


class Recorded:
    """Writes events to a report as they come, and at the end the files that are made from the report.

    Args:
        report: where to write the report as JSON lines; `None` writes none.
        outputs: the files that are made from it.

    Raises:
        ReportError: a file cannot be written; raised before the first event.
    """

    def __init__(self, report: Path | None, outputs: Outputs) -> None:
        outputs.look(written=[report] if report else [])
        self._outputs = outputs
        self._writer = ReportWriter(report) if report else None
        self._events: list[Event] = []

    def __call__(self, event: Event) -> None:
        """Write an event to the report, and keep it."""
        self._events.append(event)
        if self._writer is not None:
            self._writer.write(event)

    def close(self) -> list[str]:
        """Write the files that are made from the report, and return a line on each output that could not be written."""
        missing: list[str] = []
        if self._outputs.named and self._events and isinstance(self._events[-1], FooterEvent):
            missing += self._outputs.write(results_of(self._events))[1]
        if self._writer is not None:
            with self._writer:
                missing += [self._writer.failure] if self._writer.failure is not None else []
        return missing


def begun(device: str) -> HeaderEvent:
    """Return the event that begins a run, with "vectors" as the name of its suite."""
    return dataclasses.replace(header(Options(device=device)), suite="vectors")


def sentence(story: AnyVector) -> str:
    """Return what a vector asks, for the field in which a report says what a property means."""
    return f"{story.topic}: {story.title}"


def property_event(
    implementation: str,
    property: str,
    verdict: Verdict,
    *,
    meaning: str | None = None,
    examples: int = 0,
    seconds: float = 0.0,
    margin: float | None = None,
    reason: str | None = None,
) -> PropertyEvent:
    """Return the event with the verdict on one vector, or, for the terminal, on all vectors of a topic."""
    return PropertyEvent(
        implementation=implementation,
        property=property,
        meaning=meaning,
        verdict=verdict,
        examples=examples,
        seconds=round(seconds, 3),
        margin=margin,
        reason=reason or None,
    )


def counterexample_event(
    implementation: str, story: AnyVector, layout: Layout | None, wrong: Violation, *, vectors: Sequence[str]
) -> CounterexampleEvent:
    """Return the event that describes how a vector fails.

    Args:
        implementation: name of the implementation on which it fails.
        story: the vector.
        layout: the sharding and the number of ranks on which it does; a merge has none.
        wrong: what is wrong.
        vectors: the arguments of `ringverify vectors check` that show it again.
    """
    case, named = None, story.id
    if layout is not None and not isinstance(story, MergeVector):
        case, named = story.case(layout), trial_name(story.id, layout)
    return dataclasses.replace(
        violation_event(
            wrong, implementation=implementation, property=story.id, case=case, case_text=f"{named}: {story.title}"
        ),
        note=story.note,
        vectors=tuple(vectors),
        replay=replay_line(file=None, vectors=vectors),
    )
