"""Decide whether the failure of one property repeats that of another, before it is shrunk or afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.running import Runner
from ringverify.cases.shapes import fitted
from ringverify.check.explaining import judged_if_possible
from ringverify.check.searching import Counterexample, Found
from ringverify.diagnosis.scene import Scene
from ringverify.properties.property import Judgement, Property, Reason, Violation

SPECIAL = ("dtype", "values", "memory", "cotangent")
"""Fields of a case in which a property may be special: others have ordinary ones there."""


@dataclasses.dataclass(frozen=True)
class ToldFailure:
    """A failure that is reported in full.

    Attributes:
        property: the violated property.
        shown: the counterexample to it.
    """

    property: Property
    shown: Counterexample


def repeated(told: Sequence[ToldFailure], property: Property, found: Found, runner: Runner) -> Counterexample | None:
    """Return a counterexample that shows that a violation is one of those told before; `None` if it may be news.

    It is if what failed is wrong by the other property too, for the other's reason, once all that is special about this
    property is taken from it; if a case of the other, with what is special, breaks this property for its reason; and if
    the cause that was named, if any, accounts for all that is wrong. That case is the counterexample: it was shrunk.

    Args:
        told: failures of the same implementation that are reported in full.
        property: the violated property.
        found: how it was violated.
        runner: runs cases of both.
    """
    violation = found.judgement.violation
    if violation is None or violation.kind == "deadline":
        return None
    for earlier in told:
        shown = earlier.shown
        if not _steady(shown) or shown.violation.kind == "deadline":
            continue
        ordinary = [_likened(case, shown.case, SPECIAL, runner) for case in _compared(property, found.case, runner)]
        alike = (case for case in chain(*ordinary) if _seen(earlier.property, case, shown.violation.reason, runner))
        if (plain := next(alike, None)) is None or not _accounts_for(shown, violation, plain, runner):
            continue
        if violation.kind == "precision":  # a mean, which cases of others have too few elements for
            return _again(earlier, found.case, found.judgement, found, tried=0, smallest=False)
        for tried, case in enumerate(_special((shown.case, shown.first), found.case, runner), 1):
            if (seen := _seen(property, case, violation.reason, runner)) is not None:
                smallest = case == shown.case and shown.smallest
                return _again(earlier, case, seen, found, tried=tried, smallest=smallest)
    return None


def _again(
    earlier: ToldFailure, case: Case, seen: Judgement, found: Found, *, tried: int, smallest: bool
) -> Counterexample:
    """Return the counterexample that shows an earlier failure once more."""
    assert seen.violation is not None
    return Counterexample(
        case,
        seen.violation,
        seen.digest,
        first=found.case,
        tried=tried,
        smallest=smallest,
        repeats=True,
        diagnosis=dataclasses.replace(earlier.shown.diagnosis, where=None, region=None),
        needs=earlier.shown.needs,
        same_as=earlier.property,
    )


def _accounts_for(shown: Counterexample, violation: Violation, case: Case, runner: Runner) -> bool:
    """Return whether the cause of a failure gives other wrong results of a case too; it may, where none is known."""
    tensors = set() if violation.finding is None else set(violation.finding.tensors)
    causes, told = shown.diagnosis.causes, shown.violation.finding
    if not causes or told is None or tensors <= set(told.tensors):
        return True
    seen = runner.run(case, gradients=runner.capabilities.gradients)
    scene = Scene(case, runner.capabilities, seen)
    return seen.failure is None and any(cause.explains(scene) is not None for cause in causes)


def _compared(property: Property, case: Case, runner: Runner) -> list[Case]:
    """Return the cases that a property compares with each other, the case among them."""
    return list(dict.fromkeys((case, *property.compared(case, runner.capabilities))))


def _likened(case: Case, other: Case, fields: Sequence[str], runner: Runner) -> Iterator[Case]:
    """Yield a case with some fields of another, if that is possible."""
    with contextlib.suppress(ValueError):
        changes = {name: getattr(other if hasattr(other, name) else other.problem, name) for name in fields}
        found = fitted(case.replace(**changes), runner.capabilities)
        if why_unsupported(found, runner.capabilities) is None:
            yield found


def _special(cases: Sequence[Case], other: Case, runner: Runner) -> Iterator[Case]:
    """Yield each of some cases, then it with the `SPECIAL` fields of another, then with its dimensions too."""
    for case in dict.fromkeys(cases):
        yield case
        yield from _likened(case, other, SPECIAL, runner)
        yield from _likened(case, other, (*SPECIAL, "head_dim", "value_dim"), runner)


def same_as(told: Sequence[ToldFailure], new: ToldFailure, runner_for: Callable[[Property], Runner]) -> Property | None:
    """Return the property of the earlier failure that a new one repeats; `None` if it is news.

    Two failures are the same if they have a cause in common. If one of them has no known cause, they are the same if
    the case of each violates the other's property too, for the other's reason; failures that hang or do not repeat are
    compared by their reasons only.

    Args:
        told: failures of the same implementation that are reported in full.
        new: the new failure.
        runner_for: returns the runner for the cases of a property.
    """
    return next((earlier.property for earlier in told if _same(earlier, new, runner_for)), None)


def _same(earlier: ToldFailure, new: ToldFailure, runner_for: Callable[[Property], Runner]) -> bool:
    one, other = earlier.shown, new.shown
    causes, others = one.diagnosis.causes, other.diagnosis.causes
    if causes and others:
        return any(cause is another for cause in causes for another in others)
    reasons = one.violation.reason, other.violation.reason
    if not (_steady(one) and _steady(other)) or "deadline" in (one.violation.kind, other.violation.kind):
        return reasons[0] == reasons[1] and _steady(one) == _steady(other)
    return _breaks(new.property, one.case, reasons[1], runner_for) and _breaks(
        earlier.property, other.case, reasons[0], runner_for
    )


def _steady(shown: Counterexample) -> bool:
    """Return whether a case fails repeatably, without earlier cases in its process."""
    return shown.repeats and not shown.after


def _breaks(property: Property, case: Case, reason: Reason, runner_for: Callable[[Property], Runner]) -> bool:
    """Return whether a case violates a property for this reason."""
    return _seen(property, case, reason, runner_for(property)) is not None


def _seen(property: Property, case: Case, reason: Reason, runner: Runner) -> Judgement | None:
    """Return the judgement of a case if it violates a property for this reason."""
    seen = judged_if_possible(property, case, runner)
    if seen is None or seen.violation is None or reason not in (seen.violation.reason, *seen.violation.also):
        return None
    return seen
