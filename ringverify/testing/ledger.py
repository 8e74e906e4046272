"""What a session of pytest adds up: verdicts for people, the report, and the exit status.

It lives in the process that speaks to people; under xdist the tests run in others, and their reports bring what was
told. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringverify.check.outcome import Outcome, Told, footer_event, implementation_event
from ringverify.errors import Inconclusive
from ringverify.reports.jsonl import Event, ReportWriter, finite

INCONCLUSIVE = Inconclusive.exit_code
"""Exit status where nothing but inconclusive properties stands in the way of 0."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What came of one test of ours.

    Attributes:
        key: what it belongs to: a target, or a decorated function.
        targeted: whether it is a test of a target.
        asked: how many properties of it were to be tried.
        header: the event that begins a report of such runs.
        told: what came of the property.
    """

    key: str
    targeted: bool
    asked: int
    header: Event
    told: Told

    def to_json(self) -> str:
        """As text, for another process."""
        return json.dumps({**vars(self), "header": finite(self.header), "told": self.told.to_json()})

    @classmethod
    def from_json(cls, text: str) -> Entry:
        """From such text."""
        fields = json.loads(text)
        return cls(**{**fields, "told": Told.from_json(fields["told"])})


class Ledger:
    """Adds up.

    Args:
        report: where to write a report of the targets, if anywhere.
        baseline: whether there is a baseline.

    Raises:
        ReportError: the report cannot be written.
    """

    def __init__(self, report: Path | None, *, baseline: bool) -> None:
        self._entries: dict[str, list[Entry]] = {}
        self._writer = None if report is None else ReportWriter(report)
        self._begun = False
        self._baseline = baseline
        self._unlearned = 0

    def add(self, report: pytest.TestReport, told: str | None) -> None:
        """Take note of a report, and of what was told of a property if it is about one."""
        if told is not None:
            entry = Entry.from_json(told)
            self._entries.setdefault(entry.key, []).append(entry)
            if self._writer is not None and entry.targeted:
                if not self._begun:
                    self._writer.write(entry.header)
                    self._begun = True
                for event in entry.told.events:
                    self._writer.write(event)
        if report.failed and getattr(report, UNLEARNED, False):
            self._unlearned += 1

    def exit_status(self, status: int, failed: int) -> int:
        """The exit status of the session, where what was not learned is neither a pass nor a violation.

        Args:
            status: the one that pytest has for it.
            failed: how many tests failed, ours and others.
        """
        nothing_else = status == pytest.ExitCode.TESTS_FAILED and failed == self._unlearned
        nothing_applied = status == pytest.ExitCode.OK and any(
            outcome.exit_code == INCONCLUSIVE for outcome in self._outcomes().values()
        )
        return INCONCLUSIVE if nothing_else or nothing_applied else status

    def close(self, *, whole: bool) -> None:
        """End the report: with its footer if the session came to its end, and cut off as it is if not."""
        if self._writer is None:
            return
        with self._writer:
            if whole and self._begun:
                targeted = {key: all_of for key, all_of in self._entries.items() if all_of[0].targeted}
                for all_of in targeted.values():
                    self._writer.write(_implementation(all_of))
                outcomes = [outcome for key, outcome in self._outcomes().items() if key in targeted]
                self._writer.write(footer_event(outcomes, baseline=self._baseline))

    def lines(self) -> Iterator[tuple[str, str]]:
        """What people are told at the end: an implementation a line, with its verdict."""
        for all_of in self._entries.values():
            event, first = _implementation(all_of), all_of[0]
            counts = ", ".join(f"{count} {kind}" for kind, count in event["properties"].items() if count)
            known = f" ({event['known']} known)" if event["known"] else ""
            how = "{device}, suite {suite}, seed {seed}".format(**first.header)
            said = f"{event['implementation']}: {event['verdict']}: {counts}{known}; {event['world']} world, {how}"
            yield event["verdict"], said
            if event["undeclared"]:
                yield "", f"  not declared, so not tested: {', '.join(event['undeclared'])}"

    def _outcomes(self) -> dict[str, Outcome]:
        return {key: Outcome.of([one.told.verdict for one in all_of]) for key, all_of in self._entries.items()}


UNLEARNED = "ringverify_unlearned"
"""Attribute of a test's report that is an error since nothing was learned."""


def _implementation(all_of: list[Entry]) -> Event:
    told = [one.told for one in all_of]
    return implementation_event(
        told,
        implementation=told[0].implementation,
        asked=all_of[0].asked,
        seconds=sum(one.verdict["seconds"] for one in told),
    )
