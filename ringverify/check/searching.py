"""Try the cases of a property until one violates it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ringverify.cases.case import Case
from ringverify.cases.running import RunLog, Runner
from ringverify.check.budget import ENDLESS, Share
from ringverify.check.declaring import Declaration
from ringverify.check.drawing import draws
from ringverify.check.explaining import judged
from ringverify.check.mishap import Mishap
from ringverify.check.tried import Tried
from ringverify.diagnosis.diagnose import Diagnosis
from ringverify.events import Hint, Needed
from ringverify.properties.property import Judgement, Property, Violation
from ringverify.worlds.world import REFUSED

if TYPE_CHECKING:
    from ringverify.check.casefile import CaseFile

MOST_REFUSED = 40
"""Number of cases refused by the transport after which the search for another violation ends."""


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
        same_as: the property of which this is a violation told before, whose cause and needs it has.
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
    same_as: Property | None = None


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


def search_cases(
    search: Search, property: Property, runner: Runner, *, examples: int, seed: int, first: Sequence[CaseFile]
) -> None:
    """Try the cases of a property one after another, those of `first` before drawn ones, until the search ends."""

    def goes_on_after(case: Case) -> bool:
        if not search.in_time():
            return False
        if runner.most_ranks is not None and case.ranks > runner.most_ranks:
            return True
        return search.goes_on_after(case, judged(property, case, runner))

    try:
        for known in first:
            for earlier in known.after:
                judged(property, earlier, runner)
            search.hunt.remembered += 1
            if not goes_on_after(known.case):
                return
        for case in draws(property, runner.capabilities, examples, seed):
            if not goes_on_after(case):
                return
    except Exception as error:
        search.ended = error


def as_found(case: Case, judgement: Judgement) -> Counterexample:
    """Return the counterexample that a failing case is before anything else is known of it."""
    assert judgement.violation is not None
    return Counterexample(
        case, judgement.violation, judgement.digest, first=case, tried=0, smallest=False, repeats=True
    )


def in_short(property: str, found: Found) -> str:
    """Say in one line what was found, as it stands before it is shrunk."""
    violation = found.judgement.violation
    return property if violation is None else f"{property}: {violation.summary}"


def found_only(found: Found) -> Counterexample:
    """Return the counterexample that a violation is if nothing more is done about it."""
    shown = as_found(found.case, found.judgement)
    return dataclasses.replace(shown, refused=other_refused(found.judgement, found.refused))


def other_refused(judgement: Judgement, refused: Sequence[tuple[Case, Judgement]]) -> tuple[Case, Violation] | None:
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
