"""The run itself: every property of every implementation, told as events."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

import ringverify
from ringref.problem import Problem
from ringverify.cases.case import Case, even_multiple, why_unsupported
from ringverify.cases.running import Runner
from ringverify.check import casefile
from ringverify.check.baseline import Baseline
from ringverify.check.hunting import Counterexample, Hunt, hunt
from ringverify.check.planning import Plan, WorldName, find_device, open_world, planned
from ringverify.errors import Inconclusive, UsageError
from ringverify.implementation import Capabilities, Implementation, sharding_name
from ringverify.properties.property import Property, Suite
from ringverify.reports.jsonl import SCHEMA, Event
from ringverify.worlds.torchrun import Crew
from ringverify.worlds.world import World, WorldUnavailable

CODES = (1, 2, 3)
"""Exit codes but 0, the one that tells most first: a new violation, a baseline out of date, nothing learned."""

DEADLINES = {"simulated": 10.0, "gloo": 30.0, "nccl": 60.0}
"""Seconds for one run of one case. Processes are slower: the first run in each may import half of torch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a user asked of a run.

    Attributes:
        suite: how many examples.
        world: where ranks run; `None` chooses by what an implementation declares.
        world_sizes: world sizes to use; `None` means all that suit.
        device: device of the tensors.
        seed: decides which cases are tried.
        max_examples: examples of each property at most.
        time_budget: seconds for the whole run, or `None`.
        deadline: seconds for one run of one case; `None` is `DEADLINES` of the world.
        cases: folder for counterexamples.
        stop_early: stop at the first violation.
        verbose: also tell what is exchanged and what memory peaks at.
        baseline: the violations that are known, which do not count.
    """

    suite: Suite = "quick"
    world: WorldName | None = None
    world_sizes: tuple[int, ...] | None = None
    device: str = "cpu"
    seed: int = 0
    max_examples: int | None = None
    time_budget: float | None = None
    deadline: float | None = None
    cases: Path = Path(".ringverify")
    stop_early: bool = False
    verbose: bool = False
    baseline: Baseline | None = None


@dataclasses.dataclass(frozen=True)
class Subject:
    """An implementation to check, and what to type to get it."""

    target: str
    implementation: Implementation


class Watch(Protocol):
    """Is told how far a run has come."""

    def start(self, implementation: str, property: str, examples: int) -> None:
        """A property is about to be tried."""
        ...

    def step(self, done: int) -> None:
        """So many of its cases have been tried."""
        ...

    def stop(self) -> None:
        """It is done."""
        ...


def check(
    subjects: Sequence[Subject],
    properties: Sequence[Property],
    options: Options,
    tell: Callable[[Event], None],
    watch: Watch,
    crew: Crew | None = None,
) -> int:
    """Check implementations, tell what is found event by event, and return the exit code.

    Args:
        subjects: the implementations.
        properties: what must hold of each.
        options: what the user asked for.
        tell: is told each event.
        watch: is told how far the run has come.
        crew: the processes in which ranks run, if torchrun started this one.

    Raises:
        UsageError: options that contradict what an implementation declares.
        Inconclusive: the device or the world asked for does not exist here.
    """
    names = [subject.implementation.name for subject in subjects]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two implementations are named {name!r}: give one of them another name=")
    plans = [
        planned(subject.target, subject.implementation, world=options.world, world_sizes=options.world_sizes, crew=crew)
        for subject in subjects
    ]
    find_device(options.device)
    casefile.look_at(options.cases)
    until = time.monotonic() + (float("inf") if options.time_budget is None else options.time_budget)
    tell(
        {
            "event": "header",
            "schema": SCHEMA,
            "ringverify": ringverify.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "device": options.device,
            "suite": options.suite,
            "seed": options.seed,
        }
    )
    outcomes: list[Outcome] = []
    for plan in plans:
        world = open_world(plan.world) if crew is None else crew.world()
        try:
            run = _ImplementationRun(plan, world, options, until, tell, watch)
            outcomes.append(run.outcome(properties))
        finally:
            world.close()
        if options.stop_early and outcomes[-1].exit_code == 1:
            break
    verdicts, codes = ({getattr(outcome, name) for outcome in outcomes} for name in ("verdict", "exit_code"))
    verdict = next((v for v in ("violations", "inconclusive") if v in verdicts), "conformant")
    code = next((code for code in CODES if code in codes), 0)
    footer: Event = {"event": "footer", "verdict": verdict, "exit_code": code}
    if options.baseline is not None:
        footer["known"] = sum(outcome.known for outcome in outcomes)
        footer["unexpected"] = [line for outcome in outcomes for line in outcome.unexpected]
    tell(footer)
    return code


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one implementation.

    Attributes:
        verdict: `conformant`, `violations` or `inconclusive`; a known violation is a violation.
        exit_code: what it comes to for the run, where a known violation does not count.
        known: how many violations are known.
        unexpected: a line for each property that passes where the baseline has it violated.
    """

    verdict: str
    exit_code: int
    known: int
    unexpected: list[str]

    @classmethod
    def of(cls, properties: Sequence[Event]) -> Outcome:
        """From the events of its properties."""
        seen = {event["verdict"] for event in properties}
        verdict = "violations" if "fail" in seen else "inconclusive"
        if verdict != "violations" and "inconclusive" not in seen and "pass" in seen:
            verdict = "conformant"
        unexpected = [event["unexpected"] for event in properties if "unexpected" in event]
        code = 3 if "inconclusive" in seen or not seen & {"pass", "fail"} else 0
        if unexpected:
            code = 2
        if any(is_new_violation(event) for event in properties):
            code = 1
        return cls(verdict, code, sum("known" in event for event in properties), unexpected)


def is_new_violation(event: Event) -> bool:
    """Whether an event of a property tells of a violation that no baseline knows."""
    return event["verdict"] == "fail" and "known" not in event


@dataclasses.dataclass
class _ImplementationRun:
    plan: Plan
    world: World
    options: Options
    until: float
    tell: Callable[[Event], None]
    watch: Watch

    @property
    def implementation(self) -> Implementation:
        return self.plan.implementation

    def outcome(self, properties: Sequence[Property]) -> Outcome:
        runner = Runner(
            self.implementation,
            self.world,
            target=self.plan.target,
            device=self.options.device,
            most_ranks=self.plan.most_ranks,
            deadline=DEADLINES[self.world.name] if self.options.deadline is None else self.options.deadline,
        )
        started, told = time.monotonic(), []
        for property in properties:
            told.append(self._property(property, runner))
            if self.options.stop_early and is_new_violation(told[-1]):
                break
        seen, outcome = [event["verdict"] for event in told], Outcome.of(told)
        self.tell(
            {
                "event": "implementation",
                "implementation": self.implementation.name,
                "verdict": outcome.verdict,
                "world": self.world.name,
                "undeclared": undeclared(self.implementation.capabilities),
                "properties": {kind: seen.count(kind) for kind in ("pass", "fail", "unsupported", "inconclusive")},
                "known": outcome.known,
                "not_run": len(properties) - len(seen),
                "examples": sum(event["examples"] for event in told),
                "runs": runner.runs,
                "seconds": round(time.monotonic() - started, 3),
                "seconds_inside": round(runner.seconds_inside, 3),
            }
        )
        self._exchange(runner)
        return outcome

    def _exchange(self, runner: Runner) -> None:
        """Tell who sends how much to whom, and what memory peaks at, on one ordinary case."""
        case = ordinary_case(self.implementation.capabilities)
        if not self.options.verbose or self.world.name != "simulated" or case is None:
            return
        run = runner.run(case, gradients=self.implementation.capabilities.gradients, watch="memory").watched
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

    def _property(self, property: Property, runner: Runner) -> Event:
        """Try one property; the event that tells of it."""
        capabilities, options = self.implementation.capabilities, self.options
        event: Event = {
            "event": "property",
            "implementation": self.implementation.name,
            "property": property.id,
            "verdict": "unsupported",
            "examples": 0,
            "seconds": 0.0,
            "margin": None,
        }
        reason = property.unsupported(capabilities)
        device = torch.device(options.device).type
        if device not in capabilities.devices:
            reason = f"device {device} is not declared"
        if reason is None and property.simulated_only and self.world.name != "simulated":
            reason = f"needs the simulated world: in the {self.world.name} world nothing is watched or held back"
        if reason is not None:
            self.tell(event := {**event, "reason": reason})
            return event
        examples = property.examples_in(options.suite)
        if options.max_examples is not None:
            examples = min(examples, options.max_examples)
        self.watch.start(self.implementation.name, property.id, examples)
        try:
            found = hunt(
                property, runner, examples=examples, seed=options.seed, until=self.until, progress=self.watch.step
            )
        except (WorldUnavailable, Inconclusive) as error:
            self.tell(event := {**event, "verdict": "inconclusive", "reason": str(error)})
            return event
        finally:
            self.watch.stop()
        event |= {"examples": found.examples, "seconds": round(found.seconds, 3), "margin": found.margin}
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
            event["reason"] = f"the time budget ended after {found.examples} of {examples} examples"
        if options.baseline is not None:
            event |= _expected(event, options.baseline, whole=not found.out_of_time)
        self.tell(event)
        if found.counterexample is not None:
            self.tell(self._counterexample(property, found, found.counterexample))
        return event

    def _counterexample(self, property: Property, found: Hunt, shown: Counterexample) -> Event:
        path = casefile.save(
            self.options.cases,
            target=self.plan.target,
            property=property.id,
            world=self.world.name,
            device=self.options.device,
            counterexample=shown,
        )
        return {
            "event": "counterexample",
            "implementation": self.implementation.name,
            "property": property.id,
            "case": shown.case.to_json(),
            **told(shown),
            "after": [case.describe() for case in shown.after],
            "shrunk_from": shown.first.describe(),
            "tried": shown.tried,
            "smallest": shown.smallest,
            "repeats": shown.repeats,
            "file": str(path),
            "replay": f"ringverify replay {path}",
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
        "where": None if shown.where is None else shown.where.told(),
        "summary": violation.summary,
        "detail": violation.detail,
    }
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
        if why_unsupported(case, capabilities) is None:
            return case
    return None


def undeclared(capabilities: Capabilities) -> list[str]:
    """Optional features that an implementation does not declare, which were therefore not tested."""
    names = [
        "gradients", "lse", "lse_gradient", "gqa", "value_dim", "scale", "window", "documents", "key_lengths",
        "cross_lengths", "softcap", "dilation", "uneven", "empty_shards",
    ]  # fmt: skip
    return [name for name in names if not getattr(capabilities, name)]
