"""`subgroups`: the ring is part of a larger world, whose other ranks are busy with a ring of their own."""

from __future__ import annotations

from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.cases.strategies import Scope, cases, widest
from ringverify.implementation import Capabilities
from ringverify.properties.property import Judgement, Property, all_tensors, judge_values


def _judge(case: Case, runner: Runner) -> Judgement:
    return judge_values(case, runner, all_tensors(runner.capabilities), gradients=runner.capabilities.gradients)


def _without_subgroups(c: Capabilities) -> str | None:
    return None if c.subgroups else "subgroups=True is not declared"


SUBGROUPS = Property(
    id="subgroups",
    meaning="on an offset or strided part of the ranks the answer is the same, and the other ranks are left alone",
    examples=80,
    cases=lambda c: cases(c, Scope(dtypes=widest(c), world_sizes=(1, 2, 3, 4), groups=("offset", "strided"))),
    judge=_judge,
    unsupported=_without_subgroups,
)
