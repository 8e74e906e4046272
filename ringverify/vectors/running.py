"""Try implementations on a folder of vectors, with the verdicts and exit codes of `ringverify check`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringverify.cases.case import Undeclared
from ringverify.cases.running import RunLog, Runner
from ringverify.cases.tensorfile import Tensor
from ringverify.check.jobs import WORTH_A_WORKER, setup_of
from ringverify.check.options import Subject
from ringverify.check.outcome import ImplementationOutcome, TriedProperty, footer_event, implementation_event
from ringverify.check.planning import RunPlan, WorldName, find_device, open_world, planned
from ringverify.check.run import named_apart, not_side_by_side, undeclared, usual_deadline
from ringverify.check.units import FunctionCall, without_history
from ringverify.check.workers import Workers
from ringverify.events import CounterexampleEvent, PropertyEvent, PropertyOutcome, Verdict
from ringverify.properties.property import Judgement, Violation
from ringverify.reports.progress import Progress
from ringverify.vectors import checking, long
from ringverify.vectors.index import Index
from ringverify.vectors.long_trial import try_at_length
from ringverify.vectors.recording import Tell, begun, counterexample_event, property_event, sentence
from ringverify.vectors.story import Story
from ringverify.vectors.trying import Trial, trial, tried
from ringverify.worlds.limits import cores
from ringverify.worlds.world import World, WorldUnavailable

PIECE = 16
"""Vectors that a worker tries at once, at most."""

SHOWN = 5
"""Failing vectors of an implementation that the terminal shows in full; the others are only named."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorOptions:
    """Options of `ringverify vectors check --target`.

    Attributes:
        ids: these vectors only; `None` means all.
        world: where ranks run; `None` chooses a world by what the implementation declares.
        device: device of the tensors.
        jobs: processes that try vectors side by side; `None` is one for each core, fewer for few vectors.
    """

    ids: tuple[str, ...] | None = None
    world: WorldName | None = None
    device: str = "cpu"
    jobs: int | None = None


def run(
    found: Index,
    subjects: Sequence[Subject],
    asked: VectorOptions,
    tell: Tell,
    progress: Progress,
    record: Tell = lambda event: None,
) -> int:
    """Try the vectors on implementations, report the results, and return the exit code.

    Args:
        found: the vectors.
        subjects: the implementations.
        asked: the options.
        tell: receives the events for the terminal, one verdict per topic.
        progress: shows how far the run has come.
        record: receives the events of the report, one verdict per vector.

    Raises:
        UsageError: a file is damaged, an id unknown, or the options contradict what an implementation declares.
        Inconclusive: the device or the world asked for does not exist here.
    """
    named_apart(subject.implementation for subject in subjects)
    checking.look_at_files(found)
    there = long.read(found.folder)
    stories = found.chosen(asked.ids, there)
    at_length = [one for id, one in there.items() if id in (asked.ids or ())]
    tensors = {story.id: checking.load(found, story) for story in stories}
    plans = [
        planned(subject.target, subject.implementation, world=asked.world, world_sizes=None, crew=None)
        for subject in subjects
    ]
    find_device(asked.device)
    not_side_by_side(plans, asked.jobs)
    record(begun(asked.device))
    outcomes = []
    with contextlib.closing(Workers(progress.loading)) as workers:
        for plan in plans:
            with contextlib.closing(open_world(plan.world)) as world:
                one = _VectorRun(found, plan, world, asked, tell, progress, record, workers)
                outcomes.append(one.outcome(stories, tensors, at_length))
    footer = footer_event(outcomes, baseline=False)
    record(footer)
    return footer.exit_code


@dataclasses.dataclass
class _Totals:
    """Results of the trials of one vector.

    Attributes:
        asked: the trials to run.
        left_out: for each layout that is not tried, what it needs.
        examples: how many trials have ended.
        seconds: how long they took.
        margin: largest error over the error allowed.
        failed: the first trial that failed, and its violation.
    """

    asked: list[Trial]
    left_out: list[Undeclared]
    examples: int = 0
    seconds: float = 0.0
    margin: float = 0.0
    failed: tuple[Trial, Violation] | None = None

    @classmethod
    def of(cls, story: Story, runner: Runner) -> _Totals:
        asked = [trial(story, layout, runner.capabilities) for layout in story.layouts]
        left_out = [one for one in asked if isinstance(one, Undeclared)]
        return cls([one for one in asked if isinstance(one, Trial)], left_out)

    def add(self, one: Trial, judgement: Judgement, seconds: float) -> None:
        """Add the result of a trial that has ended."""
        self.examples += 1
        self.seconds += seconds
        self.margin = max(self.margin, judgement.margin)
        if judgement.violation is not None and self.failed is None:
            self.failed = one, judgement.violation

    def event(self, implementation: str, story: Story, ended: str | None) -> PropertyEvent:
        """Return the report's event for the vector; `ended` is the reason why no further trial could run, if any."""
        verdict: Verdict = "fail" if self.failed else "pass" if self.asked else "unsupported"
        reason = _left_out(self.left_out)
        if self.failed is None and self.examples < len(self.asked):
            verdict, reason = "inconclusive", str(ended)
        return property_event(
            implementation,
            story.id,
            verdict,
            meaning=sentence(story),
            examples=self.examples,
            seconds=self.seconds,
            margin=self.margin if self.examples and (self.margin or not self.failed) else None,
            reason=reason,
        )


@dataclasses.dataclass(frozen=True)
class _Topic:
    """The vectors of one topic, and what is to be run of them."""

    name: str
    stories: list[Story]
    runner: Runner
    tallies: dict[str, _Totals]
    trials: list[Trial]

    def pieces(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> list[FunctionCall]:
        """Return its trials as units for workers."""
        cut = [self.trials[start : start + PIECE] for start in range(0, len(self.trials), PIECE)]
        return [
            FunctionCall(_try_piece, (piece, {one.story.id: tensors[one.story.id] for one in piece})) for piece in cut
        ]


_Judged = tuple[Judgement, float]


def _try_piece(
    runner: Runner, argument: tuple[list[Trial], dict[str, Mapping[str, Tensor]]]
) -> tuple[list[_Judged], WorldUnavailable | None, RunLog]:
    """Try some vectors, until the world is unavailable, if it is."""
    trials, tensors = argument
    seen: list[_Judged] = []
    ended = None
    try:
        seen.extend(_one_by_one(trials, tensors, runner))
    except WorldUnavailable as error:
        ended = WorldUnavailable(str(error), error.detail)
    return seen, ended, without_history(runner.log)


def _one_by_one(
    trials: Sequence[Trial], tensors: Mapping[str, Mapping[str, Tensor]], runner: Runner
) -> Iterator[_Judged]:
    for one in trials:
        since = time.monotonic()
        judgement = tried(one, tensors[one.story.id], runner)
        yield judgement, time.monotonic() - since


def _by_workers(topic: _Topic, pieces: Sequence[FunctionCall], answers: Iterator[Any]) -> Iterator[_Judged]:
    """Yield what `_one_by_one` would; of the answers to all units, exactly those to `pieces` are taken."""
    ended: Exception | None = None
    for _ in pieces:
        answer = next(answers)
        if ended is None and isinstance(answer, Exception):
            ended = answer
        elif ended is None:
            seen, ended, log = answer
            topic.runner.log.add(log)
            yield from seen
    if ended is not None:
        raise ended


@dataclasses.dataclass
class _VectorRun:
    found: Index
    plan: RunPlan
    world: World
    asked: VectorOptions
    tell: Tell
    progress: Progress
    record: Tell
    workers: Workers
    shown: int = 0
    recorded: list[TriedProperty] = dataclasses.field(default_factory=list)

    def outcome(
        self,
        stories: Sequence[Story],
        tensors: Mapping[str, Mapping[str, Tensor]],
        at_length: Sequence[Mapping[str, Any]],
    ) -> ImplementationOutcome:
        implementation, started = self.plan.implementation, time.monotonic()
        names = list(dict.fromkeys(story.topic for story in stories))
        topics = [self._topic(name, [story for story in stories if story.topic == name]) for name in names]
        work = [topic.pieces(tensors) for topic in topics]
        trials = sum(len(topic.trials) for topic in topics)
        jobs = min(cores(), trials // WORTH_A_WORKER) if self.asked.jobs is None else self.asked.jobs
        setup = setup_of(topics[0].runner) if topics else None
        side_by_side = setup is not None and self.workers.ready(jobs, setup)
        answers = self.workers.in_order([piece for pieces in work for piece in pieces]) if side_by_side else iter(())
        seen = []
        for topic, pieces in zip(topics, work, strict=True):
            judged = _by_workers(topic, pieces, answers)
            event = self._told(topic, judged if side_by_side else _one_by_one(topic.trials, tensors, topic.runner))
            seen.append(self._tried(event, topic.runner.log.runs, topic.runner.log.seconds_inside))
        seen += [self._at_length(described) for described in at_length]
        seconds = time.monotonic() - started
        for tell, told in ((self.tell, seen), (self.record, self.recorded)):
            tell(implementation_event(told, implementation=implementation.name, asked=len(told), seconds=seconds))
        return ImplementationOutcome.of([one.verdict for one in seen])

    def _tried(self, event: PropertyEvent, runs: int, seconds_inside: float) -> TriedProperty:
        return TriedProperty(
            outcome=PropertyOutcome(event),
            world=self.world.name,
            undeclared=tuple(undeclared(self.plan.implementation.capabilities)),
            runs=runs,
            seconds_inside=seconds_inside,
        )

    def _at_length(self, described: Mapping[str, Any]) -> TriedProperty:
        """Try a long vector, and send its events."""
        vector, plan, name = long.of(described), self.plan, self.plan.implementation.name
        self.progress.start(name, vector.id, 1)
        try:
            found = try_at_length(described, plan, self.world, self.asked.device, self.progress.loading)
        finally:
            self.progress.stop()
        event = property_event(
            name,
            vector.id,
            found.verdict,
            meaning=sentence(vector),
            examples=int(found.verdict in ("pass", "fail")),
            seconds=found.seconds,
            margin=found.margin,
            reason=found.reason,
        )
        tried = self._tried(event, int(found.layout is not None), found.seconds_inside)
        self.recorded.append(tried)
        again = [str(self.found.folder), "--target", plan.target, "--only", vector.id]
        for tell in (self.tell, self.record):
            tell(event)
            if found.violation is not None and found.layout is not None:
                tell(counterexample_event(name, vector, found.layout, found.violation, vectors=again))
        return tried

    def _topic(self, name: str, stories: list[Story]) -> _Topic:
        runner = Runner(
            self.plan.implementation,
            self.world,
            target=self.plan.target,
            device=self.asked.device,
            most_ranks=self.plan.most_ranks,
            deadline=usual_deadline(self.world.name, self.asked.device),
        )
        tallies = {story.id: _Totals.of(story, runner) for story in stories}
        return _Topic(name, stories, runner, tallies, [one for tally in tallies.values() for one in tally.asked])

    def _told(self, topic: _Topic, judged: Iterator[_Judged]) -> PropertyEvent:
        """Try the vectors of one topic, send all their events, and return the event of the topic."""
        runner, tallies, trials = topic.runner, topic.tallies, topic.trials
        name, started = runner.implementation.name, time.monotonic()
        reason = _left_out([why for tally in tallies.values() for why in tally.left_out])
        verdict: Verdict = "unsupported"
        examples, margin, ended = 0, None, None
        self.progress.start(name, topic.name, len(trials))
        try:
            for judgement, took in judged:
                one = trials[examples]
                tallies[one.story.id].add(one, judgement, took)
                examples += 1
                self.progress.step(examples)
        except WorldUnavailable as error:
            ended = str(error)
        finally:
            self.progress.stop()
        failed = {id: tally.failed for id, tally in tallies.items() if tally.failed is not None}
        if ended is not None:
            verdict, reason = "fail" if failed else "inconclusive", ended
        elif trials:
            largest = max(tally.margin for tally in tallies.values())
            verdict, margin = "fail" if failed else "pass", largest if largest or not failed else None
        if verdict == "fail":
            reason = f"wrong: {' '.join(failed)}" + (f"; {reason}" if reason else "")
        seconds = time.monotonic() - started
        event = property_event(
            name, topic.name, verdict, examples=examples, seconds=seconds, margin=margin, reason=reason
        )
        self.tell(event)
        for one, violation in failed.values() if verdict == "fail" else ():
            if self.shown < SHOWN:
                self.shown += 1
                self.tell(self._counterexample(one, violation))
        for number, story in enumerate(topic.stories):
            self._record(story, tallies[story.id], ended, None if number else runner)
        return event

    def _record(self, story: Story, tally: _Totals, ended: str | None, runner: Runner | None) -> None:
        """Add a vector to the report; the first of a topic is given its `runner`, whose runs are then counted once."""
        event = tally.event(self.plan.implementation.name, story, ended)
        runs, inside = (0, 0.0) if runner is None else (runner.log.runs, runner.log.seconds_inside)
        self.recorded.append(self._tried(event, runs, inside))
        self.record(event)
        if tally.failed is not None:
            self.record(self._counterexample(*tally.failed))

    def _counterexample(self, one: Trial, violation: Violation) -> CounterexampleEvent:
        again = [str(self.found.folder), "--target", self.plan.target, "--only", one.story.id]
        return counterexample_event(self.plan.implementation.name, one.story, one.layout, violation, vectors=again)


def _left_out(lacking: Sequence[Undeclared]) -> str:
    """Name what must be declared to try more layouts, most frequent first; shardings only if nothing else lacks."""
    others = [one for one in lacking if one.keyword != "sharding"]
    names = [name for name, _ in Counter(one.needs for one in others or lacking).most_common()]
    return f"not declared: {', '.join(names)}" if names else ""
