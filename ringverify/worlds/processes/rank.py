"""One rank on this machine: its process, the tool's ends of its pipes, and how both are ended.

A pool uses its ranks through the protocol `Rank`, so that a rank may also run on another machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Protocol

from ringverify.worlds import reproducible, whose
from ringverify.worlds.foreign_text import stacks_of
from ringverify.worlds.limits import too_many
from ringverify.worlds.processes.blame import is_importing, main_thread
from ringverify.worlds.processes.server import SOCKETS
from ringverify.worlds.processes.wire import (
    Died,
    Event,
    Frames,
    NotAReport,
    Output,
    Ready,
    Seat,
    Whereabouts,
    unpacked,
)
from ringverify.worlds.standard_files import keep_standard_files
from ringverify.worlds.world import WorldUnavailable

LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"
GRACE_SECONDS = 10.0
"""How long a keeper may take to end what is left of its rank."""
PRELOADED = (
    "ringverify.worlds.processes.server",
    "ringverify.worlds.processes.worker",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed._functional_collectives",
)
"""Modules that the fork server imports once, in this order, so that no rank has to. Torch needs the third for a first
backward. Dynamo, which the first functional collective imports too, is left out: importing it leaves a folder in the
directory of temporary files."""

Source = tuple[Any, Callable[[], Sequence[Event]]]
"""Something that `selectors` can wait for, and the function that then reads events from it. The function raises
`EOFError` or `OSError` when nothing more will come."""


class Rank(Protocol):
    """The tool's handle of one rank."""

    @property
    def process(self) -> int | None:
        """The id of its process, if that is on this machine."""
        ...

    def sources(self) -> Sequence[Source]:
        """Return where its events come from. What a rank printed comes before what it reports."""
        ...

    def send(self, job: bytes) -> None:
        """Send it a pickled `RunRequest`.

        Raises:
            OSError: the rank is gone.
        """
        ...

    def ask_where(self) -> None:
        """Ask it where it is. The answer comes from `where`."""
        ...

    def where(self) -> Whereabouts | None:
        """Return its answer to `ask_where`, or `None` while there is none."""
        ...

    def kill(self) -> None:
        """End it, and the processes that programs have started in it, without waiting."""
        ...

    def close(self) -> None:
        """Wait for its end after `kill`, and tidy up."""
        ...


class RankHost(Protocol):
    """Where ranks are started."""

    @property
    def name(self) -> str:
        """The name of the world."""
        ...

    def start(self, world_size: int, program_module: str) -> Iterator[Rank]:
        """Start ranks 0 … world_size − 1, one at a time.

        Args:
            world_size: how many.
            program_module: the module of the first program, which a fork server that starts now imports for all ranks.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ThisMachine:
    """A `RankHost`: all ranks on this machine.

    Attributes:
        name: the name of the world.
        backend: the backend of `torch.distributed`.
        devices: the GPUs, as `CUDA_VISIBLE_DEVICES` names them, one a rank; `None` for ranks without any. With another
            backend than "nccl" they only limit the number of ranks.
        reproducible: whether matrix products on CPU have the same bits everywhere; benchmarks turn this off.
    """

    name: str = "gloo"
    backend: str = "gloo"
    devices: tuple[str, ...] | None = None
    reproducible: bool = True

    def start(self, world_size: int, program_module: str) -> Iterator[Rank]:
        """Start the ranks; they meet in a directory of their own.

        Raises:
            WorldUnavailable: this machine cannot hold so many, or has fewer GPUs.
        """
        if self.devices is not None and world_size > len(self.devices):
            raise WorldUnavailable(too_few_gpus(world_size, len(self.devices)))
        if (reason := too_many(world_size, "file descriptors", "processes", "memory")) is not None:
            raise WorldUnavailable(reason)
        keep_standard_files()
        directory = new_directory(self.name)
        products = reproducible.mode() if self.reproducible else None
        for rank in range(world_size):
            seat = Seat(rank, world_size, rank, world_size, self.backend, interface=LOOPBACK, products=products)
            if self.devices is not None and self.backend == "nccl":
                visible = ",".join(self.devices[:world_size])
                seat = dataclasses.replace(seat, device=rank, visible=visible)
            yield LocalRank(seat, directory, program_module)


def too_few_gpus(world_size: int, gpus: int) -> str:
    """Say why a world of that size does not fit on that many GPUs, and what would."""
    sizes = "" if not gpus else f"--world-sizes {','.join(map(str, range(1, gpus + 1)))}, "
    needed = f"{world_size} GPU{'s' if world_size > 1 else ''}"
    return (
        f"world size {world_size} needs {needed}, this machine has {gpus}: "
        f"use {sizes}--world gloo, or torchrun on more machines"
    )


def new_directory(name: str) -> str:
    """Return the path of a directory in which ranks may meet. Their keepers make it and remove it."""
    return os.path.join(tempfile.gettempdir(), f"ringverify-{name}-{secrets.token_hex(8)}")


class LocalRank:
    """A `Rank` that is a process of this machine, started when this is made.

    Args:
        seat: which rank it is.
        directory: for its stacks and, without another store, for meeting the others: a `new_directory`, removed when
            the rank ends.
        program_module: a module that a fork server which starts now should import.

    Raises:
        WorldUnavailable: this platform has no fork server.
        OSError: the process could not be started.
    """

    def __init__(self, seat: Seat, directory: str, program_module: str) -> None:
        context = _context()
        start_fork_server(program_module)
        # These import torch, which a tool that only uses other worlds does not need. The fork server does so meanwhile.
        from ringverify.worlds.processes.keeper import keep
        from ringverify.worlds.processes.worker import stacks_file, whose_file

        self._directory = directory
        self._stacks, self._whose = (file(directory, seat.rank) for file in (stacks_file, whose_file))
        self._jobs, theirs = context.Pipe()
        self._wire, self._frames = socket.socket(fileno=os.dup(self._jobs.fileno())), Frames()
        self._output, printing = context.Pipe(duplex=False)
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self._worker: int | None = None
        self._was_ours = True
        name = f"ringverify {seat.backend} rank {seat.rank} of {seat.world_size}"
        with theirs, printing, lifeline:
            self._process = started(keep, (seat, directory, theirs, printing, lifeline), name)
        os.set_blocking(self._output.fileno(), False)

    @property
    def process(self) -> int | None:
        """The id of its process, once it is ready."""
        return self._worker

    def sources(self) -> Sequence[Source]:
        """Return the sources of its reports, of its output and of its end."""
        return ((self._jobs, self._reported), (self._output, self._printed), (self._process.sentinel, self._died))

    def send(self, job: bytes) -> None:
        """Send it a pickled `RunRequest`."""
        self._jobs.send_bytes(job)

    def _reported(self) -> Sequence[Event]:
        try:
            data = self._wire.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError  # how it ended comes from the fork server
        try:
            reports = [unpacked(message) for message in self._frames.messages(data)]
        except NotAReport:  # the program wrote to a file descriptor that is not its own
            self.kill()
            raise EOFError from None
        for report in reports:
            if isinstance(report, Ready):
                self._worker = report.process
        return [*self._all_printed(), *reports] if reports else []

    def _died(self) -> Sequence[Event]:
        self._process.join()
        at = time.monotonic()
        last: Sequence[Event] = []
        with contextlib.suppress(EOFError, OSError):  # what it reported before it ended comes first
            if self._jobs.poll():
                last = self._reported()
        return [*self._all_printed(), *last, Died(self._process.exitcode or 0, at, whose.was_ours(self._whose))]

    def _printed(self) -> Sequence[Event]:
        try:
            text = os.read(self._output.fileno(), 1 << 20)
        except BlockingIOError:
            return []
        if not text:
            raise EOFError
        return [Output(text)]

    def _all_printed(self) -> list[Event]:
        """Read what is still in the pipe, in at most 16 parts, because a rank may flood its output."""
        found: list[Event] = []
        with contextlib.suppress(EOFError, OSError):
            while len(found) < 16 and (more := self._printed()):
                found += more
        return found

    def ask_where(self) -> None:
        """Have its `faulthandler` write a file; the keeper passes the signal on."""
        process = self._process
        self._was_ours = whose.was_ours(self._whose)  # before the signal, which may wake it
        if process.pid is not None and process.exitcode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGUSR1)

    def where(self) -> Whereabouts | None:
        """Return what the file holds, once it is complete."""
        with contextlib.suppress(OSError), open(self._stacks, errors="replace") as file:
            frames = main_thread(stacks_of(file.read()))
            if frames is not None:
                importing = is_importing(frame.file for frame in frames)
                return Whereabouts(frames, self._was_ours, importing)
        return None

    def kill(self) -> None:
        """Have its keeper end it and all that it has started."""
        self._lifeline.close()

    def close(self) -> None:
        """Wait for its end, close the pipes and remove the directory."""
        self._process.join(GRACE_SECONDS)
        self._process.kill()  # the keeper, if it has not ended yet; the rank ends with it
        for connection in (self._jobs, self._wire, self._output, self._lifeline):
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _context() -> ForkServerContext:
    try:
        return multiprocessing.get_context("forkserver")
    except ValueError:
        raise WorldUnavailable("ranks as processes need a fork server, which this platform lacks") from None


def started(target: Callable[..., object], arguments: tuple[Any, ...], name: str) -> ForkServerProcess:
    """Start a process from the fork server, which must have been started, and return it.

    Raises:
        WorldUnavailable: this platform has no fork server.
        OSError: the process could not be started.
    """
    process = _context().Process(target=target, args=arguments, name=name, daemon=True)
    with _unknown_main(), _interrupts_held_back():
        try:
            process.start()
        except ConnectionRefusedError:  # a program has just killed the fork server, which is about to be noticed
            time.sleep(GRACE_SECONDS / 10)
            process.start()
    return process


def start_fork_server(program_module: str) -> None:
    """Start the process that imports torch once for all ranks, unless it runs already; do not wait for the import.

    Args:
        program_module: a module that it should import as well.
    """
    multiprocessing.forkserver.set_forkserver_preload([*PRELOADED, program_module])
    with _unknown_main(), _interrupts_held_back(), _sockets_named(), one_thread_for_numpy():
        multiprocessing.forkserver.ensure_running()


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


BLAS_THREADS = "OPENBLAS_NUM_THREADS"

_SOCKET_FOLDERS: set[tuple[int, str]] = set()
"""Temporary folders of `multiprocessing`, each with the id of the process that made it: children inherit this set."""


@contextlib.contextmanager
def _sockets_named() -> Iterator[None]:
    """Tell a fork server that starts now where its socket is, so that it can remove that if this process is killed."""
    made_here = vars(multiprocessing.current_process())["_config"].get("tempdir") is None
    folder = multiprocessing.util.get_temp_dir()
    if made_here:
        _SOCKET_FOLDERS.add((os.getpid(), folder))
    # One that was inherited is the parent's, which still needs it when this process has ended.
    own = [folder] if (os.getpid(), folder) in _SOCKET_FOLDERS else []
    os.environ[SOCKETS] = "\n".join([str(os.getpid()), *own])
    try:
        yield
    finally:
        del os.environ[SOCKETS]


@contextlib.contextmanager
def one_thread_for_numpy() -> Iterator[None]:
    """Have the fork server, and so all ranks, multiply matrices in numpy with one thread, unless the user says else.

    Ranks share the cores, and OpenBLAS's threads wait for one another actively: two ranks on two cores verified a long
    run in three to six times the processor time. It reads this once, when numpy is imported.
    """
    said = os.environ.get(BLAS_THREADS)
    os.environ.setdefault(BLAS_THREADS, "1")
    try:
        yield
    finally:
        if said is None:
            del os.environ[BLAS_THREADS]


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Block SIGINT while processes start: a terminal sends Ctrl-C to all of them before they ignore it.

    They inherit the blocked signal and keep it blocked: ranks and the fork server end with the tool, by other means.
    """
    multiprocessing.resource_tracker.ensure_running()  # its start would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
