"""The baton: one rank runs at a time, and the seed decides which.

Each rank sleeps on a lock of its own; the rank that holds the baton opens the lock of the next and goes to sleep. The
baton moves only at communication, so a program that is deterministic between communications is so altogether. Torch's
process settings move with it: each rank finds them as it left them, as a process would.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from ringverify.worlds import torch_settings
from ringverify.worlds.stacks import frames_of_user
from ringverify.worlds.world import Failure

_POLLS_WITHOUT_PROGRESS = 1000
"""After so many calls of `is_completed()` per rank, during which nothing else happened, the ranks are in a deadlock."""
_POLLS_BEFORE_RELIEF = 4
"""After so many such calls per rank no rank can go on, and a message that is held back arrives."""


class Unwound(BaseException):
    """Raised inside a rank whose run is over, wherever it waits. No `except Exception` catches it."""


class Awaited(Protocol):
    """Something that a rank can wait for."""

    done: bool

    @property
    def elements(self) -> int | None:
        """How many elements the message has that is waited for; `None` of anything else."""
        ...

    @property
    def peer(self) -> int | None:
        """Global rank of the other side of a message; `None` of anything else."""
        ...

    def describe(self) -> str:
        """What is waited for, as the end of "rank 0 waits for …"."""
        ...


class _PlaceOfRank:
    """The state of one rank: its lock, its thread, and what it waits for."""

    __slots__ = ("awaited", "finished", "rank", "thread", "turn")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.turn = threading.Lock()
        self.turn.acquire()
        self.thread: int = 0
        self.awaited: Awaited | None = None
        self.finished = False


class Baton:
    """Decides which rank runs next, and records how the run ends.

    Attributes:
        failure: what ended the run before every rank had returned.
        over: the run has ended; a rank that communicates is unwound.
        relieve: called when no rank can go on; lets held-back messages arrive and returns whether there were any.
        explain: called at a deadlock; returns what else is known, as text.
        addressed: called at a deadlock; returns the ranks to which messages were sent that they have not received.
        acted: ranks that have communicated.
    """

    def __init__(self, world_size: int, seed: int) -> None:
        self.failure: Failure | None = None
        self.over = False
        self.relieve: Callable[[], bool] = bool
        self.explain: Callable[[], str] = str
        self.addressed: Callable[[], set[int]] = set
        self.acted: set[int] = set()
        self._random = random.Random(seed).random
        self._seats = [_PlaceOfRank(rank) for rank in range(world_size)]
        self._ready = list(range(world_size))
        self._polls = 0
        self._holder = 0
        self._news: queue.SimpleQueue[Literal["failed", "ended"]] = queue.SimpleQueue()
        self._failing = threading.Lock()
        self._settings = self._now = torch_settings.values(torch_settings.OF_PROCESS)

    # -- called by the thread that started the run ---------------------------------------------------------------------

    def start(self) -> None:
        """Give the baton to the first rank. Every rank's thread has been started or will be."""
        self._hand(self._draw())

    def news(self, timeout: float) -> Literal["failed", "ended"] | None:
        """Wait until a failure is recorded or all ranks have ended; `None` if neither happens within `timeout` s."""
        try:
            return self._news.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None

    def stop(self, failure: Failure | None) -> None:
        """End the run: record why, if nothing has ended it before; a rank that communicates next is unwound."""
        with self._failing:
            if self.failure is None:
                self.failure = failure
            if not self.over:
                self.over = True
                self._news.put("failed")

    def release_everyone(self) -> None:
        """Wake all ranks at once, because the one whose turn it is does not come back."""
        for seat in self._seats:
            self._open(seat)

    @property
    def holder(self) -> int:
        """The rank whose turn it is, or was last."""
        return self._holder

    def unfinished(self) -> list[int]:
        """The ranks that have not ended."""
        return [seat.rank for seat in self._seats if not seat.finished]

    def thread_of(self, rank: int) -> int:
        """The identifier of a rank's thread."""
        return self._seats[rank].thread

    def where(self, rank: int) -> list[str]:
        """Return where a rank is, as lines `file:line in function`, innermost last, without frames of worlds."""
        frame = sys._current_frames().get(self._seats[rank].thread)
        return frames_of_user(frame)

    def waits(self, polling: Sequence[int] = ()) -> list[str]:
        """Return a line for each rank that waits, polls or has returned; ranks that could run are left out."""
        lines = []
        for seat in self._seats:
            awaited = seat.awaited
            if awaited is not None:
                lines.append(f"rank {seat.rank} waits for {awaited.describe()}")
            elif seat.finished:
                lines.append(f"rank {seat.rank} has returned")
            elif seat.rank in polling:
                lines.append(f"rank {seat.rank} polls an operation that cannot complete")
        return lines

    # -- called by a rank ----------------------------------------------------------------------------------------------

    def enter(self, rank: int) -> bool:
        """Wait for this rank's first turn. False if the run is over before it came."""
        seat = self._seats[rank]
        seat.thread = threading.get_ident()
        seat.turn.acquire()
        self._put_back(self._settings)
        return not self.over

    def belongs(self, rank: int) -> bool:
        """Whether the calling thread is this rank's."""
        return self._seats[rank].thread == threading.get_ident()

    def check(self) -> None:
        """Raise if the run is over.

        Raises:
            Unwound: it is.
        """
        if self.over:
            raise Unwound

    def pause(self, rank: int) -> None:
        """Let another rank go on first, if the seed says so."""
        self._polls = 0
        self._move(rank)

    def poll(self, rank: int) -> None:
        """Let other ranks go on after a rank has asked for an operation that has not completed.

        Raises:
            Unwound: the run is over, or for a long time all ranks have only asked.
        """
        self._polls += 1
        if self._polls > _POLLS_BEFORE_RELIEF * len(self._seats) and self.relieve():
            self._polls = 0
        if self._polls > _POLLS_WITHOUT_PROGRESS * len(self._seats):
            self._deadlock(polling=[*self._ready, rank])
        self._move(rank)

    def wait(self, rank: int, awaited: Awaited) -> None:
        """Let others run until `awaited.done`.

        Raises:
            Unwound: the run is over, or it ends here because no rank can go on.
        """
        seat = self._seats[rank]
        while not awaited.done:
            self.check()
            seat.awaited = awaited
            if not self._someone_is_ready():
                self._deadlock(polling=[])
            self._let(self._draw(), seat)
            seat.awaited = None
        self.check()

    def wake(self, rank: int, awaited: Awaited) -> None:
        """Let a rank run again if it waits for `awaited`, which is done."""
        self._polls = 0
        if self._seats[rank].awaited is awaited:
            self._ready.append(rank)

    def leave(self, rank: int) -> None:
        """This rank has returned, raised or been unwound: pass the baton on, for good."""
        self._seats[rank].finished = True
        self._now = torch_settings.values(torch_settings.OF_PROCESS)
        left = self.unfinished()
        if not left:
            self._news.put("ended")
        elif self.over:
            self._hand(left[0])
        elif self._someone_is_ready():
            self._hand(self._draw())
        else:
            try:
                self._deadlock(polling=[])
            except Unwound:
                self._hand(left[0])

    # -- inside --------------------------------------------------------------------------------------------------------

    def _someone_is_ready(self) -> bool:
        while not self._ready:
            if not self.relieve():
                return False
        return True

    def _draw(self) -> int:
        ready = self._ready
        chosen = int(self._random() * len(ready))
        ready[chosen], ready[-1] = ready[-1], ready[chosen]
        return ready.pop()

    def _move(self, rank: int) -> None:
        self.check()
        ready = self._ready
        chosen = int(self._random() * (len(ready) + 1))
        if chosen < len(ready):
            next_rank, ready[chosen] = ready[chosen], rank
            self._let(next_rank, self._seats[rank])
            self.check()

    def _let(self, rank: int, seat: _PlaceOfRank) -> None:
        """Let another rank go on, and sleep until it is this one's turn again."""
        self._now = settings = torch_settings.values(torch_settings.OF_PROCESS)
        self._hand(rank)
        seat.turn.acquire()
        self._put_back(settings)

    def _put_back(self, settings: tuple[Any, ...]) -> None:
        """Restore the settings of the rank whose turn begins, if those of the one whose turn ended are others."""
        if settings != self._now and not self.over:  # a late thread would change settings that are no longer its own
            torch_settings.put_back(torch_settings.OF_PROCESS, settings)

    def _hand(self, rank: int) -> None:
        self._holder = rank
        self._open(self._seats[rank])

    @staticmethod
    def _open(seat: _PlaceOfRank) -> None:
        # Open already only while a run is being torn down, where the starter and a late rank may both wake a third.
        if seat.turn.locked():
            seat.turn.release()

    def _deadlock(self, polling: list[int]) -> None:
        waits, places = self.waits(polling), []
        for seat in self._seats:
            if not seat.finished:
                places += [f"rank {seat.rank} at", *(f"  {line}" for line in self.where(seat.rank))]
        detail = "\n".join([*waits, *places, self.explain()]).rstrip()
        awaited = tuple((seat.rank, seat.awaited.describe()) for seat in self._seats if seat.awaited is not None)
        peers = {seat.rank: seat.awaited.peer for seat in self._seats if seat.awaited is not None}
        returned = tuple(seat.rank for seat in self._seats if seat.finished and seat.awaited is None)
        waiting = [(seat.rank, seat.awaited.elements) for seat in self._seats if seat.awaited is not None]
        nothing, together = (tuple(rank for rank, elements in waiting if elements == n) for n in (0, None))
        left_alone = self.addressed()
        idle = tuple(rank for rank in returned if rank not in self.acted or rank in left_alone)
        message = "deadlock: " + "; ".join(waits)
        self.stop(
            Failure(
                "deadlock",
                None,
                message,
                detail,
                waits=awaited,
                returned=returned,
                for_nothing=nothing,
                idle=idle,
                together=together,
                peers=tuple((rank, peer) for rank, peer in peers.items() if peer is not None),
            )
        )
        raise Unwound
