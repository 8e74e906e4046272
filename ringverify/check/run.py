"""Run a check: try every property on every implementation, and report the results as events."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import platform
import shlex
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone

import torch

import ringverify
from ringref.problem import Problem
from ringverify.cases.case import Case, even_multiple, why_unsupported
from ringverify.cases.running import Runner
from ringverify.cases.shapes import fitted
from ringverify.cases.strategies import affordable_examples
from ringverify.check import casefile, first_look
from ringverify.check.baseline import expected
from ringverify.check.budget import Budget
from ringverify.check.casefile import CaseFile
from ringverify.check.counting import joined
from ringverify.check.declaring import in_words
from ringverify.check.hunting import hunt
from ringverify.check.jobs import Jobs, setup_of
from ringverify.check.keeping import with_what_is_alike
from ringverify.check.mishap import Mishap, attempt, with_mishaps
from ringverify.check.options import Options, Subject, Unavailable
from ringverify.check.outcome import (
    ImplementationOutcome,
    TriedProperty,
    footer_event,
    implementation_event,
    unavailable,
)
from ringverify.check.outside import of_refusals, versions_of, why_not_outside
from ringverify.check.planning import RunPlan, find_device, open_world, planned
from ringverify.check.sameness import ToldFailure, same_as
from ringverify.check.searching import Counterexample, Hunt
from ringverify.check.tried import tried_event, untried
from ringverify.check.units import Judge, Wanted
from ringverify.diagnosis.region import outline
from ringverify.errors import Inconclusive, UsageError
from ringverify.events import (
    CounterexampleEvent,
    Declaration,
    Event,
    ExchangeEvent,
    HeaderEvent,
    Printed,
    PropertyEvent,
    PropertyOutcome,
    RecordedCase,
    Refused,
    RunFailure,
    Verdict,
    from_json,
)
from ringverify.implementation import Capabilities, Implementation, sharding_name
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.property import Property, Violation
from ringverify.reports.jsonl import ReportError
from ringverify.reports.progress import Progress
from ringverify.reports.story import replay_line
from ringverify.words import PRINTED
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.processes.torchrun import Crew
from ringverify.worlds.world import OurError, World, WorldUnavailable

DEADLINES = {"simulated": 10.0, "gloo": 30.0, "nccl": 60.0, "external": 120.0}
"""Default deadline in seconds of one run of a case on a CPU, by its world; see `usual_deadline`."""


def usual_deadline(world: str, device: str = "cpu") -> float:
    """Return the deadline of one run of a case, in seconds, where none is asked for.

    Processes get more: the first run in each imports much of torch. So do devices, which load each kernel when it is
    launched first, and compile some. Programs may compile too.
    """
    return DEADLINES[world] if device == "cpu" else max(DEADLINES[world], DEADLINES["nccl"])


def check(
    subjects: Sequence[Subject | Unavailable],
    properties: Sequence[Property],
    options: Options,
    tell: Callable[[Event], None],
    progress: Progress,
    crew: Crew | None = None,
) -> int:
    """Check implementations, report the results event by event, and return the exit code.

    Args:
        subjects: the implementations, and the targets to report as impossible to check here.
        properties: what must hold of each implementation.
        options: what the user asked for.
        tell: called with each event.
        progress: informed of how far the run has come.
        crew: the processes that host ranks, if torchrun started this one.

    Raises:
        UsageError: options contradict what an implementation declares, or cases cannot be written.
        Inconclusive: the device or the world asked for does not exist here.
    """
    named = named_apart(subject.implementation for subject in subjects if isinstance(subject, Subject))
    plans = [
        subject
        if isinstance(subject, Unavailable)
        else planned(
            subject.target, subject.implementation, world=options.world, world_sizes=options.world_sizes, crew=crew
        )
        for subject in subjects
    ]
    find_device(options.device)
    casefile.look_at(options.cases)
    tried = [
        property
        for plan in plans
        if isinstance(plan, RunPlan)
        for property in properties
        if why_not(property, plan, options.device) is None
    ]
    not_side_by_side(plans, options.jobs)
    budget = Budget(options.time_budget, len(tried))
    tell(header(options))
    outcomes: list[ImplementationOutcome] = []
    with contextlib.closing(Jobs(options.jobs, progress)) as jobs:
        for plan in plans:
            if isinstance(plan, Unavailable):
                outcomes.append(_unavailable(plan, tell))
                continue
            world = open_world(plan.world) if crew is None else GlooWorld(crew)
            run = ImplementationRun(plan, world, options, budget, tell, progress, jobs)
            try:
                outcomes.append(run.outcome(properties))
            finally:
                run.close()
            if options.stop_early and outcomes[-1].exit_code == 1:
                break
    elsewhere = [] if options.baseline is None else options.baseline.elsewhere(named)
    footer = footer_event(outcomes, baseline=options.baseline is not None, elsewhere=elsewhere)
    return footer.exit_code if tells(tell, footer) else footer.exit_code or Inconclusive.exit_code


def not_side_by_side(plans: Sequence[RunPlan | Unavailable], jobs: int | None) -> None:
    """Refuse several jobs where the ranks of one case are processes, which use the cores already.

    Raises:
        UsageError: more than one job is asked for, and an implementation runs in such a world.
    """
    for plan in plans:
        if isinstance(plan, RunPlan) and plan.world != "simulated" and (jobs or 1) > 1:
            raise UsageError(
                f"--jobs {jobs}: {plan.implementation.name} runs in the {plan.world} world, whose ranks are "
                "processes and run one case at a time: leave --jobs out"
            )


def tells(tell: Callable[[Event], None], event: Event) -> bool:
    """Report an event, and return whether that worked; print the traceback of an error of ours otherwise.

    Raises:
        ReportError: the report cannot be written any more.
        OSError: an output cannot be written any more.
    """
    try:
        tell(event)
    except (ReportError, OSError):
        raise
    except Exception:
        traceback.print_exc()
        return False
    return True


def _unavailable(one: Unavailable, tell: Callable[[Event], None]) -> ImplementationOutcome:
    """Report a target that cannot be checked here."""
    tried = unavailable(one.target, one.reason)
    tell(tried.verdict)
    tell(implementation_event([tried], implementation=one.target, asked=1, seconds=0.0))
    return ImplementationOutcome.of([tried.verdict])


def named_apart(implementations: Iterable[Implementation]) -> list[str]:
    """Return the names of implementations, which must differ, since reports identify implementations by them.

    Raises:
        UsageError: two implementations have the same name, or one is given twice.
    """
    seen: dict[str, Implementation] = {}
    for one in implementations:
        if seen.get(one.name) == one:
            raise UsageError(f"the implementation {one.name!r} is named twice: leave one out")
        if one.name in seen:
            raise UsageError(f"two implementations are named {one.name!r}: give one of them another name=")
        seen[one.name] = one
    return list(seen)


def header(options: Options) -> HeaderEvent:
    """Return the event that begins a run: date, versions, platform and options."""
    return HeaderEvent(
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ringverify=ringverify.__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        device=options.device,
        suite=options.suite,
        seed=options.seed,
    )


def why_not(property: Property, plan: RunPlan, device: str) -> str | None:
    """Return why a property is not tried on an implementation; `None` if it is.

    Args:
        property: the property.
        plan: which implementation is run in which world.
        device: device of the tensors.
    """
    if plan.world == "external" and (reason := why_not_outside(property, plan.implementation)) is not None:
        return reason
    beside = property.simulated_only and plan.watched is not None
    capabilities = (plan.watched if beside and plan.watched else plan.implementation).capabilities
    kind = torch.device(device).type
    if kind not in capabilities.devices:
        return f"device {kind} is not declared"
    if (reason := property.unsupported(capabilities)) is not None:
        return reason
    if property.simulated_only and not beside and plan.world != "simulated":
        way_out = f"this run uses {plan.world}: add a run with --world simulated"
        why = "processes=True rules it out" if capabilities.processes else way_out
        return f"only the simulated world can watch ranks and delay messages, and {why}"
    if property.id == "subgroups" and plan.most_ranks == 1:
        return "a sub-group leaves at least one rank out, and there is one in all"
    return None


class ImplementationRun:
    """The check of one implementation, one property at a time.

    Args:
        plan: which implementation is run in which world.
        world: the world of the plan.
        options: what the user asked for.
        budget: the time of the whole run, shared with other implementations.
        tell: called with each event.
        progress: informed of how far a property has come.
        jobs: worker processes for the whole run; `None` for none.
    """

    def __init__(
        self,
        plan: RunPlan,
        world: World,
        options: Options,
        budget: Budget,
        tell: Callable[[Event], None],
        progress: Progress,
        jobs: Jobs | None = None,
    ) -> None:
        self._plan = plan
        self.implementation, self.target = plan.implementation, plan.target
        self.world = world
        self.options = options
        self.budget = budget
        self.tell = tell
        self.progress = progress
        self._runner = self._runner_in(world, plan.implementation, plan.most_ranks)
        self._watched = plan.watched
        self._beside: Runner | None = None
        self._stories: list[ToldFailure] = []
        self._jobs, self._setup = jobs, None if jobs is None else setup_of(self._runner)
        self._shared: set[str] = set()

    def _runner_in(self, world: World, implementation: Implementation, most_ranks: int | None) -> Runner:
        asked = self.options.deadline
        return Runner(
            implementation,
            world,
            target=self.target,
            device=self.options.device,
            most_ranks=most_ranks,
            deadline=usual_deadline(world.name, self.options.device) if asked is None else asked,
            load_deadline=self.options.load_deadline,
            loading=lambda what: self.progress.loading(what),  # `progress` may have been replaced by then
        )

    def _runner_for(self, property: Property) -> Runner:
        """Return the runner for a property: in this run's world, or in a simulated one beside it if it needs that."""
        return (self._simulated() if property.simulated_only else None) or self._runner

    def _simulated(self) -> Runner | None:
        """Return the runner in a simulated world beside this run's; `None` if the plan has none."""
        if self._watched is None:
            return None
        if self._beside is None:
            self._beside = self._runner_in(open_world("simulated"), self._watched, None)
        return self._beside

    def close(self) -> None:
        """Close the worlds; they start again when they are next used."""
        with contextlib.ExitStack() as stack:
            for runner in (self._runner, self._beside):
                if runner is not None:
                    stack.callback(runner.world.close)

    def outcome(self, properties: Sequence[Property]) -> ImplementationOutcome:
        """Try properties one after another, and report the verdict on the implementation."""
        started, tried = time.monotonic(), []
        self.share_out(properties)
        for property in self._in_turn(properties):
            tried.append(self.try_property(property))
            if self.options.stop_early and tried[-1].verdict.is_new_violation():
                break
        name, seconds = self.implementation.name, time.monotonic() - started
        event = implementation_event(tried, implementation=name, asked=len(properties), seconds=seconds)
        event = dataclasses.replace(event, versions=versions_of(self.implementation))
        features = joined([one.outcome.tried for one in tried], implementation=name)
        if self.implementation.capabilities.shapes == "compiled":
            shapes: set[str] = set().union(*(one.outcome.shapes for one in tried))
            event = dataclasses.replace(event, shapes=len(shapes))
        tellable = features is None or tells(self.tell, features)
        tellable = tells(self.tell, event) and tellable
        try:
            self._exchange(self._runner)
        except Exception:
            traceback.print_exc()
            tellable = False
        outcome = ImplementationOutcome.of([one.verdict for one in tried])
        return outcome if tellable else outcome.without_a_word()

    def _in_turn(self, properties: Sequence[Property]) -> Iterator[Property]:
        """Yield properties in the order in which to try them: with `-x`, first what a first look finds violated."""
        left = list(properties)
        if self.options.stop_early and self.options.time_budget is None:
            for property in self._violated_at_first_sight(properties):
                left.remove(property)
                yield property
        yield from left

    def _violated_at_first_sight(self, properties: Sequence[Property]) -> Iterator[Property]:
        """Yield the properties that one of their first cases violates. An error ends the look: it comes up again."""
        asked: dict[str, tuple[Wanted, Runner]] = {}
        with contextlib.suppress(Exception):
            for property in properties:
                if property in PROPERTIES.values() and why_not(property, self._plan, self.options.device) is None:
                    runner = self._runner_for(property)
                    asked[property.id] = self._asked(property, runner)[0], runner
            for units in first_look.rounds(asked):
                for unit, violated in zip(units, self._are_violated(units), strict=True):
                    if violated:
                        del asked[unit.wanted.property]
                        yield PROPERTIES[unit.wanted.property]

    def _are_violated(self, units: Sequence[Judge]) -> Iterator[bool]:
        """Yield whether a case of each unit violates its property, seen in the workers or in this run's world.

        Raises:
            Exception: a case could not be judged.
        """
        if self._jobs is not None and self._shared.issuperset(unit.wanted.property for unit in units):
            yield from self._jobs.are_violated(units)
            return
        for unit in units:
            self._begin_property()
            yield first_look.is_violated(unit, self._runner_for(PROPERTIES[unit.wanted.property]))

    def _begin_property(self) -> None:
        """Begin new logs; what outlasts a property is kept."""
        self._runner = self._runner.for_another_property()
        self._beside = None if self._beside is None else self._beside.for_another_property()

    def share_out(self, properties: Sequence[Property]) -> None:
        """Have worker processes begin with the properties, if there are any and it is worth it."""
        if self._jobs is None:
            return
        asked = []
        for property in properties:
            with contextlib.suppress(Exception):  # it is raised again when the property's turn comes
                if why_not(property, self._plan, self.options.device) is None and property in PROPERTIES.values():
                    asked.append(self._asked(property, self._runner)[0])
        share = None if self.options.time_budget is None else self.budget.share
        begun = self._jobs.begin(self._setup, self.implementation.name, asked, share)
        self._shared = {one.property for one in asked} if begun else set()

    def _asked(self, property: Property, runner: Runner) -> tuple[Wanted, list[str]]:
        """Return what is to be tried of a property, and a message for each earlier case that cannot be tried."""
        examples = affordable_examples(runner.capabilities, property.examples_in(self.options.suite))
        if self.options.max_examples is not None:
            examples = min(examples, self.options.max_examples)
        earlier, passed_over = self._remembered(property, runner)
        asked = Wanted(property=property.id, examples=examples, seed=self.options.seed, first=tuple(earlier))
        return asked, passed_over

    def _hunt(self, property: Property, runner: Runner, asked: Wanted) -> Hunt:
        """Search for a violation of a property, in this process or in workers."""
        if self._jobs is not None and property.id in self._shared:
            return self._jobs.hunt(property.id, runner.log, self._stories)
        self.progress.start(self.implementation.name, property.id, asked.examples)
        try:
            return hunt(
                property,
                runner,
                examples=asked.examples,
                seed=asked.seed,
                share=self.budget.share(),
                progress=self.progress.step,
                told=self.progress.found,
                first=asked.first,
                watched=self._simulated,
                stories=self._stories,
            )
        finally:
            self.progress.stop()

    def try_property(self, property: Property) -> TriedProperty:
        """Try one property, report the result, and return it.

        After an error of ours, this property is inconclusive unless a violation was found; others are not affected.
        """
        self._begin_property()
        runner = self._runner_for(property)
        try:
            outcome = self._property(property, runner)
        except Exception as error:
            outcome = _not_decided(self._untried(property), error)
        try:
            self.tell(outcome.verdict)
        except (ReportError, OSError):  # nothing can be reported any more
            raise
        except Exception as error:
            verdict = with_mishaps(outcome.verdict, [Mishap.of(error, f"telling of {property.id}")])
            outcome = dataclasses.replace(outcome, verdict=verdict)
            with contextlib.suppress(Exception):
                self.tell(verdict)
        if outcome.counterexample is not None:
            tells(self.tell, outcome.counterexample)  # if that fails, the verdict is reported without its details
        return TriedProperty(
            outcome=outcome,
            world=self.world.name,
            undeclared=tuple(undeclared(self.implementation.capabilities)),
            untried=tuple(untried(self._plan.declared, outcome.tried)),
            runs=runner.log.runs,
            seconds_inside=runner.log.seconds_inside,
        )

    def _exchange(self, runner: Runner) -> None:
        """With `verbose`, report traffic between ranks and peak memory on one ordinary case."""
        case = ordinary_case(self.implementation.capabilities)
        if not self.options.verbose or self.world.name != "simulated" or case is None:
            return
        try:
            run = runner.run(case, gradients=self.implementation.capabilities.gradients, watch="memory").watched
        except WorldUnavailable:
            return
        if run is None or run.traffic is None:
            return
        self.tell(
            ExchangeEvent(
                implementation=self.implementation.name,
                case=recorded(case),
                case_text=case.describe(),
                traffic=tuple(run.traffic.describe()),
                memory=tuple(line for rank in run.memory for line in rank.describe()),
            )
        )

    def _untried(self, property: Property) -> PropertyEvent:
        """Return the event of a property before it is tried."""
        return PropertyEvent(
            implementation=self.implementation.name,
            property=property.id,
            meaning=property.meaning,
            verdict="unsupported",
            examples=0,
            seconds=0.0,
            margin=None,
        )

    def _property(self, property: Property, runner: Runner) -> PropertyOutcome:
        """Search for a violation of one property, and make its events."""
        options, event = self.options, self._untried(property)
        if (why := why_not(property, self._plan, options.device)) is not None:
            return PropertyOutcome(dataclasses.replace(event, reason=why))
        beside = runner is not self._runner
        asked, passed_over = self._asked(property, runner)
        event = dataclasses.replace(event, passed_over=tuple(passed_over) or None)
        try:
            found = self._hunt(property, runner, asked)
        except Exception as error:
            unavailable = isinstance(error, WorldUnavailable) and not isinstance(error, OurError)
            if beside and unavailable:  # nobody asked for the simulated world: the property is unsupported
                return PropertyOutcome(dataclasses.replace(event, reason=f"needs the simulated world: {error}"))
            return _not_decided(event, error)
        verdict: Verdict = "pass" if found.examples else "inconclusive"
        reason: str | None = None
        margin: float | None = found.margin
        if found.counterexample is not None:
            verdict = "fail"
            if found.counterexample.violation.finding is None:
                margin = None  # the failure is not one of values, so it has no margin
        elif not found.examples:
            reason = "none of the cases drawn can test this property"
            if options.world_sizes is not None:
                reason += f" on world sizes {', '.join(map(str, options.world_sizes))}: add others with --world-sizes"
            if found.out_of_time:
                reason = "the time budget ended before the first example: raise --time-budget"
        if runner.log.refused and found.counterexample is None:
            verdict, reason = of_refusals(runner.log.refused, found.examples)
        if found.out_of_time and found.examples:
            reason = f"the time budget ended after {found.examples} of {asked.examples + len(asked.first)} examples"
        if found.unfinished is not None:
            reason = f"the time budget ended {found.unfinished}"
        event = dataclasses.replace(
            event,
            reason=reason,
            verdict=verdict,
            examples=found.examples,
            seconds=round(found.seconds, 3),
            margin=margin,
            world="simulated" if beside else None,
            gloo_refuses=tuple(f"{name}: {example}" for name, example in sorted(runner.log.findings.items())) or None,
            remembered=found.remembered or None,
        )
        if options.baseline is not None:
            event = expected(event, options.baseline, whole=not found.out_of_time)
        tried = None
        if found.examples:
            tried = tried_event(found.tried, property, runner.capabilities, implementation=event.implementation)
        shapes = tuple(sorted(found.tried.shapes)) if runner.capabilities.shapes == "compiled" else ()
        if found.counterexample is None:
            if found.examples:
                event = dataclasses.replace(event, figures=property.figures(runner.capabilities) or None)
            return PropertyOutcome(event, tried=tried, shapes=shapes)
        told = self._counterexample(property, found, found.counterexample, runner)
        return PropertyOutcome(with_mishaps(event, found.mishaps), told, tried, shapes)

    def _remembered(self, property: Property, runner: Runner) -> tuple[list[CaseFile], list[str]]:
        """Return cases that failed in earlier runs, to be tried first, and a message for each that cannot be tried."""
        found, passed_over = casefile.remembered(self.options.cases, target=self.target, property=property.id)
        usable = []
        for path, one in found:
            cases = (*one.after, one.case)
            reasons = [str(why) for case in cases if (why := why_unsupported(case, runner.capabilities)) is not None]
            if runner.most_ranks is not None and max(case.ranks for case in cases) > runner.most_ranks:
                reasons.append(f"it needs {max(case.ranks for case in cases)} ranks, and there are {runner.most_ranks}")
            if reasons:
                passed_over.append(f"case {path} is passed over: {reasons[0]}")
            else:
                usable.append(one)
        return usable, passed_over

    def _counterexample(
        self, property: Property, found: Hunt, shown: Counterexample, runner: Runner
    ) -> CounterexampleEvent:
        def saved() -> dict[str, str]:
            try:
                path = casefile.save(
                    self.options.cases,
                    target=self.target,
                    property=property.id,
                    world=runner.world.name,
                    device=self.options.device,
                    counterexample=shown,
                )
            except UsageError as error:  # the violation is reported even if its file cannot be written
                return {"note": str(error)}
            return {"file": str(path)}

        mishaps, story = found.mishaps, ToldFailure(property, shown)
        nothing: dict[str, str] = {}
        kept = attempt(mishaps, "saving the case", saved, nothing)
        again = ["ringverify", "check", self.target, "--only", property.id, "--seed", str(self.options.seed)]
        repeated = shown.same_as or attempt(
            mishaps, "comparing it with others", lambda: same_as(self._stories, story, self._runner_for), None
        )
        if repeated is None or shown.violation.reason not in [one.shown.violation.reason for one in self._stories]:
            self._stories.append(ToldFailure(property, dataclasses.replace(shown, same_as=repeated)))
        if shown.after and repeated is None:
            varied = functools.partial(with_what_is_alike, property, runner, shown)
            shown = attempt(mishaps, "varying the earlier case", varied, shown)
        # After a run without results, the map still shows which rank holds which positions.
        region = attempt(
            mishaps, "drawing where", lambda: shown.diagnosis.region or outline(shown.case, runner.capabilities), None
        )
        return dataclasses.replace(
            counterexample_event(shown, implementation=self.implementation.name, property=property.id),
            needs=shown.needs,
            region=None if region is None else region.told(),
            after=tuple(case.describe() for case in shown.after),
            shrunk_from=shown.first.describe(),
            tried=shown.tried,
            smallest=shown.smallest,
            repeats=shown.repeats,
            first_margin=found.margin,
            same_as=None if repeated is None else repeated.id,
            file=kept.get("file"),
            note=kept.get("note"),
            replay=replay_line(file=kept.get("file")) or shlex.join(again),
        )


def _not_decided(event: PropertyEvent, error: Exception) -> PropertyOutcome:
    """Return the outcome of a property whose trial ended with an error of ours or of the world."""
    return PropertyOutcome(with_mishaps(event, [Mishap.of(error, f"trying {event.property}")]))


def recorded(case: Case) -> RecordedCase:
    """Return a case in the form that events have."""
    return from_json(RecordedCase, case.to_json())


def violation_event(
    violation: Violation, *, implementation: str, property: str, case: Case | None, case_text: str
) -> CounterexampleEvent:
    """Return the event of a violation, on a case if there is one, without what shrinking and diagnosis add."""
    finding, failure = violation.finding, violation.failure
    event = CounterexampleEvent(
        implementation=implementation,
        property=property,
        case=None if case is None else recorded(case),
        case_text=case_text,
        rank=violation.rank,
        hop=None,
        tensor=None,
        index=None,
        error=None,
        allowed=None,
        diagnosis=None,
        summary=violation.summary,
        detail=violation.detail,
        failure=None if failure is None else RunFailure(kind=failure.kind, exception=failure.exception),
        replay="",
    )
    if finding is None:
        return event
    names = ("tensor", "position", "actual", "expected", "error", "allowed", "margin", "of", "wrong")
    numbers = {name: getattr(finding, name) for name in names}
    return dataclasses.replace(event, index=tuple(finding.index), **numbers)


def counterexample_event(shown: Counterexample, *, implementation: str, property: str) -> CounterexampleEvent:
    """Return the event of a counterexample, without what only the run that found it knows."""
    declaration, refused = shown.declaration, None
    if shown.refused is not None:
        case, refusal = shown.refused
        refused = Refused(summary=refusal.summary, case=recorded(case), case_text=case.describe())
    return dataclasses.replace(
        violation_event(
            shown.violation,
            implementation=implementation,
            property=property,
            case=shown.case,
            case_text=shown.case.describe(),
        ),
        hop=shown.diagnosis.hop,
        diagnosis=shown.diagnosis.text,
        hints=shown.hints,
        printed=tuple(Printed(rank, text[-PRINTED:]) for rank, text in shown.printed),
        where=shown.diagnosis.where,
        declaration=None if declaration is None else from_json(Declaration, declaration),
        declare=None if declaration is None else in_words(declaration, shown.case.problem.dtype),
        refused=refused,
    )


def ordinary_case(capabilities: Capabilities) -> Case | None:
    """Return a case of about 16 tokens on 4 ranks or another declared size, causal if declared; `None` if none fits."""
    sizes = (4, 2, 3, 1) if capabilities.world_sizes is None else capabilities.world_sizes
    for size in sizes:
        problem = Problem(
            query_length=even_multiple("zigzag", size) * (16 // size // 2 or 1),
            heads=2,
            dtype="float32" if "float32" in capabilities.dtypes else capabilities.dtypes[0],
            causal=capabilities.causal != "never",
        )
        case = Case(problem=problem, sharding=sharding_name(capabilities.shardings[0]), world_size=size)
        case = fitted(case, capabilities)
        if why_unsupported(case, capabilities) is None:
            return case
    return None


def undeclared(capabilities: Capabilities) -> list[str]:
    """Return the optional features that an implementation does not declare, and which were therefore not tested."""
    names = [
        "gradients", "lse", "lse_gradient", "gqa", "value_dim", "scale", "window", "documents", "key_lengths",
        "cross_lengths", "softcap", "sinks", "dilation", "uneven", "empty_shards",
    ]  # fmt: skip
    if capabilities.scale:
        names.append("negative_scale")
    if capabilities.window or capabilities.dilation:  # without either, every key but padding is attended
        names.append("poison_safe")
    return [*(name for name in names if not getattr(capabilities, name)), *_other_shapes(capabilities)]


def _other_shapes(c: Capabilities) -> Iterator[str]:
    """Yield the shapes that an implementation does not accept, each in a few words."""
    for what, multiple in (("heads", c.heads_multiple), ("key heads", c.key_heads_multiple)):
        if multiple not in (None, 1):
            by = "the world size" if multiple == "world_size" else multiple
            yield f"{what} not divisible by {by}"
    for what, members in (("head_dim", c.head_dims), ("value_dim", c.value_dims)):
        if members is not None:
            yield f"{what} other than {' or '.join(map(str, members))}"
    if c.shapes == "compiled":
        yield "shapes other than a few"
    if (c.length_multiple or 1) > 1:
        yield f"shard lengths not divisible by {c.length_multiple}"
