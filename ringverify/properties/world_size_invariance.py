"""`world_size_invariance`: the same problem on another number of ranks has the same answer.

The results of two runs are compared with each other, not with the oracle's: an error in the oracle's answer cannot
hide a wrong result here.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ringref.rounding import margins
from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.comparing import RankComparison, allowed, finding_at, pipeline_of
from ringverify.cases.running import Observation, Runner, shards
from ringverify.cases.shapes import fitted
from ringverify.cases.strategies import WORLD_SIZES, Scope, affordable_world_sizes, cases, widest
from ringverify.events import TensorName
from ringverify.implementation import Capabilities
from ringverify.properties.property import Judgement, Property, Violation, all_tensors, violation_of
from ringverify.words import plural

Array = NDArray[np.float64]


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
    for observation in (here, there):
        if observation.failure is not None:
            return Judgement(0.0, violation_of(observation), here.digest)
    bounds = [allowed(x, pipeline_of(x, c, seen)) for x, seen in ((case, here), (other, there))]
    queries, keys = shards(case, c)
    largest, finding = 0.0, None
    for name in all_tensors(c):
        whole = _gathered(other, c, there, name)
        limit = getattr(bounds[0], name) + getattr(bounds[1], name)
        for rank, result in enumerate(here.ranks):
            actual = getattr(result, name)
            rows = keys[rank] if name in ("dk", "dv") else queries[rank]
            where = (slice(None), slice(None), rows) if name == "lse" else (slice(None), rows)
            margin = margins(actual, whole[where], limit[where], case.problem.dtype)
            top = float(margin.max(initial=0.0))
            if top > largest:
                largest = top
                pair = RankComparison(name, rank, rows, actual, whole[where], limit[where])
                found = finding_at(pair, margin)
                finding = found if top > 1 else None
    violation = None
    if finding is not None:
        on = [f"{finding.tensor} on {size} {plural('rank', size)}" for size in (case.world_size, other.world_size)]
        summary = f"{on[0]} differs from {on[1]}, which is shown as the expected value"
        violation = Violation(("differs", finding.tensor), finding.rank, summary, "", finding)
    return Judgement(largest, violation, here.digest)


def _gathered(case: Case, c: Capabilities, observation: Observation, name: TensorName) -> Array:
    """Assemble one result of all ranks into a tensor over all positions, in canonical layout."""
    queries, keys = shards(case, c)
    rows_of = keys if name in ("dk", "dv") else queries
    p = case.problem
    length = p.nk if name in ("dk", "dv") else p.nq
    axis = 2 if name == "lse" else 1
    first = getattr(observation.ranks[0], name)
    shape = list(first.shape)
    shape[axis] = length
    whole = np.zeros(shape)
    for rank, result in enumerate(observation.ranks):
        whole[(slice(None),) * axis + (rows_of[rank],)] = getattr(result, name)
    return whole


def _one_world(c: Capabilities) -> str | None:
    sizes = affordable_world_sizes(c, WORLD_SIZES)
    return None if len(sizes) > 1 else f"runs on world size {', '.join(map(str, sizes))} only"


def _cases(c: Capabilities) -> st.SearchStrategy[Case]:
    """Draw cases whose shapes fit the smallest other world size too."""
    sizes = sorted(affordable_world_sizes(c, WORLD_SIZES))

    def fit(case: Case) -> Case:
        return fitted(case, c, worlds=[size for size in sizes if size != case.world_size][:1])

    return cases(c, Scope(dtypes=widest(c))).map(fit)


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
