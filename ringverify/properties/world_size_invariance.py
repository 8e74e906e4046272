"""`world_size_invariance`: the same problem on another number of ranks has the same answer.

The results of two runs are compared with each other, not with the oracle's: an error in the oracle's answer cannot
hide a wrong result here. Results that are wrong alike, but for their rounding, are the business of other properties.
"""

from __future__ import annotations

from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.choices import Choices, Maker
from ringverify.cases.comparing import allowed, allowed_between, answer, gathered, other_run, pipeline_of, worst
from ringverify.cases.running import Runner
from ringverify.cases.shapes import fitted
from ringverify.cases.strategies import WORLD_SIZES, Scope, affordable_world_sizes, cases, widest
from ringverify.implementation import Capabilities
from ringverify.properties.property import Judgement, Property, Violation, all_tensors, failed
from ringverify.words import plural


def other_world(case: Case, c: Capabilities) -> Case | None:
    """Return the case on the smallest other world size that the implementation supports, or `None` if there is none."""
    for size in affordable_world_sizes(c, WORLD_SIZES):
        other = case.replace(world_size=size)
        if size != case.world_size and why_unsupported(other, c) is None:
            return other
    return None


def _judge(case: Case, runner: Runner) -> Judgement:
    c = runner.capabilities
    other = other_world(case, c)
    assert other is not None  # or the case does not apply
    here, there = (runner.run(x, gradients=c.gradients) for x in (case, other))
    if (judgement := failed(here, there)) is not None:
        return judgement
    runs = ((case, here), (other, there))
    pipelines = [pipeline_of(x, c, seen) for x, seen in runs]
    bound = allowed_between(*(allowed(x, pipeline) for (x, _), pipeline in zip(runs, pipelines, strict=True)))
    names = all_tensors(c)
    ours, theirs = ({name: gathered(x, c, seen, name) for name in names} for x, seen in runs)
    right = other_run(ours, theirs, answer(case), bound, pipelines[0])
    margin, finding = worst(case, c, here, names, right)
    violation = None
    if finding is not None:
        on = [f"{finding.tensor} on {size} {plural('rank', size)}" for size in (case.world_size, other.world_size)]
        summary = f"{on[0]} differs from {on[1]}, which is shown as the expected value"
        violation = Violation(("differs", finding.tensor), finding.rank, summary, "", finding)
    return Judgement(margin, violation, here.digest)


def _one_world(c: Capabilities) -> str | None:
    sizes = affordable_world_sizes(c, WORLD_SIZES)
    return None if len(sizes) > 1 else f"runs on world size {', '.join(map(str, sizes))} only"


def _cases(c: Capabilities) -> Maker[Case]:
    """Make cases whose shapes fit the smallest other world size too."""
    sizes = sorted(affordable_world_sizes(c, WORLD_SIZES))
    any_shapes = cases(c, Scope(dtypes=widest(c)))

    def make(choices: Choices) -> Case:
        case = any_shapes(choices)
        return fitted(case, c, worlds=[size for size in sizes if size != case.world_size][:1])

    return make


WORLD_SIZE_INVARIANCE = Property(
    id="world_size_invariance",
    meaning="the same problem on another number of ranks has the same answer (no oracle involved)",
    examples=60,
    cases=_cases,
    judge=_judge,
    unsupported=_one_world,
    applies=lambda case, c: other_world(case, c) is not None,
    compared=lambda case, c: [one for one in (case, other_world(case, c)) if one is not None],
)
