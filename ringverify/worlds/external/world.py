"""The external world: every run is one case for a program in an environment of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ringverify.worlds.external.messages import Breach, CaseMessage, Error, Result, Unsupported
from ringverify.worlds.external.process import BYE_SECONDS, Ended, ProgramProcess, TooLong, command_of
from ringverify.worlds.limits import limit_in, limit_of, sentence
from ringverify.worlds.raising import Charge, raising_of
from ringverify.worlds.world import Failure, Load, LoadTooLong, Run, World, WorldRequest, WorldUnavailable

STAY = "end with exit code 0 to answer one case in each process, or read on until bye"
PLAIN = "it has to be a plain file, no link, folder or pipe"


class BadFile(Charge):
    """A worker's file of results is not there, no regular file, or of another size."""


class CaseRefused(WorldUnavailable):
    """The program says that it does not run such a case; the text is its reason."""


@dataclasses.dataclass(frozen=True)
class Question:
    """What a worker is asked, and how its results are read: what a program of this world returns.

    Attributes:
        message: makes the message, given the case's number and the paths of its files.
        inputs: content of the file of inputs.
        largest: most bytes that a right file of results can have.
        read: returns each rank's result, given the answer and the content of its file; raises `Charge` or `Breach`.
    """

    message: Callable[[int, str, str], CaseMessage]
    inputs: bytes
    largest: int
    read: Callable[[Result, bytes], tuple[Any, ...]]


class ExternalWorld(World):
    """A world whose ranks are a program's own affair: it is given global tensors, and returns global results.

    The program is named by the target to load, `program: COMMAND`. It is started once, answers one case after the
    other, and is started anew after it has ended or has let a deadline pass; starting does not count towards that. To
    end with exit code 0 after an answer is no failure; to end so with another one, unasked, says nothing of a case.
    What `run` calls a program is here called in this process, and returns the `Question` to ask; `run` raises
    `CaseRefused` where the program does not run such a case.

    Args:
        heard: called with 0 and a piece of what the program prints, in bytes, as it comes.
    """

    name = "external"

    def __init__(self, heard: Callable[[int, bytes], None] | None = None) -> None:
        self._heard = None if heard is None else lambda piece: heard(0, piece)
        self._running: dict[str, ProgramProcess] = {}
        self._staying: set[str] = set()
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end_all, self._running)

    def run_request(self, asked: WorldRequest) -> Run:
        """Ask the program that the request's `load` names what is to be asked."""
        if asked.load is None:
            raise ValueError("the external world runs programs only: a target is needed")
        began = time.monotonic()
        question: Question = asked.program(asked.argument)
        with self._lock:
            results, failure, said = self._tried(asked.load, question, asked.deadline)
        seconds = time.monotonic() - began
        printed = ((None, said),) if said else ()
        return Run((None,) * asked.world_size if failure else results, failure, seconds, printed=printed)

    def close(self) -> None:
        """End the program. The next run starts it anew."""
        with self._lock:
            _end_all(self._running)

    def _tried(self, load: Load, question: Question, deadline: float) -> tuple[tuple[Any, ...], Failure | None, str]:
        """Ask the worker; return each rank's result, or how the run failed, and what was printed.

        One that had answered and ended well is started anew and asked again: it may answer one case in a process.
        """
        worker = self._worker(load)
        had_answered = worker.has_answered
        worker.forget_printed()
        with self._ending_what_fails(load.what):
            results, failure = _asked(worker, question, deadline)
        if failure is not None and failure.kind != "raised":
            self._running.pop(load.what).end(kindly=False)
            if had_answered and failure.exit_code == 0:
                return self._tried(load, question, deadline)
            if had_answered and failure.kind == "died":
                self._hold_to_staying(load, question, deadline)
        return results, failure, worker.printed

    def _hold_to_staying(self, load: Load, question: Question, deadline: float) -> None:
        """Raise if the program ends after an answer though nothing more is asked: then no case has made it end.

        Asked in a new process, once for each program that stays.
        """
        if load.what in self._staying:
            return
        worker = self._worker(load)
        with self._ending_what_fails(load.what):
            _, failure = _asked(worker, question, deadline)
            ended = worker.ended_within(BYE_SECONDS) if failure is None else None
            if ended is not None:
                raise WorldUnavailable(f"the program {ended} after its answer, unasked: {STAY}", worker.printed)
        if failure is None:
            self._staying.add(load.what)
        elif failure.kind != "raised":
            self._running.pop(load.what).end(kindly=False)

    def _worker(self, load: Load) -> ProgramProcess:
        """Return the running worker, started if it is not there."""
        if load.what not in self._running:
            load.told(load.what)
            try:
                with _unavailable():
                    self._running[load.what] = ProgramProcess(command_of(load.what), self._heard)
                with self._ending_what_fails(load.what):
                    self._running[load.what].hello(load.deadline)
            finally:
                load.told(None)
        return self._running[load.what]

    @contextlib.contextmanager
    def _ending_what_fails(self, target: str) -> Iterator[None]:
        """End the worker if the block raises; what is not about the case becomes `WorldUnavailable`."""
        try:
            with _unavailable():
                yield
        except CaseRefused:
            raise
        except BaseException:
            self._running.pop(target).end(kindly=False)
            raise


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    """Turn what went wrong with a worker into `WorldUnavailable`."""
    try:
        yield
    except Breach as error:
        raise WorldUnavailable(f"the program {error}") from None
    except Ended as error:
        raise WorldUnavailable(f"the program {error} before its hello") from None
    except TooLong:
        raise LoadTooLong("the program did not say hello in time; allow more with --load-deadline") from None
    except ValueError as error:
        raise WorldUnavailable(str(error)) from None
    except OSError as error:
        limit = limit_of(error, starting=True)
        raise WorldUnavailable(f"{'no worker can be run' if limit is None else sentence(limit)}: {error}") from None


def _asked(worker: ProgramProcess, question: Question, deadline: float) -> tuple[tuple[Any, ...], Failure | None]:
    """Ask, and return each rank's result, or how the run failed."""
    try:
        said, path = worker.ask(question.message, question.inputs, deadline)
    except Ended as error:
        if error.exit_code == -signal.SIGKILL:
            why = "was ended by signal SIGKILL, as the kernel does when memory runs out: nothing was learned"
            raise WorldUnavailable(f"the program {why}", worker.printed) from None
        return (), Failure("died", None, f"the program {error}", worker.printed, exit_code=error.exit_code)
    except TooLong:
        return (), Failure("deadline", None, f"after {deadline:g} s the program had not answered", worker.printed)
    if isinstance(said, Unsupported):
        raise CaseRefused(said.reason)
    if isinstance(said, Error):
        text = said.text.strip().splitlines()
        told = f"the program raised {said.exception}{f': {text[0]}' if text else ''}"
        limit = "memory" if said.exception == "MemoryError" else limit_in(said.text)
        return (), Failure("raised", None, told, said.traceback, exception=said.exception, limit=limit)
    assert isinstance(said, Result)
    try:
        return question.read(said, _content(path, question.largest)), None
    except Charge as charge:
        raised = raising_of(charge)
        told = f"the program {raised.what}"
        return (), Failure("raised", None, told, "", raised.exception, rule=raised.rule, tensor=raised.tensor)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _content(path: Path, largest: int) -> bytes:
    """Return the content of a worker's file, which may be anything.

    Raises:
        BadFile: it is not there, no regular file, or too large.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        why = PLAIN if error.errno == errno.ELOOP else error.strerror
        raise BadFile(f"wrote no file of results: {why}", rule="file") from None
    about = os.fstat(opened)
    if not stat.S_ISREG(about.st_mode):
        os.close(opened)
        raise BadFile(f"wrote no file of results: {PLAIN}", rule="file")
    with open(opened, "rb") as file:
        if about.st_size > largest:
            raise BadFile(f"wrote {about.st_size} bytes of results, and {largest} are the most possible", rule="file")
        return file.read(largest)


def _end_all(running: dict[str, ProgramProcess]) -> None:
    while running:
        running.popitem()[1].end(kindly=True)
