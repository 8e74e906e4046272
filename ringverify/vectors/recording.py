"""A check of vectors as a report: the events of `ringverify check`, with a vector in the place of a property.

So whatever reads a report reads this one: JUnit has a test a vector, `ringverify report` makes its page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ringverify.check.options import Options
from ringverify.check.run import header
from ringverify.properties.property import Violation
from ringverify.reports.command import Outputs
from ringverify.reports.jsonl import Event, ReportWriter, finite, replay_line
from ringverify.reports.results import results_of
from ringverify.vectors.story import Layout, Story, trial_name

SUITE = "vectors"
"""What the header of a report has in the place of a suite."""

Tell = Callable[[Event], None]


class Recorded:
    """Told events go to a report, and when all is told, to files that are made of it.

    Args:
        report: where to write a report, if anywhere.
        outputs: what else to write.

    Raises:
        ReportError: something cannot be written; found out before anything is told.
    """

    def __init__(self, report: Path | None, outputs: Outputs) -> None:
        outputs.look(written=[report] if report else [])
        self._outputs = outputs
        self._writer = ReportWriter(report) if report else None
        self._events: list[Event] = []

    def __call__(self, event: Event) -> None:
        """Take an event."""
        self._events.append(finite(event))
        if self._writer is not None:
            self._writer.write(event)

    def close(self) -> list[str]:
        """Write what there is to write; a line on each output that could not be."""
        missing: list[str] = []
        if self._outputs.named and self._events and self._events[-1]["event"] == "footer":
            missing += self._outputs.write(results_of(self._events))[1]
        if self._writer is not None:
            with self._writer:
                missing += [self._writer.failure] if self._writer.failure is not None else []
        return missing


def begun(device: str) -> Event:
    """The event that begins a run."""
    return {**header(Options(device=device)), "suite": SUITE}


def vector_event(implementation: str, story: Story, verdict: str, **fields: Any) -> Event:
    """The event that tells of one vector; `fields` are those that it adds to, or changes."""
    return {
        "event": "property",
        "implementation": implementation,
        "property": story.id,
        "meaning": f"{story.topic}: {story.title}",
        "verdict": verdict,
        "examples": 0,
        "seconds": 0.0,
        "margin": None,
        **fields,
    }


def counterexample_event(
    implementation: str, story: Story, layout: Layout, wrong: Violation, *, vectors: Sequence[str]
) -> Event:
    """The event that tells how a vector fails.

    Args:
        implementation: what it fails on.
        story: the vector.
        layout: the sharding and the number of ranks on which it does.
        wrong: what is wrong.
        vectors: the arguments of `ringverify vectors check` that show it again.
    """
    event: Event = {
        "event": "counterexample",
        "implementation": implementation,
        "property": story.id,
        "case": story.case(layout).to_json(),
        "case_text": f"{trial_name(story, layout)}: {story.title}",
        "summary": wrong.summary,
        "note": story.note,
        **dict.fromkeys(("hop", "tensor", "index", "error", "allowed", "diagnosis")),
        "rank": wrong.rank,
        "detail": wrong.detail,
        "vectors": list(vectors),
        "replay": replay_line({"vectors": vectors}),
    }
    if wrong.finding is not None:
        names = ("tensor", "position", "actual", "expected", "error", "allowed", "index")
        event |= {name: getattr(wrong.finding, name) for name in names}
    return event
