"""Decide whether the failure of one property repeats that of another, before it is shrunk or afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.running import Runner
from ringverify.cases.shapes import fitted
from ringverify.check.explaining import judged_if_possible
from ringverify.check.searching import Counterexample, Found
from ringverify.diagnosis.hypothesis import Hypothesis, comparable
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.properties.property import Judgement, Property, Reason, Violation

SPECIAL = ("dtype", "values", "memory", "cotangent")
"""Fields of a case in which a property may be special: others have ordinary ones there."""

OF_A_CACHE = ("chunks", "page_table", "sharding", "causal")
"""Fields of a case that make it one of calls on a cache."""

STRUCTURES = (
    ("group",),
    OF_A_CACHE,
    ("query_length", "key_length", "documents", "key_lengths", "causal", "window"),
    ("world_size",),
)
"""Fields of a case without which there may be nothing that a property could test."""


@dataclasses.dataclass(frozen=True)
class ToldFailure:
    """A failure that was reported: in full, or as the same as another, to which it adds a reason.

    Attributes:
        property: the violated property.
        shown: the counterexample to it.
    """

    property: Property
    shown: Counterexample

    def story(self) -> Property:
        """Return the property whose failure is reported in full."""
        return self.shown.same_as or self.property


def repeated(told: Sequence[ToldFailure], property: Property, found: Found, runner: Runner) -> Counterexample | None:
    """Return a counterexample that shows that a violation is one of those told before; `None` if it may be news.

    It is if what failed is wrong by the other property too, for the other's reason, once all that is special about this
    property is taken from it; if a case of the other, with what is special, breaks this property for its reason; and if
    the cause that was named, if any, accounts for all that is wrong. That case is the counterexample: it was shrunk.

    Args:
        told: failures of the same implementation that were reported.
        property: the violated property.
        found: how it was violated.
        runner: runs cases of both.
    """
    violation = found.judgement.violation
    if violation is None or violation.kind == "deadline":
        return None
    for earlier in told:
        shown = earlier.shown
        if not _steady(shown) or shown.violation.kind == "deadline" or not _end_alike(shown.violation, violation):
            continue
        plain = _plain(earlier, property, found.case, runner, runner)
        if plain is None or not _accounts_for(shown, violation, plain, runner):
            continue
        if violation.kind == "precision":  # a mean, which cases of others have too few elements for
            return _again(earlier, found.case, found.judgement, found, tried=0, smallest=False)
        for tried, case, seen in _broken(property, shown, found.case, violation.reason, runner):
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
        same_as=earlier.story(),
    )


def _end_alike(one: Violation, other: Violation) -> bool:
    """Return whether both runs returned results, or neither: an exception and a wrong number are two things to mend."""
    return (one.failure is None) == (other.failure is None)


def _accounts_for(shown: Counterexample, violation: Violation, case: Case, runner: Runner) -> bool:
    """Return whether the cause of a failure gives other wrong results of a case too; it may, where none is known."""
    tensors = set() if violation.finding is None else set(violation.finding.tensors)
    causes, told = shown.diagnosis.causes, shown.violation.finding
    if not causes or told is None or tensors <= set(told.tensors):
        return True
    return _explains(causes, case, runner)


def _plain(earlier: ToldFailure, property: Property, case: Case, runner: Runner, other: Runner) -> Case | None:
    """Return a case of a property, without what is special, that `other` shows to break an earlier one for its reason.

    Args:
        earlier: the earlier failure.
        property: the property that the case violates.
        case: a case of the property; those that it is compared with are tried too.
        runner: runs cases of the property.
        other: runs cases of the earlier one's.
    """
    reason, there = earlier.shown.violation.reason, earlier.shown.case
    for one in _compared(property, case, runner):
        special = SPECIAL if bool(one.chunks) == bool(there.chunks) else (*SPECIAL, *OF_A_CACHE)
        for plain in _likened(one, there, special, other):
            if _seen(earlier.property, plain, reason, other) is not None:
                return plain
    return None


def _broken(
    property: Property, earlier: Counterexample, special: Case, reason: Reason, runner: Runner
) -> Iterator[tuple[int, Case, Judgement]]:
    """Yield cases of an earlier failure, with what is special about another, that violate a property for a reason.

    Yields:
        the number of cases tried until then; the case; its judgement.
    """
    for tried, case in enumerate(_special(property, (earlier.case, earlier.first), special, runner), 1):
        if (seen := _seen(property, case, reason, runner)) is not None:
            yield tried, case, seen


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


def _special(property: Property, cases: Sequence[Case], other: Case, runner: Runner) -> Iterator[Case]:
    """Yield each of some cases, then it with the `SPECIAL` fields of another, then with its dimensions too.

    Where that is nothing to the property, they have of the other what makes it so.
    """
    for case in dict.fromkeys(cases):
        yield case
        for one in _likened(case, other, SPECIAL, runner):
            yield one
            if not property.applies(one, runner.capabilities):
                for fields in STRUCTURES:
                    alike = _likened(case, other, (*SPECIAL, *fields), runner)
                    yield from (found for found in alike if property.applies(found, runner.capabilities))
        yield from _likened(case, other, (*SPECIAL, "head_dim", "value_dim"), runner)


def same_as(told: Sequence[ToldFailure], new: ToldFailure, runner_for: Callable[[Property], Runner]) -> Property | None:
    """Return the property of the earlier failure that a new one repeats; `None` if it is news.

    Two failures are the same if they have a cause in common, or the earlier one's gives the wrong results of both; if
    they break the same rule of a call, or follow from the same state that is kept. If one of them has no known cause,
    they are the same too if the case of each violates the other's property, for the other's reason, once what is
    special about a property is taken from it or given to it; failures that hang or do not repeat are compared by their
    reasons only.

    Args:
        told: failures of the same implementation that were reported.
        new: the new failure.
        runner_for: returns the runner for the cases of a property.
    """
    return next((earlier.story() for earlier in told if _same(earlier, new, runner_for)), None)


def _same(earlier: ToldFailure, new: ToldFailure, runner_for: Callable[[Property], Runner]) -> bool:
    one, other = earlier.shown, new.shown
    causes, others = one.diagnosis.causes, other.diagnosis.causes
    if any(cause is another for cause in causes for another in others):
        return True
    if not _end_alike(one.violation, other.violation):
        return False
    if _in_words(one) is not None and _in_words(one) == _in_words(other):
        return True
    reasons = one.violation.reason, other.violation.reason
    if not (_steady(one) and _steady(other)) or "deadline" in (one.violation.kind, other.violation.kind):
        return not (causes and others) and reasons[0] == reasons[1] and _steady(one) == _steady(other)
    first, second = runner_for(earlier.property), runner_for(new.property)
    if causes and _explains(causes, other.case, second):
        return True
    if (causes and others) or _plain(earlier, new.property, other.case, second, first) is None:
        return False
    return any(_broken(new.property, one, other.case, reasons[1], second))


def _in_words(shown: Counterexample) -> object:
    """Return what is wrong where no hypothesis says it: the rule of a call that is broken, or what state is kept."""
    failure = shown.violation.failure
    if failure is not None and failure.rule is not None:
        return failure.rule, failure.tensor
    return shown.diagnosis.text if shown.after else None


def _explains(causes: Sequence[Hypothesis], case: Case, runner: Runner) -> bool:
    """Return whether one of some causes gives the results of a case, which are wrong and not all rounding."""
    scenes = []
    for call in case.calls[-2:] if case.chunks else (case,):  # faults are predicted a call at a time
        seen = runner.run(call, gradients=runner.capabilities.gradients)
        if seen.failure is not None or not comparable(scene := Scene(call, runner.capabilities, seen)):
            return False
        scenes += [scene] if wrong_tensors(scene) else []
    return bool(scenes) and any(all(one.explains(scene) is not None for scene in scenes) for one in causes)


def _steady(shown: Counterexample) -> bool:
    """Return whether a case fails repeatably, without earlier cases in its process."""
    return shown.repeats and not shown.after


def _seen(property: Property, case: Case, reason: Reason, runner: Runner) -> Judgement | None:
    """Return the judgement of a case if it violates a property for this reason."""
    seen = judged_if_possible(property, case, runner)
    if seen is None or seen.violation is None or reason not in (seen.violation.reason, *seen.violation.also):
        return None
    return seen
