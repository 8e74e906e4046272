"""Units of work of a check, and the worker process that does them, one after another, in a simulated world of its own.

A unit depends on the implementation, the property and the seed only, never on how many workers there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]  # typeshed lacks it
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import cloudpickle
import torch

from ringverify.cases.case import Case
from ringverify.cases.running import RunLog, Runner
from ringverify.check.budget import Share
from ringverify.check.casefile import CaseFile
from ringverify.check.drawing import drawn
from ringverify.check.explaining import judged
from ringverify.check.finishing import finished
from ringverify.check.hunting import hunt
from ringverify.check.sameness import ToldFailure
from ringverify.check.searching import Found
from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.implementation import Implementation
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.property import Judgement, Property
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.processes.sharing import use_server
from ringverify.worlds.world import REFUSED

LEAVING_SECONDS = 5.0
"""How long a worker may take to end its world's process when the tool has ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """The fields of a `Runner` of which a worker makes its own."""

    implementation: Implementation
    target: str
    device: str
    deadline: float
    load_deadline: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be tried of a property; the fields are arguments of `hunt`."""

    property: str
    examples: int
    seed: int
    first: tuple[CaseFile, ...] = ()


@dataclasses.dataclass(frozen=True)
class CaseToJudge:
    """A case to judge, and the cases to run before it in the same process."""

    case: Case
    after: tuple[Case, ...] = ()


@dataclasses.dataclass(frozen=True)
class Draw:
    """Draw the cases of a property. The answer is a list of them."""

    wanted: Wanted


@dataclasses.dataclass(frozen=True)
class Judge:
    """Judge cases until one violates the property. The answer is a list with a `JudgedCase` for each that was judged.

    Attributes:
        wanted: the property.
        place: the unit's place among those of the property.
        trials: the cases.
    """

    wanted: Wanted
    place: int
    trials: tuple[CaseToJudge, ...]


@dataclasses.dataclass(frozen=True)
class Finish:
    """Shrink, confirm and explain a violation. The answer is an `Ending` and the log of its runs.

    Attributes:
        wanted: the property.
        found: the violation.
        stories: as in `hunt`.
    """

    wanted: Wanted
    found: Found
    stories: tuple[ToldFailure, ...]


@dataclasses.dataclass(frozen=True)
class Whole:
    """Search for a violation of a property within a time. The answer is a `Hunt` and the log of its runs.

    Attributes:
        wanted: the property.
        share: its time; `None` until it begins.
    """

    wanted: Wanted
    share: Share | None = None


Unit = Draw | Judge | Finish | Whole


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """FunctionCall a function. The answer is what it returns.

    Attributes:
        function: called with a runner whose log is its own, or with `None` if workers have no setup; importable by
            name.
        argument: its second argument.
    """

    function: Callable[[Any, Any], Any]
    argument: Any


@dataclasses.dataclass(frozen=True)
class JudgedCase:
    """What judging a case showed.

    Attributes:
        case: the case.
        judgement: the judgement, or `None` after an error.
        log: the log of its runs alone.
        seconds: wall-clock time.
        history: if it violates the property, the cases run before in the same process, the latest first.
        error: why it could not be judged.
    """

    case: Case
    judgement: Judgement | None
    log: RunLog
    seconds: float
    history: tuple[Case, ...] = ()
    error: Exception | None = None

    @property
    def ends(self) -> bool:
        """Whether no later case has to be judged."""
        violation = None if self.judgement is None else self.judgement.violation
        return self.judgement is None or (violation is not None and violation.kind != REFUSED)


def _as_listed(hypothesis: Hypothesis) -> tuple[Callable[[Any], Hypothesis], tuple[Any]]:
    """Reduce a hypothesis, which holds functions, to its place in the catalogue; one made for a case goes by value."""
    for place, one in enumerate(HYPOTHESES):
        if one is hypothesis:
            return _listed, (place,)
    return cloudpickle.loads, (cloudpickle.dumps(hypothesis),)


def _listed(place: int) -> Hypothesis:
    return HYPOTHESES[place]


def _by_id(property: Property) -> tuple[Callable[[str], Property], tuple[str]]:
    """Reduce a property, which holds functions, to its id in the catalogue."""
    return _property, (property.id,)


def _property(id: str) -> Property:
    return PROPERTIES[id]


ForkingPickler.register(Hypothesis, _as_listed)
ForkingPickler.register(Property, _by_id)


class Bench:
    """Does units for one implementation.

    Args:
        setup: the implementation and how it is run.
        loading: called with the target when a process begins to load it, and with `None` at the end.
    """

    def __init__(self, setup: Setup, loading: Callable[[str | None], None]) -> None:
        self._runner = Runner(world=ContainedWorld(), loading=loading, **vars(setup))

    def close(self) -> None:
        """End the world's process."""
        self._runner.world.close()

    def do(self, unit: Unit | FunctionCall) -> Any:
        """Do a unit, and return the answer."""
        with self._alone() as runner:
            if isinstance(unit, FunctionCall):
                return unit.function(runner, unit.argument)
            wanted, property = unit.wanted, PROPERTIES[unit.wanted.property]
            match unit:
                case Draw():
                    return drawn(property, runner.capabilities, wanted.examples, wanted.seed)
                case Judge():
                    return list(self._seen(property, unit.trials))
                case Finish():
                    ending = finished(
                        property,
                        runner,
                        unit.found,
                        examples=wanted.examples,
                        seed=wanted.seed,
                        first=wanted.first,
                        stories=unit.stories,
                    )
                    return ending, without_history(runner.log)
                case Whole():
                    assert unit.share is not None
                    found = hunt(
                        property,
                        runner,
                        examples=wanted.examples,
                        seed=wanted.seed,
                        share=unit.share,
                        progress=lambda done: None,
                        first=wanted.first,
                    )
                    return found, without_history(runner.log)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Runner]:
        """Yield a runner whose log begins empty, but for what outlasts it in this process."""
        kept = self._runner.log
        log = RunLog(history=kept.history, load_failure=kept.load_failure)
        try:
            yield dataclasses.replace(self._runner, log=log)
        finally:
            kept.load_failure = log.load_failure

    def _seen(self, property: Property, trials: tuple[CaseToJudge, ...]) -> Iterator[JudgedCase]:
        for trial in trials:
            began, judgement, error = time.monotonic(), None, None
            history = tuple(dict.fromkeys(reversed(self._runner.log.history)))
            with self._alone() as runner:
                try:
                    for earlier in trial.after:
                        judged(property, earlier, runner)
                    judgement = judged(property, trial.case, runner)
                except Exception as raised:
                    error = _sendable(raised)
            violates = judgement is not None and judgement.violation is not None
            log, seconds = without_history(runner.log), time.monotonic() - began
            yield (seen := JudgedCase(trial.case, judgement, log, seconds, history if violates else (), error))
            if seen.ends:
                return


def without_history(log: RunLog) -> RunLog:
    """Return a log as it is sent to the tool, which has no use for the history of another process."""
    return dataclasses.replace(log, history=deque())


def _sendable(error: Exception) -> Any:
    """Return what arrives in another process as the exception, with the text of its traceback for its cause."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    return ExceptionWithTraceback(error, error.__traceback__)


def work(connection: Connection, lifeline: Connection, server: dict[str, Any]) -> None:
    """Do units until the tool asks for no more. This is the main function of a worker process.

    Args:
        connection: brings a `Setup`, or a unit; takes `("loading", target)` and `("done", answer)`.
        lifeline: closes when the tool ends, however it ends.
        server: from `shared_server`.
    """
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    multiprocessing.current_process().daemon = False  # a daemon could have no children
    use_server(server)
    torch.set_num_threads(1)
    gc.freeze()  # or the collector walks through all that torch has made, again and again
    bench: Bench | None = None
    try:
        while True:
            asked = connection.recv()
            if isinstance(asked, Setup):
                if bench is not None:
                    bench.close()
                bench = Bench(asked, lambda what: connection.send(("loading", what)))
                continue
            try:
                answer = asked.function(None, asked.argument) if bench is None else bench.do(asked)
            except Exception as error:
                answer = _sendable(error)
            try:
                connection.send(("done", answer))
            except (AttributeError, TypeError, ValueError) as error:  # it cannot be pickled
                connection.send(("done", _sendable(error)))
    except (EOFError, OSError):
        pass
    finally:
        if bench is not None:
            bench.close()


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(0)


def _end_with(lifeline: Connection) -> None:
    """End this process when the tool has ended: it may be in the middle of a unit."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGTERM)
    time.sleep(LEAVING_SECONDS)
    os._exit(1)
