"""Try properties in worker processes side by side, with the results of trying them one after another.

The cases of a property are drawn before any is run, and judged in pieces that do not depend on the number of workers.
What they show is taken in the order of drawing, up to the first violation: what workers found out about later cases
meanwhile is dropped. When it is the property's turn, that violation is shrunk and explained in one worker, unless it is
one that was told before, while others go on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ringverify.cases.running import RunLog, Runner
from ringverify.check.budget import Share
from ringverify.check.mishap import Mishap
from ringverify.check.sameness import ToldFailure
from ringverify.check.searching import Ending, Found, Hunt, Search, found_only, in_short
from ringverify.check.units import CaseToJudge, Draw, Finish, Judge, JudgedCase, Setup, Unit, Wanted, Whole
from ringverify.check.workers import Workers
from ringverify.describing import FunctionElsewhere, place_of
from ringverify.properties.catalogue import PROPERTIES
from ringverify.reports.progress import Progress
from ringverify.worlds.limits import cores
from ringverify.worlds.world import WorldUnavailable

WORTH_A_WORKER = 100
"""Without `--jobs`, there is one worker for so many examples, at most: it takes a tenth of a second to start."""

MOST_CASES, PIECES = 16, 8
"""A unit judges a PIECES-th of the examples that the quick suite has of a property, and at most so many: properties
whose cases take long have few examples."""


class PropertyTrial:
    """The trial of one property: which units are to be done next, and what came of those that were.

    Args:
        wanted: what is to be tried.
        share: returns its share of the time when it begins; it is then a single unit. `None` where time is not limited.
        progress: called after each unit.
        told: called with what a violation is when it is found, before it is shrunk.
    """

    def __init__(
        self,
        wanted: Wanted,
        share: Callable[[], Share] | None,
        progress: Callable[[], None],
        told: Callable[[str], None],
    ) -> None:
        self.wanted = wanted
        self.log = RunLog()
        self.search = Search()
        self.error: Exception | None = None
        self.done = False
        self.waiting: deque[Unit] = deque([Draw(wanted) if share is None else Whole(wanted)])
        self._share = share
        self._progress, self._told = progress, told
        self._concluded = False
        self._pieces = 0
        self._answers: dict[int, list[JudgedCase]] = {}
        self._taken = 0
        self._history: tuple[Any, ...] = ()
        self._found: Found | None = None
        self._stories: tuple[ToldFailure, ...] | None = None

    @property
    def examples(self) -> int:
        """How many examples were tried, those of units that are not taken yet included."""
        return self.search.hunt.examples + sum(map(len, self._answers.values()))

    def next(self) -> Unit:
        """Return the next unit to be done."""
        unit = self.waiting.popleft()
        if isinstance(unit, Whole) and unit.share is None and self._share is not None:
            return Whole(unit.wanted, self._share())
        return unit

    def take(self, unit: Unit, answer: Any) -> None:
        """Take the answer to a unit, which is an exception if the unit failed."""
        match unit:
            case _ if self.done or (isinstance(unit, Judge) and self._concluded):
                return  # of later cases than the violation
            case Judge() if isinstance(answer, Exception):
                self._judged(unit.place, [JudgedCase(unit.trials[0].case, None, RunLog(), 0.0, error=answer)])
            case Judge():
                self._judged(unit.place, answer)
            case _ if isinstance(answer, Exception):
                self.error, self.done = answer, True
            case Draw():
                self._drawn([CaseToJudge(case) for case in answer])
            case Finish():
                ending, log = answer
                self._finished(ending, log)
            case Whole():
                self.search.hunt, log = answer
                self.log.add(log)
                self.done = True
        self._progress()

    def lost(self, unit: Unit, error: WorldUnavailable) -> None:
        """Do without the answer to a unit: a violation stands as it was found, else nothing is learned."""
        if isinstance(unit, Finish):
            mishap = Mishap.of(error, "explaining the case")
            self._finished(Ending(found_only(unit.found), mishaps=(mishap,)), RunLog())
        else:
            self.take(unit, error)

    def _drawn(self, trials: list[CaseToJudge]) -> None:
        size = max(1, min(MOST_CASES, PROPERTIES[self.wanted.property].examples // PIECES))
        first = tuple(CaseToJudge(known.case, known.after) for known in self.wanted.first)
        pieces = [tuple(trials[start : start + size]) for start in range(0, len(trials), size)]
        # The first piece is that of earlier failures, though it may be empty.
        self.waiting.extend(Judge(self.wanted, place, piece) for place, piece in enumerate([first, *pieces]) if piece)
        self._pieces = 1 + len(pieces)
        if not first:
            self._judged(0, [])

    def _judged(self, place: int, answer: list[JudgedCase]) -> None:
        self._answers[place] = answer
        if answer and answer[-1].ends:
            self.waiting = deque(unit for unit in self.waiting if isinstance(unit, Judge) and unit.place < place)
        while self._taken in self._answers:
            for seen in self._answers.pop(self._taken):
                if not self._goes_on_after(self._taken, seen):
                    self._conclude()
                    return
            self._taken += 1
        if self._taken == self._pieces:
            self._conclude()

    def _goes_on_after(self, place: int, seen: JudgedCase) -> bool:
        if place == 0:
            self.search.hunt.remembered += 1
        self.search.hunt.seconds += seen.seconds
        self.log.add(seen.log)
        if seen.judgement is None:
            self.search.ended = seen.error
            return False
        if seen.judgement.violation is not None and not self._history:
            self._history = seen.history
        return self.search.goes_on_after(seen.case, seen.judgement)

    def _conclude(self) -> None:
        self._concluded = True
        self.waiting.clear()
        self._answers.clear()
        try:
            found = self.search.found(self.log, self._history)
        except Exception as error:
            self.error, found = error, None
        if found is None:
            self.done = True
        else:
            self._told(in_short(self.wanted.property, found))
            self._found = found
            self._finish()

    def has_its_turn(self, stories: Sequence[ToldFailure]) -> None:
        """Have the violation finished, if there is one: `stories` are all that are told before it."""
        self._stories = tuple(stories)
        self._finish()

    def _finish(self) -> None:
        if self._found is not None and self._stories is not None:
            self.waiting.append(Finish(self.wanted, self._found, self._stories))

    def _finished(self, ending: Ending, log: RunLog) -> None:
        self.search.ends_with(ending)
        self.search.hunt.seconds += ending.seconds
        self.log.add(log)
        self.done = True


class Jobs:
    """Has workers try the properties of one implementation after another.

    Args:
        asked: how many workers; `None` is one for each core that this process may use, unless there is little to do.
        progress: informed of how far the work has come.
    """

    def __init__(self, asked: int | None, progress: Progress) -> None:
        self._asked, self._progress = asked, progress
        self._workers = Workers(progress.loading)
        self._examples = 0
        self._trials: dict[str, PropertyTrial] = {}
        self._violated: set[str] = set()
        self._title = ""

    def begin(
        self, setup: Setup | None, title: str, asked: Sequence[Wanted], share: Callable[[int], Share] | None
    ) -> bool:
        """Take on the properties of an implementation, and return whether workers will try them.

        Args:
            setup: what workers need, from `setup_of`; another object for another implementation.
            title: the name of the implementation.
            asked: what is to be tried.
            share: returns the share of a property when it begins, given how many are tried side by side; `None` where
                there is no time budget. With one, a property is a single unit, so that its share is one worker's.
        """
        self._examples += sum(one.examples for one in asked)
        most = min(cores(), self._examples // WORTH_A_WORKER) if self._asked is None else self._asked
        most = most if share is None else min(most, len(asked))
        if setup is None or not self._workers.ready(most, setup):
            return False
        self._title = title
        of_each = None if share is None else functools.partial(share, self._workers.most)
        self._trials = {one.property: PropertyTrial(one, of_each, self._step, self._progress.found) for one in asked}
        self._violated.clear()
        return True

    def hunt(self, property: str, log: RunLog, stories: Sequence[ToldFailure]) -> Hunt:
        """Return what `hunting.hunt` would, and add to a log what it would have.

        Args:
            property: its id.
            log: the log.
            stories: as there.

        Raises:
            Exception: as there.
        """
        trial, trials = self._trials[property], self._trials.values()
        total = sum(one.wanted.examples + len(one.wanted.first) for one in trials)
        done = sum(one.done for one in trials)
        self._progress.start(self._title, f"{done} of {len(trials)} properties", total)
        self._step()
        trial.has_its_turn(stories)
        try:
            # After a property that `are_violated` has seen violated, the run mostly ends.
            others = [] if property in self._violated else [one for one in trials if one is not trial]
            self._workers.work_on([trial, *others], lambda: trial.done)
        finally:
            self._progress.stop()
        log.add(trial.log)
        if trial.error is not None:
            raise trial.error
        return trial.search.hunt

    def are_violated(self, units: Sequence[Judge]) -> Iterator[bool]:
        """Yield whether a case of each unit violates its property.

        Raises:
            Exception: a case could not be judged.
        """
        for unit, answer in zip(units, self._workers.in_order(units), strict=True):
            if isinstance(answer, Exception):
                raise answer
            if answer and (error := answer[-1].error) is not None:
                raise error
            if violated := bool(answer) and answer[-1].ends:
                self._violated.add(unit.wanted.property)
            yield violated

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        self._workers.close()

    def _step(self) -> None:
        self._progress.step(sum(trial.examples for trial in self._trials.values()))


def setup_of(runner: Runner) -> Setup | None:
    """Return the setup of a runner, or `None` if workers could not make the same one of it."""
    if runner.target is None or runner.world.name != "simulated":
        return None
    implementation = runner.implementation
    file, line = place_of(implementation)
    function = FunctionElsewhere(runner.target, file, line, implementation.name)
    fields = {name: getattr(runner, name) for name in ("target", "device", "deadline", "load_deadline")}
    setup = Setup(implementation=dataclasses.replace(implementation, function=function), **fields)
    try:
        ForkingPickler.dumps(setup)
    except Exception:  # a sharding function of a test, for instance
        return None
    return setup
