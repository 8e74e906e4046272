"""What an earlier call keeps that spoils a later one: by what it is kept, how the two calls relate, what both need.

Of two calls the first was found after which the second fails. Variants of both are run, each pair in a fresh process:
the earlier call with one factor changed, to learn what has to be the same in both, or at least as large; the two in
the other order, and one of them with another mask or place instead; and both without what both of them have.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringverify.cases.case import Case
from ringverify.cases.running import Runner, shards
from ringverify.check.explaining import afresh
from ringverify.check.following import KEPT_BY, PLACES, changed
from ringverify.check.searching import Counterexample
from ringverify.diagnosis.conduct import TIED, CallRelation, differing, in_words, of_state, untied
from ringverify.diagnosis.when.conditions import FLAGS, MASKS
from ringverify.diagnosis.when.needs import MOST_RANKS
from ringverify.diagnosis.when.varying import Varying
from ringverify.properties.property import Property
from ringverify.worlds.patience import slowness

STATE_VARYING = 6.0
"""Seconds of a quick processor for what both need, and for how they relate each; a variant costs a fresh process."""

POSITIONS = "positions on a rank"
"""What is the same, where other lengths or ranks do as long as some rank holds the same positions."""

NUMBERS = ("query_length", "key_length", "world_size", "batch", "heads", "key_heads", "head_dim")
"""Fields of which the earlier call may need more, or fewer, than the later one has."""

INSTEAD = 2
"""Variants of each other mask, or place, that are tried instead of the one in which two calls differ."""

SHARED = 3
"""Variants of lengths and ranks, in which some rank holds the same positions, that are tried before this is denied."""

PLAINER = {**dict.fromkeys(MASKS), "causal": False, "softcap": None, "scale": None, "sinks": False}
"""Fields that both calls may need, each with its value where it is absent."""

DEFAULTS = {"key_heads": "gqa", "key_length": "cross"}
"""The same of fields which are those of queries where they are absent, with the condition that they make true."""

ORDINARY = 2
"""Seeds of ordinary values with which both calls have to pass without what they are said to need."""

COUNTED = {"world_size": "ranks", "heads": "heads", "batch": "batch entries"}
"""Numbers of which both calls may need as many as they have."""


class TwoCalls:
    """Two calls of which the earlier one makes the later one fail, and variants of them.

    Args:
        property: the violated property.
        runner: runs the implementation.
        earlier: the earlier case.
        case: the later one, which fails after it.
    """

    def __init__(self, property: Property, runner: Runner, earlier: Case, case: Case) -> None:
        self._property, self._runner, self._until = property, runner, time.monotonic() + STATE_VARYING * slowness()
        self.earlier, self.case = earlier, case
        self._unlike = differing(case, earlier).keys()
        self.fields = untied(self._unlike)
        self._varying = Varying(runner.capabilities, MOST_RANKS)

    def in_time(self) -> bool:
        """Whether another variant may be run."""
        return time.monotonic() < self._until

    def passes(self, earlier: Case, case: Case | None = None) -> bool:
        """Return whether the later case, or another one, passes after an earlier one."""
        judgement = afresh(self._property, self._runner, [earlier, self.case if case is None else case])
        return judgement.applies and judgement.violation is None

    def _fails(self, earlier: Case, case: Case) -> bool:
        return afresh(self._property, self._runner, [earlier, case]).violation is not None

    def variants(self, factor: str, of: Case) -> list[Case]:
        """Return a case with a factor changed, the least changed first."""
        others = [one for one in self._varying.of(of, factor) if self._property.applies(one, self._runner.capabilities)]
        return sorted(others, key=lambda one: len(differing(of, one)))

    def enlarge(self) -> None:
        """Make both calls larger alike as far as the later one still fails: in a small one much stands in for much."""
        larger: dict[str, object] = {}
        for growth in self._varying.growths:
            for case in self._varying.grown(self.case, growth)[:1]:
                change = differing(self.case, case)
                larger |= change if change.keys().isdisjoint((*self.fields, "world_size")) else {}
        for change in (larger, *({name: value} for name, value in larger.items())):
            earlier, later = (changed(self._property, self._runner, one, change) for one in (self.earlier, self.case))
            if earlier is not None and later is not None and self.in_time() and self._fails(earlier, later):
                self.earlier, self.case = earlier, later
                if change == larger:
                    break

    def kept_by(self) -> tuple[list[str], list[CallRelation]]:
        """Return the factors that have to be the same in both, and those of which the earlier call needs enough."""
        alike, enough = list[str](), list[CallRelation]()
        for factor, field in KEPT_BY.items():
            if field in self._unlike or not self.in_time():
                continue
            sides = self._with_less_and_more(factor, field)
            if True in sides and False not in sides:
                alike.append(self._tied(field) or factor)
            elif True in sides:
                enough.append(CallRelation(field, 1 if sides[0] else -1, at_least=True))
        return alike, enough

    def _with_less_and_more(self, factor: str, field: str) -> tuple[bool | None, bool | None]:
        """Return whether the later call passes after one that has less, and more, of something; `None` if unknown.

        What is no number is one or the other.
        """
        variants = self._alone(factor, field)
        if field not in NUMBERS:
            return None, bool(variants) and self.passes(variants[0])
        less, more = (
            next((one for one in variants if _compared(field, one, self.earlier) == sign), None) for sign in (-1, 1)
        )
        return None if less is None else self.passes(less), None if more is None else self.passes(more)

    def _tied(self, field: str) -> str | None:
        """Return the field that has to be the same instead of one that it follows where it is not given."""
        tied = TIED.get(field)
        if tied is None:
            return None
        more: dict[str, object] = {field: 2 * _value(field, self.earlier), tied: _value(tied, self.earlier)}
        apart = changed(self._property, self._runner, self.earlier, more)
        return tied if apart is not None and self.in_time() and self._fails(apart, self.case) else None

    def _alone(self, factor: str, field: str) -> list[Case]:
        """Return variants of the earlier case in which nothing else is changed: what else is may be why it passes."""
        free = {field, TIED.get(field), *(one for one, other in TIED.items() if other == field)}
        return [one for one in self.variants(factor, self.earlier) if differing(self.earlier, one).keys() <= free]

    def share_positions(self, alike: Sequence[str]) -> bool:
        """Return whether, of what must be the same, other lengths and ranks do with the same positions on a rank."""
        kept = [factor for factor in PLACES if factor in alike]
        others = (
            one
            for factor in kept
            for one in self.variants(factor, self.earlier)
            if _share_positions(one, self.case, self._runner)
        )
        return not all(map(self.passes, itertools.islice(others, SHARED)))

    def by_number_of_documents(self) -> bool:
        """Return whether an empty document more in the earlier call lets the later one pass."""
        documents = self.earlier.problem.documents
        if self.fields != ("documents",) or documents is None or not self.in_time():
            return False
        return self.passes(self.earlier.replace(documents=(*documents, documents[-1])))

    def instead(self, may_do: dict[str, str]) -> list[str]:
        """Return the factors in which the two may differ instead."""
        if not self.fields or self.fields[0] not in may_do.values():
            return []
        found = list[str]()
        for factor, field in may_do.items():
            others = (one for one in self.variants(factor, self.case) if {*differing(self.case, one)} == {field})
            if field not in self.fields and self.in_time():
                found += [] if all(map(self.passes, itertools.islice(others, INSTEAD))) else [factor]
        return found

    def relation(self) -> CallRelation | None:
        """Return how the two have to differ, if not in any way: the other order passes, whatever the values."""
        if len(self.fields) != 1 or not self.in_time():
            return None
        both = ((self.earlier, self.case), *self._ordinary(self.earlier, self.case))
        if not all(self.passes(later, earlier) for earlier, later in both):
            return None
        (field,) = self.fields
        sign = _compared(field, self.earlier, self.case)
        return CallRelation(field, sign, present=field not in NUMBERS) if sign else None

    def needed_of_both(self) -> Iterator[str]:
        """Yield what both calls have and need, where ordinary values show what is wrong."""
        if not all(self._fails(*both) for both in self._ordinary(self.earlier, self.case)):
            return
        for field, condition in [*zip(PLAINER, PLAINER, strict=True), *DEFAULTS.items()]:
            plain = PLAINER.get(field)
            has = getattr(self.case.problem, field) not in (None, plain)
            if has and field not in self.fields and self._both_pass({field: plain}):
                instead = self._masks_instead(field) if field in MASKS else []
                yield " or ".join(FLAGS[name][0] for name in (condition, *instead))
        for field, many in COUNTED.items():
            count, grouped = _value(field, self.case), field == "heads" and self.case.problem.group_size > 1
            if field not in self.fields and not grouped and count > 1 and self._both_pass({field: count - 1}):
                yield f"at least {count} {many}"

    def _masks_instead(self, mask: str) -> list[str]:
        """Return the masks that do instead of one that both calls have."""
        found = list[str]()
        for other in MASKS:
            if other not in (mask, *self.fields) and not getattr(self.case.problem, other):
                values = (getattr(one.problem, other) for one in self.variants(other, self.case)[:INSTEAD])
                if any(self._both_fail({mask: PLAINER[mask], other: value}) for value in values):
                    found.append(other)
        return found

    def _both_fail(self, change: dict[str, object]) -> bool:
        """Return whether the later call fails after the earlier one where both are changed."""
        earlier, case = (changed(self._property, self._runner, one, change) for one in (self.earlier, self.case))
        return earlier is not None and case is not None and self.in_time() and self._fails(earlier, case)

    def _both_pass(self, change: dict[str, object]) -> bool:
        """Return whether the later call passes after the earlier one where both are changed, whatever the values."""
        earlier, case = (changed(self._property, self._runner, one, change) for one in (self.earlier, self.case))
        if earlier is None or case is None or not self.in_time():
            return False
        return all(self.passes(*both) for both in ((earlier, case), *self._ordinary(earlier, case)))

    def _ordinary(self, earlier: Case, case: Case) -> list[tuple[Case, Case]]:
        """Return the two with other values: those of the earlier call are others where they were."""
        found = []
        for seed in range(ORDINARY):
            first, second = (
                changed(self._property, self._runner, one, {"values": "normal", "seed": one.seed + seed})
                for one in (earlier, case)
            )
            found += [] if first is None or second is None else [(first, second)]
        return found


def with_what_is_alike(property: Property, runner: Runner, shown: Counterexample) -> Counterexample:
    """Return a case that fails after another one with all that the earlier one needs.

    That is what has to be the same in both, or as large: another length, say, with which the earlier one lets it pass.
    It is which other mask, or place, does instead of that in which the two differ, if they do; and what both need, such
    as a causal mask. Where they differ in several fields, or it is no state that was found, it is returned as it is.
    """
    calls = TwoCalls(property, runner, shown.after[0], shown.case)
    fields = calls.fields
    if shown.needs is None or len(fields) > 1 or shown.needs.requires != of_state(fields)[:1]:
        return shown
    needed_of_both = [*calls.needed_of_both()]  # of the smallest: they have little that they do not need
    calls = TwoCalls(property, runner, shown.after[0], shown.case)
    calls.enlarge()
    alike, enough = calls.kept_by()
    if not PLACES.keys().isdisjoint(alike) and calls.share_positions(alike):
        alike = [POSITIONS, *(factor for factor in alike if factor not in PLACES)]
    if calls.by_number_of_documents():
        alike.append("number of documents")
    instead = calls.instead(
        {factor: KEPT_BY[factor] for factor in (*MASKS, *PLACES) if POSITIONS not in alike or factor in MASKS}
    )
    relation = None if instead else calls.relation()
    same = [in_words(KEPT_BY.get(factor, factor)) for factor in alike if factor not in instead]
    differ = (*fields, *(KEPT_BY[factor] for factor in instead))
    requires, cause = of_state(differ, same, together=False, relation=relation, enough=enough)
    diagnosis = dataclasses.replace(shown.diagnosis, text=cause)
    needs = dataclasses.replace(shown.needs, requires=(requires, *needed_of_both), complete=calls.in_time())
    return dataclasses.replace(shown, needs=needs, diagnosis=diagnosis)


def _value(field: str, case: Case) -> int:
    """Return a number of a case: that which holds where the field is left to its default."""
    p = case.problem
    resolved: dict[str, Callable[[], int]] = {
        "query_length": lambda: p.nq,
        "key_length": lambda: p.nk,
        "key_heads": lambda: p.hk,
        "value_dim": lambda: p.dv,
        "world_size": lambda: case.world_size,
    }
    return resolved.get(field, lambda: int(getattr(p, field)))()


def _compared(field: str, one: Case, other: Case) -> int:
    """Return 1 if one case has more of something than another, −1 if it has less, and 0 if that has no meaning."""
    if field in NUMBERS:
        a, b = _value(field, one), _value(field, other)
    elif field in (*MASKS, "softcap", "scale", "sinks"):
        a, b = (int(bool(getattr(case.problem, field))) for case in (one, other))
    else:
        return 0
    return (a > b) - (a < b)


def _share_positions(one: Case, other: Case, runner: Runner) -> bool:
    """Return whether some rank holds the same queries and some rank the same keys in both cases, none of them empty."""
    sides = zip(shards(one, runner.capabilities), shards(other, runner.capabilities), strict=True)
    return all(any(len(a) and np.array_equal(a, b) for a in mine for b in theirs) for mine, theirs in sides)
