"""The processes of one world size: started together, kept warm, ended together.

A pool is used for run after run until something goes wrong in it; then it is ended whole, since a process group with a
broken member cannot be mended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.resource_tracker
import os
import pickle
import selectors
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from ringverify.worlds.gloo_blame import Died, doubt, first_cause, main_thread, out_of_time
from ringverify.worlds.gloo_wire import Job, NotReady, Raised, Ready, Report, Returned, is_clean
from ringverify.worlds.world import Failure, WorldUnavailable

START_SECONDS = 120.0
"""How long the ranks may take to meet; on a loaded machine importing torch alone takes many seconds."""
SETTLE_SECONDS = 0.05
"""After a rank has failed: how long to wait for a cause that happened earlier but is reported later."""
CONSEQUENCE_SECONDS = 0.5
"""The same, where what is known so far looks like the consequence of something else."""
STACK_SECONDS = 2.0
"""How long a stuck rank may take to say where it is."""
GRACE_SECONDS = 5.0
"""How long the system may take to bury a process that was killed."""
OUTPUT_BYTES = 32_768
"""How much of the end of a rank's output is kept."""
PRELOADED = ("ringverify.worlds.gloo_worker", "torch.fx.experimental.symbolic_shapes")
"""Imported once, by the fork server; the second is what torch imports in a first backward pass, for a second."""
MOST_GROUPS = 64
"""A pool whose program has made more groups than this, each with its threads and sockets, is not used again."""


@dataclasses.dataclass
class _Rank:
    """The tool's end of one rank."""

    process: ForkServerProcess
    jobs: Connection
    output: Connection
    printed: bytearray = dataclasses.field(default_factory=bytearray)


class Pool:
    """`world_size` ranks, ready to run.

    Args:
        world_size: how many.
        program_module: the module of the first program, which a fork server that starts now imports for all ranks.

    Raises:
        WorldUnavailable: they could not be started or could not meet.
    """

    def __init__(self, world_size: int, program_module: str) -> None:
        self.world_size = world_size
        self.usable = True
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._directory = ""
        self._lifeline: Connection | None = None
        try:
            self._directory = tempfile.mkdtemp(prefix="ringverify-gloo-")
            self._start(program_module)
        except WorldUnavailable:
            self.end()
            raise
        except (OSError, EOFError, ValueError, RuntimeError) as error:
            self.end()
            raise WorldUnavailable(
                f"the gloo world could not start {world_size} processes: {type(error).__name__}: {error}"
            ) from error
        except BaseException:
            self.end()
            raise

    def _start(self, program_module: str) -> None:
        # Imports torch, which a tool that only uses another world may never need.
        from ringverify.worlds.gloo_worker import serve

        try:
            context = multiprocessing.get_context("forkserver")
        except ValueError:
            raise WorldUnavailable("the gloo world needs a fork server, which this platform lacks") from None
        context.set_forkserver_preload([*PRELOADED, program_module])
        lifeline, self._lifeline = context.Pipe(duplex=False)
        with lifeline, _unknown_main(), _interrupts_held_back():
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                output, printing = context.Pipe(duplex=False)
                process = context.Process(
                    target=serve,
                    args=(rank, self.world_size, self._directory, theirs, printing, lifeline),
                    name=f"ringverify gloo rank {rank} of {self.world_size}",
                    daemon=True,
                )
                with theirs, printing:
                    process.start()
                os.set_blocking(output.fileno(), False)
                self._ranks.append(_Rank(process, ours, output))
        for number, rank_ in enumerate(self._ranks):
            self._selector.register(rank_.jobs, selectors.EVENT_READ, ("jobs", number))
            self._selector.register(rank_.output, selectors.EVENT_READ, ("output", number))
            self._selector.register(rank_.process.sentinel, selectors.EVENT_READ, ("process", number))
        self._meet()

    def _meet(self) -> None:
        waiting = set(range(self.world_size))
        until = time.monotonic() + START_SECONDS
        while waiting:
            for rank, event in self._events(until):
                match event:
                    case Ready():
                        waiting.discard(rank)
                    case NotReady(reason=reason):
                        raise WorldUnavailable(f"the gloo world could not start: rank {rank}: {reason}")
                    case Died():
                        self._drain()
                        last = "".join(self._text(rank).strip().splitlines()[-1:])
                        raise WorldUnavailable(
                            f"the gloo world could not start: rank {rank}'s process {event.what}{last and f': {last}'}"
                        )
            if time.monotonic() >= until:
                raise WorldUnavailable(
                    f"the gloo world could not start: its {self.world_size} ranks did not meet "
                    f"within {START_SECONDS:g} s"
                )

    def run(self, body: bytes, deadline: float) -> list[bytes] | Failure:
        """Run a pickled (program, argument) on every rank: each rank's pickled result, or the failure.

        After a failure, or when a run has left something behind, `usable` is False.
        """
        usable, self.usable = self.usable, False
        assert usable, "a pool that failed is not run again"
        for rank in self._ranks:
            rank.printed.clear()
        job = pickle.dumps(Job(tuple(sys.path), _working_directory(), body), protocol=5)
        until = time.monotonic() + deadline
        returned: dict[int, Returned] = {}
        failed: dict[int, Raised | Died] = {}
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it has just died; its sentinel says how
                rank.jobs.send_bytes(job)
        settled = False
        while len(returned) + len(failed) < self.world_size and time.monotonic() < until:
            for number, event in self._events(until):
                match event:
                    case Returned():
                        returned[number] = event
                    case Raised() | Died():
                        failed.setdefault(number, event)
            if failed and not settled:
                certain = not all(map(doubt, failed.values()))
                until = min(until, time.monotonic() + (SETTLE_SECONDS if certain else CONSEQUENCE_SECONDS))
                settled = certain
        if failed:
            self._drain()
            return first_cause(failed, [self._text(rank) for rank in range(self.world_size)])
        if len(returned) < self.world_size:
            stuck = [rank for rank in range(self.world_size) if rank not in returned]
            stacks = self._stacks(stuck)
            self._drain()
            texts = [self._text(rank) for rank in range(self.world_size)]
            return out_of_time(deadline, sorted(returned), stacks, texts)
        residues = [returned[rank].residue for rank in range(self.world_size)]
        self.usable = is_clean(residues, most_groups=MOST_GROUPS)
        return [returned[rank].result for rank in range(self.world_size)]

    def _events(self, until: float) -> Iterator[tuple[int, Report | Died]]:
        """What ranks report until something happens or the time has come; output is read on the way."""
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            what, number = key.data
            rank = self._ranks[number]
            match what:
                case "output":
                    self._read(number)
                case "jobs":
                    try:
                        yield number, pickle.loads(rank.jobs.recv_bytes())
                    except (EOFError, OSError):
                        self._selector.unregister(rank.jobs)  # how it ended comes from the fork server
                    except Exception:  # the program wrote to a file descriptor that is not its own
                        self._selector.unregister(rank.jobs)
                        rank.process.kill()
                case "process":
                    self._selector.unregister(rank.process.sentinel)
                    rank.process.join()
                    yield number, Died(rank.process.exitcode or 0, time.monotonic())

    def _read(self, number: int) -> bool:
        """Take what a rank has printed, keeping the end of it; whether there was something."""
        rank = self._ranks[number]
        try:
            text = os.read(rank.output.fileno(), 1 << 20)
        except BlockingIOError:
            return False
        if not text:
            self._selector.unregister(rank.output)
            return False
        rank.printed += text
        if len(rank.printed) > OUTPUT_BYTES:
            del rank.printed[:-OUTPUT_BYTES]
        return True

    def _drain(self) -> None:
        """Take what is still in the pipes; a rank that floods its output is not waited for."""
        registered = {key.data for key in self._selector.get_map().values()}
        for number in range(self.world_size):
            if ("output", number) in registered:
                for _ in range(16):
                    if not self._read(number):
                        break

    def _text(self, rank: int) -> str:
        return self._ranks[rank].printed.decode(errors="replace")

    def _stacks(self, stuck: list[int]) -> dict[int, str | None]:
        """Where each rank is, as its own `faulthandler` says; None where it does not answer."""
        from ringverify.worlds.gloo_worker import stacks_file

        stacks: dict[int, str | None] = dict.fromkeys(stuck)
        for rank in stuck:
            self._signal(rank, signal.SIGUSR1)
        until = time.monotonic() + STACK_SECONDS
        while None in stacks.values() and time.monotonic() < until:
            time.sleep(0.02)
            for rank in [rank for rank, stack in stacks.items() if stack is None]:
                with contextlib.suppress(OSError), open(stacks_file(self._directory, rank), errors="replace") as file:
                    stacks[rank] = main_thread(file.read())
        return stacks

    def _signal(self, rank: int, number: int) -> None:
        process = self._ranks[rank].process
        if process.pid is not None and process.exitcode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)

    def is_alive(self) -> bool:
        """Whether every rank is still there; one may have been ended since the last run by what that left behind."""
        return all(rank.process.exitcode is None for rank in self._ranks)

    def end(self) -> None:
        """End the processes, and the children that programs left in their process groups."""
        self.usable = False
        for rank in self._ranks:
            # Also where the rank itself has ended: a process group outlives its leader.
            if rank.process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.kill()  # it may not have had the time to make its process group
        for rank in self._ranks:
            rank.process.join(GRACE_SECONDS)
            rank.jobs.close()
            rank.output.close()
        if self._lifeline is not None:
            self._lifeline.close()
        self._selector.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


@contextlib.contextmanager
def _unknown_main() -> Iterator[None]:
    """Keep `multiprocessing` from running the tool's main script again in every rank.

    Programs are importable by name, so no rank needs it; a script without a main guard would start ranks for ever.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Keep Ctrl-C, which a terminal sends to all, from processes that have not yet begun to ignore it.

    They inherit what is held back here, and for good: ranks and the fork server end with the tool, by other means.
    """
    multiprocessing.resource_tracker.ensure_running()  # when it starts, it lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
