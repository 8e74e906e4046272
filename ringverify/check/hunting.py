"""Search for a case that violates a property, and shrink, confirm and explain it."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ringverify.cases.case import Case
from ringverify.cases.running import RunLog, Runner
from ringverify.cases.shrinking import Shrunk, shrink
from ringverify.check.beside import SHARED_STATE, beside
from ringverify.check.budget import ENDLESS, Share
from ringverify.check.declaring import Declaration, would_pass
from ringverify.check.drawing import visit_cases
from ringverify.check.explaining import explained, judged, judged_if_possible, quick_place, when_it_fails
from ringverify.check.mishap import Mishap, attempt
from ringverify.check.repeating import same_failure
from ringverify.check.suggesting import suggested
from ringverify.check.tried import Tried
from ringverify.diagnosis.diagnose import Diagnosis
from ringverify.errors import Inconclusive
from ringverify.events import Hint, Needed
from ringverify.properties.property import Judgement, Property, Violation
from ringverify.worlds.world import REFUSED, WorldUnavailable

if TYPE_CHECKING:
    from ringverify.check.casefile import CaseFile

HUNG_DEADLINE = 1.0
"""Deadline in seconds of a simulated run while a hanging case is shrunk: a small case takes milliseconds."""

HUNG_SHRINKING = 1.0
"""Seconds for shrinking a case that hangs, since every attempt may take up to its deadline."""

MOST_REFUSED = 40
"""Number of cases refused by the transport after which the search for another violation ends."""

STATE_SUSPECTS = 12
"""How many earlier cases, the latest first, are suspected of having left state behind in the process."""

STATE_SHRINKING = 10.0
"""Seconds for shrinking that earlier case, since every attempt costs a fresh process."""


@dataclasses.dataclass(frozen=True)
class Counterexample:
    """The smallest case found that violates a property.

    Attributes:
        case: the smallest failing case.
        violation: how it violates the property.
        digest: SHA-256 of the results, as in `Observation.digest`.
        first: the failing case that was found first, from which it was shrunk.
        tried: number of cases run while shrinking.
        smallest: whether no further step shrinks it; if not, the budget or the time ended first.
        repeats: whether the case failed in the same way when it was run again in a fresh process; see `same_failure`.
        after: cases that have to run before it in the same process for it to fail; mostly none.
        diagnosis: the cause, and where the result is wrong; empty if none was found, or no values came back.
        declaration: what would have to be declared for the implementation to pass, if nothing else is wrong.
        needs: when it fails; `None` if it was not varied.
        refused: a case in which the transport refused a call, and that violation; the search went on after it.
        hints: what else was noticed, if no cause was found.
        printed: what each rank printed when the case was last run; `None` stands for a process that ranks share.
    """

    case: Case
    violation: Violation
    digest: str
    first: Case
    tried: int
    smallest: bool
    repeats: bool
    after: tuple[Case, ...] = ()
    diagnosis: Diagnosis = Diagnosis()
    declaration: Declaration | None = None
    needs: Needed | None = None
    refused: tuple[Case, Violation] | None = None
    hints: tuple[Hint, ...] = ()
    printed: tuple[tuple[int | None, str], ...] = ()


@dataclasses.dataclass
class Hunt:
    """The result of searching for a violation of one property.

    Attributes:
        examples: number of cases that tested the property.
        margin: largest margin (error over allowed error) of these cases, that of a violation included.
        seconds: wall-clock time, shrinking included.
        counterexample: the counterexample, or `None`.
        out_of_time: whether the time budget ended the search.
        remembered: how many of the examples are cases of earlier runs.
        unfinished: when the time budget ended the work on a counterexample, as in "before the case was explained".
        mishaps: steps that failed by an error of ours, or because a world was unavailable.
        tried: the examples by their features.
    """

    examples: int = 0
    margin: float = 0.0
    seconds: float = 0.0
    counterexample: Counterexample | None = None
    out_of_time: bool = False
    remembered: int = 0
    unfinished: str | None = None
    mishaps: list[Mishap] = dataclasses.field(default_factory=list)
    tried: Tried = dataclasses.field(default_factory=Tried)


@dataclasses.dataclass(frozen=True)
class Found:
    """The violation that ended a search, before it is shrunk.

    Attributes:
        case: the failing case.
        judgement: how it fails.
        refused: cases in which the transport refused a call, with what was seen; `case` may be one of them.
        history: cases run before, the latest first, each once: module state that they left may still be there.
        notes: what ranks tried until then that cannot be done in this world, as in `RunLog`.
    """

    case: Case
    judgement: Judgement
    refused: tuple[tuple[Case, Judgement], ...]
    history: tuple[Case, ...]
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Ending:
    """What the work on a found violation gave.

    Attributes:
        counterexample: the counterexample.
        unfinished: as in `Hunt`.
        mishaps: as in `Hunt`.
        instead: the search from the beginning that found the violation shown, if it is another than the one found.
        seconds: wall-clock time.
    """

    counterexample: Counterexample
    unfinished: str | None = None
    mishaps: tuple[Mishap, ...] = ()
    instead: Hunt | None = None
    seconds: float = 0.0


class Search:
    """What the cases of a property have shown so far, taken in the order in which they are drawn.

    Args:
        share: the time for the search.
        progress: called with the number of cases that tested the property so far.
    """

    def __init__(self, share: Share = ENDLESS, progress: Callable[[int], None] = lambda done: None) -> None:
        self.hunt = Hunt()
        self.ended: Exception | None = None
        self._share, self._progress = share, progress
        self._found: list[tuple[Case, Judgement]] = []
        self._refused: list[tuple[Case, Judgement]] = []

    def in_time(self) -> bool:
        """Whether another case may be started; if not, the hunt is out of time."""
        late = time.monotonic() > (self._share.until if self.hunt.examples else self._share.end)
        self.hunt.out_of_time = self.hunt.out_of_time or late
        return not late

    def goes_on_after(self, case: Case, judgement: Judgement) -> bool:
        """Count a case, and return whether the search goes on."""
        if not judgement.applies:
            return True
        self.hunt.examples += 1
        self.hunt.tried.add(case)
        self._progress(self.hunt.examples)
        if judgement.violation is None:
            self.hunt.margin = max(self.hunt.margin, judgement.margin)
            return True
        if judgement.violation.kind == REFUSED:
            self._refused.append((case, judgement))
            return len(self._refused) < MOST_REFUSED
        self._found.append((case, judgement))
        return False

    def found(self, log: RunLog, history: Sequence[Case] | None = None) -> Found | None:
        """Return the violation that was found, with the history of `log` unless another is given.

        Raises:
            Exception: what ended the search before a violation was found; afterwards, it is noted as a mishap.
        """
        if self.ended is not None and not self._found and not self._refused:
            raise self.ended
        if self.ended is not None:
            self.hunt.mishaps.append(Mishap.of(self.ended, "trying further cases"))
        if not self._found and not self._refused:
            return None
        case, judgement = (self._found or self._refused)[0]
        self.hunt.margin = max(self.hunt.margin, judgement.margin)
        before = reversed(log.history) if history is None else history
        return Found(case, judgement, tuple(self._refused), tuple(dict.fromkeys(before)), tuple(log.notes))

    def ends_with(self, ending: Ending) -> None:
        """Add to the hunt what the work on the violation gave."""
        if ending.instead is not None:
            for name in ("examples", "margin", "remembered", "tried"):
                setattr(self.hunt, name, getattr(ending.instead, name))
        self.hunt.counterexample, self.hunt.unfinished = ending.counterexample, ending.unfinished
        self.hunt.mishaps += ending.mishaps


class _Stop(BaseException):
    """Ends the drawing of examples; not an `Exception`, so that Hypothesis lets it through."""


class _Unrepeated(BaseException):
    """A violation depends on what ran before it in its process, or on chance; no `Exception`, so not a mishap."""


def hunt(
    property: Property,
    runner: Runner,
    *,
    examples: int,
    seed: int,
    share: Share = ENDLESS,
    progress: Callable[[int], None],
    shrinking: bool = True,
    first: Sequence[CaseFile] = (),
    watched: Callable[[], Runner | None] = lambda: None,
) -> Hunt:
    """Try up to `examples` cases of a property, stop at the first violation, and shrink it.

    A call that the transport refuses on some world sizes only, such as a send to oneself on one rank, does not end the
    search: other violations would never be seen. If no other is found, the refusal is the violation.

    Args:
        property: what must hold.
        runner: runs the implementation; a new one for each property (`Runner.for_another_property`).
        examples: most cases to draw.
        seed: decides which cases are drawn.
        share: the time for the search, shrinking included.
        progress: called with the number of cases tried so far.
        shrinking: whether to shrink and explain the case found first.
        first: counterexamples of earlier runs, tried before drawn cases.
        watched: returns a runner in a simulated world, if `runner` is in another one, or `None`.

    Raises:
        WorldUnavailable: the world could not be set up, or a limit of the machine was reached, before a violation.
        Exception: an error of ours, before a violation was found; later errors are noted as mishaps.
    """
    started = time.monotonic()
    search = Search(share, progress)
    _search(search, property, runner, examples, seed, first)
    if (found := search.found(runner.log)) is not None:
        if shrinking:
            search.ends_with(
                finished(
                    property,
                    runner,
                    found,
                    examples=examples,
                    seed=seed,
                    share=share,
                    first=first,
                    watched=watched,
                )
            )
        else:
            search.ends_with(Ending(found_only(found)))
    search.hunt.seconds = time.monotonic() - started
    return search.hunt


def _search(
    search: Search, property: Property, runner: Runner, examples: int, seed: int, first: Sequence[CaseFile]
) -> None:
    """Try the cases of a property one after another, until the search ends."""

    def visit(case: Case) -> None:
        if not search.in_time():
            raise _Stop
        if runner.most_ranks is not None and case.ranks > runner.most_ranks:
            return
        try:
            judgement = judged(property, case, runner)
        except Exception as error:  # Hypothesis must not see it: it would run the case again
            search.ended = error
            raise _Stop from None
        if not search.goes_on_after(case, judgement):
            raise _Stop

    try:
        for known in first:
            for earlier in known.after:
                judged(property, earlier, runner)
            search.hunt.remembered += 1
            visit(known.case)
        visit_cases(property, runner.capabilities, examples, seed, visit)
    except _Stop:
        pass
    except Exception as error:
        search.ended = error


def found_only(found: Found) -> Counterexample:
    """Return the counterexample that a violation is if nothing more is done about it."""
    shown = as_found(found.case, found.judgement)
    return dataclasses.replace(shown, refused=_other_refused(found.judgement, found.refused))


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
    """
    mishaps: list[Mishap] = []
    began = time.monotonic()

    def shown(one: Found, *, own: bool) -> tuple[Counterexample, str | None]:
        refused = list(one.refused)
        shown, unfinished = _smallest(property, runner, one, refused, share, watched, mishaps, own=own)
        return dataclasses.replace(shown, refused=_other_refused(one.judgement, refused)), unfinished

    runner.log.notes += [note for note in found.notes if note not in runner.log.notes]
    try:
        return Ending(*shown(found, own=False), tuple(mishaps), seconds=time.monotonic() - began)
    except _Unrepeated:
        runner.world.close()
        runner.log.history.clear()
    search = Search(Share(until=share.late, end=share.late))
    _search(search, property, runner, examples, seed, first)
    again = attempt(mishaps, "trying its cases again", lambda: search.found(runner.log), None)
    mishaps += search.hunt.mishaps
    ending = shown(found if again is None else again, own=True)
    return Ending(*ending, tuple(mishaps), None if again is None else search.hunt, time.monotonic() - began)


def _other_refused(judgement: Judgement, refused: Sequence[tuple[Case, Judgement]]) -> tuple[Case, Violation] | None:
    """Return the plainest refused case if the violation is another one."""
    violation = judgement.violation
    return _plainest(refused) if violation is not None and violation.kind != REFUSED else None


def _plainest(refused: Sequence[tuple[Case, Judgement]]) -> tuple[Case, Violation] | None:
    """Return the refused case on the fewest ranks, with its violation; `None` if there is none."""
    if not refused:
        return None
    case, judgement = min(refused, key=lambda one: one[0].ranks)
    assert judgement.violation is not None
    return case, judgement.violation


def _suggested(property: Property, place: Runner, case: Case, violation: Violation) -> list[Hint]:
    """Return a hint at the capability that would keep the suite from drawing such a case, if there is one."""

    def passes(other: Case) -> bool:
        seen = judged_if_possible(property, other, place)
        return seen is not None and seen.applies and seen.violation is None

    failure = violation.failure
    refused = failure is not None and failure.kind == "raised" and failure.rule in (None, "shape")
    found = suggested(case, place.capabilities, passes, refused=refused)
    return [] if found is None else [Hint(found)]


def as_found(case: Case, judgement: Judgement) -> Counterexample:
    """Return the counterexample that a failing case is before anything else is known of it."""
    assert judgement.violation is not None
    return Counterexample(
        case, judgement.violation, judgement.digest, first=case, tried=0, smallest=False, repeats=True
    )


def _smallest(
    property: Property,
    runner: Runner,
    found: Found,
    refused: list[tuple[Case, Judgement]],
    share: Share,
    watched: Callable[[], Runner | None],
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
    first, judgement = found.case, found.judgement
    violation = judgement.violation
    assert violation is not None
    reason, seconds = violation.reason, 20.0
    hangs = violation.kind == "deadline"
    if hangs:  # not in worlds of processes: restarting the ranks after each hang would take too long
        seconds = HUNG_SHRINKING if runner.world.name == "simulated" else 0.0
    hurried = runner.within(HUNG_DEADLINE) if hangs else runner
    best = (first, judgement)

    def still_fails(case: Case) -> bool:
        nonlocal best
        try:
            seen = judged(property, case, hurried)
        except (Inconclusive, WorldUnavailable):
            return False  # nothing was learned of this case; the best one so far stands
        if seen.violation is None or reason not in (seen.violation.reason, *seen.violation.also):
            if seen.violation is not None and seen.violation.kind == REFUSED:
                refused.append((case, seen))
            return False
        best = (case, seen)
        return True

    # Half of what is left of the share, so that there is time to explain what was found.
    allowed = max(0.0, share.until - time.monotonic()) / 2
    capabilities = runner.capabilities

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
    complete = shrunk is not None and shrunk.complete
    unfinished = "before the smallest case was found" if shrunk and not complete and allowed < seconds else None
    case, judgement = best
    after: tuple[Case, ...] = ()
    repeats = True

    def confirmed() -> tuple[tuple[Case, ...], Judgement]:
        again = _afresh(property, runner, [case])
        if again.violation is not None:
            return (), again
        if not own:
            raise _Unrepeated
        return _what_it_follows(property, runner, case, found.history, share)

    if not hangs and (again := attempt(mishaps, "running the case afresh", confirmed, None)) is not None:
        after, afresh = again
        repeats = bool(after) or same_failure(afresh, judgement)
        judgement = afresh if afresh.violation is not None else judgement
    violation = judgement.violation
    assert violation is not None
    printed = runner.log.printed
    # A failure that depends on earlier cases, or on chance, cannot be explained from this case.
    steady = repeats and not after
    in_time = time.monotonic() <= share.late
    diagnosis, declaration, needs = Diagnosis(), None, None
    place = functools.cache(lambda: quick_place(property, runner, watched, case, violation))
    if steady and in_time:
        if not hangs:
            varied = "finding out when the case fails"
            needs = attempt(mishaps, varied, lambda: when_it_fails(property, place(), case, violation), None)
        explanation = attempt(
            mishaps,
            "explaining the case",
            lambda: explained(runner, property, violation, case, first, needs),
            None,
        )
        diagnosis = explanation or diagnosis
        declaration = attempt(
            mishaps,
            "looking for a declaration",
            lambda: would_pass(property, runner, violation, (case, first)),
            None,
        )
    if steady and not in_time:
        unfinished = "before the case was explained" if unfinished is None else f"{unfinished} and explained"
    hints = [Hint(note) for note in runner.log.notes]
    if runner.world.name == "simulated" and after and not hints:
        hints.append(Hint(SHARED_STATE))
    unexplained = declaration is None and not diagnosis.causes
    if steady and in_time and unexplained and not hangs:
        hints += attempt(mishaps, "looking for hints", lambda: _suggested(property, place(), case, violation), [])
    if in_time and not hints and not hangs and unexplained:

        def around() -> list[Hint]:
            there = runner if runner.world.name == "simulated" else watched()
            return beside(property, runner, there, case, violation)

        hints = attempt(mishaps, "looking for hints", around, [])
    counterexample = Counterexample(
        case=case,
        violation=violation,
        digest=judgement.digest,
        first=first,
        tried=0 if shrunk is None else shrunk.tried,
        smallest=complete,
        repeats=repeats,
        after=after,
        diagnosis=diagnosis,
        declaration=declaration,
        needs=None if needs is None else needs.told(),
        hints=tuple(hints),
        printed=printed,
    )
    return counterexample, unfinished


def _afresh(property: Property, runner: Runner, cases: list[Case]) -> Judgement:
    """Judge the last of `cases` in a fresh process, after running the others there."""
    runner.world.close()
    return [judged(property, case, runner) for case in cases][-1]


def _what_it_follows(
    property: Property, runner: Runner, case: Case, before: tuple[Case, ...], share: Share
) -> tuple[tuple[Case, ...], Judgement]:
    """Find an earlier case after which `case` fails in a fresh process, though alone it passes: state is left behind.

    `case` has to fail twice in the same way: a failure by chance would follow any case.

    Returns:
        the earlier case, shrunk, and the judgement of `case` after it; `()` and a pass if there is none.
    """

    def after(other: Case) -> Judgement:
        return _afresh(property, runner, [other, case])

    for earlier in [other for other in before if other != case][:STATE_SUSPECTS]:
        if time.monotonic() > share.late:
            break
        if same_failure(after(earlier), after(earlier)):
            shrunk = shrink(
                earlier, lambda other: after(other).violation is not None, runner.capabilities, seconds=STATE_SHRINKING
            )
            seen = after(shrunk.case)
            if same_failure(seen, after(shrunk.case)):
                return (shrunk.case,), seen
    return (), Judgement(0.0, None)
