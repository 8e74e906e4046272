"""A case that fails only after another one, in one process: what is left behind, and what it is kept by."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.running import Runner, shards
from ringverify.cases.shapes import fitted
from ringverify.cases.shrinking import shrink
from ringverify.check.budget import Share
from ringverify.check.explaining import afresh
from ringverify.check.repeating import same_failure
from ringverify.check.sameness import ToldFailure
from ringverify.check.searching import Counterexample, Found
from ringverify.diagnosis.conduct import differing, in_words, of_state
from ringverify.diagnosis.when.conditions import MASKS
from ringverify.diagnosis.when.needs import MOST_RANKS
from ringverify.diagnosis.when.varying import Varying
from ringverify.properties.property import Judgement, Property

STATE_HISTORY = 256
"""How many earlier cases, the latest first, are run all together before one of them is suspected."""

STATE_SUSPECTS = 12
"""How many earlier cases, the latest first, are suspected of having left state behind in the process."""

KEPT_SUSPECTS = 48
"""The same where it is known that state is left behind, so that none of them is shrunk."""

STATE_SEARCH = 10.0
"""Seconds for trying the case after itself with one field changed; every attempt costs a fresh process or two."""

STATE_VARYING = 5.0
"""Seconds for finding out what has to be the same in both; every attempt costs a fresh process."""

STATE_SHRINKING = 10.0
"""Seconds for shrinking that earlier case, since every attempt costs a fresh process."""

PLACES = {"ranks": "world_size", "length": "query_length", "sharding": "sharding"}
"""Factors that decide which positions a rank holds, each with its field."""

KEPT_BY = {
    **PLACES,
    "causal": "causal",
    "window": "window",
    "documents": "documents",
    "key_lengths": "key_lengths",
    "dilation": "dilation",
    "batch": "batch",
    "heads": "heads",
    "key heads": "key_heads",
    "dims": "head_dim",
    "dtype": "dtype",
    "softcap": "softcap",
    "scale": "scale",
}
"""Factors that may have to be the same in an earlier call whose state is used again, since it is kept by them too, each
with its field; the likeliest first."""

POSITIONS = "positions on a rank"
"""What is the same, where other lengths or ranks do as long as some rank holds the same positions."""

TIED = {"heads": "key_heads", "head_dim": "value_dim", "query_length": "key_length"}
"""Fields whose value may have to be changed together with another one's."""

INSTEAD = 2
"""Variants of each other mask, or place, that are tried instead of the one in which two calls differ."""

SHARED = 3
"""Variants of lengths and ranks, in which some rank holds the same positions, that are tried before this is denied."""


def what_it_follows(
    property: Property, runner: Runner, case: Case, before: tuple[Case, ...], share: Share, *, until: float
) -> tuple[tuple[Case, ...], Case, Judgement]:
    """Find an earlier case after which `case` fails in a fresh process, though alone it passes: state is left behind.

    First it is the case itself, as it is or with one field as in a case before: the two are shrunk together, so that
    they differ in what the state does not tell apart; no field is begun past `until`, a value of `time.monotonic()`.
    Then it is one of the cases before, shrunk by itself. `case` has to fail twice in the same way: a failure by chance
    would follow any.

    Returns:
        the earlier case; the case, shrunk if that is of use; and the judgement of the case after it. If there is none,
        `()`, the case and a pass.
    """

    def after(other: Case, one: Case = case) -> Judgement:
        return afresh(property, runner, [other, one])

    def fails(other: Case | None, one: Case = case) -> bool:
        return other is not None and after(other, one).violation is not None

    def like(one: Case, change: dict[str, object]) -> Case | None:
        """The case with a field changed, if it can test the property."""
        try:
            other = fitted(one.replace(**change), runner.capabilities)
        except ValueError:
            return None
        possible = why_unsupported(other, runner.capabilities) is None and property.applies(other, runner.capabilities)
        return other if possible and differing(one, other).keys() <= change.keys() else None

    def both(one: Case, change: dict[str, object]) -> bool:
        return fails(like(one, change), one) and afresh(property, runner, [one]).violation is None

    latest: dict[str, object] = {}
    for earlier in before:
        latest = differing(case, earlier) | latest
    for change in ({}, *({name: value} for name, value in latest.items())):
        if time.monotonic() > min(until, share.late):
            break
        if not both(case, change):
            continue
        one = shrink(case, functools.partial(both, change=change), runner.capabilities, seconds=STATE_SHRINKING).case
        if (other := like(one, change)) is not None and same_failure(found := after(other, one), after(other, one)):
            return (other,), one, found
    others = [other for other in before if other != case][:STATE_HISTORY]
    alone = _the_one(others, lambda some: afresh(property, runner, [*reversed(some), case]).violation is not None)
    for earlier in alone or others[:STATE_SUSPECTS]:
        if time.monotonic() > share.late:
            break
        if same_failure(after(earlier), after(earlier)):
            one = shrink(earlier, fails, runner.capabilities, seconds=STATE_SHRINKING).case
            for change in _together(differing(one, case)):  # in as few fields as it takes
                closer = like(one, change)
                one = closer if closer is not None and fails(closer) else one
            found = after(one)
            if same_failure(found, after(one)):
                return (one,), case, found
    return (), case, Judgement(0.0, None)


def _the_one(cases: Sequence[Case], fails_after: Callable[[Sequence[Case]], bool]) -> Sequence[Case]:
    """Return the one of some cases after which alone another fails, found by halves; none if there is no such one."""
    if not cases or not fails_after(cases):
        return ()
    while len(cases) > 1:
        halves = cases[: len(cases) // 2], cases[len(cases) // 2 :]
        cases = next((half for half in halves if fails_after(half)), ())
    return cases


def _together(fields: dict[str, object]) -> list[dict[str, object]]:
    """Return changes of one field each, but of two where one of them may not be had without the other."""
    return [
        {name: value} | {other: fields[other] for other in (TIED.get(name),) if other in fields}
        for name, value in fields.items()
    ]


def follows_again(
    stories: Sequence[ToldFailure], property: Property, runner: Runner, found: Found
) -> Counterexample | None:
    """Return a counterexample that shows kept state once more, where that was told; `None` if it may be news.

    It is if the case fails after one of those before it, twice, and passes alone, twice. It is not shrunk.
    """
    told = next((story for story in stories if story.shown.after), None)
    if told is None or any(afresh(property, runner, [found.case]).violation is not None for _ in range(2)):
        return None
    for earlier in [other for other in found.history if other != found.case][:KEPT_SUSPECTS]:
        seen = afresh(property, runner, [earlier, found.case])
        if seen.violation is not None and same_failure(seen, afresh(property, runner, [earlier, found.case])):
            return Counterexample(
                found.case,
                seen.violation,
                seen.digest,
                first=found.case,
                tried=0,
                smallest=False,
                repeats=True,
                after=(earlier,),
                diagnosis=dataclasses.replace(told.shown.diagnosis, where=None, region=None),
                needs=told.shown.needs,
                same_as=told.story(),
            )
    return None


def with_what_is_alike(property: Property, runner: Runner, shown: Counterexample) -> Counterexample:
    """Return a case that fails after another one with all that the earlier one needs.

    That is what has to be the same in both: another length, say, with which the earlier one lets it pass. And it is
    which other mask, or place, does instead of that in which the two differ, if they do. Where they differ in several
    fields, or it is no state that was found, it is returned as it is.
    """
    case, earlier = shown.case, shown.after[0]
    fields = tuple(differing(case, earlier))
    if shown.needs is None or len(fields) > 1 or shown.needs.requires != of_state(fields)[:1]:
        return shown
    varying = Varying(runner.capabilities, MOST_RANKS)
    until = time.monotonic() + STATE_VARYING

    def variants(factor: str, of: Case = earlier) -> list[Case]:
        """The earlier case, or the later one, with a factor changed, the least changed first."""
        others = [one for one in varying.of(of, factor) if property.applies(one, runner.capabilities)]
        return sorted(others, key=lambda one: len(differing(of, one)))

    def passes(other: Case) -> bool:
        return afresh(property, runner, [other, case]).violation is None

    def alone(factor: str, field: str) -> list[Case]:
        """The variant in which nothing else is changed, if there is one: what else is may be why it passes."""
        free = {field, TIED.get(field), *(one for one, other in TIED.items() if other == field)}
        return [one for one in variants(factor) if differing(earlier, one).keys() <= free][:1]

    alike = list[str]()
    for factor, field in KEPT_BY.items():
        if field not in fields and time.monotonic() < until and any(map(passes, alone(factor, field))):
            alike.append(factor)
    if not PLACES.keys().isdisjoint(alike):
        kept = [factor for factor in PLACES if factor in alike]
        others = (one for factor in kept for one in variants(factor) if _share_positions(one, case, runner))
        if not all(map(passes, itertools.islice(others, SHARED))):
            alike = [POSITIONS, *(factor for factor in alike if factor not in PLACES)]
    if fields == ("documents",) and time.monotonic() < until and any(map(passes, _with_an_empty_document(earlier))):
        alike.append("number of documents")
    may_do = {factor: KEPT_BY[factor] for factor in (*MASKS, *PLACES) if POSITIONS not in alike or factor in MASKS}
    instead = [
        factor
        for factor, field in may_do.items()
        if fields and fields[0] in may_do.values() and field not in fields and time.monotonic() < until
        if not all(map(passes, [one for one in variants(factor, case) if {*differing(case, one)} == {field}][:INSTEAD]))
    ]
    alike = [factor for factor in alike if factor not in instead]
    same = [in_words(KEPT_BY.get(factor, factor)) for factor in alike]
    requires, cause = of_state((*fields, *(KEPT_BY[factor] for factor in instead)), same, together=False)
    diagnosis = dataclasses.replace(shown.diagnosis, text=cause)
    return dataclasses.replace(shown, needs=dataclasses.replace(shown.needs, requires=(requires,)), diagnosis=diagnosis)


def _with_an_empty_document(case: Case) -> list[Case]:
    """Return the case with one document more, which has no positions: only their number tells them apart."""
    documents = case.problem.documents
    return [] if documents is None else [case.replace(documents=(*documents, documents[-1]))]


def _share_positions(one: Case, other: Case, runner: Runner) -> bool:
    """Return whether some rank holds the same queries and some rank the same keys in both cases, none of them empty."""
    sides = zip(shards(one, runner.capabilities), shards(other, runner.capabilities), strict=True)
    return all(any(len(a) and np.array_equal(a, b) for a in mine for b in theirs) for mine, theirs in sides)
