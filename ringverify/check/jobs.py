"""Try properties in worker processes side by side, with the results of trying them one after another.

The cases of a property are drawn before any is run, and judged in pieces that do not depend on the number of workers.
What they show is taken in the order of drawing, up to the first violation: what workers found out about later cases
meanwhile is dropped. That violation is then shrunk and explained in one worker, while others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ringverify.cases.running import RunLog, Runner
from ringverify.check.budget import Share
from ringverify.check.hunting import Ending, Hunt, Search, found_only
from ringverify.check.mishap import Mishap
from ringverify.check.units import CaseToJudge, Draw, Finish, Judge, JudgedCase, Setup, Unit, Wanted, Whole, work
from ringverify.describing import FunctionElsewhere, place_of
from ringverify.properties.catalogue import PROPERTIES
from ringverify.reports.progress import Progress
from ringverify.worlds.limits import cores
from ringverify.worlds.processes.rank import start_fork_server, started
from ringverify.worlds.processes.server import CACHE
from ringverify.worlds.processes.sharing import shared_server
from ringverify.worlds.processes.wire import how_it_ended
from ringverify.worlds.world import WorldUnavailable

WORKER_MODULE = "ringverify.check.units"
"""The module that workers need, for the fork server to import."""

WORTH_A_WORKER = 100
"""Without `--jobs`, there is one worker for so many examples, at most: it takes a tenth of a second to start."""

MOST_CASES, PIECES = 16, 8
"""A unit judges a PIECES-th of the examples that the quick suite has of a property, and at most so many: properties
whose cases take long have few examples."""

ENDING_SECONDS = 7.0
"""How long a worker that is asked to end may take to end the process of its world."""


class PropertyTrial:
    """The trial of one property: which units are to be done next, and what came of those that were.

    Args:
        asked: what is to be tried.
        unit: its first unit: the drawing of its cases, or all of it within a time.
        progress: called after each unit.
    """

    def __init__(self, asked: Wanted, unit: Unit, progress: Callable[[], None]) -> None:
        self.asked = asked
        self.log = RunLog()
        self.search = Search()
        self.error: Exception | None = None
        self.done = False
        self.waiting: deque[Unit] = deque([unit])
        self._progress = progress
        self._concluded = False
        self._pieces = 0
        self._answers: dict[int, list[JudgedCase]] = {}
        self._taken = 0
        self._again: list[Unit] = []
        self._history: tuple[Any, ...] = ()

    @property
    def examples(self) -> int:
        """How many examples were tried, those of units that are not taken yet included."""
        return self.search.hunt.examples + sum(map(len, self._answers.values()))

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

    def lost(self, unit: Unit, how: str) -> None:
        """Do a unit whose worker has ended once more; the second time, nothing more is learned of the property."""
        if not any(unit is other for other in self._again):
            self._again.append(unit)
            self.waiting.appendleft(unit)
            return
        error = WorldUnavailable(f"the worker process that tried it {how}, and so did another one")
        if isinstance(unit, Finish):
            mishap = Mishap.of(error, "explaining the case")
            self._finished(Ending(found_only(unit.found), mishaps=(mishap,)), RunLog())
        else:
            self.take(unit, error)

    def _drawn(self, trials: list[CaseToJudge]) -> None:
        size = max(1, min(MOST_CASES, PROPERTIES[self.asked.property].examples // PIECES))
        first = tuple(CaseToJudge(known.case, known.after) for known in self.asked.first)
        pieces = [tuple(trials[start : start + size]) for start in range(0, len(trials), size)]
        # The first piece is that of earlier failures, though it may be empty.
        self.waiting.extend(Judge(self.asked, place, piece) for place, piece in enumerate([first, *pieces]) if piece)
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
            self.waiting.append(Finish(self.asked, found))

    def _finished(self, ending: Ending, log: RunLog) -> None:
        self.search.ends_with(ending)
        self.search.hunt.seconds += ending.seconds
        self.log.add(log)
        self.done = True


class Worker:
    """A worker process, started when this is made.

    Raises:
        OSError: it could not be started.
        WorldUnavailable: this platform has no fork server.
    """

    def __init__(self) -> None:
        start_fork_server(WORKER_MODULE)
        self.connection, theirs = multiprocessing.Pipe()
        lifeline, self._lifeline = multiprocessing.Pipe(duplex=False)
        self.unit: Unit | None = None
        self.task: PropertyTrial | None = None
        self.setup: Setup | None = None
        with theirs, lifeline:
            arguments = (theirs, lifeline, shared_server(), CACHE)
            self._process = started(work, arguments, "ringverify worker")

    def begin(self, task: PropertyTrial, unit: Unit, setup: Setup) -> None:
        """Have it do a unit."""
        self.task, self.unit = task, unit
        with contextlib.suppress(OSError):  # it has just ended, which is seen when its answer is read
            if self.setup is not setup:
                self.connection.send(setup)
                self.setup = setup
            self.connection.send(unit)

    def how_it_ended(self) -> str:
        """Say how it ended, once nothing comes from it any more."""
        self._process.join(ENDING_SECONDS)
        return how_it_ended(self._process.exitcode or 0)

    def ask_to_end(self) -> None:
        """Have it end the process of its world, and end."""
        self._process.terminate()

    def end(self) -> None:
        """Wait until it has ended."""
        self._process.join(ENDING_SECONDS)
        self._process.kill()
        self.connection.close()
        self._lifeline.close()


class Jobs:
    """Worker processes, started when there is work for them.

    Args:
        asked: how many; `None` is one for each core that this process may use, unless there is little to do.
        progress: informed of how far the work has come.
    """

    def __init__(self, asked: int | None, progress: Progress) -> None:
        self._asked, self._progress = asked, progress
        self._most = 0
        self._workers: list[Worker] = []
        self._tasks: dict[str, PropertyTrial] = {}
        self._setup: Setup | None = None
        self._share: Callable[[int], Share] | None = None
        self._title = ""

    def begin(self, runner: Runner, asked: Sequence[Wanted], share: Callable[[int], Share] | None) -> bool:
        """Take on the properties of an implementation, and return whether workers will try them.

        Args:
            runner: runs the implementation in this process.
            asked: what is to be tried.
            share: returns the share of a property when it begins, given how many are tried side by side; `None` where
                there is no time budget. With one, a property is a single unit, so that its share is one worker's.
        """
        self._tasks.clear()
        self._setup = _setup(runner)
        examples = sum(one.examples for one in asked)
        most = min(cores(), examples // WORTH_A_WORKER) if self._asked is None else self._asked
        self._most = most if share is None else min(most, len(asked))
        if self._setup is None or self._most < 2:
            return False
        try:
            self._start()
        except (OSError, WorldUnavailable):
            return False  # this process does the work, and says what is wrong if it cannot
        self._share, self._title = share, runner.implementation.name
        for one in asked:
            first: Unit = Draw(one) if share is None else Whole(one)
            self._tasks[one.property] = PropertyTrial(one, first, self._step)
        return True

    def hunt(self, property: str, log: RunLog) -> Hunt:
        """Return what `hunting.hunt` would, and add to a log what it would have.

        Raises:
            Exception: as there.
        """
        task = self._tasks[property]
        done = sum(one.done for one in self._tasks.values())
        total = sum(one.asked.examples + len(one.asked.first) for one in self._tasks.values())
        self._progress.start(self._title, f"{done} of {len(self._tasks)} properties", total)
        self._step()
        try:
            self._dispatch()
            while not task.done:
                self._listen()
                self._dispatch()
        finally:
            self._progress.stop()
        log.add(task.log)
        if task.error is not None:
            raise task.error
        return task.search.hunt

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        ending, self._workers = self._workers, []
        for worker in ending:
            worker.ask_to_end()
        for worker in ending:
            worker.end()

    def _start(self) -> Worker:
        self._workers.append(worker := Worker())
        return worker

    def _step(self) -> None:
        self._progress.step(sum(task.examples for task in self._tasks.values()))

    def _dispatch(self) -> None:
        """Give units to idle workers, those of earlier properties first, and start workers while there are more."""
        for task in self._tasks.values():
            while task.waiting:
                worker = next((one for one in self._workers if one.unit is None), None)
                if worker is None:
                    if len(self._workers) == self._most:
                        return
                    try:
                        worker = self._start()
                    except (OSError, WorldUnavailable):
                        if not self._workers:
                            raise
                        self._most = len(self._workers)
                        return
                unit = task.waiting.popleft()
                if isinstance(unit, Whole) and unit.share is None and self._share is not None:
                    unit = Whole(unit.asked, self._share(self._most))
                assert self._setup is not None
                worker.begin(task, unit, self._setup)

    def _listen(self) -> None:
        """Wait for workers, and take what they answer."""
        busy = {worker.connection: worker for worker in self._workers if worker.unit is not None}
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            worker = busy[connection]
            unit, task = worker.unit, worker.task
            assert unit is not None
            assert task is not None
            try:
                kind, answer = connection.recv()
            except (EOFError, OSError):
                self._workers.remove(worker)
                task.lost(unit, worker.how_it_ended())
                worker.end()
                continue
            if kind == "loading":
                self._progress.loading(answer)
            else:
                worker.unit = worker.task = None
                task.take(unit, answer)


def _setup(runner: Runner) -> Setup | None:
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
