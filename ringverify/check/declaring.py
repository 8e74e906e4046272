"""After a failure in bfloat16 or float16: find the declaration under which the implementation would have passed.

Results that are off by a few roundings are often right for another pipeline than the one declared: probabilities
rounded to the input dtype before they are multiplied with v, gradients summed over ranks in the input dtype, or running
sums in it. The failing case, the one found first and others of the property are judged under each such declaration, and
the least permissive one that they all pass is reported. No tolerance changes, and faults do not pass as rounding:

1. If float64 or float32 is declared too, the same cases must be right in it.
2. The property `precision` must pass under the other declaration too, on a case of each kind that it draws.
3. With running sums in the input dtype, bounds may exceed the values themselves. So the error must be explained too: on
   these cases as they were drawn, it is in the mean no larger than that of an emulated pipeline with this declaration.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ringref.problem import DtypeName
from ringref.rounding import UNIT_ROUNDOFF, unit_in_words
from ringverify.cases.case import POISONED, Case, why_unsupported
from ringverify.cases.running import Observation, Runner
from ringverify.check.drawing import drawn
from ringverify.diagnosis.diagnose import Diagnosis
from ringverify.events import TensorName
from ringverify.implementation import Capabilities, Implementation
from ringverify.properties.precision import LOW, PRECISION, each_kind, errs_as_declared
from ringverify.properties.property import Property, Violation, judge_everything
from ringverify.worlds.world import WorldUnavailable

NUMERIC = ("value", "precision", "differs", "moves", "shift", "adjoint")
"""Kinds of violations that depend on how much error is allowed."""

OTHERS = 8
"""Number of further cases of the property that must pass too, so that it is not by luck."""

SECONDS, OUTSIDE = 20.0, 90.0
"""Seconds for finding a declaration, here and of a program, which may compile; if none is found by then, none is
reported."""

Declaration = dict[str, str]
"""Names of capabilities, and the values to declare."""


@dataclasses.dataclass(frozen=True)
class _RunOnce(Runner):
    """A runner that caches results by case: a declaration changes the errors allowed, not the results."""

    seen: dict[tuple[object, ...], Observation] = dataclasses.field(default_factory=dict)

    def run(self, case: Case, *, gradients: bool, **how: Any) -> Observation:
        """Run a case, or return the observation of its earlier run; runs on other inputs are not cached."""
        if how.get("inputs") is not None:
            return super().run(case, gradients=gradients, **how)
        key = (case, gradients, *sorted(how.items()))
        if key not in self.seen:
            self.seen[key] = super().run(case, gradients=gradients, **how)
        return self.seen[key]


class _OutOfTime(Exception):
    """The time for finding a declaration is over."""


def would_pass(property: Property, runner: Runner, violation: Violation, cases: Sequence[Case]) -> Declaration | None:
    """Find the least permissive other declaration under which a property holds on 16-bit cases where it failed.

    Args:
        property: the violated property.
        runner: runs the implementation in its world.
        violation: how the smallest case violates it.
        cases: the smallest failing case, then others, such as the one found first.

    Returns:
        what would have to be declared; `None` if no declaration accounts for the violation, or time ran out.
    """
    dtype = cases[0].problem.dtype
    if dtype not in LOW or violation.kind not in NUMERIC:
        return None
    until = time.monotonic() + (OUTSIDE if runner.world.name == "external" else SECONDS)
    fields = {field.name: getattr(runner, field.name) for field in dataclasses.fields(Runner)}
    once = _RunOnce(**fields)
    c = runner.capabilities
    alone = dataclasses.replace(c, dtypes=(dtype,))
    tensor = None if violation.finding is None else violation.finding.tensor
    like = [case for case in dict.fromkeys(cases) if case.problem.dtype == dtype]
    try:
        for declaration in alternatives(c, dtype):
            once = dataclasses.replace(once, implementation=_declaring(runner, declaration))
            if not _holds(property, once, like, until):
                continue
            others = drawn(property, alone, OTHERS)
            sample = list(dict.fromkeys([*like, *others]))
            if _accounts(property, once, sample, like[-1], tensor, until):
                return declaration
    except (WorldUnavailable, _OutOfTime):
        return None
    return None


def alternatives(c: Capabilities, dtype: DtypeName) -> Iterator[Declaration]:
    """Yield more permissive declarations, the least permissive first: `reduces` is, for it loosens only dk and dv."""
    input = {name: "input" for name in ("reduces", "probabilities") if getattr(c, name) != "input"}
    if not c.gradients:
        input.pop("reduces", None)
    some = [{name: value} for name, value in input.items()] + ([input] if len(input) > 1 else [])
    yield from some
    if UNIT_ROUNDOFF[c.accumulates] < UNIT_ROUNDOFF[dtype]:
        for more in ({}, *some):
            yield {"accumulates": dtype, **more}


def contradicted(declaration: Declaration, diagnosis: Diagnosis) -> bool:
    """Return whether digits show what is rounded, and a declaration does not allow this: then it is no answer."""
    allowed_by = diagnosis.causes[0].allowed_by if diagnosis.causes else None
    return allowed_by is not None and not set(declaration) <= set(allowed_by)


def in_words(declaration: Declaration, dtype: DtypeName) -> str:
    """Return the hint for the report: what to declare, and what `u` is, in one line."""
    which = ", ".join(f'{name}="{value}"' for name, value in declaration.items())
    them = "it" if len(declaration) == 1 else "them"
    return f"would pass with {which}: declare {them} if that is what your kernel does ({unit_in_words(dtype)})"


def _declaring(runner: Runner, declaration: Declaration) -> Implementation:
    capabilities = dataclasses.replace(runner.capabilities, **declaration)  # type: ignore[arg-type]
    return dataclasses.replace(runner.implementation, capabilities=capabilities)


def _holds(property: Property, runner: Runner, cases: Sequence[Case], until: float) -> bool:
    """Return whether a property holds on all cases that can test it.

    Raises:
        _OutOfTime: not known by `until`.
    """
    for case in cases:
        if time.monotonic() > until:
            raise _OutOfTime
        applies = _can_run(case, runner) and property.applies(case, runner.capabilities)
        if applies and property.judge(case, runner).violation is not None:
            return False
    return True


def _accounts(
    property: Property, runner: Runner, cases: Sequence[Case], first: Case, tensor: TensorName | None, until: float
) -> bool:
    """Return whether another declaration accounts for the errors on cases, by the three rules of this module.

    Args:
        property: the property that is violated under the implementation's own declaration.
        runner: runs the implementation with the other declaration.
        cases: the smallest failing case, then others.
        first: the one of these that was found first.
        tensor: the result that is wrong in the smallest case, if it is one result.
        until: value of `time.monotonic()` at which to give up.

    Raises:
        _OutOfTime: not known by `until`.
    """
    c, dtype = runner.capabilities, cases[0].problem.dtype
    full: tuple[DtypeName, ...] = ("float64", "float32")
    wider = [declared for declared in full if declared in c.dtypes]
    for case in cases if wider else ():
        if time.monotonic() > until:
            raise _OutOfTime
        wide = case.replace(dtype=wider[0])
        if _can_run(wide, runner) and judge_everything(wide, runner).violation is not None:
            return False
    means = each_kind(dataclasses.replace(c, dtypes=(dtype,)), dtype)
    if not _holds(property, runner, cases, until) or not _holds(PRECISION, runner, means, until):
        return False
    if UNIT_ROUNDOFF[c.accumulates] < UNIT_ROUNDOFF[dtype]:
        return True
    if tensor == "lse" and not wider:
        return False  # the emulation gives no error of lse
    plain = [
        case
        for case in cases
        if case.cotangent == "out" and case.values not in POISONED and not case.problem.sinks and _can_run(case, runner)
    ]
    if cases[0] not in plain:
        return False
    if first in plain and first != cases[0]:
        del plain[0]  # shrinking chose it for its error, among many: it is no sample, and fails only as the first does
    return errs_as_declared([(case, runner.run(case, gradients=c.gradients)) for case in plain], c)


def _can_run(case: Case, runner: Runner) -> bool:
    fits = runner.most_ranks is None or case.ranks <= runner.most_ranks
    return fits and why_unsupported(case, runner.capabilities) is None
