"""Looking for a case that breaks a property, and for the smallest such case."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.running import Runner
from ringverify.cases.shrinking import shrink
from ringverify.check.declaring import Declaration, would_pass
from ringverify.check.drawing import visit_cases
from ringverify.check.explaining import broken, explained
from ringverify.diagnosis.region import Region
from ringverify.diagnosis.where import Where
from ringverify.errors import Inconclusive
from ringverify.properties.property import Judgement, Property, Suite, Violation
from ringverify.worlds.world import WorldUnavailable

if TYPE_CHECKING:
    from ringverify.check.casefile import CaseFile

SECOND_CHANCE = 2.0
"""A run that passes its deadline is given this many times as long once more: the first may have been importing."""

HUNG_DEADLINE = 2.0
"""Seconds a simulated run may take once one is known to hang: a small case takes milliseconds in a warm process."""

HUNG_SHRINKING = 6.0
"""Seconds for shrinking a case that hangs, where every attempt may cost the deadline."""

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
        repeats: whether the case failed in the same way, bit for bit, when it was run again in a fresh process.
        after: cases that have to run before it in the same process for it to fail; mostly none.
        diagnosis: what explains it, in a sentence; or that nothing does; `None` where there are no values to explain.
        hop: passes that the block had made which was treated wrongly, if it is those of one hop.
        where: the rows, heads and keys concerned; `None` where there are no values to look at.
        region: the same as a map.
        declaration: what would have to be declared for the implementation to pass, if that is all that is wrong.
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
    region: Region | None = None
    declaration: Declaration | None = None


@dataclasses.dataclass
class Hunt:
    """What became of looking for a violation of one property.

    Attributes:
        examples: cases that put the property to the test.
        margin: largest error over allowed error among those that held.
        seconds: wall-clock time, shrinking included.
        counterexample: what was found, if anything.
        out_of_time: whether the time budget ended the search.
    """

    examples: int = 0
    margin: float = 0.0
    seconds: float = 0.0
    counterexample: Counterexample | None = None
    out_of_time: bool = False


class _Stop(BaseException):
    """Ends the drawing of examples; not an `Exception`, so that Hypothesis lets it through."""


def hunt(
    property: Property,
    runner: Runner,
    *,
    examples: int,
    seed: int,
    until: float,
    progress: Callable[[int], None],
    shrinking: bool = True,
    suite: Suite = "quick",
    first: Sequence[CaseFile] = (),
) -> Hunt:
    """Try `examples` cases of a property, stop at the first violation, and shrink it.

    Args:
        property: what must hold.
        runner: the implementation in its world.
        examples: cases to try at most.
        seed: decides which.
        until: `time.monotonic()` after which no further case is started.
        progress: called with the number of cases tried so far.
        shrinking: whether to look for the smallest case, or to leave it at the first.
        suite: whose profile Hypothesis draws under.
        first: counterexamples of earlier runs, to be tried before others.

    Raises:
        WorldUnavailable: the world could not be set up.
        Inconclusive: the machine, not the implementation, gave up (out of memory).
    """
    started = time.monotonic()
    hunt = Hunt()
    found: list[tuple[Case, Judgement]] = []

    def visit(case: Case) -> None:
        if time.monotonic() > until:
            hunt.out_of_time = True
            raise _Stop
        if runner.most_ranks is not None and case.ranks > runner.most_ranks:
            return
        judgement = judged(property, case, runner)
        if not judgement.applies:
            return
        hunt.examples += 1
        progress(hunt.examples)
        if judgement.violation is None:
            hunt.margin = max(hunt.margin, judgement.margin)
            return
        found.append((case, judgement))
        raise _Stop

    try:
        for known in first:
            if why_unsupported(known.case, runner.capabilities) is None:
                for earlier in known.after:
                    judged(property, earlier, runner)
                visit(known.case)
        visit_cases(property, runner.capabilities, examples, seed, visit, suite)
    except _Stop:
        pass
    if found:
        case, judgement = found[0]
        hunt.counterexample = _smallest(property, runner, case, judgement) if shrinking else _as_found(case, judgement)
        hunt.margin = max(hunt.margin, found[0][1].margin)
    hunt.seconds = time.monotonic() - started
    return hunt


def judged(property: Property, case: Case, runner: Runner) -> Judgement:
    """Judge one case; a run past its deadline gets a second chance, with more time.

    A case that cannot put the property to the test is not run.

    Raises:
        Inconclusive: the machine, not the implementation, gave up (out of memory).
        WorldUnavailable: the world could not be set up.
    """
    if not property.applies(case, runner.capabilities):
        return Judgement(0.0, None, applies=False)
    judgement = property.judge(case, runner)
    if judgement.violation is not None and judgement.violation.reason[0] == "deadline" and not runner.hangs:
        runner.deadline *= SECOND_CHANCE
        judgement = property.judge(case, runner)
    violation = judgement.violation
    if violation is not None and _out_of_memory(violation):
        raise Inconclusive(f"out of memory ({violation.summary}) on {case.describe()}")
    return judgement


def _out_of_memory(violation: Violation) -> bool:
    """Whether the machine gave up rather than the implementation; the kernel ends whom it picks by SIGKILL."""
    match violation.reason:
        case ("raised", "MemoryError" | "OutOfMemoryError"):
            return True
        case ("raised", "RuntimeError"):
            return "can't allocate memory" in violation.summary
        case ("died", _):
            return violation.summary.endswith("SIGKILL")
    return False


def _as_found(case: Case, judgement: Judgement) -> Counterexample:
    assert judgement.violation is not None
    return Counterexample(
        case, judgement.violation, judgement.digest, first=case, tried=0, smallest=False, repeats=True
    )


def _smallest(property: Property, runner: Runner, first: Case, judgement: Judgement) -> Counterexample:
    violation = judgement.violation
    assert violation is not None
    reason, seconds = violation.reason, 20.0
    if violation.reason[0] == "deadline":
        # A hung world of processes is replaced by a cold one, which imports again: too slow for a short deadline.
        runner.hangs, warm = True, runner.world.name == "simulated"
        runner.deadline = min(runner.deadline, HUNG_DEADLINE) if warm else runner.deadline / SECOND_CHANCE
        seconds = HUNG_SHRINKING if warm else 0.0
    best = (first, judgement)

    def still_fails(case: Case) -> bool:
        nonlocal best
        try:
            seen = judged(property, case, runner)
        except (Inconclusive, WorldUnavailable):
            return False  # of this case nothing was learned; the one that was found still stands
        if seen.violation is None or reason not in (seen.violation.reason, *seen.violation.also):
            return False
        best = (case, seen)
        return True

    ran_before = tuple(dict.fromkeys(reversed(runner.history)))
    start = first
    if first.delayed == "some" and judgement.delayed:
        # The messages that were held back, by number: so it can be found out which of them it takes.
        explicit = first.replace(delayed=judgement.delayed)
        start = explicit if still_fails(explicit) else first
    capabilities = runner.capabilities
    shrunk = shrink(
        start, still_fails, capabilities, seconds=seconds, applies=lambda case: property.applies(case, capabilities)
    )
    case, judgement = best
    after: tuple[Case, ...] = ()
    repeats = True
    if not runner.hangs:
        again = _afresh(property, runner, [case])
        if again.violation is None:
            after, again = _what_it_follows(property, runner, case, ran_before)
        repeats = bool(after) or _same_failure(again, judgement)
        judgement = again if again.violation is not None else judgement
    assert judgement.violation is not None
    # What depends on earlier cases, or on chance, is not to be explained by a case.
    steady = repeats and not after
    diagnosis = explained(runner, judgement.violation, case, first) if steady else None
    text, declaration = None if diagnosis is None else diagnosis.text, None
    try:
        declaration = would_pass(property, runner, judgement.violation, (case, first)) if steady else None
    except Exception as error:  # the verdict stands
        text = broken(error)
    return Counterexample(
        case=case,
        violation=judgement.violation,
        digest=judgement.digest,
        first=first,
        tried=shrunk.tried,
        smallest=shrunk.complete,
        repeats=repeats,
        after=after,
        diagnosis=text,
        hop=None if diagnosis is None else diagnosis.hop,
        where=None if diagnosis is None else diagnosis.where,
        region=None if diagnosis is None else diagnosis.region,
        declaration=declaration,
    )


def _afresh(property: Property, runner: Runner, cases: list[Case]) -> Judgement:
    """Judge the last of `cases` in a process in which the others have run, and nothing else."""
    runner.world.close()
    return [judged(property, case, runner) for case in cases][-1]


def _what_it_follows(
    property: Property, runner: Runner, case: Case, before: tuple[Case, ...]
) -> tuple[tuple[Case, ...], Judgement]:
    """The earlier case after which `case` fails in a fresh process, though alone it does not: state is left behind.

    It has to fail twice, bit for bit: what fails by chance fails after anything.
    """

    def after(other: Case) -> Judgement:
        return _afresh(property, runner, [other, case])

    for earlier in [other for other in before if other != case][:STATE_SUSPECTS]:
        if _same_failure(after(earlier), after(earlier)):
            shrunk = shrink(
                earlier, lambda other: after(other).violation is not None, runner.capabilities, seconds=STATE_SHRINKING
            )
            seen = after(shrunk.case)
            if _same_failure(seen, after(shrunk.case)):
                return (shrunk.case,), seen
    return (), Judgement(0.0, None)


def _same_failure(one: Judgement, other: Judgement) -> bool:
    return one.violation is not None and other.violation is not None and one.digest == other.digest
