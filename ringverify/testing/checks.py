"""Implementations under check in one process of pytest, a property at a time; their worlds stay warm in between."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ringverify.check.budget import Budget
from ringverify.check.casefile import look_at
from ringverify.check.interrupts import interrupts
from ringverify.check.options import Options, Subject
from ringverify.check.outcome import TriedProperty
from ringverify.check.planning import RunPlan, find_device, open_world, planned
from ringverify.check.run import ImplementationRun
from ringverify.implementation import Implementation
from ringverify.properties.property import Property
from ringverify.testing.conformance import reached
from ringverify.testing.undisturbed import undisturbed
from ringverify.testing.unwatched import Unwatched

MOST_WARM = 2
"""Runs whose worlds are kept: each world is a process, or several, that has imported torch."""


@dataclasses.dataclass(frozen=True)
class PlannedChecks:
    """One implementation with all that is asked of it.

    Attributes:
        key: what tells it from others of this run.
        plan: what is run where.
        options: what was asked for.
        asked: how many properties.
    """

    key: str
    plan: RunPlan
    options: Options
    asked: int


def plan_for(subject: Subject, options: Options) -> RunPlan:
    """What is run where; refused here rather than in the middle of a run.

    Raises:
        UsageError: what is asked for contradicts what the implementation declares, or the folder cannot be written.
        Inconclusive: the device or the world asked for does not exist here.
    """
    plan = planned(
        subject.target, subject.implementation, world=options.world, world_sizes=options.world_sizes, crew=None
    )
    find_device(options.device)
    look_at(options.cases)
    return plan


class Checks:
    """Tries properties.

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

    def of(self, key: str, implementation: Implementation, options: Options, *, asked: int) -> PlannedChecks:
        """An implementation that is at hand, with what is asked of it.

        Raises:
            UsageError: no other process could find it, or it declares something else than is asked for.
            Inconclusive: no other process could be asked for it, or what it is to run on does not exist here.
        """
        with undisturbed(self._folder):
            if key not in self._targets:
                self._targets[key] = reached(implementation, options.load_deadline)
            target = self._targets[key]
            return PlannedChecks(f"{key} {target}", plan_for(Subject(target, implementation), options), options, asked)

    def try_property(self, one: PlannedChecks, property: Property) -> TriedProperty:
        """Try a property, and say what came of it."""
        with undisturbed(self._folder), interrupts() as look:
            run = self._run(one)
            run.progress = Unwatched(look)
            return run.try_property(property)

    def close(self) -> None:
        """End all worlds."""
        for key in self._warm:
            self._runs[key].close()
        self._warm.clear()

    def _run(self, one: PlannedChecks) -> ImplementationRun:
        if one.key not in self._runs:
            seconds = one.options.time_budget
            budget = self._budgets.setdefault(seconds, Budget(seconds, self._expected))
            self._runs[one.key] = ImplementationRun(
                one.plan, open_world(one.plan.world), one.options, budget, lambda event: None, Unwatched()
            )
        self._warm = [*(key for key in self._warm if key != one.key), one.key]
        while len(self._warm) > MOST_WARM:
            self._runs[self._warm.pop(0)].close()  # it starts again when it is needed again
        return self._runs[one.key]
