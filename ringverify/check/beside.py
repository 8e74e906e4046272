"""Look for hints on a failure whose cause is unknown: related properties, and the other tensor layout."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ringverify.cases.case import Case
from ringverify.cases.comparing import worst
from ringverify.cases.running import Observation, Runner
from ringverify.check.outside import why_not_outside
from ringverify.errors import Inconclusive
from ringverify.events import Hint
from ringverify.implementation import TensorLayout
from ringverify.properties.adversity import HAZARDS, PROGRESS
from ringverify.properties.buffers import INPUTS_UNTOUCHED
from ringverify.properties.property import Judgement, Property, Violation, all_tensors, judge_everything
from ringverify.properties.reentrancy import REENTRANCY
from ringverify.properties.uninitialised import UNINITIALISED
from ringverify.worlds.world import WorldUnavailable

NEIGHBOURS = (HAZARDS, PROGRESS, INPUTS_UNTOUCHED, UNINITIALISED, REENTRANCY)
"""Properties that are judged too on the failing case of another property, the most telling first."""

SECONDS = 3.0
"""Seconds for all of them together, and the deadline of each run; a run that has begun is not cut short."""

SHARED_STATE = (
    "An earlier case in the same process changes this result. Simulated ranks are threads of one process and share "
    "module globals: if your module caches its group or rank, declare processes=True"
)


def beside(property: Property, runner: Runner, watched: Runner | None, case: Case, violation: Violation) -> list[Hint]:
    """Return what else is wrong on a case that violates a property.

    Args:
        property: the violated property.
        runner: runs the implementation in its world.
        watched: runs it in a simulated world; `None` if it cannot be run in one.
        case: the failing case.
        violation: how the case violates the property.
    """
    until = time.monotonic() + SECONDS
    runner, watched = runner.within(SECONDS), None if watched is None else watched.within(SECONDS)
    return [*_layout(runner, case, violation), *_neighbours(property, runner, watched, case, violation, until)]


def _neighbours(
    property: Property, runner: Runner, watched: Runner | None, case: Case, violation: Violation, until: float
) -> Iterator[Hint]:
    """Yield the violations of related properties on the case, as far as they are news."""
    known = (violation.reason, *violation.also)
    right: bool | None = None  # whether the results are right in an ordinary run; `None`: not known yet
    for neighbour in NEIGHBOURS:
        there = watched if neighbour.simulated_only else runner
        if neighbour is property or there is None or neighbour.unsupported(runner.capabilities) is not None:
            continue
        if runner.world.name == "external" and why_not_outside(neighbour, runner.implementation) is not None:
            continue
        for variant in _unfriendly(case) if neighbour is HAZARDS else (case,):
            if time.monotonic() > until:
                return
            seen = _judged(neighbour, variant, there)
            if seen is None or seen.violation is None or seen.violation.reason in known:
                continue
            if seen.violation.kind == "deadline":  # the deadline is shorter here, so this says nothing
                return
            if seen.violation.kind in ("value", "raised"):  # news only if an ordinary run is right
                if right is None:
                    usual = _judged(None, case, runner)
                    right = usual is not None and usual.violation is None
                if not right:
                    continue
            found = seen.violation
            shared = f"; {found.cause}" if found.reason == ("hazard", "shared") else ""
            yield Hint(found.summary + shared, neighbour.id)
            break


def _unfriendly(case: Case) -> Sequence[Case]:
    """Return the case itself, and the case with blocking sends and delayed messages."""
    return (case, case.replace(transport="rendezvous", delayed="some"))


def _judged(property: Property | None, case: Case, runner: Runner) -> Judgement | None:
    """Judge a property on a case, or all results if it is `None`; `None` where nothing was learned."""
    try:
        return judge_everything(case, runner) if property is None else property.judge(case, runner)
    except (WorldUnavailable, Inconclusive):
        return None


def _layout(runner: Runner, case: Case, violation: Violation) -> Iterator[Hint]:
    """Yield a hint if an implementation that raises, or is wrong, gives right results in the other tensor layout."""
    c = runner.capabilities
    if violation.kind not in ("raised", "value"):
        return
    layout: TensorLayout = "bshd" if c.tensor_layout == "bhsd" else "bhsd"
    try:
        declared, other = (runner.run(case, gradients=c.gradients, layout=one) for one in (None, layout))
    except WorldUnavailable:
        return

    def right(seen: Observation) -> bool:
        return seen.failure is None and worst(case, c, seen, all_tensors(c))[1] is None

    if violation.kind == "raised" and declared.failure is None:
        return  # it does not raise in a single call, so the layout is not the cause
    if right(other) and not right(declared):
        yield Hint(f'The case is right where tensors are given as "{layout}": declare tensor_layout="{layout}"')
