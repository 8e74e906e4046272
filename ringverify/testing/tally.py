"""What a session of pytest adds up: verdicts for people, the report, and the exit status.

It lives in the process that speaks to people; under xdist the tests run in others, and their reports bring what was
told. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ringverify.check.outcome import LOADS, ImplementationOutcome, TriedProperty, footer_event, implementation_event
from ringverify.errors import Inconclusive
from ringverify.events import HeaderEvent, ImplementationEvent, Known, as_json, from_json
from ringverify.reports.jsonl import ReportWriter

INCONCLUSIVE = Inconclusive.exit_code
"""Exit status where nothing but inconclusive properties stands in the way of 0."""


@dataclasses.dataclass(frozen=True)
class TestedProperty:
    """What came of one property: of a target, for a decorated function, or in a call of `run_conformance`.

    Attributes:
        key: what it belongs to: a target, a function or a call.
        name: of the implementation, as the report has it; see `name_with`.
        asked: how many properties of it were to be tried.
        header: the event that begins a report of such runs.
        tried: what came of the property.
        called: whether it is of a call, where the test that makes it decides what it comes to.
    """

    key: str
    name: str
    asked: int
    header: HeaderEvent
    tried: TriedProperty
    called: bool = False

    def to_text(self) -> str:
        """As text, for another process."""
        return json.dumps(as_json(self))

    @classmethod
    def from_text(cls, text: str) -> TestedProperty:
        """From such text."""
        return from_json(cls, json.loads(text))


def name_with(implementation: str, test: str) -> str:
    """The name in a report of what a test checks, where others check the same implementation.

    A report has one verdict on a property of a name.
    """
    return f"{implementation} ({test})"


class Tally:
    """Adds up.

    Args:
        report: where to write a report, if anywhere.
        settings: device, suite and seed that pytest was asked for; what differs from them is told apart.
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
        """Take note of a report of a test, and of what was told of properties in it."""
        for text in told:
            self.note(_as_expected(TestedProperty.from_text(text), report))
        if report.failed and getattr(report, UNLEARNED, False):
            self._unlearned += 1

    def note(self, tested: TestedProperty) -> None:
        """Take note of a property."""
        self._tested.setdefault(tested.key, []).append(tested)
        if self._writer is not None:
            if not self._begun:
                self._writer.write(dataclasses.replace(tested.header, **self._settings))
                self._begun = True
            for event in tested.tried.outcome.events:
                self._writer.write(dataclasses.replace(event, implementation=tested.name))

    def exit_status(self, status: int, failed: int) -> int:
        """The exit status of the session, where what was not learned is neither a pass nor a violation.

        Args:
            status: the one that pytest has for it.
            failed: how many tests failed, ours and others.
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
        """End the report: with its footer if the session came to its end, and cut off as it is if not."""
        if self._writer is None:
            return
        with self._writer:
            if whole and self._begun:
                for all_of in self._tested.values():
                    header = all_of[0].header
                    said = {name: getattr(header, name) for name in self._settings}
                    own = {name: value for name, value in said.items() if value != self._settings[name]}
                    self._writer.write(dataclasses.replace(_implementation(all_of), **own))
                outcomes = [self._outcome(all_of) for all_of in self._tested.values()]
                known = self._baseline or any(outcome.known for outcome in outcomes)
                self._writer.write(footer_event(outcomes, baseline=known))

    def lines(self) -> Iterator[tuple[str, str]]:
        """What people are told at the end: an implementation a line, with its verdict."""
        for all_of in self._tested.values():
            event, first = _implementation(all_of), all_of[0]
            if first.called:
                continue  # its test says what there is to say
            counts = ", ".join(f"{count} {kind}" for kind, count in (event.properties or {}).items() if count)
            known = f" ({event.known} known)" if event.known else ""
            where = [] if first.tried.verdict.property == LOADS else [f"{event.world} world", first.header.device]
            how = ", ".join([*where, f"suite {first.header.suite}, seed {first.header.seed}"])
            yield event.verdict, f"{first.name}: {event.verdict}: {counts}{known}; {how}{event.not_reached}"
            if event.undeclared:
                yield "", f"  not declared, so not tested: {', '.join(event.undeclared)}"
        if self._writer is not None and self._nothing_to_report():
            yield "inconclusive", f"no report {self._writer.path}: no test that ran checks an implementation"

    def remarks(self) -> Iterator[str]:
        """What nobody may miss, however quiet the session is: passes of less than was asked for, and seeds drawn."""
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
"""Attribute of a test's report that is an error since nothing was learned."""


def _as_expected(tested: TestedProperty, report: pytest.TestReport) -> TestedProperty:
    """The same, where a violation is known if its test does not fail of it: it is marked so, or catches the error."""
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
