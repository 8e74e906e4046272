"""The suite `scale`: one run of one problem at the length that is asked for, verified where its results lie."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import get_args

from ringverify.cases.case import Case
from ringverify.check.baseline import Baseline, expected
from ringverify.check.options import Options, Subject, Unavailable
from ringverify.check.outcome import (
    ImplementationOutcome,
    TriedProperty,
    footer_event,
    implementation_event,
    unavailable,
)
from ringverify.check.planning import RunPlan, find_device, planned
from ringverify.check.run import header, named_apart
from ringverify.errors import UsageError
from ringverify.events import Event
from ringverify.properties.memory import MEMORY
from ringverify.properties.suites import Method
from ringverify.reports.progress import Progress
from ringverify.scale.checked import Checked
from ringverify.scale.estimating import growth_of, refuse_growth, refuse_too_long
from ringverify.scale.growth import Growth
from ringverify.scale.memory import memory
from ringverify.scale.request import ScaleRequest, cases_of
from ringverify.scale.trials import Trials, open_fast
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.processes.torchrun import Crew
from ringverify.worlds.world import World


def check_scale(
    subjects: Sequence[Subject | Unavailable],
    options: Options,
    asked: ScaleRequest,
    tell: Callable[[Event], None],
    progress: Progress,
    crew: Crew | None = None,
) -> int:
    """Check implementations at length, report the results event by event, and return the exit code.

    Raises:
        UsageError: options contradict what an implementation declares, or the length does not fit into memory.
        Inconclusive: the device or the world asked for does not exist here.
    """
    named = named_apart(subject.implementation for subject in subjects if isinstance(subject, Subject))
    find_device(options.device)
    tried: list[Unavailable | tuple[RunPlan, list[Case], Growth | None]] = []
    for subject in subjects:
        if isinstance(subject, Unavailable):
            tried.append(subject)
            continue
        plan = planned(
            subject.target, subject.implementation, world=options.world, world_sizes=options.world_sizes, crew=crew
        )
        if plan.world == "external":
            raise UsageError(
                f"{subject.target}: a program makes its own ranks, and --suite scale needs ours; leave it out"
            )
        cases, growth = cases_of(plan, asked, options, crew), None
        for case in cases:
            here = case.world_size if crew is None else crew.here
            refuse_too_long(case, plan, here)
            with contextlib.closing(_world(plan, crew)) as world:
                growth = growth_of(Trials(plan, world, options, progress), case, here)
            if growth is not None:
                refuse_growth(case, plan, growth)
        tried.append((plan, cases, growth))
    tell(header(options))
    outcomes = []
    for one in tried:
        if isinstance(one, Unavailable):
            outcomes.append(_told([unavailable(one.target, one.reason)], one.target, 1, options, tell))
            continue
        plan, cases, growth = one
        with contextlib.closing(_world(plan, crew)) as world:
            trials = Trials(plan, world, options, progress)
            trials.grown = growth
            checked = Checked(trials, asked.length)
            tries = {name: partial(checked.by, name) for name in get_args(Method)} | {
                MEMORY.id: partial(memory, trials)
            }
            found = (tries[property](cases) for property in asked.properties)
            outcomes.append(_told(found, plan.implementation.name, len(asked.properties), options, tell))
        if options.stop_early and outcomes[-1].exit_code == 1:
            break
    elsewhere = [] if options.baseline is None else options.baseline.elsewhere(named)
    footer = footer_event(outcomes, baseline=options.baseline is not None, elsewhere=elsewhere)
    tell(footer)
    return footer.exit_code


def _world(plan: RunPlan, crew: Crew | None) -> World:
    return open_fast(plan.world) if crew is None else GlooWorld(crew)


def _told(
    results: Iterable[TriedProperty], name: str, asked: int, options: Options, tell: Callable[[Event], None]
) -> ImplementationOutcome:
    """Report results as they come, and then the verdict on an implementation."""
    began, found = time.monotonic(), []
    for one in results:
        found.append(one if options.baseline is None else _known(one, options.baseline))
        for event in found[-1].outcome.events:
            tell(event)
        if options.stop_early and found[-1].verdict.is_new_violation():
            break
    tell(implementation_event(found, implementation=name, asked=asked, seconds=time.monotonic() - began))
    return ImplementationOutcome.of([one.verdict for one in found])


def _known(one: TriedProperty, baseline: Baseline) -> TriedProperty:
    """Return a result with what the baseline says of it."""
    verdict = expected(one.verdict, baseline)
    return dataclasses.replace(one, outcome=dataclasses.replace(one.outcome, verdict=verdict))
