"""`forward`, `lse`, `gradients`, `lse_gradient`: each result equals the oracle's on every rank."""

from __future__ import annotations

from functools import partial

from ringverify.cases.comparing import GRADIENTS
from ringverify.cases.strategies import Scope, cases, widest, within
from ringverify.implementation import Capabilities
from ringverify.properties.property import Property, always, judge_values, needs


def _of_lse(c: Capabilities) -> Scope:
    return Scope(dtypes=widest(c), cotangents=("both", "lse"))


def _without_gradients(c: Capabilities) -> str | None:
    return None if c.gradients else "gradients=False is declared"


FORWARD = Property(
    id="forward",
    meaning="out equals the oracle's on every rank",
    examples=120,
    cases=lambda c: cases(c, Scope(dtypes=widest(c))),
    judge=partial(judge_values, tensors=("out",), gradients=False),
    unsupported=always,
    results=("out",),
)
LSE = Property(
    id="lse",
    meaning="lse is the natural log-sum-exp over all attended keys on every rank, and -inf for a query without keys",
    examples=80,
    cases=lambda c: cases(c, Scope(dtypes=widest(c))),
    judge=partial(judge_values, tensors=("lse",), gradients=False),
    unsupported=needs("lse"),
    results=("lse",),
)
GRADIENTS_OF_OUT = Property(
    id="gradients",
    meaning="dq, dk and dv equal the oracle's on every rank, for a random cotangent of out",
    examples=250,
    cases=lambda c: cases(c, Scope(dtypes=widest(c))),
    judge=partial(judge_values, tensors=GRADIENTS, gradients=True),
    unsupported=_without_gradients,
    results=GRADIENTS,
)
GRADIENTS_OF_LSE = Property(
    id="lse_gradient",
    meaning="dq, dk and dv equal the oracle's for a random cotangent of lse, alone and with one of out",
    examples=160,
    cases=lambda c: cases(c, _of_lse(c)),
    judge=partial(judge_values, tensors=GRADIENTS, gradients=True),
    unsupported=needs("lse_gradient"),
    applies=lambda case, c: within(case, c, _of_lse(c)),
    results=GRADIENTS,
)
