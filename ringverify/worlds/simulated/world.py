"""The simulated world: ranks are threads of one process that run unmodified `torch.distributed` code, one at a time.

Ranks take turns at communication only, and the seed decides whose turn it is, so a run repeats bit for bit. A deadlock
is detected at once, when no rank can go on, and its failure says who waits for whom.

What ranks share as threads of one process, and would not share as processes: torch's random generator (which a run
leaves as its ranks leave it) and all module state of the packages they use. Torch's settings, its default dtype above
all, are each rank's own during a run, and restored after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ringverify.worlds import torch_settings, whose
from ringverify.worlds.exceptions import trace_of
from ringverify.worlds.limits import limit_of, sentence, too_many
from ringverify.worlds.patience import Patience
from ringverify.worlds.printing import RankOutput, Show, as_rank, listening
from ringverify.worlds.processes.blame import is_importing
from ringverify.worlds.raising import Raising, raising_of
from ringverify.worlds.simulated.baton import Baton, Unwound
from ringverify.worlds.simulated.exchange import Event, Exchange
from ringverify.worlds.simulated.one_core import started_here
from ringverify.worlds.simulated.process_group import SimulatedGroup
from ringverify.worlds.simulated.torch_private import RankBookkeeping, RankThreads, check_modes, make_store
from ringverify.worlds.watch.watching import Watch
from ringverify.worlds.world import Conditions, Failure, OurError, Run, TooEarly, World, WorldRequest, WorldUnavailable

_GRACE = 0.5
"""Seconds that ranks are given to unwind before their threads are abandoned."""

MOST_RANKS = 1024
"""Most ranks of one world. Ranks take turns in one interpreter, so that runs of more ranks would take too long."""

_ONE_AT_A_TIME = threading.Lock()
"""A run changes what `torch.distributed` means to the process; two at once would undo one another's changes."""

_RANK_THREADS = RankThreads()

FOREIGN_GROUP = (
    "A process group of another rank or of an earlier run was used. Ranks of the simulated world are threads of one "
    "process and share what a module keeps: a module that caches its group or rank has to declare processes=True"
)
NO_RANK = (
    "torch.distributed was called on a thread that is no rank's. In the simulated world each rank is one thread, "
    "and threads that it starts belong to no rank: call torch.distributed on the rank's own thread, or declare "
    "processes=True"
)


class SimulatedWorld(World):
    """A world whose ranks are threads of this process, new ones for every run. See the module.

    The thread that calls `run` waits. Its own `torch.distributed`, initialised or not, is as before when that returns.

    Args:
        observe: called, on the rank's thread, at every post and every finish of an operation.
        show: what becomes of ranks' output, see `ringverify.worlds.printing.Show`.
    """

    name = "simulated"

    def __init__(self, observe: Callable[[Event], None] | None = None, *, show: Show = "plain") -> None:
        self._observe = observe
        self._show = show

    def run_request(self, asked: WorldRequest) -> Run:
        """Run the program on threads that are new for this run."""
        if _RANK_THREADS.mine() is not None:
            raise WorldUnavailable("a rank of a simulated world cannot start another simulated world")
        if asked.world_size > MOST_RANKS:
            raise WorldUnavailable(f"a simulated world holds at most {MOST_RANKS} ranks, not {asked.world_size}")
        if (reason := too_many(asked.world_size, "threads")) is not None:
            raise WorldUnavailable(reason)
        if asked.load is not None:
            asked.load.call(asked.load.what)
        if asked.watch:
            check_modes()
        started = time.perf_counter()
        with _ONE_AT_A_TIME:
            watching = Watch(asked.world_size, memory=asked.watch == "memory") if asked.watch else None
            output = RankOutput(asked.world_size, self._show)
            ranks = _Ranks(asked, watching, self._observe, output)
            with listening(self._show), _no_collector() if asked.watch == "memory" else contextlib.nullcontext():
                failure = ranks.run()
        exchange = ranks.exchange
        exchange.settle()
        return Run(
            (None,) * asked.world_size if failure is not None else tuple(ranks.results),
            failure,
            time.perf_counter() - started,
            unreceived=exchange.unreceived(),
            delayed=exchange.delayed,
            hazards=watching.hazards(exchange.left(), failed=failure is not None) if watching else (),
            traffic=watching.traffic() if watching else None,
            memory=watching.memory() if watching else (),
            findings=tuple(sorted(exchange.findings.items())),
            printed=output.printed(),
            notes=ranks.notes(),
        )


class _Ranks:
    """The ranks of one run."""

    def __init__(
        self, asked: WorldRequest, watch: Watch | None, observe: Callable[[Event], None] | None, output: RankOutput
    ) -> None:
        self._program, self._argument, self._size = asked.program, asked.argument, asked.world_size
        self._deadline = asked.deadline
        self._watch = watch
        self._output = output
        self._foreign_group = False
        self._baton = Baton(self._size, asked.seed)
        self.exchange = Exchange(self._baton, self._size, asked.conditions or Conditions(), asked.seed, watch)
        self._baton.explain, self._baton.relieve = self._mail, self.exchange.relieve
        self._baton.addressed = self.exchange.addressed
        self.exchange.observe = observe
        self._store = make_store()
        self._unavailable: WorldUnavailable | None = None
        self._broken: BaseException | None = None
        self.results: list[Any] = [None] * self._size
        self._bookkeeping: dict[int, RankBookkeeping] = {}
        self._threads = [
            threading.Thread(target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self._size)
        ]

    def run(self) -> Failure | None:
        """Start the ranks, wait for them, and put everything back."""
        deadline = self._deadline
        patience = Patience(deadline, [os.getpid()])
        settings = torch_settings.values(torch_settings.OF_PROCESS)
        filters, show = warnings.filters, warnings.showwarning
        _RANK_THREADS.install()
        _intercept_exit()
        in_time = False
        try:
            try:
                with started_here():
                    for thread in self._threads:
                        thread.start()
            except (RuntimeError, MemoryError) as error:
                limit = limit_of(error, starting=True) or "threads"
                raise WorldUnavailable(
                    f"no thread could be started for one of {self._size} ranks: {sentence(limit)}: {error}"
                ) from error
            self._baton.start()
            while not in_time and patience.left() > 0:
                in_time = self._baton.news(patience.slice()) is not None
            if not in_time:
                self._unavailable = self._too_early(deadline) or self._unavailable
                self._baton.stop(self._too_late(deadline))  # ranks then leave the code that they were in
        finally:
            self._end(patient=in_time)
            torch_settings.put_back(torch_settings.OF_PROCESS, settings)
            if warnings.filters is not filters:
                # Ranks that leave `catch_warnings` in another order than they entered put back one another's filters.
                warnings.filters = filters
                with warnings.catch_warnings():
                    pass  # its end makes Python notice that the filters are others
            warnings.showwarning = show
            if _RANK_THREADS.remove(self._bookkeeping.values()):
                os._exit = _OUTER["exit"]
        if self._unavailable is not None:
            raise self._unavailable
        if self._broken is not None and self._baton.failure is None:
            raise OurError.of(self._broken, limit_of(self._broken))
        return self._baton.failure

    # -- the thread of a rank ------------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> None:
        try:
            if self._baton.enter(rank):
                self._turn(rank)
            self._baton.leave(rank)
        except Unwound:
            pass  # sent to a thread that was late, and has arrived after all
        except BaseException as error:  # an error of ours, or what the program has made of Python
            self._broken = error
            self._baton.stop(None)

    def _turn(self, rank: int) -> None:
        def make_group(name: str, ranks: tuple[int, ...], description: str) -> SimulatedGroup:
            return SimulatedGroup(self.exchange, name, ranks, rank, description)

        def exited(status: int) -> None:
            raised = Raising(f"called os._exit({status})", "\n".join(self._baton.where(rank)), call="os._exit")
            self._baton.stop(Failure.of(rank, raised))

        bookkeeping = self._bookkeeping[rank] = RankBookkeeping(rank, self._size, make_group, exited)
        try:
            _RANK_THREADS.enter(bookkeeping, self._store)
            if self._watch is not None:
                self._watch.enter(rank)
            with as_rank(rank, self._output), whose.theirs():
                self.results[rank] = self._program(self._argument)
        except Unwound:
            if not self._baton.over:  # raised by a group of another run, which is over
                self._foreign_group = True
                message = (
                    f"rank {rank} communicated over a process group of an earlier run, which a module may have cached"
                )
                self._baton.stop(Failure("raised", rank, message, "\n".join(self._baton.where(rank))))
        except WorldUnavailable as error:
            self._unavailable = error
            self._baton.stop(None)
        except BaseException as error:
            self._foreign_group |= self._met_foreign_group(rank, error)
            with whose.theirs():  # reading an exception of its own class runs its code
                self._baton.stop(Failure.of(rank, raising_of(error)))
        finally:
            if self._watch is not None:
                self._watch.leave(rank)
            _RANK_THREADS.leave()

    def _met_foreign_group(self, rank: int, error: BaseException) -> bool:
        """Whether a frame of an error's traceback holds a group of another rank or of another run."""
        frames = [frame for frame, _ in traceback.walk_tb(trace_of(error))]
        values = [value for frame in frames for value in frame.f_locals.values()]
        groups = [value for value in values if issubclass(type(value), SimulatedGroup)]  # `isinstance` asks the value
        return any(not group.belongs_to(self.exchange, rank) for group in groups)

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each thing that the program tried and that ranks of this world cannot do."""
        found = [FOREIGN_GROUP] if self._foreign_group else []
        return (*found, NO_RANK) if _RANK_THREADS.strangers else tuple(found)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self, *, patient: bool) -> None:
        """Wait for every thread to end, or abandon it.

        Ranks unwind one after another, as they ran. If one does not come back, the rest do so at once.

        Args:
            patient: let the rank whose turn it is reach its next communication before it is interrupted.
        """
        baton = self._baton
        if baton.unfinished():
            baton.stop(None)
            if not patient:
                self._interrupt_holder()
            if not self._ended(_GRACE):
                self._interrupt_holder()
                baton.release_everyone()
        until = time.perf_counter() + _GRACE
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.perf_counter()))

    def _interrupt_holder(self) -> None:
        """Raise `Unwound` in the rank whose turn it is, as soon as it runs Python again."""
        if self._baton.holder in self._baton.unfinished():
            thread = ctypes.c_ulong(self._baton.thread_of(self._baton.holder))
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Unwound))

    def _ended(self, timeout: float) -> bool:
        until = time.perf_counter() + timeout
        while self._baton.unfinished():
            if self._baton.news(until - time.perf_counter()) is None:
                return False
        return True

    def _too_late(self, deadline: float) -> Failure:
        rank = self._baton.holder
        places = self._baton.where(rank)
        place = places[-1] if places else "a place without a Python stack"
        detail = "\n".join([f"rank {rank} at", *(f"  {line}" for line in places), *self._baton.waits()])
        return Failure(
            "deadline", rank, f"after {deadline:g} s rank {rank} had not returned: it was at {place}", detail
        )

    def _too_early(self, deadline: float) -> TooEarly | None:
        """Return the error to raise if time ran out in an import or in ringverify's own code, else `None`."""
        rank = self._baton.holder
        thread = self._baton.thread_of(rank)
        frames = traceback.extract_stack(sys._current_frames().get(thread))
        stack = "".join(frames.format())
        importing = is_importing(frame.filename for frame in frames)
        if whose.is_theirs(thread) and not importing:
            return None
        return TooEarly.at(deadline, rank, stack, importing=importing)

    def _mail(self) -> str:
        return "\n".join(one.describe() for one in self.exchange.unreceived() if one.kind == "message")


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Turn off Python's cycle collector, so that memory is freed when its last reference goes, and not later."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


_OUTER: dict[str, Any] = {}


def _intercept_exit() -> None:
    if os._exit is not _exit:
        _OUTER["exit"], _OUTER["process"] = os._exit, os.getpid()
        os._exit = _exit


def _exit(status: int) -> NoReturn:
    """Replace `os._exit`: on a rank's thread it ends the run; in a child that a rank forked, it ends that child."""
    bookkeeping = _RANK_THREADS.mine()
    if bookkeeping is None or os.getpid() != _OUTER["process"]:
        outer: Callable[[int], NoReturn] = _OUTER["exit"]
        outer(status)
    bookkeeping.exited(status)
    raise Unwound
