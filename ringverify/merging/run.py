"""The check of merges: call each in a process of its own, try every property on it, report, decide."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

from ringref.rounding import unit_in_words
from ringverify.check.budget import Budget
from ringverify.check.mishap import Mishap, with_mishaps
from ringverify.check.options import CheckRequest, Options, Unavailable
from ringverify.check.outcome import (
    ImplementationOutcome,
    TriedProperty,
    footer_event,
    implementation_event,
    unavailable,
)
from ringverify.check.planning import find_device
from ringverify.check.run import header, usual_deadline
from ringverify.errors import UsageError
from ringverify.events import CounterexampleEvent, Event, PropertyEvent, PropertyOutcome, RunFailure
from ringverify.merge_contract import MergeCapabilities, MergeImplementation
from ringverify.merging.case import MergeCase
from ringverify.merging.faults import MergeFault
from ringverify.merging.judging import MergeSearch, ToldMerge, cause_of, judge_merge, same_failure, search
from ringverify.merging.properties import LOW, MergeProperty, element_named, select_merge
from ringverify.merging.running import Grouping, MergeResult, MergeTask, run_merge
from ringverify.properties.suites import SCALE, SMOKE_EXAMPLES, TIMES
from ringverify.reports.progress import Progress
from ringverify.reports.story import replay_line
from ringverify.targets import from_anywhere, load_merge
from ringverify.worlds.limits import sentence
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.processes.wire import how_it_ended
from ringverify.worlds.world import Failure, Load, OurError


@dataclasses.dataclass(frozen=True)
class MergeSubject:
    """A merge to check, and the target by which it was named."""

    target: str
    merge: MergeImplementation


class MergeCalls:
    """Calls one merge, in a process of its own that it may damage.

    Args:
        subject: the merge.
        options: what the user asked for.
        loading: called with the target while the process loads it, and with `None` at the end.
    """

    def __init__(self, subject: MergeSubject, options: Options, loading: Callable[[str | None], None]) -> None:
        self.target = from_anywhere(subject.target)
        self.device = options.device
        self.deadline = usual_deadline("simulated") if options.deadline is None else options.deadline
        self.load = Load(self.target, load_merge, options.load_deadline, loading)
        self.runs = 0
        self.world = GlooWorld(called="the merge's process")

    def __call__(self, case: MergeCase, grouping: Grouping, *, gradients: bool) -> MergeResult | Failure:
        """Merge the partials of a case.

        Raises:
            WorldUnavailable: nothing was learned.
        """
        self.runs += 1
        task = MergeTask(self.target, case, grouping, gradients, self.device)
        run = self.world.run(run_merge, task, world_size=1, seed=0, deadline=self.deadline, load=self.load)
        found: MergeResult | Failure = run.results[0] if run.failure is None else run.failure
        if isinstance(found, MergeResult):
            return found
        if found.limit is not None:
            raise OurError(f"{sentence(found.limit)}: {found.message}", found.detail)
        match found.kind:
            case "died":
                return dataclasses.replace(
                    found, message=f"the process of the merge {how_it_ended(found.exit_code or 0)}"
                )
            case "deadline":
                where = "".join(f": {text}" for _, text in found.places)
                return dataclasses.replace(
                    found, message=f"after {self.deadline:g} s the merge had not returned{where}"
                )
        return found


def asked_of_merges(request: CheckRequest) -> list[MergeProperty]:
    """Return the properties to try on merges.

    Raises:
        UsageError: an option is one of attention alone, or names no property of a merge.
    """
    for option, value in (
        ("--world", request.world),
        ("--world-sizes", request.world_sizes),
        ("--suite scale", request.suite == SCALE or None),
        ("--baseline", request.baseline),
    ):
        if value is not None:
            raise UsageError(f"{option} is for implementations of attention, and this is a merge; leave it out")
    return select_merge(request.only, request.skip or ())


def check_merges(
    subjects: Sequence[MergeSubject | Unavailable],
    properties: Sequence[MergeProperty],
    options: Options,
    tell: Callable[[Event], None],
    progress: Progress,
) -> int:
    """Check merges, report the results event by event, and return the exit code.

    Raises:
        UsageError: two merges have the same name, or the device is unknown.
        Inconclusive: the device asked for does not exist here.
    """
    find_device(options.device)
    names = [one.merge.name for one in subjects if isinstance(one, MergeSubject)]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two merges are named {name!r}: give one of them another name=")
    budget = Budget(options.time_budget, len(names) * len(properties))
    tell(header(options))
    outcomes: list[ImplementationOutcome] = []
    for subject in subjects:
        began, tried = time.monotonic(), []
        if isinstance(subject, Unavailable):
            tried, name, asked = [unavailable(subject.target, subject.reason)], subject.target, 1
            tell(tried[0].verdict)
        else:
            name, asked = subject.merge.name, len(properties)
            calls = MergeCalls(subject, options, progress.loading)
            with contextlib.closing(calls.world):
                stories: list[ToldMerge] = []
                for property in properties:
                    tried.append(_tried(property, subject, options, budget, calls, progress, stories))
                    for event in tried[-1].outcome.events:
                        tell(event)
                    if options.stop_early and tried[-1].verdict.is_new_violation():
                        break
        verdict = implementation_event(tried, implementation=name, asked=asked, seconds=time.monotonic() - began)
        tell(dataclasses.replace(verdict, world=None, not_run_in=None, seconds_inside=None))
        outcomes.append(ImplementationOutcome.of([one.verdict for one in tried]))
        if options.stop_early and outcomes[-1].exit_code == 1:
            break
    footer = footer_event(outcomes, baseline=False)
    tell(footer)
    return footer.exit_code


def undeclared_of(c: MergeCapabilities) -> tuple[str, ...]:
    """Return what a merge does not declare, and what was therefore not tested."""
    names = [name for name in ("lse", "gradients", "nan", "strided") if not getattr(c, name)]
    return (*names, *(["empty partials"] if c.empty is None else []), *(one for one in LOW if one not in c.dtypes))


def _tried(
    property: MergeProperty,
    subject: MergeSubject,
    options: Options,
    budget: Budget,
    calls: MergeCalls,
    progress: Progress,
    stories: list[ToldMerge],
) -> TriedProperty:
    """Try one property on one merge; a failure that none of the `stories` tells joins them."""
    merge, c = subject.merge, subject.merge.capabilities
    event = PropertyEvent(
        implementation=merge.name,
        property=property.id,
        meaning=property.meaning,
        verdict="unsupported",
        examples=0,
        seconds=0.0,
        margin=None,
    )
    began, runs = time.monotonic(), calls.runs
    told: CounterexampleEvent | None = None
    device = options.device.partition(":")[0]
    reason = f"device {device} is not declared" if device not in c.devices else property.lacks(c)
    share = budget.share()
    if reason is not None:
        event = dataclasses.replace(event, reason=reason)
    else:
        examples = (
            min(property.examples, SMOKE_EXAMPLES)
            if options.suite == "smoke"
            else (property.examples * TIMES[options.suite])
        )
        examples = examples if options.max_examples is None else min(examples, options.max_examples)
        progress.start(merge.name, property.id, examples)
        try:
            found = search(property, c, calls, examples=examples, seed=options.seed, share=share, step=progress.step)
            event = dataclasses.replace(event, verdict="pass", examples=found.examples, margin=found.margin)
            if found.cut_short:
                why = f"the time budget ended after {found.examples} of {examples} examples"
                event = dataclasses.replace(event, reason=why)
            if found.case is not None:
                told = _counterexample(property, subject, options, found, calls, stories)
                margin = None if told.error is None else found.margin  # of a failure that is one of values
                event = dataclasses.replace(event, verdict="fail", margin=margin)
        except Exception as error:
            event = with_mishaps(event, [Mishap.of(error, f"trying {property.id}")])
            told = None
        finally:
            progress.stop()
        event = dataclasses.replace(event, seconds=round(time.monotonic() - began, 3))
    return TriedProperty(
        outcome=PropertyOutcome(event, told),
        world="none",
        undeclared=undeclared_of(c),
        runs=calls.runs - runs,
    )


def _counterexample(
    property: MergeProperty,
    subject: MergeSubject,
    options: Options,
    found: MergeSearch,
    calls: MergeCalls,
    stories: list[ToldMerge],
) -> CounterexampleEvent:
    """Return the event of a violation, with its cause if a fault gives the same numbers."""
    case, first = found.case, found.first
    assert case is not None
    assert first is not None
    c, narrow = subject.merge.capabilities, dataclasses.replace(subject.merge.capabilities, accumulates=case.dtype)
    declare = None
    if property.low and c.accumulates != case.dtype and judge_merge(property, first, narrow, calls)[1] is None:
        declare = f'accumulates="{case.dtype}", with which this error is allowed; {unit_in_words(case.dtype)}'
    again = (subject.target, "--only", property.id, "--seed", str(options.seed))
    story = ToldMerge(property, found, cause_of(property, found, c, calls))
    repeated = next((one.property.id for one in stories if same_failure(one, story, c, calls)), None)
    if repeated is None:
        stories.append(story)
    return dataclasses.replace(
        counterexample(subject.merge.name, property.id, found, story.cause),
        same_as=repeated,
        declare=declare,
        merge=again,
        replay=replay_line(file=None, merge=again),
    )


def counterexample(name: str, property: str, found: MergeSearch, cause: MergeFault | None) -> CounterexampleEvent:
    """Return the event of a violation that a search found, without how to see it again."""
    violation, case, first = found.violation, found.case, found.first
    assert violation is not None
    assert case is not None
    assert first is not None
    failure, wrong = violation.failure, violation.wrong
    event = CounterexampleEvent(
        implementation=name,
        property=property,
        case=None,
        merge_case=case.recorded(),
        case_text=case.describe(),
        rank=None,
        hop=None,
        tensor=None,
        index=None,
        error=None,
        allowed=None,
        diagnosis=None if cause is None else cause.sentence,
        summary=violation.summary,
        detail=violation.detail,
        failure=None if failure is None else RunFailure(kind=failure.kind, exception=failure.exception),
        shrunk_from=first.describe(),
        tried=found.tried,
        smallest=True,
        replay="",
    )
    if wrong is None:
        return event
    return dataclasses.replace(
        event,
        element=element_named(wrong, case),
        actual=wrong.actual,
        expected=wrong.expected,
        error=wrong.error,
        allowed=wrong.allowed,
        margin=wrong.margin,
        of=wrong.of,
        first_margin=found.margin,
    )
