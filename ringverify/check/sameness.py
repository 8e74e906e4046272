"""Decide whether the failure of one property repeats that of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.check.explaining import judged
from ringverify.check.searching import Counterexample
from ringverify.errors import Inconclusive
from ringverify.properties.property import Property, Reason
from ringverify.worlds.world import WorldUnavailable


@dataclasses.dataclass(frozen=True)
class ToldFailure:
    """A failure that is reported in full.

    Attributes:
        property: the violated property.
        shown: the counterexample to it.
    """

    property: Property
    shown: Counterexample


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
    try:
        seen = judged(property, case, runner_for(property)).violation
    except (Inconclusive, WorldUnavailable):
        return False
    return seen is not None and reason in (seen.reason, *seen.also)
