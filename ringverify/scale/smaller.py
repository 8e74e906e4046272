"""Whether a fault at length shows at small size too, and which case the ordinary suite then finds."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ringverify.cases.case import Case
from ringverify.cases.comparing import worst
from ringverify.cases.running import Runner
from ringverify.check.budget import Budget
from ringverify.check.hunting import hunt
from ringverify.check.planning import open_world
from ringverify.check.run import usual_deadline
from ringverify.events import TensorName
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.suites import Method
from ringverify.scale.comparison import EVERY
from ringverify.scale.finding import saved
from ringverify.scale.trials import Trials
from ringverify.worlds.world import WorldUnavailable

SMALL = (64, 512)
"""Lengths of the ordinary suite at which a fault is looked for again."""
SEARCH_SECONDS = 10.0
"""For the search of a smaller case, of one property."""
ORDINARY = dict(zip(EVERY, ("forward", "lse", *["gradients"] * 4), strict=True))
"""The property of the ordinary suites that compares a result."""


class Smaller(NamedTuple):
    """What was found below the length.

    Attributes:
        text: it, in words.
        property: the property of the ordinary suite whose search found a case, if it did.
        file: the file of that case.
    """

    text: str
    property: str | None = None
    file: str | None = None


def smaller(trials: Trials, method: Method, case: Case, tensors: Sequence[TensorName]) -> Smaller:
    """Say whether the fault shows at small lengths of the problem, and which case the ordinary suite then finds.

    If it does not, the length is halved until the suite lets it pass too.
    """
    shows, needs = case.problem.nq, 0
    with contextlib.closing(open_world("simulated")) as world:
        runner = Runner(
            trials.plan.implementation, world, target=trials.plan.target, deadline=usual_deadline("simulated")
        )
        for length in () if trials.capabilities.processes else SMALL:
            small = trials.shorter(case, length)
            if small is None:
                continue
            try:
                observation = runner.run(small, gradients=trials.capabilities.gradients)
            except WorldUnavailable:
                break
            if observation.failure is None and worst(small, trials.capabilities, observation, EVERY)[1] is None:
                needs = length
                continue
            found = _shrunk(trials, runner, tensors)
            return found._replace(text=f"it shows at {length} positions too{found.text}")
    while (half := trials.shorter(case, shows // 2)) is not None and half.problem.nq > needs:
        with contextlib.suppress(WorldUnavailable):
            run, _ = trials.run(method, half)
            if run.failure is None and any(report.differences for report in run.results):
                shows = half.problem.nq
                continue
            needs = half.problem.nq if run.failure is None else needs
        break
    least = f"it needs more than {needs:,} positions" if needs else "at small lengths it was not tried"
    return Smaller(least if shows == case.problem.nq else f"it shows at {shows:,} positions too; {least}")


def _shrunk(trials: Trials, runner: Runner, tensors: Sequence[TensorName]) -> Smaller:
    """Say which case the search of the ordinary suite finds and shrinks, for the first result that is wrong."""
    for name in dict.fromkeys(ORDINARY[tensor] for tensor in tensors):
        property = PROPERTIES[name]
        if property.unsupported(trials.capabilities) is None:
            hunted = hunt(
                property,
                runner.for_another_property(),
                examples=property.examples,
                seed=trials.options.seed,
                share=Budget(SEARCH_SECONDS, 1).share(),
                progress=lambda _: None,
            )
            if (found := hunted.counterexample) is not None:
                again = ["ringverify", "check", trials.plan.target, "--only", name]
                path, _ = saved(trials, name, found, "simulated")
                if path is not None:
                    again = ["ringverify", "replay", path]
                text = f": {found.case.describe()} is a smaller case of it, which `{shlex.join(again)}` shows"
                return Smaller(text, name, path if found.violation.failure is None else None)
    return Smaller(", and the ordinary suite finds no smaller case")
