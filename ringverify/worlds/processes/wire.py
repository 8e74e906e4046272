"""Messages between a world of processes and its ranks, and the state in which a run leaves a rank's process groups.

Everything here is a pickle between processes of one run of the tool, never a file. Importing this module does not
import torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pickle
import signal
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ringverify.worlds.exceptions import one_line
from ringverify.worlds.foreign_text import Frame, tells_of_lost_peer
from ringverify.worlds.limits import limit_of, sentence
from ringverify.worlds.raising import Raising

MessageKey = tuple[str, int | None, int, int]
"""(name of the group, source or `None` for any, destination, tag); ranks are those within the group."""


@dataclasses.dataclass(frozen=True)
class Seat:
    """Which rank a process is, and how it meets the others.

    Attributes:
        rank: its rank.
        world_size: number of ranks.
        local_rank: its rank among the ranks of its machine.
        local_world_size: number of ranks on its machine.
        backend: the backend of `torch.distributed`.
        device: its CUDA device, counted among those it can see; `None` if it has none.
        visible: the CUDA devices that it can see, as `CUDA_VISIBLE_DEVICES`; `None` leaves the variable alone.
        store: address, port and prefix of a TCP store; `None` is a file in the directory that all ranks share.
        interface: the network interface for gloo; `None` lets gloo choose.
        products: MKL's mode of matrix products, as `MKL_CBWR`; `None` leaves the variable alone.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    backend: str = "gloo"
    device: int | None = None
    visible: str | None = None
    store: tuple[str, int, str] | None = None
    interface: str | None = None
    products: str | None = None


@dataclasses.dataclass(frozen=True)
class RunRequest:
    """One program to run.

    Attributes:
        path: the module search path of the tool at this moment; a target may have extended it since the worker started.
        directory: the working directory, if it still exists.
        body: `pickle.dumps((program, argument))`, pickled apart, so that a program that cannot be imported is not taken
            for a broken pipe.
    """

    path: tuple[str, ...]
    directory: str | None
    body: bytes


@dataclasses.dataclass(frozen=True)
class Ready:
    """The worker has joined its process group. `process` is its process id; the tool started its keeper, not it."""

    process: int | None = None


@dataclasses.dataclass(frozen=True)
class NotReady:
    """The worker could not be started, or could not set its process group up.

    Attributes:
        reason: why, in a line.
        consequence: it looks like the consequence of another rank's end.
    """

    reason: str
    consequence: bool = False

    @classmethod
    def of(cls, error: Exception) -> NotReady:
        """Build the message from the exception that was raised."""
        limit, said = limit_of(error, starting=True), one_line(error)
        return cls(said if limit is None else f"{sentence(limit)}: {said}", tells_of_lost_peer(said))


@dataclasses.dataclass(frozen=True)
class Residue:
    """One rank's process groups after a run. All ranks' residues together tell whether the groups can be used again.

    Attributes:
        intact: the default group is still the one that the worker made, torch could report all fields below, and the
            process's standard streams are in place.
        groups: number of process groups made so far.
        collectives: collectives started on each group so far, by the group's name.
        messages: sends minus receives posted during the run, for each message key where that is not zero.
    """

    intact: bool
    groups: int
    collectives: dict[str, int]
    messages: dict[MessageKey, int]


@dataclasses.dataclass(frozen=True)
class Returned:
    """The program returned; `result` is a pickle of what it returned."""

    result: bytes
    residue: Residue


@dataclasses.dataclass(frozen=True)
class Raised(Raising):
    """The program raised.

    Attributes:
        at: `time.monotonic()` of that moment, comparable between processes of one machine.
        consequence: it looks like the consequence of another rank's end, and is rarely the cause.
        ours: it is an error in ringverify: `what` is its message, and `detail` its whole traceback.
    """

    at: float = dataclasses.field(kw_only=True)
    consequence: bool = dataclasses.field(kw_only=True)
    ours: bool = dataclasses.field(default=False, kw_only=True)


@dataclasses.dataclass(frozen=True)
class Died:
    """A rank's process ended.

    Attributes:
        exit_code: as `multiprocessing` has it, negative for a signal.
        at: as in `Raised`.
        ours: none of the implementation's code was running in it.
    """

    exit_code: int
    at: float
    ours: bool = False

    @property
    def what(self) -> str:
        """How it ended, to follow "rank 1's process"."""
        return how_it_ended(self.exit_code)


def how_it_ended(exit_code: int) -> str:
    """Say how a process ended, to follow "the process"."""
    return f"ended with exit code {exit_code}" if exit_code >= 0 else f"was ended by signal {signal_name(-exit_code)}"


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGSEGV, or its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


@dataclasses.dataclass(frozen=True)
class Output:
    """What a rank wrote to its standard output or standard error."""

    text: bytes


@dataclasses.dataclass(frozen=True)
class Whereabouts:
    """Where a rank is, as an answer to that question.

    Attributes:
        frames: stack of the thread that runs programs, innermost frame first.
        ours: none of the implementation's code is running in it.
        importing: it is in the middle of an import.
    """

    frames: tuple[Frame, ...]
    ours: bool
    importing: bool


Report = Ready | NotReady | Returned | Raised
"""A message that a rank itself sends."""

Event = Report | Died | Output
"""Anything that becomes known of a rank."""


MOST = 1 << 30
"""Most bytes of a message."""

_DIGEST = 16
_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!Q")


class NotAReport(Exception):
    """What came out of a rank's pipe is no report: the program wrote there, or the rank died while it was writing."""


def packed(report: Report) -> bytes:
    """Serialise a report, with a digest that tells it from bytes that a program wrote to the same descriptor."""
    body = pickle.dumps(report, protocol=5)
    return hashlib.blake2b(body, digest_size=_DIGEST).digest() + body


def unpacked(message: bytes) -> Report:
    """Return the report that `packed` serialised.

    Raises:
        NotAReport: the bytes are something else.
    """
    digest, body = message[:_DIGEST], message[_DIGEST:]
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != digest:
        raise NotAReport("it has another digest")
    try:
        report = _Unpickler(io.BytesIO(body)).load()
    except Exception as error:  # whatever a forged pickle makes of its parts
        raise NotAReport(type(error).__name__) from None
    if not isinstance(report, Report):
        raise NotAReport(type(report).__name__)
    return report


class _Unpickler(pickle.Unpickler):
    """Loads reports and nothing else, so that a forged pickle runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of a report, or of what reports hold."""
        if module == __name__ and name in ("Ready", "NotReady", "Returned", "Raised", "Residue"):
            return globals()[name]
        raise NotAReport(f"it names {module}.{name}")


class Frames:
    """Splits a stream of bytes into messages, framed as `multiprocessing.connection.Connection` does it.

    It never waits: a reader that waited for the bytes that a damaged length announces would wait for ever.
    """

    def __init__(self) -> None:
        self._pending = bytearray()

    def messages(self, data: bytes) -> list[bytes]:
        """Add bytes to the stream, and return the messages that are now complete.

        Raises:
            NotAReport: a length is negative or more than `MOST`.
        """
        self._pending += data
        found = []
        while len(self._pending) >= _LENGTH.size:
            (length,), start = _LENGTH.unpack_from(self._pending), _LENGTH.size
            if length == -1 and len(self._pending) >= start + _LONG_LENGTH.size:
                (length,), start = _LONG_LENGTH.unpack_from(self._pending, start), start + _LONG_LENGTH.size
            elif length == -1:
                break
            if not 0 <= length <= MOST:
                raise NotAReport(f"a message of {length:,} bytes")
            if len(self._pending) < start + length:
                break
            found.append(bytes(self._pending[start : start + length]))
            del self._pending[: start + length]
        return found


def is_clean(residues: Sequence[Residue], *, most_groups: int) -> bool:
    """Whether the next run can use the same process group: nothing is under way and all ranks are in step.

    A message that nobody received would be the next run's first; a rank that has started one collective more than
    another would meet the next run's in the wrong order.
    """
    collectives: defaultdict[str, set[int]] = defaultdict(set)
    precise: defaultdict[MessageKey, int] = defaultdict(int)
    for residue in residues:
        if not residue.intact or residue.groups != residues[0].groups or residue.groups > most_groups:
            return False
        for group, count in residue.collectives.items():
            collectives[group].add(count)
        for key, surplus in residue.messages.items():
            precise[key] += surplus
    if any(len(counts) > 1 for counts in collectives.values()):
        return False
    # A receive from any source matches a send from whichever: such messages are only counted by destination.
    loose = {(group, destination, tag) for group, source, destination, tag in precise if source is None}
    sums: defaultdict[Any, int] = defaultdict(int)
    for key, surplus in precise.items():
        group, _, destination, tag = key
        sums[(group, destination, tag) if (group, destination, tag) in loose else key] += surplus
    return not any(sums.values())
