"""Implementations held to a folder of vectors: verdicts and exit codes as `ringverify check` has them."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringverify.cases.running import Runner
from ringverify.check.options import Subject, Watch
from ringverify.check.outcome import Outcome, Told, footer_event, implementation_event
from ringverify.check.planning import Plan, WorldName, find_device, open_world, planned
from ringverify.check.run import DEADLINES, named_apart, undeclared
from ringverify.properties.property import Violation
from ringverify.reports.jsonl import Event
from ringverify.vectors import checking
from ringverify.vectors.index import Index
from ringverify.vectors.story import Story
from ringverify.vectors.tensorfile import Tensor
from ringverify.vectors.trying import Trial, trial, tried
from ringverify.worlds.world import World, WorldUnavailable

SHOWN = 5
"""Failing vectors of an implementation that are shown whole; the others are named."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """What a user asked of a run.

    Attributes:
        ids: these vectors only; `None` means all.
        world: where ranks run; `None` chooses by what an implementation declares.
        device: device of the tensors.
    """

    ids: tuple[str, ...] | None = None
    world: WorldName | None = None
    device: str = "cpu"


def run(found: Index, subjects: Sequence[Subject], wish: Wish, tell: Callable[[Event], None], watch: Watch) -> int:
    """Try the vectors on implementations, tell what comes of it, and return the exit code.

    Raises:
        UsageError: a file is damaged, an id unknown, or the options contradict what an implementation declares.
        Inconclusive: the device or the world asked for does not exist here.
    """
    named_apart(subject.implementation for subject in subjects)
    checking.look_at_files(found)
    stories = found.chosen(wish.ids)
    tensors = {story.id: checking.load(found, story) for story in stories}
    plans = [
        planned(subject.target, subject.implementation, world=wish.world, world_sizes=None, crew=None)
        for subject in subjects
    ]
    find_device(wish.device)
    outcomes = []
    for plan in plans:
        world = open_world(plan.world)
        try:
            outcomes.append(_Run(found, plan, world, wish, tell, watch).outcome(stories, tensors))
        finally:
            world.close()
    code: int = footer_event(outcomes, baseline=False)["exit_code"]
    return code


@dataclasses.dataclass
class _Run:
    found: Index
    plan: Plan
    world: World
    wish: Wish
    tell: Callable[[Event], None]
    watch: Watch
    shown: int = 0

    def outcome(self, stories: Sequence[Story], tensors: Mapping[str, Mapping[str, Tensor]]) -> Outcome:
        implementation, started = self.plan.implementation, time.monotonic()
        topics = list(dict.fromkeys(story.topic for story in stories))
        seen = []
        for topic in topics:
            runner = Runner(
                implementation,
                self.world,
                target=self.plan.target,
                device=self.wish.device,
                most_ranks=self.plan.most_ranks,
                deadline=DEADLINES[self.world.name],
            )
            event = self._topic(topic, [story for story in stories if story.topic == topic], tensors, runner)
            missing = undeclared(implementation.capabilities)
            seen.append(
                Told(implementation.name, self.world.name, missing, [event], runner.runs, runner.seconds_inside)
            )
        seconds = time.monotonic() - started
        self.tell(implementation_event(seen, implementation=implementation.name, asked=len(topics), seconds=seconds))
        return Outcome.of([one.verdict for one in seen])

    def _topic(
        self, topic: str, stories: list[Story], tensors: Mapping[str, Mapping[str, Tensor]], runner: Runner
    ) -> Event:
        """What came of the vectors of one topic, told."""
        name, started = runner.implementation.name, time.monotonic()
        asked = [trial(story, layout, runner.capabilities) for story in stories for layout in story.layouts]
        trials = [one for one in asked if isinstance(one, Trial)]
        reason = _left_out([one for one in asked if isinstance(one, str)])
        event: Event = {
            "event": "property",
            "implementation": name,
            "property": topic,
            "verdict": "unsupported",
            "examples": 0,
            "seconds": 0.0,
            "margin": None,
        }
        failed: dict[str, tuple[Trial, Violation]] = {}
        largest = 0.0
        self.watch.start(name, topic, len(trials))
        try:
            for one in trials:
                judgement = tried(one, tensors[one.story.id], runner)
                largest = max(largest, judgement.margin)
                if judgement.violation is not None:
                    failed.setdefault(one.story.id, (one, judgement.violation))
                event["examples"] += 1
                self.watch.step(event["examples"])
            if trials:
                event |= {"verdict": "fail" if failed else "pass", "margin": largest if largest or not failed else None}
        except WorldUnavailable as error:
            event["verdict"], reason = "inconclusive", str(error)
        finally:
            self.watch.stop()
        event["seconds"] = round(time.monotonic() - started, 3)
        if event["verdict"] == "fail":
            reason = f"wrong: {' '.join(failed)}" + (f"; {reason}" if reason else "")
        if reason:
            event["reason"] = reason
        self.tell(event)
        for one, violation in failed.values() if event["verdict"] == "fail" else ():
            if self.shown < SHOWN:
                self.shown += 1
                self.tell(self._counterexample(one, violation))
        return event

    def _counterexample(self, one: Trial, violation: Violation) -> Event:
        again = f"ringverify vectors check {self.found.folder} --target {self.plan.target} --only {one.story.id}"
        fields: dict[str, Any] = {
            "event": "counterexample",
            "implementation": self.plan.implementation.name,
            "summary": violation.summary,
            "case_text": f"{one.name}: {one.story.title}",
            "note": one.story.note,
            "rank": violation.rank,
            "tensor": None,
            "diagnosis": None,
            "detail": violation.detail,
            "replay": again,
        }
        if (finding := violation.finding) is not None:
            names = ("tensor", "position", "actual", "expected", "error", "allowed", "index")
            fields |= {name: getattr(finding, name) for name in names}
        return fields


def _left_out(reasons: Sequence[str]) -> str:
    """What would have to be declared for more, most wanted first; another sharding only where that is all."""
    wanted = Counter(reason.split(" is ")[0].removesuffix("=False") for reason in reasons)
    others = [name for name, _ in wanted.most_common() if not name.startswith("sharding ")]
    names = others or [name for name, _ in wanted.most_common()]
    return f"not declared: {', '.join(names)}" if names else ""
