"""Shrink a violation that was found, run it again in a fresh process, and explain it."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.cases.shrinking import Shrunk, shrink
from ringverify.check.accounting import Account, depends_on_messages
from ringverify.check.budget import ENDLESS, Share
from ringverify.check.explaining import afresh, judged
from ringverify.check.following import STATE_SEARCH, follows_again, what_it_follows
from ringverify.check.mishap import Mishap, attempt
from ringverify.check.repeating import same_failure
from ringverify.check.sameness import ToldFailure, repeated
from ringverify.check.searching import Counterexample, Ending, Found, Search, other_refused, search_cases
from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.errors import Inconclusive
from ringverify.properties.property import Judgement, Property
from ringverify.worlds.patience import slowness
from ringverify.worlds.world import REFUSED, WorldUnavailable

if TYPE_CHECKING:
    from ringverify.check.casefile import CaseFile

HUNG_DEADLINE = 1.0
"""Deadline in seconds of a simulated run while a hanging case is shrunk: a small case takes milliseconds."""

HUNG_SHRINKING = 1.0
"""Seconds for shrinking a case that hangs, since every attempt may take up to its deadline."""


class _Unrepeated(BaseException):
    """A violation depends on what ran before it in its process, or on chance; no `Exception`, so not a mishap."""


def finished(
    property: Property,
    runner: Runner,
    found: Found,
    *,
    examples: int,
    seed: int,
    share: Share = ENDLESS,
    first: Sequence[CaseFile] = (),
    watched: Callable[[], Runner | None] = lambda: None,
    known: Sequence[Hypothesis] = HYPOTHESES,
    stories: Sequence[ToldFailure] = (),
) -> Ending:
    """Shrink a violation, run it again in a fresh process, and explain it.

    A violation that does not repeat alone in a fresh process may depend on any case that ran before it in its process:
    on other properties, and on how cases were shared out among processes. So the cases of this property are tried again
    from the beginning in a fresh process, and what fails there is shown. Else what was found is.

    Args:
        property: what is violated.
        runner: runs the implementation; its process need not be the one in which the violation was found.
        found: the violation.
        examples: as in `hunt`, for the search from the beginning, and so are all others.
        seed: see there.
        share: see there.
        first: see there.
        watched: see there.
        known: see there.
        stories: see there.
    """
    mishaps: list[Mishap] = []
    began = time.monotonic()
    again = attempt(mishaps, "comparing it with others", lambda: repeated(stories, property, found, runner), None)
    if again is None and any(story.shown.after for story in stories):
        kept = functools.partial(follows_again, stories, property, runner, found)
        again = attempt(mishaps, "comparing it with kept state", kept, None)
    if again is not None:
        return Ending(again, seconds=time.monotonic() - began)

    # One fault is likelier than two: what was found to be the cause before is tried of this violation too.
    of_stories = {id(cause): story for story in stories for cause in story.shown.diagnosis.causes}
    earlier = [cause for story in stories for cause in story.shown.diagnosis.causes if cause not in known]

    def shown(one: Found, *, own: bool) -> tuple[Counterexample, str | None]:
        refused = list(one.refused)
        hypotheses = [*known, *earlier]
        shown, unfinished = _smallest(property, runner, one, refused, share, watched, hypotheses, mishaps, own=own)
        story = next((of_stories[id(cause)] for cause in shown.diagnosis.causes if id(cause) in of_stories), None)
        same = None if story is None else story.story()
        return dataclasses.replace(shown, refused=other_refused(one.judgement, refused), same_as=same), unfinished

    runner.log.notes += [note for note in found.notes if note not in runner.log.notes]
    try:
        return Ending(*shown(found, own=False), tuple(mishaps), seconds=time.monotonic() - began)
    except _Unrepeated:
        runner.world.close()
        runner.log.history.clear()
    search = Search(Share(until=share.late, end=share.late))
    search_cases(search, property, runner, examples=examples, seed=seed, first=first)
    anew = attempt(mishaps, "trying its cases again", lambda: search.found(runner.log), None)
    mishaps += search.hunt.mishaps
    ending = shown(found if anew is None else anew, own=True)
    return Ending(*ending, tuple(mishaps), None if anew is None else search.hunt, time.monotonic() - began)


def _smallest(
    property: Property,
    runner: Runner,
    found: Found,
    refused: list[tuple[Case, Judgement]],
    share: Share,
    watched: Callable[[], Runner | None],
    known: Sequence[Hypothesis],
    mishaps: list[Mishap],
    *,
    own: bool,
) -> tuple[Counterexample, str | None]:
    """Shrink a failing case, run it again in a fresh process, and explain it.

    Smaller cases that the transport refuses are appended to `refused`, and failing steps to `mishaps`; the violation
    stands whatever fails. `own` says that the history is all that ran in its process, or that no such search found it.

    Returns:
        the counterexample, and when the time ended the work on it, as in `Hunt.unfinished`.

    Raises:
        _Unrepeated: it does not repeat alone in a fresh process, and the history is not its own.
    """
    if attempt(mishaps, "running the case afresh", lambda: _kept(property, runner, found), False):
        if not own:
            raise _Unrepeated
        way, shrunk, unfinished = [(found.case, found.judgement)], None, None  # it is shrunk with what it follows
    else:
        way, shrunk, unfinished = _shrunk(property, runner, found, refused, share, mishaps)
    case, judgement = way[-1]

    def confirmed() -> tuple[tuple[Case, ...], Case, Judgement]:
        seen = afresh(property, runner, [case])
        if seen.violation is not None:
            return (), case, seen
        if not own:
            raise _Unrepeated
        there = runner if runner.world.name == "simulated" else watched()
        if there is not None and depends_on_messages(case, there):
            return (), case, Judgement(0.0, None)
        # What it was shrunk to may need a call that was made on the way to it.
        until = time.monotonic() + STATE_SEARCH * slowness()
        for one in dict.fromkeys((case, found.case)):
            before = tuple(dict.fromkeys((found.case, *found.history)))
            after, smaller, seen = what_it_follows(property, runner, one, before, share, until=until)
            if after:
                return after, smaller, seen
        return (), case, Judgement(0.0, None)

    after: tuple[Case, ...] = ()
    repeats = alone = True
    again = None if _hangs(found) else attempt(mishaps, "running the case afresh", confirmed, None)
    if again is not None:
        after, case, seen = again
        repeats = bool(after) or same_failure(seen, judgement)
        alone = seen.violation is not None and not after
        judgement = seen if seen.violation is not None else judgement
    assert judgement.violation is not None
    violation = judgement.violation
    if _hangs(found) and case != found.case:
        violation = dataclasses.replace(violation, summary=f"{violation.summary} ({_waited(runner)})")
    counterexample = Counterexample(
        case=case,
        violation=violation,
        digest=judgement.digest,
        first=found.case,
        tried=0 if shrunk is None else shrunk.tried,
        smallest=shrunk is not None and shrunk.complete,
        repeats=repeats,
        after=after,
        printed=runner.log.printed,
    )
    in_time = time.monotonic() <= share.late
    if repeats and not after and not in_time:
        unfinished = "before the case was explained" if unfinished is None else f"{unfinished} and explained"
    larger = [one for one, _ in way if one != case]
    late = share.late if in_time else None
    account = Account(property, runner, watched, counterexample, known, mishaps, late, hangs=_hangs(found))
    return account.told(larger, alone=alone), unfinished


def _kept(property: Property, runner: Runner, found: Found) -> bool:
    """Return whether a case passes in fresh processes: it is not worth while to shrink it without what came before.

    Where ranks are processes, it takes longer to start them than to find out later.
    """
    if runner.world.name != "simulated" or _hangs(found):
        return False
    return all(afresh(property, runner, [found.case]).violation is None for _ in range(2))


def _hangs(found: Found) -> bool:
    return found.judgement.violation is not None and found.judgement.violation.kind == "deadline"


def _waited(runner: Runner) -> str:
    """Return how long the case found first was waited for: the smaller ones have a shorter deadline."""
    return f"the case it was shrunk from, after {runner.deadline:g} s"


def _shrunk(
    property: Property,
    runner: Runner,
    found: Found,
    refused: list[tuple[Case, Judgement]],
    share: Share,
    mishaps: list[Mishap],
) -> tuple[list[tuple[Case, Judgement]], Shrunk | None, str | None]:
    """Shrink a failing case. Arguments are those of `_smallest`.

    Returns:
        the case and each smaller one that fails likewise, in turn; what shrinking returned, or `None` if it raised;
        and whether the time ended it, as in `Hunt.unfinished`.
    """
    first, judgement = found.case, found.judgement
    assert judgement.violation is not None
    reason, capabilities, way = judgement.violation.reason, runner.capabilities, [(first, judgement)]
    seconds, hurried = 20.0, runner
    if _hangs(found):  # not in worlds of processes: restarting the ranks after each hang would take too long
        seconds = HUNG_SHRINKING if runner.world.name == "simulated" else 0.0
        hurried = runner.within(HUNG_DEADLINE)

    def still_fails(case: Case) -> bool:
        try:
            seen = judged(property, case, hurried)
        except (Inconclusive, WorldUnavailable):
            return False  # nothing was learned of this case; the best one so far stands
        if seen.violation is None or reason not in (seen.violation.reason, *seen.violation.also):
            if seen.violation is not None and seen.violation.kind == REFUSED:
                refused.append((case, seen))
            return False
        way.append((case, seen))
        return True

    # Half of what is left of the share, so that there is time to explain what was found.
    allowed = max(0.0, share.until - time.monotonic()) / 2

    def smaller() -> Shrunk:
        start = first
        if first.delayed == "some" and judgement.delayed:
            # Name the messages that were really held back, so that shrinking can find out which of them it takes.
            explicit = first.replace(delayed=judgement.delayed)
            start = explicit if still_fails(explicit) else first
        return shrink(
            start,
            still_fails,
            capabilities,
            seconds=min(seconds, allowed),
            applies=lambda case: property.applies(case, capabilities),
        )

    shrunk = attempt(mishaps, "shrinking the case", smaller, None)
    cut = shrunk is not None and not shrunk.complete and allowed < seconds
    return way, shrunk, "before the smallest case was found" if cut else None
