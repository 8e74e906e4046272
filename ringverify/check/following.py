"""A case that fails only after another one, in one process: the earlier case is found."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.running import Runner
from ringverify.cases.shapes import fitted
from ringverify.cases.shrinking import shrink
from ringverify.check.budget import Share
from ringverify.check.explaining import afresh
from ringverify.check.repeating import same_failure
from ringverify.check.sameness import ToldFailure
from ringverify.check.searching import Counterexample, Found
from ringverify.diagnosis.conduct import TIED, differing
from ringverify.diagnosis.when.conditions import MASKS
from ringverify.diagnosis.when.needs import MOST_RANKS
from ringverify.diagnosis.when.varying import Varying
from ringverify.properties.property import Judgement, Property
from ringverify.worlds.patience import slowness

STATE_HISTORY = 256
"""How many earlier cases, those most like it, are run all together before one of them is suspected."""

STATE_SUSPECTS = 12
"""How many earlier cases, the latest first, are suspected of having left state behind in the process."""

STATE_SEARCH = 10.0
"""Seconds for trying the case after itself with one field changed; every attempt costs a fresh process or two.

They are those of a quick processor, as are those for shrinking: a slow one has more.
"""

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
}
"""Factors by which state may be kept, each with its field; the likeliest first."""

VALUES = 6
"""Values of a field with which an earlier call is tried that is like the later one in all else."""


def what_it_follows(
    property: Property, runner: Runner, case: Case, before: tuple[Case, ...], share: Share, *, until: float
) -> tuple[tuple[Case, ...], Case, Judgement]:
    """Find an earlier case after which `case` fails in a fresh process, though alone it passes: state is left behind.

    First it is the case itself, as it is or with one field changed: the two are shrunk together, so that they differ in
    what the state does not tell apart; this ends at `until`, a value of `time.monotonic()`. Then it is one of the cases
    before, shrunk by itself. `case` has to fail twice in the same way: a failure by chance would follow any.

    Returns:
        the earlier case; the case, shrunk if that is of use; and the judgement of the case after it. If there is none,
        `()`, the case and a pass.
    """

    def after(other: Case, one: Case = case) -> Judgement:
        return afresh(property, runner, [other, one])

    def fails(other: Case | None, one: Case = case) -> bool:
        return other is not None and after(other, one).violation is not None

    like = functools.partial(changed, property, runner)

    def both(one: Case, change: dict[str, object]) -> bool:
        return fails(like(one, change), one) and afresh(property, runner, [one]).violation is None

    after_all = functools.partial(_fails_after, property, runner, case)
    # The same call, or one of other values, may do. What is kept may be what the first call leaves, or the last.
    similar = [way for some in _like_those(property, runner, case, before) for way in (some, some[::-1])]
    for some in ([case], [case.replace(seed=case.seed + 1)], *similar):
        for change in (differing(case, other) for other in _the_one(some, after_all)):
            if not both(case, change):
                continue
            one = shrink(
                case, functools.partial(both, change=change), runner.capabilities, seconds=STATE_SHRINKING * slowness()
            ).case
            other = like(one, change)
            if other is not None and same_failure(found := after(other, one), after(other, one)):
                return (other,), one, found
        if time.monotonic() > min(until, share.late):
            break
    others = _most_alike(case, before, runner)
    for earlier in _the_one(others, after_all) or others[:STATE_SUSPECTS]:
        if time.monotonic() > share.late:
            break
        if same_failure(after(earlier), after(earlier)):
            one = shrink(earlier, fails, runner.capabilities, seconds=STATE_SHRINKING * slowness()).case
            for change in _together(differing(one, case)):  # in as few fields as it takes
                closer = like(one, change)
                one = closer if closer is not None and fails(closer) else one
            found = after(one)
            if same_failure(found, after(one)):
                return (one,), case, found
    return (), case, Judgement(0.0, None)


def changed(property: Property, runner: Runner, case: Case, change: dict[str, object]) -> Case | None:
    """Return a case with some fields changed and no others, if it can test a property."""
    try:
        other = fitted(case.replace(**change), runner.capabilities)
    except ValueError:
        return None
    possible = why_unsupported(other, runner.capabilities) is None and property.applies(other, runner.capabilities)
    return other if possible and differing(case, other).keys() <= change.keys() else None


def _like_those(property: Property, runner: Runner, case: Case, before: Sequence[Case]) -> list[list[Case]]:
    """Return cases that differ in one field, to be run together: with values of cases before, and others of masks.

    Those that differ in another field are none of them: they may leave what the case itself would.
    """
    values: dict[str, list[object]] = {}
    for earlier in before:
        for name, value in differing(case, earlier).items():
            some = values.setdefault(name, [])
            some += [value] if len(some) < VALUES and value not in some else []
    changes = [
        change
        for place in range(VALUES)
        for change in _together({name: each[place] for name, each in values.items() if len(each) > place})
    ]
    found: dict[tuple[str, ...], list[Case]] = {(mask,): [] for mask in MASKS}
    for change in (*changes, *_others(case, runner, MASKS)):
        one = changed(property, runner, case, change)
        same = found.setdefault((*sorted(change),), [])
        same += [one] if one is not None and one not in (case, *same) else []
    return [same for same in found.values() if same]


def _most_alike(case: Case, before: Sequence[Case], runner: Runner) -> list[Case]:
    """Return the other cases before that are most like a case, in their order: state is kept by what is the same."""
    varying = Varying(runner.capabilities, MOST_RANKS)
    others = [other for other in before if other != case]
    chosen = {*sorted(others, key=lambda one: -varying.likeness(one, case))[:STATE_HISTORY]}
    return [other for other in others if other in chosen]


def _others(case: Case, runner: Runner, fields: Collection[str]) -> Iterator[dict[str, object]]:
    """Yield changes of one of some fields each."""
    varying = Varying(runner.capabilities, MOST_RANKS)
    for factor, field in KEPT_BY.items():
        changes = (differing(case, one) for one in (varying.of(case, factor) if field in fields else ()))
        yield from itertools.islice((change for change in changes if {*change} == {field}), VALUES)


def _fails_after(property: Property, runner: Runner, case: Case, some: Sequence[Case]) -> bool:
    """Return whether a case fails in a fresh process after all of some cases, of which the first is run last."""
    return afresh(property, runner, [*reversed(some), case]).violation is not None


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


def _as_told(property: Property, runner: Runner, shown: Counterexample, case: Case) -> list[Case]:
    """Return earlier cases that differ from a case as the earlier one of a counterexample does from the later one."""
    change = differing(shown.case, shown.after[0])
    changes = [change, differing(shown.after[0], shown.case), *_others(case, runner, change)][:VALUES]
    found = (changed(property, runner, case, one) for one in changes)
    return [one for one in dict.fromkeys(found) if one is not None and (one != case or not change)]


def follows_again(
    stories: Sequence[ToldFailure], property: Property, runner: Runner, found: Found
) -> Counterexample | None:
    """Return a counterexample that shows kept state once more, where that was told; `None` if it may be news.

    It is if the case fails after one of those before it, twice, and passes alone, twice. It is not shrunk.
    """
    told = next((story for story in stories if story.shown.after), None)
    if told is None or any(afresh(property, runner, [found.case]).violation is not None for _ in range(2)):
        return None

    fails_after = functools.partial(_fails_after, property, runner, found.case)
    others = _most_alike(found.case, found.history, runner)
    suspects: tuple[Callable[[], Sequence[Case]], ...] = (
        lambda: _as_told(property, runner, told.shown, found.case),
        lambda: _the_one(others, fails_after) or others[:STATE_SUSPECTS],
    )
    for earlier in itertools.chain.from_iterable(some() for some in suspects):
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
