"""`subgroups`: the ring is part of a larger world, whose other ranks are busy with a ring of their own."""

from __future__ import annotations

from ringverify.cases.strategies import Scope, cases, widest, within
from ringverify.implementation import Capabilities
from ringverify.properties.property import Property, judge_everything, needs


def _scope(c: Capabilities) -> Scope:
    return Scope(dtypes=widest(c), world_sizes=(1, 2, 3, 4), groups=("offset", "strided"))


SUBGROUPS = Property(
    id="subgroups",
    meaning=(
        "on a subgroup of the ranks (offset or strided) results are right, and nothing that it sends reaches the other "
        "ranks"
    ),
    examples=80,
    cases=lambda c: cases(c, _scope(c)),
    judge=judge_everything,
    unsupported=needs("subgroups"),
    applies=lambda case, c: within(case, c, _scope(c)),
)
