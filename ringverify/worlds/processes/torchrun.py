"""Under torchrun: rank 0 drives, and each other process that torchrun started hosts one rank of whatever rank 0 runs.

As in every world of processes, no program runs in a process that has to survive it: each process forks the rank that
it hosts, and forks another when a program has damaged that. So a rank that raises, hangs or is killed costs its run
and nothing else, and a world of any size up to torchrun's has a default group of its own instead of a sub-group. Ranks
on further machines join in the same way. Rank 0 and the others exchange pickles, between processes of one run that hold
the same key: rank 0 draws the key and puts it into torchrun's own store. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

from ringverify.worlds import reproducible
from ringverify.worlds.processes.meeting import Meeting, meet
from ringverify.worlds.processes.rank import LOOPBACK, LocalRank, Rank, Source, new_directory
from ringverify.worlds.processes.wire import Died, Event, NotReady, Raised, Seat, Whereabouts
from ringverify.worlds.world import WorldUnavailable

MEETING_SECONDS = 300.0
"""How long rank 0 waits for the others: they may be on machines that start later, and all import torch first."""
ASKING_SECONDS = 0.02
"""Seconds between two looks of a host for the answer of a rank that was asked where it is."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """This process among those that torchrun started, according to the environment.

    Attributes:
        rank: its rank.
        world_size: number of processes.
        local_rank: its rank among the processes of its machine.
        machine: name or number of its machine.
        address: address of the store.
        port: port of the store.
        hosts_store: this process, rank 0, has to host the store, because torchrun's agent does not.
        attempt: torchrun's restart count, which tells this run from others that use the same store.
    """

    rank: int
    world_size: int
    local_rank: int
    machine: str
    address: str
    port: int
    hosts_store: bool
    attempt: str


def placement(environment: Mapping[str, str] = os.environ) -> Placement | None:
    """Read the placement from the environment; `None` if neither torchrun nor its like started this process."""
    try:
        rank, world_size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        return Placement(
            rank=rank,
            world_size=world_size,
            local_rank=int(environment.get("LOCAL_RANK", rank)),
            machine=environment.get("GROUP_RANK", socket.gethostname()),
            address=environment["MASTER_ADDR"],
            port=port,
            hosts_store=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    except (KeyError, ValueError):
        return None


@dataclasses.dataclass(frozen=True)
class _Member:
    """How a process introduces itself to rank 0."""

    rank: int
    local_rank: int
    machine: str
    gpus: int


@dataclasses.dataclass(frozen=True)
class _Host:
    """Rank 0's request for a rank: connect once more, send this back as the first message, and host the rank there."""

    number: int
    seat: Seat
    program_module: str


@dataclasses.dataclass(frozen=True)
class _AskWhere:
    """Rank 0's question where a rank is."""


@dataclasses.dataclass(frozen=True)
class _Goodbye:
    """The run is over."""


class Crew:
    """The processes that torchrun started, as rank 0 sees them: a `RankHost` for worlds of up to that many ranks.

    Args:
        here: rank 0's placement.
        backend: of `torch.distributed`; `None` is NCCL if every process has a GPU of its own, and gloo otherwise.

    Attributes:
        size: number of processes.
        name: "nccl" or "gloo".
        here: number of processes on rank 0's machine.
        remark: a line on what was chosen, and why.

    Raises:
        WorldUnavailable: NCCL is asked for, and some process has no GPU.
    """

    def __init__(self, here: Placement, backend: Literal["gloo", "nccl"] | None = None) -> None:
        self.size = here.world_size
        self._here = here
        self._store = _store(here)
        self._number = 0
        self._connections: dict[int, Connection] = {}
        self._members = {0: _introduction(here)}
        secret = secrets.token_bytes(32)
        # If all processes are on one machine, no other machine has to reach it.
        alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        self._meeting = Meeting(None if alone else here.address, secret, 64 + 4 * self.size)
        self._store.set(_key(here), json.dumps([self._meeting.address, self._meeting.port, secret.hex()]))
        for connection, member in self._arrivals(self.size - 1):
            self._members[member.rank], self._connections[member.rank] = member, connection
        without = [rank for rank, member in sorted(self._members.items()) if member.local_rank >= member.gpus]
        if backend == "nccl" and without:
            self.close()
            raise WorldUnavailable(
                f"rank {without[0]} has no GPU of its own (its machine has {self._members[without[0]].gpus}): "
                "start fewer ranks a machine, or use --world gloo"
            )
        self.name: Literal["gloo", "nccl"] = backend or ("gloo" if without else "nccl")
        names = [member.machine for member in self._members.values()]
        machines, self.here = len({*names}), names.count(names[0])
        why = "" if backend or not without else f": rank {without[0]} has no GPU of its own"
        self.remark = f"{self.size} ranks on {machines} machine{'s' if machines > 1 else ''}, over {self.name}{why}"
        self._alone = machines == 1

    def start(self, world_size: int, program_module: str) -> Iterator[Rank]:
        """Have processes 0 … world_size − 1 host a rank each.

        Raises:
            WorldUnavailable: there are fewer processes than that.
        """
        if world_size > self.size:
            raise WorldUnavailable(too_few(world_size, self.size))
        self._number += 1
        members = [self._members[rank] for rank in range(world_size)]
        seats = [self._seat(member, members) for member in members]
        for seat in seats[1:]:
            self._connections[seat.rank].send(_Host(self._number, seat, program_module))
        yield LocalRank(seats[0], new_directory("torchrun"), program_module)
        arrived: dict[int, Connection] = {}
        for connection, hosting in self._arrivals(world_size - 1, self._number):
            arrived[hosting.seat.rank] = connection
        for rank in range(1, world_size):
            yield _RemoteRank(arrived[rank], one_clock=self._alone)

    def _seat(self, member: _Member, members: Sequence[_Member]) -> Seat:
        return Seat(
            rank=member.rank,
            world_size=len(members),
            local_rank=member.local_rank,
            local_world_size=sum(other.machine == member.machine for other in members),
            backend=self.name,
            device=member.local_rank if self.name == "nccl" else None,
            store=(self._here.address, self._here.port, f"{_key(self._here)}/{self._number}"),
            interface=LOOPBACK if self._alone else None,
            products=reproducible.mode(),
        )

    def _arrivals(self, wanted: int, number: int | None = None) -> Iterator[tuple[Connection, Any]]:
        """Yield `wanted` connections, each with its first message: a `_Member`, or a `_Host` with that number.

        Raises:
            WorldUnavailable: not all of them come in time.
        """
        until = time.monotonic() + MEETING_SECONDS
        came = 0
        while came < wanted:
            arrival = self._meeting.arrival(until)
            if arrival is None:
                raise WorldUnavailable(
                    f"of {wanted} other ranks that torchrun announced, {came} connected within {MEETING_SECONDS:g} s: "
                    "check that every machine runs this command and reaches MASTER_ADDR"
                )
            connection, said = arrival
            if number is None or said.number == number:  # others come late, for ranks that were given up
                came += 1
                yield connection, said

    def close(self) -> None:
        """Tell the other processes to end."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(_Goodbye())
            connection.close()
        self._meeting.close()


class _RemoteRank:
    """A `Rank` that another process hosts.

    Args:
        connection: to that process, for this rank alone.
        one_clock: it is on this machine, so that its times can be compared.
    """

    def __init__(self, connection: Connection, *, one_clock: bool) -> None:
        self._connection = connection
        self._one_clock = one_clock
        self._where: Whereabouts | None = None

    @property
    def process(self) -> int | None:
        """None: it may be on another machine."""
        return None

    def sources(self) -> Sequence[Source]:
        return ((self._connection, self._told),)

    def send(self, job: bytes) -> None:
        self._connection.send(job)

    def _told(self) -> Sequence[Event]:
        event: Event | Whereabouts = self._connection.recv()
        match event:
            case Whereabouts():
                self._where = event
                return []
            case Died() | Raised() if not self._one_clock:
                return [dataclasses.replace(event, at=time.monotonic())]
            case _:
                return [event]

    def ask_where(self) -> None:
        self._connection.send(_AskWhere())

    def where(self) -> Whereabouts | None:
        return self._where

    def kill(self) -> None:
        self._connection.close()

    def close(self) -> None:
        pass


def serve(here: Placement) -> int:
    """Host ranks for rank 0 until it says goodbye.

    Returns:
        0 after the goodbye, 3 if rank 0 has gone without one.
    """
    address, port, key = json.loads(_store(here).get(_key(here)))

    def connect() -> Connection:
        return meet(address, port, bytes.fromhex(key))

    introduction = _introduction(here)  # imports torch: done before rank 0 waits for this process
    with contextlib.suppress(EOFError, OSError), connect() as driver:
        driver.send(introduction)
        while isinstance(order := driver.recv(), _Host):
            connection = connect()
            connection.send(order)
            try:
                rank = LocalRank(order.seat, new_directory("torchrun"), order.program_module)
            except (OSError, EOFError, ValueError, RuntimeError) as error:
                connection.send(NotReady.of(error))
                continue
            threading.Thread(target=_host, args=(rank, connection), name="ringverify-host", daemon=True).start()
        return 0
    return 3


def _host(rank: LocalRank, driver: Connection) -> None:
    """Pass rank 0's requests on to a rank, and the rank's events to rank 0, until rank 0 closes the connection."""
    asking = False
    with driver, selectors.DefaultSelector() as selector:
        for source, read in rank.sources():
            selector.register(source, selectors.EVENT_READ, read)
        selector.register(driver, selectors.EVENT_READ, None)
        with contextlib.suppress(EOFError, OSError):
            while True:
                for chosen, _ in selector.select(ASKING_SECONDS if asking else None):
                    if chosen.data is None:
                        match driver.recv():
                            case _AskWhere():
                                asking = True
                                rank.ask_where()
                            case job:
                                with contextlib.suppress(OSError):  # it has just died, which arrives as an event
                                    rank.send(job)
                        continue
                    try:
                        events = chosen.data()
                    except (EOFError, OSError):
                        selector.unregister(chosen.fileobj)
                        continue
                    for event in events:
                        driver.send(event)
                        if isinstance(event, Died):
                            selector.unregister(chosen.fileobj)
                if asking and (found := rank.where()) is not None:
                    asking = False
                    driver.send(found)
    rank.kill()
    rank.close()


def too_few(world_size: int, ranks: int) -> str:
    """Say why a world of that size does not fit on so many processes, and what would."""
    return (
        f"world size {world_size} needs {world_size} ranks, torchrun started {ranks}: "
        f"use --world-sizes up to {ranks}, or torchrun --nproc-per-node {world_size}"
    )


def _introduction(here: Placement) -> _Member:
    import torch

    return _Member(here.rank, here.local_rank, here.machine, torch.cuda.device_count())


def _store(here: Placement) -> Any:
    import torch.distributed

    stores: Any = torch.distributed  # documented there, but not in its __all__
    return stores.TCPStore(here.address, here.port, is_master=here.hosts_store, wait_for_workers=False)


def _key(here: Placement) -> str:
    return f"ringverify/{here.attempt}"
