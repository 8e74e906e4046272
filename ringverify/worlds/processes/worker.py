"""One rank of a world of processes: it joins a process group once and then runs programs until it is told to stop.

Whether this process can still be used after a program is decided at the other end of the pipe, by the tool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from ringverify.words import TEXT, cut
from ringverify.worlds import reproducible, whose
from ringverify.worlds.exceptions import one_line
from ringverify.worlds.foreign_text import tells_of_lost_peer
from ringverify.worlds.processes.residue import MessageCount
from ringverify.worlds.processes.settings import Settings
from ringverify.worlds.processes.wire import NotReady, Raised, Ready, Report, Returned, RunRequest, Seat, packed
from ringverify.worlds.raising import raising_of
from ringverify.worlds.world import WorldUnavailable

FOREVER = datetime.timedelta(days=1)
"""The process group's timeout. A run's deadline is kept by the tool, which can inspect a stuck rank."""

_STACKS = "stacks-"
_WHOSE = "whose-"


def serve(seat: Seat, directory: str, requests: Connection, output: Connection) -> NoReturn:
    """Run programs as one rank until the keeper ends this process, which is when the tool ends.

    Args:
        seat: which rank this is, and how it meets the others.
        directory: the ranks of a machine may meet there, and stacks are written there on request.
        requests: brings `RunRequest`s; takes one `Ready` or `NotReady`, then a `Report` for each request.
        output: what becomes standard output and standard error.
    """
    _settle(output)
    multiprocessing.current_process().daemon = False  # a daemon, as which the tool started it, could have no children
    whose.write_to(whose_file(directory, seat.rank))
    settings = Settings(_environment(seat), seat.device)
    os.register_at_fork(after_in_child=requests.close)  # or the tool would take a forked child for the rank
    with open(stacks_file(directory, seat.rank), "w") as stacks:
        messages = MessageCount(numbers_messages=seat.backend == "gloo")
        try:
            _join(seat, directory)
        except Exception as error:
            _send(requests, NotReady.of(error))
            os._exit(0)
        _send(requests, Ready(os.getpid()))
        while True:
            try:
                request = pickle.loads(requests.recv_bytes())
            except (EOFError, OSError):
                _leave()
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            _send(requests, _run(request, messages, settings))


def _join(seat: Seat, directory: str) -> None:
    """Become a member of the default group."""
    torch_distributed: Any = dist  # stores are documented there, but are not in its __all__
    if seat.store is None:
        store = torch_distributed.FileStore(_store(directory), seat.world_size)
    else:
        address, port, prefix = seat.store
        store = torch_distributed.PrefixStore(prefix, torch_distributed.TCPStore(address, port, is_master=False))
    device = None
    if seat.device is not None:
        device = torch.device("cuda", seat.device)
        torch.cuda.set_device(device)
    dist.init_process_group(
        seat.backend, store=store, rank=seat.rank, world_size=seat.world_size, timeout=FOREVER, device_id=device
    )
    # Connections are made here, not in the first run, where an interface that does not work would look like the
    # implementation's fault.
    dist.barrier()


def stacks_file(directory: str, rank: int) -> str:
    """Return the path of the file to which a rank writes the stacks of its threads when it gets SIGUSR1."""
    return os.path.join(directory, f"{_STACKS}{rank}")


def whose_file(directory: str, rank: int) -> str:
    """Return the path of the file that says whose code a rank is running."""
    return os.path.join(directory, f"{_WHOSE}{rank}")


def _store(directory: str) -> str:
    """Return the path of the file store in which the ranks of a machine meet."""
    return os.path.join(directory, "store")


def _environment(seat: Seat) -> dict[str, str]:
    """Return the variables that torchrun sets, since plain scripts read them, the visible GPUs and MKL's mode."""
    variables = {
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.local_rank),
        "WORLD_SIZE": str(seat.world_size),
        "LOCAL_WORLD_SIZE": str(seat.local_world_size),
        "GLOO_SOCKET_IFNAME": seat.interface,
        "CUDA_VISIBLE_DEVICES": seat.visible,
        reproducible.VARIABLE: seat.products,
    }
    return {name: value for name, value in variables.items() if value is not None}


def _settle(output: Connection) -> None:
    """Detach this process from the terminal, and send its output to the tool."""
    # Children that a program forks share this process group and end with it; Ctrl-C is the tool's to handle.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    # Line by line, so that what a rank printed before it died is not lost with its buffers.
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    faulthandler.enable(file=2)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # workers are expendable, the harness is not
    gc.freeze()  # pages shared with the fork server stay shared


def _leave() -> NoReturn:
    """Give the keeper time to end this process, then exit: that a program has closed the pipe is no end of the tool."""
    time.sleep(1.0)
    os._exit(0)


def _run(request: RunRequest, messages: MessageCount, settings: Settings) -> Report:
    process = os.getpid()
    try:
        with whose.ours():
            settings.restore(request)
            messages.begin()
            program, argument = pickle.loads(request.body)
            with whose.theirs():
                result = program(argument)
            _only_in(process)
            body = pickle.dumps(result, protocol=5)
            residue = messages.residue()
            return Returned(body, dataclasses.replace(residue, intact=residue.intact and settings.can_be_restored()))
    except BaseException as error:
        _only_in(process)
        with whose.theirs():  # reading an exception of its own class runs its code
            return _raised(error)


def _only_in(process: int) -> None:
    """Exit if this is a child that the program forked and let return: only the rank itself reports."""
    if os.getpid() != process:
        os._exit(0)


def _raised(error: BaseException) -> Raised:
    at = time.monotonic()
    kind = type(error)  # `isinstance` would ask the exception's own `__class__`
    if issubclass(kind, WorldUnavailable):
        ours = cast(WorldUnavailable, error)
        return Raised(cut(str(ours)), cut(ours.detail, TEXT), at=at, consequence=False, ours=True)
    gone = issubclass(kind, (RuntimeError, OSError)) and tells_of_lost_peer(one_line(error))
    return Raised(**vars(raising_of(error)), at=at, consequence=gone)


def _send(requests: Connection, report: Report) -> None:
    try:
        requests.send_bytes(packed(report))
    except (OSError, ValueError):
        _leave()
