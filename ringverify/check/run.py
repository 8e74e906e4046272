"""The run itself: every property of every implementation, told as events."""

from __future__ import annotations

import contextlib
import platform
import shlex
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import torch

import ringverify
from ringref.problem import Problem
from ringverify.cases.case import Case, even_multiple, why_unsupported
from ringverify.cases.running import Runner
from ringverify.cases.shapes import fitted
from ringverify.cases.strategies import affordable_examples
from ringverify.check import casefile
from ringverify.check.baseline import Baseline
from ringverify.check.budget import Budget
from ringverify.check.casefile import CaseFile
from ringverify.check.declaring import in_words
from ringverify.check.explaining import takes
from ringverify.check.hunting import Counterexample, Hunt, hunt
from ringverify.check.mishap import Mishap, attempt, with_mishaps
from ringverify.check.options import Options, Subject, Unavailable, Watch
from ringverify.check.outcome import (
    Outcome,
    Told,
    footer_event,
    implementation_event,
    is_new_violation,
    told_of_unavailable,
)
from ringverify.check.planning import Plan, find_device, open_world, planned
from ringverify.check.sameness import Story, same_as
from ringverify.diagnosis.region import outline
from ringverify.errors import Inconclusive, UsageError
from ringverify.implementation import Capabilities, Implementation, sharding_name
from ringverify.properties.property import Property
from ringverify.reports.jsonl import SCHEMA, Event, ReportError, replay_line
from ringverify.worlds.printing import LETTERS
from ringverify.worlds.processes.torchrun import Crew
from ringverify.worlds.world import OurError, World, WorldUnavailable

DEADLINES = {"simulated": 10.0, "gloo": 30.0, "nccl": 60.0}
"""Seconds for one run of one case. Processes are slower: the first run in each may import half of torch."""


def check(
    subjects: Sequence[Subject | Unavailable],
    properties: Sequence[Property],
    options: Options,
    tell: Callable[[Event], None],
    watch: Watch,
    crew: Crew | None = None,
) -> int:
    """Check implementations, tell what is found event by event, and return the exit code.

    Args:
        subjects: the implementations, and targets that cannot be checked here, of which that is told.
        properties: what must hold of each.
        options: what the user asked for.
        tell: is told each event.
        watch: is told how far the run has come.
        crew: the processes in which ranks run, if torchrun started this one.

    Raises:
        UsageError: options that contradict what an implementation declares.
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
        if isinstance(plan, Plan)
        for property in properties
        if why_not(property, plan, options.device) is None
    ]
    budget = Budget(options.time_budget, len(tried))
    tell(header(options))
    outcomes: list[Outcome] = []
    for plan in plans:
        if isinstance(plan, Unavailable):
            outcomes.append(_unavailable(plan, tell))
            continue
        world = open_world(plan.world) if crew is None else crew.world()
        run = ImplementationRun(plan, world, options, budget, tell, watch)
        try:
            outcomes.append(run.outcome(properties))
        finally:
            run.close()
        if options.stop_early and outcomes[-1].exit_code == 1:
            break
    elsewhere = [] if options.baseline is None else options.baseline.elsewhere(named)
    footer = footer_event(outcomes, baseline=options.baseline is not None, elsewhere=elsewhere)
    code: int = footer["exit_code"]
    return code if tells(tell, footer) else code or Inconclusive.exit_code


def tells(tell: Callable[[Event], None], event: Event) -> bool:
    """Tell an event that is no property's; whether that was possible. What was found before stays found.

    Raises:
        ReportError: it cannot be written, nor can any other.
        OSError: the same.
    """
    try:
        tell(event)
    except (ReportError, OSError):
        raise
    except Exception:
        traceback.print_exc()
        return False
    return True


def _unavailable(one: Unavailable, tell: Callable[[Event], None]) -> Outcome:
    """Tell of a target that cannot be checked here."""
    told = told_of_unavailable(one.target, one.reason)
    tell(told.verdict)
    tell(implementation_event([told], implementation=one.target, asked=1, seconds=0.0))
    return Outcome.of([told.verdict])


def named_apart(implementations: Iterable[Implementation]) -> list[str]:
    """The names of implementations, by which reports tell them apart.

    Raises:
        UsageError: two have the same, or one is there twice.
    """
    seen: dict[str, Implementation] = {}
    for one in implementations:
        if seen.get(one.name) == one:
            raise UsageError(f"the implementation {one.name!r} is asked for twice: once is enough")
        if one.name in seen:
            raise UsageError(f"two implementations are named {one.name!r}: give one of them another name=")
        seen[one.name] = one
    return list(seen)


def header(options: Options) -> Event:
    """The event that begins a run."""
    return {
        "event": "header",
        "schema": SCHEMA,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "ringverify": ringverify.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": options.device,
        "suite": options.suite,
        "seed": options.seed,
    }


def why_not(property: Property, plan: Plan, device: str) -> str | None:
    """Why a property is not tried on an implementation, or `None` if it is.

    Args:
        property: what must hold.
        plan: what is run where.
        device: of the tensors.
    """
    beside = property.simulated_only and plan.watched is not None
    capabilities = (plan.watched if beside and plan.watched else plan.implementation).capabilities
    kind = torch.device(device).type
    if kind not in capabilities.devices:
        return f"device {kind} is not declared"
    if (reason := property.unsupported(capabilities)) is not None:
        return reason
    if property.simulated_only and not beside and plan.world != "simulated":
        return f"needs the simulated world: in the {plan.world} world nothing is watched or held back"
    return None


class ImplementationRun:
    """One implementation, a property at a time.

    Args:
        plan: what is run where.
        world: that world.
        options: what the user asked for.
        budget: the time for it, shared with what else is tried.
        tell: is told each event.
        watch: is told how far a property has come.
    """

    def __init__(
        self, plan: Plan, world: World, options: Options, budget: Budget, tell: Callable[[Event], None], watch: Watch
    ) -> None:
        self._plan = plan
        self.implementation, self.target = plan.implementation, plan.target
        self.world = world
        self.options = options
        self.budget = budget
        self.tell = tell
        self.watch = watch
        self._runner = self._runner_in(world, plan.implementation, plan.most_ranks)
        self._watched = plan.watched
        self._beside: Runner | None = None
        self._stories: list[Story] = []

    def _runner_in(self, world: World, implementation: Implementation, most_ranks: int | None) -> Runner:
        return Runner(
            implementation,
            world,
            target=self.target,
            device=self.options.device,
            most_ranks=most_ranks,
            deadline=DEADLINES[world.name] if self.options.deadline is None else self.options.deadline,
            load_deadline=self.options.load_deadline,
            loading=lambda what: self.watch.loading(what),  # whoever watches then
        )

    def _runner_for(self, property: Property) -> Runner:
        """In this run's world, or in a simulated one beside it for what only that can show."""
        return (self._simulated() if property.simulated_only else None) or self._runner

    def _simulated(self) -> Runner | None:
        """In a simulated world beside this run's, if there can be one."""
        if self._watched is None:
            return None
        if self._beside is None:
            self._beside = self._runner_in(open_world("simulated"), self._watched, None)
        return self._beside

    def close(self) -> None:
        """End the worlds; they start again when they are needed again."""
        with contextlib.ExitStack() as stack:
            for runner in (self._runner, self._beside):
                if runner is not None:
                    stack.callback(runner.world.close)

    def outcome(self, properties: Sequence[Property]) -> Outcome:
        """Try properties one after another, and tell what came of the implementation."""
        started, told = time.monotonic(), []
        for property in properties:
            told.append(self.try_property(property))
            if self.options.stop_early and is_new_violation(told[-1].verdict):
                break
        event = implementation_event(
            told,
            implementation=self.implementation.name,
            asked=len(properties),
            seconds=time.monotonic() - started,
        )
        tellable = tells(self.tell, event)
        try:
            self._exchange(self._runner)
        except Exception:
            traceback.print_exc()
            tellable = False
        outcome = Outcome.of([one.verdict for one in told])
        return outcome if tellable else outcome.without_a_word()

    def try_property(self, property: Property) -> Told:
        """Try one property; tell what came of it, and give that back.

        An error of ours costs this property its verdict, unless a violation was found, and no other property anything.
        """
        self._runner = self._runner.for_another_property()
        self._beside = None if self._beside is None else self._beside.for_another_property()
        runner = self._runner_for(property)
        try:
            events = self._property(property, runner)
        except Exception as error:
            events = [with_mishaps(self._untried(property), [Mishap.of(error, f"trying {property.id}")])]
        for place, event in enumerate(events):
            try:
                self.tell(event)
            except (ReportError, OSError):  # it cannot be told to anybody any more
                raise
            except Exception as error:
                if place > 0:  # that there is a violation is told, and how it looks cannot be
                    traceback.print_exc()
                    continue
                events[0] = with_mishaps(event, [Mishap.of(error, f"telling of {property.id}")])
                with contextlib.suppress(Exception):
                    self.tell(events[0])
        return Told(
            implementation=self.implementation.name,
            world=self.world.name,
            undeclared=undeclared(self.implementation.capabilities),
            events=events,
            runs=runner.log.runs,
            seconds_inside=runner.log.seconds_inside,
        )

    def _exchange(self, runner: Runner) -> None:
        """Tell who sends how much to whom, and what memory peaks at, on one ordinary case."""
        case = ordinary_case(self.implementation.capabilities)
        if not self.options.verbose or self.world.name != "simulated" or case is None:
            return
        try:
            run = runner.run(case, gradients=self.implementation.capabilities.gradients, watch="memory").watched
        except WorldUnavailable:
            return
        if run is None or run.traffic is None:
            return
        memory = [line for rank in run.memory for line in rank.describe()]
        self.tell(
            {
                "event": "exchange",
                "implementation": self.implementation.name,
                "case": case.to_json(),
                "case_text": case.describe(),
                "traffic": run.traffic.describe(),
                "memory": memory,
            }
        )

    def _untried(self, property: Property) -> Event:
        """The event of a property of which nothing is known yet."""
        return {
            "event": "property",
            "implementation": self.implementation.name,
            "property": property.id,
            "meaning": property.meaning,
            "verdict": "unsupported",
            "examples": 0,
            "seconds": 0.0,
            "margin": None,
        }

    def _property(self, property: Property, runner: Runner) -> list[Event]:
        """Try one property: the event that tells of it, and that of its counterexample."""
        options, event = self.options, self._untried(property)
        if (reason := why_not(property, self._plan, options.device)) is not None:
            return [{**event, "reason": reason}]
        examples = affordable_examples(runner.capabilities, property.examples_in(options.suite))
        if options.max_examples is not None:
            examples = min(examples, options.max_examples)
        beside = runner is not self._runner
        earlier, passed_over = self._remembered(property, runner)
        if passed_over:
            event["passed_over"] = passed_over
        self.watch.start(self.implementation.name, property.id, examples)
        try:
            found = hunt(
                property,
                runner,
                examples=examples,
                seed=options.seed,
                share=self.budget.share(),
                progress=self.watch.step,
                suite=options.suite,
                first=earlier,
                watched=self._simulated,
            )
        except Exception as error:
            unavailable = isinstance(error, WorldUnavailable) and not isinstance(error, OurError)
            if beside and unavailable:  # nobody asked for it
                return [{**event, "reason": f"needs the simulated world: {error}"}]
            return [with_mishaps(event, [Mishap.of(error, f"trying {property.id}")])]
        finally:
            self.watch.stop()
        if beside:
            event["world"] = runner.world.name
        if runner.log.findings:
            event["gloo_refuses"] = [f"{name}: {example}" for name, example in sorted(runner.log.findings.items())]
        event |= {"examples": found.examples, "seconds": round(found.seconds, 3), "margin": found.margin}
        if found.remembered:
            event["remembered"] = found.remembered
        if found.counterexample is not None:
            event["verdict"] = "fail"
            if found.counterexample.violation.finding is None:
                event["margin"] = None  # it failed without a number
        elif found.examples:
            event["verdict"] = "pass"
        else:
            event["verdict"] = "inconclusive"
            event["reason"] = "the time budget ended first" if found.out_of_time else "no case puts it to the test"
        if found.out_of_time and found.examples:
            event["reason"] = f"the time budget ended after {found.examples} of {examples + len(earlier)} examples"
        if found.unfinished is not None:
            event["reason"] = f"the time budget ended {found.unfinished}"
        if options.baseline is not None:
            event |= _expected(event, options.baseline, whole=not found.out_of_time)
        if found.counterexample is None:
            return [event]
        shown = self._counterexample(property, found, found.counterexample, runner)
        return [with_mishaps(event, found.mishaps), shown]

    def _remembered(self, property: Property, runner: Runner) -> tuple[list[CaseFile], list[str]]:
        """The cases that failed in earlier runs, which are tried first; and those that cannot be tried, and why not."""
        found, passed_over = casefile.remembered(self.options.cases, target=self.target, property=property.id)
        usable = []
        for path, one in found:
            cases = (*one.after, one.case)
            reasons = [why for case in cases if (why := why_unsupported(case, runner.capabilities)) is not None]
            if runner.most_ranks is not None and max(case.ranks for case in cases) > runner.most_ranks:
                reasons.append(f"it needs {max(case.ranks for case in cases)} ranks, and there are {runner.most_ranks}")
            if reasons:
                passed_over.append(f"case {path} is passed over: {reasons[0]}")
            else:
                usable.append(one)
        return usable, passed_over

    def _counterexample(self, property: Property, found: Hunt, shown: Counterexample, runner: Runner) -> Event:
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
            except UsageError as error:  # a violation is one, whether or not there is room for its file
                return {"note": str(error)}
            return {"file": str(path)}

        mishaps, story = found.mishaps, Story(property, shown)
        nothing: dict[str, str] = {}
        kept = attempt(mishaps, "saving the case", saved, nothing)
        again = ["ringverify", "check", self.target, "--only", property.id, "--seed", str(self.options.seed)]
        repeated = attempt(
            mishaps, "comparing it with others", lambda: same_as(self._stories, story, self._runner_for), None
        )
        if repeated is None:
            self._stories.append(story)
        # Of a run that returned nothing, who holds what can still be drawn.
        region = attempt(
            mishaps, "drawing where", lambda: shown.region or outline(shown.case, runner.capabilities), None
        )
        return {
            "event": "counterexample",
            "implementation": self.implementation.name,
            "property": property.id,
            "case": shown.case.to_json(),
            **told(shown),
            "region": None if region is None else region.told(),
            "after": [case.describe() for case in shown.after],
            "shrunk_from": shown.first.describe(),
            "tried": shown.tried,
            "smallest": shown.smallest,
            "repeats": shown.repeats,
            "first_margin": found.margin,
            "same_as": None if repeated is None else repeated.id,
            **kept,
            "replay": replay_line(kept) or shlex.join(again),
        }


def _expected(event: Event, baseline: Baseline, *, whole: bool) -> Event:
    """What the baseline adds to an event of a property; a pass that the time budget cut short surprises nobody."""
    id = (event["implementation"], event["property"])
    known, surprise = baseline.known(*id), baseline.surprise(*id)
    if event["verdict"] == "fail" and known is not None:
        return {"known": known.told()}
    return {"unexpected": surprise} if event["verdict"] == "pass" and surprise is not None and whole else {}


def told(shown: Counterexample) -> dict[str, Any]:
    """A counterexample's violation as the fields of an event."""
    violation, finding = shown.violation, shown.violation.finding
    fields: dict[str, Any] = {
        "case_text": shown.case.describe(),
        "rank": violation.rank,
        "hop": shown.hop,
        "tensor": None,
        "index": None,
        "error": None,
        "allowed": None,
        "diagnosis": shown.diagnosis,
        "hints": [hint.told() for hint in shown.hints],
        "takes": takes(shown.case) if shown.smallest else [],
        "printed": [{"rank": rank, "text": text[-LETTERS:]} for rank, text in shown.printed],
        "where": None if shown.where is None else shown.where.told(),
        "summary": violation.summary,
        "detail": violation.detail,
    }
    if shown.declaration is not None:
        words = in_words(shown.declaration, shown.case.problem.dtype)
        fields |= {"declaration": shown.declaration, "declare": words}
    if violation.failure is not None:
        fields["failure"] = {"kind": violation.failure.kind, "exception": violation.failure.exception}
    if shown.refused is not None:
        case, refusal = shown.refused
        fields["refused"] = {"summary": refusal.summary, "case": case.to_json(), "case_text": case.describe()}
    if finding is not None:
        fields |= {name: getattr(finding, name) for name in ("tensor", "position", "actual", "expected", "error")}
        fields |= {name: getattr(finding, name) for name in ("allowed", "margin", "of")}
        fields |= {"index": list(finding.index), "wrong": {str(r): n for r, n in finding.wrong.items()}}
    return fields


def ordinary_case(capabilities: Capabilities) -> Case | None:
    """Sixteen tokens on four ranks, or on as many as are declared, causal if that is declared."""
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
    """Optional features that an implementation does not declare, which were therefore not tested."""
    names = [
        "gradients", "lse", "lse_gradient", "gqa", "value_dim", "scale", "window", "documents", "key_lengths",
        "cross_lengths", "softcap", "dilation", "uneven", "empty_shards",
    ]  # fmt: skip
    if capabilities.scale:
        names.append("negative_scale")
    if capabilities.window or capabilities.dilation:  # without either, every key that is no padding is attended
        names.append("poison_safe")
    return [*(name for name in names if not getattr(capabilities, name)), *_other_shapes(capabilities)]


def _other_shapes(c: Capabilities) -> Iterator[str]:
    """The shapes that an implementation does not take, each in a few words."""
    for what, multiple in (("heads", c.heads_multiple), ("key heads", c.key_heads_multiple)):
        if multiple not in (None, 1):
            by = "the world size" if multiple == "world_size" else multiple
            yield f"{what} that {by} does not divide"
    for what, members in (("head_dim", c.head_dims), ("value_dim", c.value_dims)):
        if members is not None:
            yield f"{what} other than {' or '.join(map(str, members))}"
    if (c.length_multiple or 1) > 1:
        yield f"shards of a length that {c.length_multiple} does not divide"
