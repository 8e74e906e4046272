"""Oracles that are wrong on purpose, each in one known way: every witness has to reject those that it can see.

Each is a function `(problem, inputs) -> results` beside a problem on which it is wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from unittest import mock

import numpy as np
from comparing import oracle
from drawing import Inputs

import ringref.pattern
from ringref.problem import Dilation, Problem

Oracle = Callable[[Problem, Inputs], dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A wrong oracle and a problem that shows it."""

    answer: Oracle
    problem: Problem


def _with_pattern(change: Callable[[Problem], np.ndarray]) -> Oracle:
    def answer(problem: Problem, inputs: Inputs) -> dict[str, np.ndarray]:
        with mock.patch("ringref.attention.multiplicity", change):
            return oracle(problem, inputs)

    return answer


def _with_results(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Oracle:
    return lambda problem, inputs: change(oracle(problem, inputs))


def _top_left(problem: Problem) -> np.ndarray:
    i, j = np.arange(problem.nq)[:, None], np.arange(problem.nk)[None, :]
    return ringref.pattern.multiplicity(problem.replace(causal=False)) * (j <= i)


PLAIN = Problem(query_length=5, key_length=5, heads=2, head_dim=3)
CROSS = Problem(query_length=4, key_length=6, heads=2, head_dim=3, causal=True)
TWICE = Problem(
    query_length=6, heads=2, head_dim=3, dilation=Dilation(((6, 1), (3, 1)), heads="shared", head_offset="cyclic")
)

WRONG: dict[str, Wrong] = {
    "causal aligned top-left": Wrong(_with_pattern(_top_left), CROSS),
    "causal leaks one key": Wrong(
        _with_pattern(lambda problem: ringref.pattern.multiplicity(problem.replace(causal=False, window=(None, 1)))),
        PLAIN.replace(causal=True),
    ),
    "window one too wide": Wrong(
        _with_pattern(lambda problem: ringref.pattern.multiplicity(problem.replace(window=(3, 1)))),
        PLAIN.replace(window=(2, 1)),
    ),
    "documents ignored": Wrong(
        _with_pattern(lambda problem: ringref.pattern.multiplicity(problem.replace(documents=None))),
        PLAIN.replace(documents=(0, 2, 2, 5)),
    ),
    "multiplicity ignored": Wrong(
        _with_pattern(lambda problem: np.minimum(ringref.pattern.multiplicity(problem), 1)), TWICE
    ),
    "softcap ignored": Wrong(
        lambda problem, inputs: oracle(problem.replace(softcap=None), inputs), PLAIN.replace(softcap=2.0)
    ),
    "scale 1 / D": Wrong(lambda problem, inputs: oracle(problem.replace(scale=1 / problem.head_dim), inputs), PLAIN),
    "lse in base 2": Wrong(
        _with_results(lambda answer: {**answer, "lse": answer["lse"] / math.log(2)}), PLAIN.replace(causal=True)
    ),
    "lse 0 where empty": Wrong(
        _with_results(lambda answer: {**answer, "lse": np.nan_to_num(answer["lse"], neginf=0.0)}),
        PLAIN.replace(key_lengths=(0,)),
    ),
    "dlse ignored": Wrong(
        lambda problem, inputs: oracle(problem, dataclasses.replace(inputs, dlse=np.zeros_like(inputs.dlse))), PLAIN
    ),
    "dk and dv swapped": Wrong(_with_results(lambda answer: {**answer, "dk": answer["dv"], "dv": answer["dk"]}), PLAIN),
    "dq not scaled": Wrong(_with_results(lambda answer: {**answer, "dq": answer["dq"] * math.sqrt(3)}), PLAIN),
}
