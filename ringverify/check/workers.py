"""Worker processes that do units of work side by side: started when there is work, and ended with the tool.

A worker that ends without an answer costs nothing the first time: another one is given its unit.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from ringverify.check.units import Setup, work
from ringverify.worlds.processes.rank import start_fork_server, started
from ringverify.worlds.processes.sharing import shared_server
from ringverify.worlds.processes.wire import how_it_ended
from ringverify.worlds.world import WorldUnavailable

WORKER_MODULE = "ringverify.check.units"
"""The module that workers need, for the fork server to import."""

ENDING_SECONDS = 7.0
"""How long a worker that is asked to end may take to end the process of its world."""


class Task(Protocol):
    """Something that is done unit by unit; which units are next may depend on the answers to others.

    Attributes:
        waiting: the units that may be done now.
    """

    waiting: deque[Any]

    def next(self) -> Any:
        """Take the next unit out of those that wait, and return it."""
        ...

    def take(self, unit: Any, answer: Any) -> None:
        """Take the answer to a unit, which is an exception if the unit failed."""
        ...

    def lost(self, unit: Any, error: WorldUnavailable) -> None:
        """Do without the answer to a unit: two workers that were given it have ended."""
        ...


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
        self.unit: Any = None
        self.task: Task | None = None
        self.setup: Setup | None = None
        with theirs, lifeline:
            arguments = (theirs, lifeline, shared_server())
            self._process = started(work, arguments, "ringverify worker")

    def begin(self, task: Task, unit: Any, setup: Setup | None) -> None:
        """Have it do a unit of a task, with the setup if it needs one."""
        self.task, self.unit = task, unit
        with contextlib.suppress(OSError):  # it has just ended, which is seen when its answer is read
            if setup is not None and self.setup is not setup:
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


class Workers:
    """Worker processes.

    Args:
        loading: called with a target when a worker begins to load it, and with `None` at the end.
    """

    def __init__(self, loading: Callable[[str | None], None] = lambda what: None) -> None:
        self.most = 0
        self._loading = loading
        self._workers: list[Worker] = []
        self._setup: Setup | None = None
        self._lost: list[Any] = []

    def ready(self, most: int, setup: Setup | None) -> bool:
        """Set how many workers there may be, and what they need; return whether there are several to be had."""
        self.most, self._setup = most, setup
        if most < 2:
            return False
        try:
            if not self._workers:
                self._start()
        except (OSError, WorldUnavailable):
            return False  # the tool's own process does the work, and says what is wrong if it cannot
        return True

    def work_on(self, tasks: Sequence[Task], done: Callable[[], bool]) -> None:
        """Have units done until `done`, those of earlier tasks first; then keep workers busy, but wait for none."""
        self._dispatch(tasks)
        while not done():
            self._listen()
            self._dispatch(tasks)

    def in_order(self, units: Sequence[Any]) -> Iterator[Any]:
        """Yield the answers to units in the order of the units; the answer of a unit that failed is an exception."""
        task = _Several(units)
        for unit in units:
            self.work_on([task], lambda unit=unit: id(unit) in task.answers)  # type: ignore[misc]
            yield task.answers.pop(id(unit))

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

    def _dispatch(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            while task.waiting:
                worker = next((one for one in self._workers if one.unit is None), None)
                if worker is None:
                    if len(self._workers) >= self.most:
                        return
                    try:
                        worker = self._start()
                    except (OSError, WorldUnavailable):
                        if not self._workers:
                            raise
                        self.most = len(self._workers)
                        return
                worker.begin(task, task.next(), self._setup)

    def _listen(self) -> None:
        """Wait for workers, and hand on what they answer."""
        busy = {worker.connection: worker for worker in self._workers if worker.unit is not None}
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            worker = busy[connection]
            unit, task = worker.unit, worker.task
            assert task is not None
            try:
                kind, answer = connection.recv()
            except (EOFError, OSError):
                self._workers.remove(worker)
                self._ended(unit, task, worker.how_it_ended())
                worker.end()
                continue
            if kind == "loading":
                self._loading(answer)
            else:
                worker.unit = worker.task = None
                task.take(unit, answer)

    def _ended(self, unit: Any, task: Task, how: str) -> None:
        if any(unit is other for other in self._lost):
            task.lost(unit, WorldUnavailable(f"the worker process that tried it {how}, and so did another one"))
        else:
            self._lost.append(unit)
            task.waiting.appendleft(unit)


class _Several:
    """A `Task` of units that do not depend on one another."""

    def __init__(self, units: Sequence[Any]) -> None:
        self.waiting = deque(units)
        self.answers: dict[int, Any] = {}

    def next(self) -> Any:
        return self.waiting.popleft()

    def take(self, unit: Any, answer: Any) -> None:
        self.answers[id(unit)] = answer

    def lost(self, unit: Any, error: WorldUnavailable) -> None:
        self.take(unit, error)
