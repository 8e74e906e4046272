"""`forward`, `lse`, `gradients`, `lse_gradient`: each result equals the oracle's on every rank."""

from __future__ import annotations

from ringverify.cases.case import Case
from ringverify.cases.comparing import GRADIENTS
from ringverify.cases.running import Runner
from ringverify.cases.strategies import Scope, cases, widest, within
from ringverify.implementation import Capabilities
from ringverify.properties.property import Judgement, Property, always, judge_values, needs


def _judge_out(case: Case, runner: Runner) -> Judgement:
    return judge_values(case, runner, ("out",), gradients=False)


def _judge_lse(case: Case, runner: Runner) -> Judgement:
    return judge_values(case, runner, ("lse",), gradients=False)


def _judge_gradients(case: Case, runner: Runner) -> Judgement:
    return judge_values(case, runner, GRADIENTS, gradients=True)


def _of_lse(c: Capabilities) -> Scope:
    return Scope(dtypes=widest(c), cotangents=("both", "lse"))


def _without_gradients(c: Capabilities) -> str | None:
    return None if c.gradients else "gradients=False is declared"


FORWARD = Property(
    id="forward",
    meaning="out equals the oracle's on every rank",
    examples=120,
    cases=lambda c: cases(c, Scope(dtypes=widest(c))),
    judge=_judge_out,
    unsupported=always,
)
LSE = Property(
    id="lse",
    meaning="lse is the natural log-sum-exp over all attended keys on every rank, and -inf for a query without keys",
    examples=80,
    cases=lambda c: cases(c, Scope(dtypes=widest(c))),
    judge=_judge_lse,
    unsupported=needs("lse"),
)
GRADIENTS_OF_OUT = Property(
    id="gradients",
    meaning="dq, dk and dv equal the oracle's on every rank, for a random cotangent of out",
    examples=250,
    cases=lambda c: cases(c, Scope(dtypes=widest(c))),
    judge=_judge_gradients,
    unsupported=_without_gradients,
)
GRADIENTS_OF_LSE = Property(
    id="lse_gradient",
    meaning="dq, dk and dv equal the oracle's for a random cotangent of lse, alone and with one of out",
    examples=160,
    cases=lambda c: cases(c, _of_lse(c)),
    judge=_judge_gradients,
    unsupported=needs("lse_gradient"),
    applies=lambda case, c: within(case, c, _of_lse(c)),
)
