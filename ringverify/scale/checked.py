"""The properties of one implementation at length that its results decide, each tried by running its cases."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from ringverify.cases.case import Case, why_unsupported
from ringverify.check.outcome import TriedProperty
from ringverify.events import CounterexampleEvent, Hint, PropertyOutcome
from ringverify.properties.property import Violation
from ringverify.properties.suites import Method
from ringverify.scale.figures import figures
from ringverify.scale.finding import digest_of, kept, violated, wrong_results
from ringverify.scale.precision import rounded_more
from ringverify.scale.smaller import smaller
from ringverify.scale.task import RankReport
from ringverify.scale.trials import Trials
from ringverify.worlds.limits import sentence
from ringverify.worlds.world import Run, WorldUnavailable


class Checked:
    """The check of one implementation in one world.

    Args:
        trials: runs its cases.
        length: positions that were asked for.
        recording: whether a failure is looked for at smaller lengths, and written to a file.

    Attributes:
        digest: SHA-256 of what the last run found wrong.
    """

    def __init__(self, trials: Trials, length: int, *, recording: bool = True) -> None:
        self.digest = ""
        self._trials, self._length, self._recording = trials, length, recording

    def by(self, method: Method, cases: Sequence[Case]) -> TriedProperty:
        """Run the cases, and verify them by a method; the first that is wrong decides."""
        began, rows, margin, told, inside = time.monotonic(), 0, 0.0, list[str](), 0.0
        trials, world = self._trials, self._trials.world.name
        event, outcome = trials.event, None
        for case in cases:
            lacks = why_unsupported(case, trials.capabilities)
            if lacks is not None or (method == "identities" and not trials.capabilities.gradients):
                reason = "gradients are not declared" if lacks is None else lacks.text
                outcome = PropertyOutcome(event(method, "unsupported", 0, began, reason=reason))
                break
            try:
                run, noted = trials.run(method, case)
            except WorldUnavailable as error:
                outcome = PropertyOutcome(event(method, "inconclusive", rows, began, reason=str(error)))
                break
            if run.failure is not None:
                outcome = self._ended(method, case, run, noted, began)
                break
            reports: Sequence[RankReport] = run.results
            rows += sum(sum(report.rows.values()) for report in reports)
            inside += max(report.inside[0] for report in reports)
            margin = max(margin, *(one for report in reports for one in report.margins.values()))
            probabilities = trials.capabilities.probabilities
            told += figures(case, reports, probabilities, asked=self._length, one_process=world == "simulated")
            mean, rounded = rounded_more(case, reports, probabilities)
            margin = max(margin, mean)
            wrong = [(rank, one) for rank, report in enumerate(reports) for one in report.differences]
            if wrong:
                self.digest = digest_of(repr(wrong))
                found, violation = wrong_results(trials, method, case, wrong, reports)
                if self._recording:
                    found = kept(trials, method, case, violation, self.digest, found)
                    tensors = tuple(dict.fromkeys(one.tensor for _, one in wrong))
                    least = smaller(trials, method, case, tensors)
                    found = dataclasses.replace(
                        found, hints=(Hint(least.text),), smaller=least.file, smaller_property=least.property
                    )
                outcome = PropertyOutcome(event(method, "fail", rows, began, margin=margin, figures=told), found)
                break
            if rounded is not None:
                found = self._rounded(method, case, rounded)
                outcome = PropertyOutcome(event(method, "fail", rows, began, margin=margin, figures=told), found)
                break
        if outcome is None:
            outcome = PropertyOutcome(event(method, "pass", rows, began, margin=margin, figures=told))
        return TriedProperty(outcome=outcome, world=world, runs=len(cases), seconds_inside=inside)

    def _rounded(self, method: Method, case: Case, violation: Violation) -> CounterexampleEvent:
        """Return the event of a mean error that is too large, with its file."""
        self.digest = digest_of(violation.summary)
        found = violated(self._trials, method, violation, case)
        if self._recording:
            found = kept(self._trials, method, case, violation, self.digest, found)
        return found

    def _ended(self, method: Method, case: Case, run: Run, noted: dict[int, Any], began: float) -> PropertyOutcome:
        """Return the outcome of a run that gave no results, with what was verified until then."""
        failure, event = run.failure, self._trials.event
        assert failure is not None
        rows = sum(sum(note.get("rows", {}).values()) for note in noted.values())
        wrong = sum(sum(note.get("wrong", {}).values()) for note in noted.values())
        until = f"until then {rows:,} rows were verified, {wrong:,} of them wrong"
        if not wrong and (failure.kind in ("died", "deadline") or failure.limit is not None):
            why = failure.message if failure.limit is None else f"{sentence(failure.limit)}: {failure.message}"
            return PropertyOutcome(event(method, "inconclusive", rows, began, reason=f"{why}; {until}"))
        violation = Violation(
            (failure.kind,), failure.rank, f"{failure.message}; {until}", failure.detail, failure=failure
        )
        self.digest = digest_of(f"{failure.kind} on {failure.rank}")
        found: CounterexampleEvent = violated(self._trials, method, violation, case)
        if self._recording:
            found = kept(self._trials, method, case, violation, self.digest, found)
        return PropertyOutcome(event(method, "fail", rows, began), found)
