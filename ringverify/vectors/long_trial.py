"""Try one long vector on one implementation: every rank makes its shard, and sums of results are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringverify.cases.case import why_unsupported
from ringverify.check.planning import RunPlan
from ringverify.events import Verdict
from ringverify.properties.property import Violation
from ringverify.scale.rank import verify
from ringverify.scale.task import LongTask, RankReport
from ringverify.scale.trials import SECONDS
from ringverify.targets import from_anywhere, load
from ringverify.vectors import long
from ringverify.vectors.story import Layout
from ringverify.worlds.limits import sentence
from ringverify.worlds.world import Load, World, WorldUnavailable


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongTrial:
    """How a long vector went on an implementation; without a layout it was not run."""

    verdict: Verdict
    reason: str | None = None
    layout: Layout | None = None
    margin: float | None = None
    violation: Violation | None = None
    seconds: float = 0.0
    seconds_inside: float = 0.0


def try_at_length(
    described: Mapping[str, Any], plan: RunPlan, world: World, device: str, loading: Callable[..., Any]
) -> LongTrial:
    """Run a long vector in the first of its layouts that is declared, in the widest dtype that is."""
    vector, c = long.of(described), plan.implementation.capabilities
    dtype = next((dtype for dtype in long.DTYPES if dtype in c.dtypes), None)
    if dtype is None or plan.world == "external":
        lacks = "a program makes its own ranks" if dtype else f"not declared: {' or '.join(long.DTYPES)}"
        return LongTrial(verdict="unsupported", reason=lacks)
    lacking = []
    for layout in vector.layouts:
        case, gradients = vector.case(layout, dtype), c.gradients
        if case.cotangent != "out" and not (c.lse_gradient and gradients):
            case, gradients = case.replace(cotangent="out"), False
        undeclared = why_unsupported(case, c)
        if undeclared is None:
            break
        lacking.append(undeclared.needs)
    else:
        return LongTrial(verdict="unsupported", reason=f"not declared: {', '.join(dict.fromkeys(lacking))}")
    golden = long.golden(described, dtype)
    task = LongTask(from_anywhere(plan.target), case, "checksums", device, golden=golden, gradients=gradients)
    try:
        run = world.run(
            verify,
            task,
            world_size=case.world_size,
            seed=case.schedule,
            deadline=SECONDS,
            load=Load(task.target, load, told=loading),
        )
    except WorldUnavailable as error:
        return LongTrial(verdict="inconclusive", reason=str(error), layout=layout)
    if (failure := run.failure) is not None:
        if failure.kind in ("died", "deadline") or failure.limit is not None:
            why = failure.message if failure.limit is None else f"{sentence(failure.limit)}: {failure.message}"
            return LongTrial(verdict="inconclusive", reason=why, layout=layout)
        wrong = Violation((failure.kind,), failure.rank, failure.message, failure.detail, failure=failure)
        return LongTrial(verdict="fail", layout=layout, violation=wrong)
    reports: Sequence[RankReport] = run.results
    worst = next(iter(reports[0].differences), None)
    margin = max(reports[0].margins.values())
    seconds = [max(of) for of in zip(*((one.inside[0], one.verifying[0]) for one in reports), strict=True)]
    violation = None
    if worst is not None:
        summary = f"{worst.identity}, where {worst.allowed:.3g} is allowed"
        violation = Violation(("value", worst.tensor), None, summary)
    return LongTrial(
        verdict="pass" if violation is None else "fail",
        layout=layout,
        margin=margin,
        violation=violation,
        seconds=sum(seconds),
        seconds_inside=seconds[0],
    )
