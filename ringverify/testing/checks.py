"""Check implementations in one pytest process, one property at a time; their worlds stay open in between."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ringverify.check.budget import Budget
from ringverify.check.casefile import look_at
from ringverify.check.jobs import Jobs
from ringverify.check.options import Options, Subject
from ringverify.check.outcome import TriedProperty
from ringverify.check.planning import RunPlan, find_device, open_world, planned
from ringverify.check.run import ImplementationRun, not_side_by_side
from ringverify.implementation import Implementation
from ringverify.interrupts import interrupts
from ringverify.properties.property import Property
from ringverify.reports.progress import HIDDEN
from ringverify.testing.conformance import reached
from ringverify.testing.undisturbed import undisturbed

MOST_WARM = 2
"""Largest number of implementations whose worlds stay open: each world is one process or more with torch imported."""


@dataclasses.dataclass(frozen=True)
class PlannedChecks:
    """One implementation with all that is asked of it.

    Attributes:
        key: identifies it among those of this session.
        plan: what is run in which world.
        options: the options of its runs.
        asked: how many of its properties are to be tried.
    """

    key: str
    plan: RunPlan
    options: Options
    asked: int


def plan_for(subject: Subject, options: Options) -> RunPlan:
    """Plan the runs of an implementation; refuse here, rather than in the middle of a run, what cannot run.

    Raises:
        UsageError: what is asked for contradicts what the implementation declares, or the folder cannot be written.
        Inconclusive: the device or the world asked for does not exist here.
    """
    plan = planned(
        subject.target, subject.implementation, world=options.world, world_sizes=options.world_sizes, crew=None
    )
    find_device(options.device)
    look_at(options.cases)
    not_side_by_side([plan], options.jobs)
    return plan


class Checks:
    """Tries properties, and keeps the worlds of a few implementations open.

    Args:
        folder: the working directory that targets and files are relative to, whatever a test changes.
        expected: how many properties are going to be tried, among which the time is shared.
    """

    def __init__(self, folder: Path, expected: int) -> None:
        self._folder = folder
        self._expected = expected
        self._budgets: dict[float | None, Budget] = {}
        self._targets: dict[str, str] = {}
        self._runs: dict[str, ImplementationRun] = {}
        self._warm: list[str] = []
        self._jobs: dict[int | None, Jobs] = {}

    def of(self, key: str, implementation: Implementation, options: Options, *, asked: int) -> PlannedChecks:
        """Plan the checks of an implementation object, such as one of a decorated test.

        Raises:
            UsageError: no other process could import it, or what is asked for contradicts what it declares.
            Inconclusive: no other process could be started, or the device or the world does not exist here.
        """
        with undisturbed(self._folder):
            if key not in self._targets:
                self._targets[key] = reached(implementation, options.load_deadline)
            target = self._targets[key]
            return PlannedChecks(f"{key} {target}", plan_for(Subject(target, implementation), options), options, asked)

    def try_property(self, one: PlannedChecks, property: Property) -> TriedProperty:
        """Try a property, and return what came of it."""
        with undisturbed(self._folder), interrupts():
            run = self._run(one)
            run.share_out([property])
            return run.try_property(property)

    def close(self) -> None:
        """End all worlds."""
        for key in self._warm:
            self._runs[key].close()
        self._warm.clear()
        for jobs in self._jobs.values():
            jobs.close()

    def _run(self, one: PlannedChecks) -> ImplementationRun:
        if one.key not in self._runs:
            seconds = one.options.time_budget
            budget = self._budgets.setdefault(seconds, Budget(seconds, self._expected))
            jobs = self._jobs.setdefault(one.options.jobs, Jobs(one.options.jobs, HIDDEN))
            self._runs[one.key] = ImplementationRun(
                one.plan, open_world(one.plan.world), one.options, budget, lambda event: None, HIDDEN, jobs
            )
        self._warm = [*(key for key in self._warm if key != one.key), one.key]
        while len(self._warm) > MOST_WARM:
            self._runs[self._warm.pop(0)].close()  # its world starts again when it is needed again
        return self._runs[one.key]
