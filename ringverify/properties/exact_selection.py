"""`exact_selection`: inputs whose right answer is an integer, compared bit for bit in every dtype.

Each query selects one key, and a key that the mask forbids would score higher. There is no tolerance in which a fault
could hide: a leaking mask, a dropped key, a wrong position or a value of another rank changes an integer.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ringverify.cases.case import Case
from ringverify.cases.choices import Choices, Maker
from ringverify.cases.comparing import Right, allowed, answer, pipeline_of, worst
from ringverify.cases.inputs import MOST_KEYS, selectable
from ringverify.cases.running import Runner
from ringverify.cases.shapes import fitted, length_unit
from ringverify.cases.strategies import WORLD_SIZES, Scope, affordable_world_sizes, cases
from ringverify.events import TensorName
from ringverify.implementation import Capabilities, sharding_name
from ringverify.properties.property import Judgement, Property, Violation, failed


def _judge(case: Case, runner: Runner) -> Judgement:
    c = runner.capabilities
    observation = runner.run(case, gradients=c.gradients)
    if (judgement := failed(observation)) is not None:
        return judgement
    tensors: tuple[TensorName, ...] = ("out", "dv") if c.gradients else ("out",)
    # One exponential of a row is exactly 1 and all others are exactly 0, so the oracle's own answer is the integer.
    exact = {name: np.round(getattr(answer(case), name)) for name in tensors}
    bound = allowed(case, pipeline_of(case, c, observation))
    bound = dataclasses.replace(bound, **{name: np.zeros_like(integers) for name, integers in exact.items()})
    margin, finding = worst(case, c, observation, tensors, Right(bound, **exact))
    if finding is None:
        return Judgement(margin, None, observation.digest)
    summary = f"{finding.tensor} on rank {finding.rank} is not exactly the integers that the selected keys give"
    violation = Violation(("inexact", finding.tensor), finding.rank, summary, "", finding)
    return Judgement(margin, violation, observation.digest)


def _selects(case: Case, c: Capabilities) -> bool:
    """Whether each query selects one key: nothing is exact otherwise."""
    return case.values == "selectors" and selectable(case)


def _cases(c: Capabilities) -> Maker[Case]:
    """Make cases with a head dimension for every key, and without scale, softcap or shared dilation (not exact)."""
    any_shapes = cases(c, Scope(values=("selectors",), world_sizes=_sizes(c), longest=16))

    def make(choices: Choices) -> Case:
        case = any_shapes(choices)
        p = case.problem
        dilation = p.dilation if p.dilation is None or p.dilation.heads == "split" else None
        width = max(p.nk, p.head_dim)
        value_dim = p.dv if c.value_dim else None
        plain = case.replace(scale=None, softcap=None, dilation=dilation, head_dim=width, value_dim=value_dim)
        return fitted(plain, c)

    return make


def _sizes(c: Capabilities) -> tuple[int, ...]:
    """World sizes on which one key per rank, and the required length unit, fit in the largest possible head_dim."""
    return tuple(size for size in affordable_world_sizes(c, WORLD_SIZES) if _shortest(c, size) <= _widest_head(c))


def _shortest(c: Capabilities, size: int) -> int:
    """Return the smallest number of keys that is tried on a world: one per rank, and what every sharding requires."""
    return max(size, *(length_unit(c, sharding_name(sharding), size) for sharding in c.shardings))


def _widest_head(c: Capabilities) -> int:
    return MOST_KEYS if c.head_dims is None else min(MOST_KEYS, c.head_dims[-1])


def _too_narrow(c: Capabilities) -> str | None:
    if _sizes(c):
        return None
    shortest = min(_shortest(c, size) for size in affordable_world_sizes(c, WORLD_SIZES))
    return (
        f"needs a head_dim of at least the number of keys: the largest possible head_dim is {_widest_head(c)}, the "
        f"smallest possible number of keys {shortest}"
    )


EXACT_SELECTION = Property(
    id="exact_selection",
    meaning="where each query selects one key, out and dv are exactly the right integers, in every dtype",
    examples=120,
    cases=_cases,
    judge=_judge,
    unsupported=_too_narrow,
    applies=_selects,
    results=("out", "dv"),
)
