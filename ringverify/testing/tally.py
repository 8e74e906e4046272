"""The sum of a pytest session: verdicts on the terminal, the report, and the exit status.

It is kept in the main process; under xdist tests run in workers, and their test reports carry the outcomes of
properties. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ringverify.check.counting import joined
from ringverify.check.outcome import LOADS, ImplementationOutcome, TriedProperty, footer_event, implementation_event
from ringverify.errors import Inconclusive
from ringverify.events import HeaderEvent, ImplementationEvent, Known, as_json, from_json
from ringverify.reports.features import untried_line
from ringverify.reports.jsonl import ReportWriter

INCONCLUSIVE = Inconclusive.exit_code
"""Exit status of a session that would be 0 but for inconclusive properties."""


@dataclasses.dataclass(frozen=True)
class TestedProperty:
    """The outcome of one property: of a target, of a decorated function, or in a call of `run_conformance`.

    Attributes:
        key: what the property was tried for: a target, a function or a call.
        name: name of the implementation in the report; see `name_with`.
        asked: how many properties were to be tried under that key.
        header: the event that begins a report of such runs.
        tried: the outcome of the property, and what it took.
        called: whether it comes from a call, where the calling test decides whether it fails.
    """

    key: str
    name: str
    asked: int
    header: HeaderEvent
    tried: TriedProperty
    called: bool = False

    def to_text(self) -> str:
        """Write it as text, for another process."""
        return json.dumps(as_json(self))

    @classmethod
    def from_text(cls, text: str) -> TestedProperty:
        """Read the text that `to_text` wrote."""
        return from_json(cls, json.loads(text))


def name_with(implementation: str, test: str) -> str:
    """Return the name in a report of an implementation that several tests check, for one of these tests.

    A report may have only one verdict on each property of a name.
    """
    return f"{implementation} ({test})"


class Tally:
    """Adds up the outcomes of a session, and writes its report.

    Args:
        report: file of the report; `None` writes none.
        settings: device, suite and seed that pytest was asked for; an implementation with other ones records its own.
        baseline: whether there is a baseline.

    Raises:
        ReportError: the report cannot be written.
    """

    def __init__(self, report: Path | None, *, settings: Mapping[str, Any], baseline: bool) -> None:
        self._tested: dict[str, list[TestedProperty]] = {}
        self._writer = None if report is None else ReportWriter(report)
        self._settings = settings
        self._begun = False
        self._baseline = baseline
        self._unlearned = 0

    def add(self, report: pytest.TestReport, told: Iterable[str]) -> None:
        """Add the report of a test, and the outcomes of properties that it carries."""
        for text in told:
            self.note(_as_expected(TestedProperty.from_text(text), report))
        if report.failed and getattr(report, UNLEARNED, False):
            self._unlearned += 1

    def note(self, tested: TestedProperty) -> None:
        """Add the outcome of a property."""
        self._tested.setdefault(tested.key, []).append(tested)
        if self._writer is not None:
            if not self._begun:
                self._writer.write(dataclasses.replace(tested.header, **self._settings))
                self._begun = True
            for event in tested.tried.outcome.events:
                self._writer.write(dataclasses.replace(event, implementation=tested.name))

    def exit_status(self, status: int, failed: int) -> int:
        """Return the exit status of the session, in which inconclusive is neither a pass nor a violation.

        Args:
            status: the exit status that pytest itself gives.
            failed: how many tests failed, those of ringverify and others.
        """
        nothing_else = status == pytest.ExitCode.TESTS_FAILED and failed == self._unlearned
        ours = (self._outcome(all_of) for all_of in self._tested.values() if not all_of[0].called)
        nothing_applied = any(outcome.exit_code == INCONCLUSIVE for outcome in ours) or self._nothing_to_report()
        if nothing_else or (status == pytest.ExitCode.OK and nothing_applied):
            return INCONCLUSIVE
        unwritten = self._writer is not None and self._writer.failure is not None
        return pytest.ExitCode.USAGE_ERROR if unwritten and status == pytest.ExitCode.OK else status

    def _nothing_to_report(self) -> bool:
        return self._writer is not None and not self._begun

    def close(self, *, whole: bool) -> None:
        """End the report: with its footer if the session was completed, else cut off as it is."""
        if self._writer is None:
            return
        with self._writer:
            if whole and self._begun:
                for all_of in self._tested.values():
                    header = all_of[0].header
                    said = {name: getattr(header, name) for name in self._settings}
                    own = {name: value for name, value in said.items() if value != self._settings[name]}
                    name, found = all_of[0].name, (one.tried.outcome.tried for one in all_of)
                    if (features := joined(found, implementation=name)) is not None:
                        self._writer.write(features)
                    self._writer.write(dataclasses.replace(_implementation(all_of), **own))
                outcomes = [self._outcome(all_of) for all_of in self._tested.values()]
                known = self._baseline or any(outcome.known for outcome in outcomes)
                self._writer.write(footer_event(outcomes, baseline=known))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of the summary, each with the verdict that decides its colour; "" is no verdict."""
        for all_of in self._tested.values():
            event, first = _implementation(all_of), all_of[0]
            if first.called:
                continue  # its test says what there is to say
            counts = ", ".join(f"{count} {kind}" for kind, count in (event.properties or {}).items() if count)
            known = f" ({event.known} known)" if event.known else ""
            where = [] if first.tried.verdict.property == LOADS else [f"{event.world} world", first.header.device]
            how = ", ".join([*where, f"suite {first.header.suite}, seed {first.header.seed}"])
            yield event.verdict, f"{first.name}: {event.verdict}: {counts}{known}; {how}{event.not_reached}"
            if (untried := untried_line(event)) is not None:
                yield "", f"  {untried}"
            if event.undeclared:
                yield "", f"  not declared, so not tested: {', '.join(event.undeclared)}"
        if self._writer is not None and self._nothing_to_report():
            yield "inconclusive", f"report {self._writer.path} was not written: no test checked an implementation"

    def remarks(self) -> Iterator[str]:
        """Yield the lines shown even with `-q`: a failed report, seeds that were drawn, passes that were cut short."""
        if self._writer is not None and self._writer.failure is not None:
            yield self._writer.failure
        tested = [one for all_of in self._tested.values() for one in all_of]
        headers = [one.header for one in tested]
        for seed in dict.fromkeys(header.seed for header in headers if header.suite == "nightly"):
            yield f"suite nightly, seed {seed}: --ringverify-seed {seed}, or seed={seed} in a call, tries it again"
        for one in tested:
            verdict = one.tried.verdict
            if verdict.verdict == "pass" and verdict.reason is not None:
                yield f"{one.name}: {verdict.property}: {verdict.reason}"

    @staticmethod
    def _outcome(all_of: list[TestedProperty]) -> ImplementationOutcome:
        return ImplementationOutcome.of([one.tried.verdict for one in all_of])


UNLEARNED = "ringverify_unlearned"
"""Attribute of a test's report: whether it is an error because nothing was learned."""


def _as_expected(tested: TestedProperty, report: pytest.TestReport) -> TestedProperty:
    """Mark a new violation as known if its test passes all the same: it is an xfail, or it catches the error."""
    outcome = tested.tried.outcome
    if report.failed or not outcome.verdict.is_new_violation():
        return tested
    reason = str(getattr(report, "wasxfail", "")).removeprefix("reason: ") or "its test expects it"
    verdict = dataclasses.replace(outcome.verdict, known=Known(reason=reason, link=report.nodeid))
    tried = dataclasses.replace(tested.tried, outcome=dataclasses.replace(outcome, verdict=verdict))
    return dataclasses.replace(tested, tried=tried)


def _implementation(all_of: list[TestedProperty]) -> ImplementationEvent:
    tried = [one.tried for one in all_of]
    return implementation_event(
        tried,
        implementation=all_of[0].name,
        asked=all_of[0].asked,
        seconds=sum(one.verdict.seconds for one in tried),
    )
