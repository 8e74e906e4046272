"""`uninitialised`: results do not depend on what newly allocated memory holds before it is written.

Memory from `torch.empty` mostly holds zeros, which hides a row that is never written, or a gradient that is added to a
buffer that was never cleared. Here it holds NaN.
"""

from __future__ import annotations

from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.cases.strategies import Scope, cases, widest
from ringverify.properties.property import Judgement, Property, always, judged_where


def _judge(case: Case, runner: Runner) -> Judgement:
    observation = runner.run(case, gradients=runner.capabilities.gradients, unwritten=True)
    return judged_where(case, runner, observation, when="torch.empty returns memory filled with NaN")


UNINITIALISED = Property(
    id="uninitialised",
    meaning="results do not depend on uninitialised memory: torch.empty is filled with NaN",
    examples=60,
    cases=lambda c: cases(c, Scope(dtypes=widest(c), want_empty_rows=True)),
    judge=_judge,
    unsupported=always,
)
