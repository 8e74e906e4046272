"""Looking for a case that breaks a property, and for the smallest such case."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.cases.shrinking import Shrunk, shrink
from ringverify.check.beside import SHARED_STATE, beside
from ringverify.check.budget import ENDLESS, Share
from ringverify.check.declaring import Declaration, would_pass
from ringverify.check.drawing import visit_cases
from ringverify.check.explaining import explained
from ringverify.check.mishap import Mishap, attempt
from ringverify.check.needing import needed
from ringverify.check.repeating import same_failure
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.region import FailureMap
from ringverify.errors import Inconclusive
from ringverify.events import Hint, Where
from ringverify.properties.property import Judgement, Property, Violation
from ringverify.properties.suites import Suite
from ringverify.worlds.world import REFUSED, WorldUnavailable

if TYPE_CHECKING:
    from ringverify.check.casefile import CaseFile

HUNG_DEADLINE = 1.0
"""Seconds a simulated run may take while a case that hangs is shrunk: a small case takes milliseconds."""

HUNG_SHRINKING = 1.0
"""Seconds for shrinking a case that hangs, where every attempt may cost the deadline."""

MOST_REFUSED = 40
"""Cases that a transport may refuse, before what else is wrong is not looked for any longer."""

STATE_SUSPECTS = 12
"""How many earlier cases are tried, the latest first, as the one that left state behind."""

STATE_SHRINKING = 10.0
"""Seconds for shrinking the earlier case, where every attempt costs a fresh process."""


@dataclasses.dataclass(frozen=True)
class Counterexample:
    """The smallest case found that violates a property.

    Attributes:
        case: the case.
        violation: what is wrong on it.
        digest: SHA-256 of the bits that came back.
        first: the case that was found first.
        tried: cases run while shrinking.
        smallest: whether shrinking ended by itself rather than by its budget.
        repeats: whether the case failed in the same way when it was run again in a fresh process; see `same_failure`.
        after: cases that have to run before it in the same process for it to fail; mostly none.
        diagnosis: what explains it, in a sentence; `None` where nothing does, or there are no values to explain.
        causes: the hypotheses that the diagnosis names, the plainest first.
        hop: passes that the block had made which was treated wrongly, if it is those of one hop.
        where: the rows, heads and keys concerned; `None` where there are no values to look at.
        region: the same as a map.
        declaration: what would have to be declared for the implementation to pass, if that is all that is wrong.
        refused: another case and what the transport refused of it; looking for violations went on after it.
        hints: what was found beside it, where nothing explains it.
        printed: what each rank printed when the case was run last; `None` stands for a process that ranks share.
    """

    case: Case
    violation: Violation
    digest: str
    first: Case
    tried: int
    smallest: bool
    repeats: bool
    after: tuple[Case, ...] = ()
    diagnosis: str | None = None
    hop: int | None = None
    where: Where | None = None
    region: FailureMap | None = None
    declaration: Declaration | None = None
    refused: tuple[Case, Violation] | None = None
    causes: tuple[Hypothesis, ...] = ()
    hints: tuple[Hint, ...] = ()
    printed: tuple[tuple[int | None, str], ...] = ()


@dataclasses.dataclass
class Hunt:
    """What became of looking for a violation of one property.

    Attributes:
        examples: cases that put the property to the test.
        margin: largest error over allowed error among those that held.
        seconds: wall-clock time, shrinking included.
        counterexample: what was found, if anything.
        out_of_time: whether the time budget ended the search.
        remembered: how many of the examples are cases of earlier runs.
        unfinished: what the time budget left undone of a counterexample, in words.
        mishaps: what could not be done with a counterexample, by an error of ours or for want of a world.
    """

    examples: int = 0
    margin: float = 0.0
    seconds: float = 0.0
    counterexample: Counterexample | None = None
    out_of_time: bool = False
    remembered: int = 0
    unfinished: str | None = None
    mishaps: list[Mishap] = dataclasses.field(default_factory=list)


class _Stop(BaseException):
    """Ends the drawing of examples; not an `Exception`, so that Hypothesis lets it through."""


def hunt(
    property: Property,
    runner: Runner,
    *,
    examples: int,
    seed: int,
    share: Share = ENDLESS,
    progress: Callable[[int], None],
    shrinking: bool = True,
    suite: Suite = "quick",
    first: Sequence[CaseFile] = (),
    watched: Callable[[], Runner | None] = lambda: None,
) -> Hunt:
    """Try `examples` cases of a property, stop at the first violation, and shrink it.

    A message to oneself, which depends on the number of ranks, does not end the search: what else is wrong would never
    be seen. If nothing else is, it is the violation.

    Args:
        property: what must hold.
        runner: the implementation in its world; another one for each property (`Runner.for_another_property`).
        examples: cases to try at most.
        seed: decides which.
        share: the time for it.
        progress: called with the number of cases tried so far.
        shrinking: whether to look for the smallest case, or to leave it at the first.
        suite: whose profile Hypothesis draws under.
        first: counterexamples of earlier runs, to be tried before others.
        watched: the implementation in a simulated world, where the runner's is another one.

    Raises:
        WorldUnavailable: the world could not be set up, or the machine, not the implementation, gave up.
        Exception: an error of ours, before a violation was found; what follows one costs it nothing.
    """
    started = time.monotonic()
    hunt = Hunt()
    found: list[tuple[Case, Judgement]] = []
    refused: list[tuple[Case, Judgement]] = []
    ended: list[Exception] = []

    def visit(case: Case) -> None:
        if time.monotonic() > (share.until if hunt.examples else share.end):
            hunt.out_of_time = True
            raise _Stop
        if runner.most_ranks is not None and case.ranks > runner.most_ranks:
            return
        try:
            judgement = judged(property, case, runner)
        except Exception as error:  # Hypothesis is not to draw the case again
            ended.append(error)
            raise _Stop from None
        if not judgement.applies:
            return
        hunt.examples += 1
        progress(hunt.examples)
        if judgement.violation is None:
            hunt.margin = max(hunt.margin, judgement.margin)
            return
        if judgement.violation.kind == REFUSED:
            refused.append((case, judgement))
            if len(refused) < MOST_REFUSED:
                return
        else:
            found.append((case, judgement))
        raise _Stop

    try:
        for known in first:
            for earlier in known.after:
                judged(property, earlier, runner)
            hunt.remembered += 1
            visit(known.case)
        visit_cases(property, runner.capabilities, examples, seed, visit, suite)
    except _Stop:
        pass
    except Exception as error:
        ended.append(error)
    if ended and not found and not refused:
        raise ended[0]
    hunt.mishaps += [Mishap.of(error, "trying further cases") for error in ended]
    if found or refused:
        case, judgement = (found or refused)[0]
        shown = _as_found(case, judgement)
        if shrinking:
            shown, hunt.unfinished = _smallest(property, runner, case, judgement, refused, share, watched, hunt.mishaps)
        hunt.counterexample = dataclasses.replace(shown, refused=_plainest(refused) if found else None)
        hunt.margin = max(hunt.margin, judgement.margin)
    hunt.seconds = time.monotonic() - started
    return hunt


def _plainest(refused: Sequence[tuple[Case, Judgement]]) -> tuple[Case, Violation] | None:
    """Of the cases that were refused, the one on the fewest ranks."""
    if not refused:
        return None
    case, judgement = min(refused, key=lambda one: one[0].ranks)
    assert judgement.violation is not None
    return case, judgement.violation


def _needed(property: Property, runner: Runner, case: Case, violation: Violation) -> list[Hint]:
    """Which capability keeps the suite from asking for such a case, where a case like it without that passes."""

    def passes(other: Case) -> bool:
        try:
            seen = judged(property, other, runner)
        except (Inconclusive, WorldUnavailable):
            return False
        return seen.applies and seen.violation is None

    found = needed(case, runner.capabilities, passes, refused=violation.kind == "raised")
    return [] if found is None else [Hint(found)]


def judged(property: Property, case: Case, runner: Runner) -> Judgement:
    """Judge one case. A case that cannot put the property to the test is not run.

    Raises:
        WorldUnavailable: the world could not be set up, or the machine, not the implementation, gave up.
    """
    if not property.applies(case, runner.capabilities):
        return Judgement(0.0, None, applies=False)
    return property.judge(case, runner)


def _as_found(case: Case, judgement: Judgement) -> Counterexample:
    assert judgement.violation is not None
    return Counterexample(
        case, judgement.violation, judgement.digest, first=case, tried=0, smallest=False, repeats=True
    )


def _smallest(
    property: Property,
    runner: Runner,
    first: Case,
    judgement: Judgement,
    refused: list[tuple[Case, Judgement]],
    share: Share,
    watched: Callable[[], Runner | None],
    mishaps: list[Mishap],
) -> tuple[Counterexample, str | None]:
    """The smallest case, explained, and what there was no time for.

    Smaller cases that are refused are added to `refused`, and to `mishaps` what could not be done: that a violation was
    found stays.
    """
    violation = judgement.violation
    assert violation is not None
    reason, seconds = violation.reason, 20.0
    hangs = violation.kind == "deadline"
    if hangs:  # processes that are ranks are slow to start again: there each attempt would cost too much
        seconds = HUNG_SHRINKING if runner.world.name == "simulated" else 0.0
    hurried = runner.within(HUNG_DEADLINE) if hangs else runner
    best = (first, judgement)

    def still_fails(case: Case) -> bool:
        nonlocal best
        try:
            seen = judged(property, case, hurried)
        except (Inconclusive, WorldUnavailable):
            return False  # of this case nothing was learned; the one that was found still stands
        if seen.violation is None or reason not in (seen.violation.reason, *seen.violation.also):
            if seen.violation is not None and seen.violation.kind == REFUSED:
                refused.append((case, seen))
            return False
        best = (case, seen)
        return True

    # Half of what is left of the share, so that there is time to explain what was found.
    allowed = max(0.0, share.until - time.monotonic()) / 2
    ran_before = tuple(dict.fromkeys(reversed(runner.log.history)))
    capabilities = runner.capabilities

    def smaller() -> Shrunk:
        start = first
        if first.delayed == "some" and judgement.delayed:
            # The messages that were held back, by number: so it can be found out which of them it takes.
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
        return _what_it_follows(property, runner, case, ran_before, share)

    if not hangs and (again := attempt(mishaps, "running the case afresh", confirmed, None)) is not None:
        after, afresh = again
        repeats = bool(after) or same_failure(afresh, judgement)
        judgement = afresh if afresh.violation is not None else judgement
    violation = judgement.violation
    assert violation is not None
    printed = runner.log.printed
    # What depends on earlier cases, or on chance, is not to be explained by a case.
    steady = repeats and not after
    in_time = time.monotonic() <= share.late
    diagnosis, declaration = None, None
    if steady and in_time:
        diagnosis = attempt(mishaps, "explaining the case", lambda: explained(runner, violation, case, first), None)
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
    unexplained = declaration is None and (diagnosis is None or not diagnosis.causes)
    if steady and in_time and unexplained and not hangs:
        hints += attempt(mishaps, "looking for hints", lambda: _needed(property, runner, case, violation), [])
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
        diagnosis=None if diagnosis is None else diagnosis.text,
        hop=None if diagnosis is None else diagnosis.hop,
        where=None if diagnosis is None else diagnosis.where,
        region=None if diagnosis is None else diagnosis.region,
        declaration=declaration,
        causes=() if diagnosis is None else diagnosis.causes,
        hints=tuple(hints),
        printed=printed,
    )
    return counterexample, unfinished


def _afresh(property: Property, runner: Runner, cases: list[Case]) -> Judgement:
    """Judge the last of `cases` in a process in which the others have run, and nothing else."""
    runner.world.close()
    return [judged(property, case, runner) for case in cases][-1]


def _what_it_follows(
    property: Property, runner: Runner, case: Case, before: tuple[Case, ...], share: Share
) -> tuple[tuple[Case, ...], Judgement]:
    """The earlier case after which `case` fails in a fresh process, though alone it does not: state is left behind.

    It has to fail twice, in the same way: what fails by chance fails after anything.
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
