"""The ranks of one world size: started together, kept warm, ended together.

A pool is used for run after run until something goes wrong in it; then it is ended whole, since a process group with a
broken member cannot be mended.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import sys
import time
from collections.abc import Callable, Iterator

from ringverify.worlds.exceptions import one_line
from ringverify.worlds.foreign_text import last_words
from ringverify.worlds.limits import limit_in, limit_of, sentence
from ringverify.worlds.patience import Patience
from ringverify.worlds.processes.blame import doubt, first_cause, out_of_time
from ringverify.worlds.processes.rank import Rank, RankHost
from ringverify.worlds.processes.wire import (
    Died,
    NotReady,
    Output,
    Raised,
    Ready,
    Report,
    Returned,
    RunRequest,
    Whereabouts,
    is_clean,
)
from ringverify.worlds.world import Failure, Load, LoadTooLong, OurError, TooEarly, WorldUnavailable

START_SECONDS = 120.0
"""How long the ranks may take to meet; on a loaded machine importing torch alone takes many seconds."""
CAUSE_SECONDS = 1.0
"""After a rank could not meet another that had gone: how long to wait for that other rank's reason."""
SETTLE_SECONDS = 0.05
"""After a rank has failed: how long to wait for a cause that happened earlier but is reported later."""
CONSEQUENCE_SECONDS = 0.2
"""How long to wait for a cause where all failures known so far look like consequences of another. Beside eight busy
loops on two cores, the cause came at most 0.07 s later."""
ENDING_SECONDS = 7.0
"""The same where a rank has closed its pipes: it is ending, which its keeper reports when nothing of it is left."""
STACK_SECONDS = 2.0
"""How long a stuck rank may take to say where it is."""
OUTPUT_BYTES = 32_768
"""How much of the end of a rank's output is kept."""
MOST_GROUPS = 64
"""A pool whose program has made more groups than this, each with its threads and sockets, is not used again."""


class Pool:
    """`world_size` ranks, ready to run.

    Args:
        place: where they are started.
        world_size: how many.
        program_module: the module of the first program.
        called: what messages call the world.
        heard: called with a rank and a piece of its output in bytes, as it comes.

    Raises:
        WorldUnavailable: they could not be started or could not meet.
    """

    def __init__(
        self,
        place: RankHost,
        world_size: int,
        program_module: str,
        called: str,
        heard: Callable[[int, bytes], None] | None = None,
    ) -> None:
        self.world_size = world_size
        self.usable = True
        self._heard = heard
        self._loaded: set[tuple[str, str]] = set()
        self._until = time.monotonic() + START_SECONDS
        self._world = called
        self._ranks: list[Rank] = []
        self._printed = [bytearray() for _ in range(world_size)]
        self._hung_up = set[int]()
        self._selector = selectors.DefaultSelector()
        try:
            for number, rank in enumerate(place.start(world_size, program_module)):
                self._ranks.append(rank)
                self._look_at_time()
                for source, read in rank.sources():
                    self._selector.register(source, selectors.EVENT_READ, (number, read))
            self._meet()
        except WorldUnavailable:
            self.end()
            raise
        except (OSError, EOFError, ValueError, RuntimeError) as error:
            self.end()
            limit = limit_of(error, starting=True)
            told = "" if limit is None else f"{sentence(limit)}: "
            if isinstance(error, EOFError):  # the fork server ends when it cannot fork
                told = f"its fork server ended, perhaps because {sentence('processes')}: "
            processes = "a process" if world_size == 1 else f"{world_size} processes"
            raise WorldUnavailable(f"{self._world} could not start {processes}: {told}{one_line(error)}") from error
        except BaseException:
            self.end()
            raise

    def _meet(self) -> None:
        waiting, consequences = set(range(self.world_size)), dict[int, str]()
        while waiting:
            for rank, event in self._events(self._until):
                match event:
                    case Ready():
                        waiting.discard(rank)
                    case NotReady(reason=reason, consequence=True):  # its cause may still be reported
                        consequences[rank] = f"rank {rank}: {reason}"
                        self._until = min(self._until, time.monotonic() + CAUSE_SECONDS)
                    case NotReady(reason=reason):
                        raise WorldUnavailable(f"{self._world} could not start: rank {rank}: {reason}")
                    case Died() if rank not in consequences:
                        limit, last = limit_in(self._text(rank), starting=True), last_words(self._text(rank))
                        told = [sentence(limit)] if limit is not None else []
                        why = ": ".join([f"rank {rank}'s process {event.what}", *told, *([last] if last else [])])
                        raise WorldUnavailable(f"{self._world} could not start: {why}")
            self._look_at_time(*consequences.values())

    def _look_at_time(self, *consequences: str) -> None:
        if time.monotonic() >= self._until:
            late = f"its {self.world_size} ranks did not meet within {START_SECONDS:g} s"
            raise WorldUnavailable(f"{self._world} could not start: {[*consequences, late][0]}")

    def has_loaded(self, program: str, what: str) -> bool:
        """Whether every rank has loaded what a program needs: its module, and what it is to be run on."""
        return (program, what) in self._loaded

    def load(self, body: bytes, program: str, load: Load) -> None:
        """Have every rank load what a program needs.

        Args:
            body: the pickled (program, argument) that loads it, as in `run`.
            program: name of the program that needs it.
            load: what to load.

        Raises:
            WorldUnavailable: a rank could not load it.
        """
        load.told(load.what)
        what = load.what or program
        try:
            ended = self.run(body, load.deadline)
        except TooEarly as error:
            ended = Failure("deadline", None, str(error), error.detail)
        finally:
            load.told(None)
        match ended:
            case Failure(kind="deadline", detail=detail):
                raise LoadTooLong(
                    f"{what} was still loading after {load.deadline:g} s: allow more with --load-deadline", detail
                )
            case Failure(message=message, detail=detail):
                raise OurError(f"{what} could not be loaded: {message}", detail)
        self._loaded.add((program, load.what))
        self.usable = True  # what an import leaves behind, it leaves in every process

    def run(self, body: bytes, deadline: float) -> list[bytes] | Failure:
        """Run a pickled (program, argument) on every rank; return each rank's pickled result, or the failure.

        After a failure, or when a run has left something behind, `usable` is False.

        Raises:
            WorldUnavailable: the run ended in code of ringverify, or in the middle of an import.
        """

        usable, self.usable = self.usable, False
        assert usable, "a pool that failed is not run again"
        for printed in self._printed:
            printed.clear()
        self._hung_up.clear()
        job = pickle.dumps(RunRequest(tuple(sys.path), _working_directory(), body), protocol=5)
        patience = Patience(deadline, self.processes)
        until = math.inf
        returned: dict[int, Returned] = {}
        failed: dict[int, Raised | Died] = {}
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it has just died, which arrives as an event
                rank.send(job)
        settled, first = False, math.inf
        while len(returned) + len(failed) < self.world_size and patience.left() > 0 and time.monotonic() < until:
            for number, event in self._events(min(until, time.monotonic() + patience.slice())):
                match event:
                    case Returned():
                        returned[number] = event
                    case Raised() | Died():
                        failed.setdefault(number, event)
            if failed and not settled:
                now = time.monotonic()
                settled, first = not all(map(doubt, failed.values())), min(first, now)
                ending = bool(self._hung_up - failed.keys())
                until = now + SETTLE_SECONDS if settled else first + (ENDING_SECONDS if ending else CONSEQUENCE_SECONDS)
        if failed:
            self._drain()
            return first_cause(failed, [self._text(rank) for rank in range(self.world_size)])
        if len(returned) < self.world_size:
            stuck = [rank for rank in range(self.world_size) if rank not in returned]
            stacks = self._stacks(stuck)
            texts = [self._text(rank) for rank in range(self.world_size)]
            return out_of_time(deadline, sorted(returned), stacks, texts)
        residues = [returned[rank].residue for rank in range(self.world_size)]
        self.usable = is_clean(residues, most_groups=MOST_GROUPS)
        return [returned[rank].result for rank in range(self.world_size)]

    def _events(self, until: float) -> Iterator[tuple[int, Report | Died]]:
        """Yield what ranks report, waiting for it at most until `until` (`time.monotonic()`); keep what they print."""
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            number, read = key.data
            try:
                events = read()
            except (EOFError, OSError):
                self._selector.unregister(key.fileobj)
                self._hung_up.add(number)
                continue
            for event in events:
                match event:
                    case Output(text=text):
                        if self._heard is not None:
                            self._heard(number, text)
                        self._printed[number] += text
                        del self._printed[number][:-OUTPUT_BYTES]
                    case _:
                        if isinstance(event, Died):
                            self._selector.unregister(key.fileobj)
                        yield number, event

    def _drain(self) -> None:
        """Read what has been printed, in at most 16 rounds, because a rank may flood its output."""
        for _ in range(16):
            for _ in self._events(0.0):
                pass

    def _text(self, rank: int) -> str:
        return self._printed[rank].decode(errors="replace")

    def printed(self) -> tuple[tuple[int, str], ...]:
        """Return what each rank printed in the last run, for ranks that printed anything."""
        return tuple((rank, self._text(rank)) for rank in range(self.world_size) if self._printed[rank])

    def _stacks(self, stuck: list[int]) -> dict[int, Whereabouts | None]:
        """Ask stuck ranks where they are; return each one's answer, or `None` if it does not answer in time."""
        stacks: dict[int, Whereabouts | None] = dict.fromkeys(stuck)
        for rank in stuck:
            with contextlib.suppress(OSError):
                self._ranks[rank].ask_where()
        until = time.monotonic() + STACK_SECONDS
        while None in stacks.values() and time.monotonic() < until:
            time.sleep(0.02)  # a rank that floods its output always has an event
            self._drain()
            for rank in [rank for rank, stack in stacks.items() if stack is None]:
                stacks[rank] = self._ranks[rank].where()
        return stacks

    @property
    def processes(self) -> list[int]:
        """The ids of the ranks' processes that are on this machine."""
        return [one.process for one in self._ranks if one.process is not None]

    def is_alive(self) -> bool:
        """Whether every rank still runs: what the last run left behind may have ended one."""
        before = len(self._selector.get_map())
        for _ in self._events(0.0):
            pass
        return len(self._selector.get_map()) == before

    def end(self) -> None:
        """End the ranks, and the processes that programs have started in them."""
        self.usable = False
        self._selector.close()
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.close()


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None
