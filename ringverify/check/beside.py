"""What is found beside a failure that has no cause yet: hazards, neighbouring properties, another layout, the world."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ringverify.cases.case import Case
from ringverify.cases.comparing import worst
from ringverify.cases.running import Runner
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
"""Properties that a case of another one is tried on, those that see most first."""

SECONDS = 3.0
"""Time for all of them, and for each run; the run that is under way then is the last."""

SHARED_STATE = (
    "What one case leaves behind changes the next. Ranks of the simulated world are threads of one process and share "
    "what a module keeps: a module that caches its group or rank has to declare processes=True"
)


def beside(property: Property, runner: Runner, watched: Runner | None, case: Case, violation: Violation) -> list[Hint]:
    """What else is wrong on a case that breaks a property.

    Args:
        property: the property.
        runner: the implementation in its world.
        watched: the implementation in a simulated world, if it can be run in one.
        case: the case.
        violation: how it breaks the property.
    """
    until = time.monotonic() + SECONDS
    runner, watched = runner.within(SECONDS), None if watched is None else watched.within(SECONDS)
    return [*_layout(runner, case, violation), *_neighbours(property, runner, watched, case, violation, until)]


def _neighbours(
    property: Property, runner: Runner, watched: Runner | None, case: Case, violation: Violation, until: float
) -> Iterator[Hint]:
    """What the neighbouring properties say of the case, where that is more than what is known."""
    known = (violation.reason, *violation.also)
    right: bool | None = None  # whether the case is right when it is run as usual
    for neighbour in NEIGHBOURS:
        there = watched if neighbour.simulated_only else runner
        if neighbour is property or there is None or neighbour.unsupported(runner.capabilities) is not None:
            continue
        for variant in _unfriendly(case) if neighbour is HAZARDS else (case,):
            if time.monotonic() > until:
                return
            seen = _judged(neighbour, variant, there)
            if seen is None or seen.violation is None or seen.violation.reason in known:
                continue
            if seen.violation.kind == "deadline":  # which is shorter here than anywhere else
                return
            if seen.violation.kind in ("value", "raised"):  # news only where nothing is wrong as usual
                if right is None:
                    usual = _judged(None, case, runner)
                    right = usual is not None and usual.violation is None
                if not right:
                    continue
            yield Hint(seen.violation.summary, neighbour.id)
            break


def _unfriendly(case: Case) -> Sequence[Case]:
    """The case as it is, and where sends wait for receives and messages are held back."""
    return (case, case.replace(transport="rendezvous", delayed="some"))


def _judged(property: Property | None, case: Case, runner: Runner) -> Judgement | None:
    """What a property says of a case, or all values together; `None` where nothing was learned."""
    try:
        return judge_everything(case, runner) if property is None else property.judge(case, runner)
    except (WorldUnavailable, Inconclusive):
        return None


def _layout(runner: Runner, case: Case, violation: Violation) -> Iterator[Hint]:
    """Whether an implementation that raises is right when it is given the other layout."""
    c = runner.capabilities
    if violation.kind != "raised":
        return
    layout: TensorLayout = "bshd" if c.tensor_layout == "bhsd" else "bhsd"
    try:
        if runner.run(case, gradients=c.gradients).failure is None:
            return  # a single call is right as it is
        observation = runner.run(case, gradients=c.gradients, layout=layout)
    except WorldUnavailable:
        return
    if observation.failure is None and worst(case, c, observation, all_tensors(c))[1] is None:
        yield Hint(f'The case is right where tensors are given as "{layout}": declare tensor_layout="{layout}"')
