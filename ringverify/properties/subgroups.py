"""`subgroups`: the ring is part of a larger world, whose other ranks are busy with a ring of their own."""

from __future__ import annotations

from ringverify.cases.strategies import Scope, cases, widest, within
from ringverify.implementation import Capabilities
from ringverify.properties.property import Property, judge_everything


def _scope(c: Capabilities) -> Scope:
    return Scope(dtypes=widest(c), world_sizes=(1, 2, 3, 4), groups=("offset", "strided"))


def _without_subgroups(c: Capabilities) -> str | None:
    return None if c.subgroups else "subgroups=True is not declared"


SUBGROUPS = Property(
    id="subgroups",
    meaning="on an offset or strided part of the ranks the answer is the same, and the other ranks are left alone",
    examples=80,
    cases=lambda c: cases(c, _scope(c)),
    judge=judge_everything,
    unsupported=_without_subgroups,
    applies=lambda case, c: within(case, c, _scope(c)),
)
