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
from ringverify.check.hunting import Counterexample, Hunt, hunt
from ringverify.check.planning import Plan, WorldName, find_device, open_world, planned
from ringverify.errors import Inconclusive, UsageError
from ringverify.implementation import Capabilities, Implementation, sharding_name
from ringverify.properties.property import Property, Suite
from ringverify.reports.jsonl import SCHEMA, Event
from ringverify.worlds.torchrun import Crew
from ringverify.worlds.world import World, WorldUnavailable

EXIT_CODES = {"conformant": 0, "violations": 1, "inconclusive": 3}

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
    verdicts = []
    for plan in plans:
        world = open_world(plan.world) if crew is None else crew.world()
        try:
            run = _ImplementationRun(plan, world, options, until, tell, watch)
            verdicts.append(run.verdict(properties))
        finally:
            world.close()
        if options.stop_early and verdicts[-1] == "violations":
            break
    verdict = next((v for v in ("violations", "inconclusive") if v in verdicts), "conformant")
    tell({"event": "footer", "verdict": verdict, "exit_code": EXIT_CODES[verdict]})
    return EXIT_CODES[verdict]


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

    def verdict(self, properties: Sequence[Property]) -> str:
        runner = Runner(
            self.implementation,
            self.world,
            target=self.plan.target,
            device=self.options.device,
            most_ranks=self.plan.most_ranks,
            deadline=DEADLINES[self.world.name] if self.options.deadline is None else self.options.deadline,
        )
        started, seen, examples = time.monotonic(), [], 0
        for property in properties:
            verdict, tried = self._property(property, runner)
            seen.append(verdict)
            examples += tried
            if verdict == "fail" and self.options.stop_early:
                break
        verdict = "violations" if "fail" in seen else "inconclusive"
        if verdict != "violations" and "inconclusive" not in seen and "pass" in seen:
            verdict = "conformant"
        self.tell(
            {
                "event": "implementation",
                "implementation": self.implementation.name,
                "verdict": verdict,
                "world": self.world.name,
                "undeclared": undeclared(self.implementation.capabilities),
                "properties": {kind: seen.count(kind) for kind in ("pass", "fail", "unsupported", "inconclusive")},
                "not_run": len(properties) - len(seen),
                "examples": examples,
                "runs": runner.runs,
                "seconds": round(time.monotonic() - started, 3),
                "seconds_inside": round(runner.seconds_inside, 3),
            }
        )
        self._exchange(runner)
        return verdict

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

    def _property(self, property: Property, runner: Runner) -> tuple[str, int]:
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
            self.tell({**event, "reason": reason})
            return "unsupported", 0
        examples = property.examples_in(options.suite)
        if options.max_examples is not None:
            examples = min(examples, options.max_examples)
        self.watch.start(self.implementation.name, property.id, examples)
        try:
            found = hunt(
                property, runner, examples=examples, seed=options.seed, until=self.until, progress=self.watch.step
            )
        except (WorldUnavailable, Inconclusive) as error:
            self.tell({**event, "verdict": "inconclusive", "reason": str(error)})
            return "inconclusive", 0
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
        self.tell(event)
        if found.counterexample is not None:
            self.tell(self._counterexample(property, found, found.counterexample))
        return event["verdict"], found.examples

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
