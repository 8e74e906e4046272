"""The interface of every world: run one program on every rank, and return the results or the failure.

A world knows nothing of attention. It gives each rank an initialised `torch.distributed`, runs the program there, and
returns each rank's result or the failure that ended the run.
"""

from __future__ import annotations

import abc
import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ringverify.words import TEXT, cut
from ringverify.worlds.exceptions import one_line
from ringverify.worlds.limits import Limit, sentence
from ringverify.worlds.raising import Raising
from ringverify.worlds.watch.hazards import Hazard
from ringverify.worlds.watch.memory import Memory
from ringverify.worlds.watch.traffic import Traffic

REFUSED = "refused"
"""First part of `Failure.manner` where the transport refused a call that only some world sizes make."""

FailureKind = Literal["raised", "deadlock", "deadline", "died"]


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a run ended without a result on every rank. Texts that are too long are cut.

    Attributes:
        kind: "raised": a rank raised (`SystemExit` included); "deadlock": no rank can go on; "deadline": time ran out
            while a rank was still computing; "died": a rank's process ended without a report.
        rank: the rank in which the failure began, if it began in one.
        message: one line, for a table or a report.
        detail: all that is known: the rank's own traceback, who waits for whom, captured output.
        exception: type of the exception, if a rank raised one.
        call: the function by which the rank ended its process, if it called one.
        rule: the rule that the rank broke, if it raised a `Charge`.
        tensor: name of the result that the `Charge` is about, if there is one.
        refusal: name of what the transport refused, where that depends on the number of ranks.
        limit: the machine limit that the rank reached, if it was one.
        line: the innermost line of the user's code in which the rank raised, such as "at ring.py:41 in attend, by
            `x = y[: n]`", if there is one; or that autograd did.
        exit_code: of a process that ended without a report, negative for a signal.
        places: where ranks were when time ran out: pairs of a rank and a text such as "at ring.py:41 in attend".
        waits: of a deadlock, the ranks that wait and what each waits for.
        returned: of a deadlock, the ranks that have returned.
        for_nothing: of a deadlock, the ranks that wait for a message without elements.
        idle: of a deadlock, the ranks that returned and never communicated, or left messages unreceived.
        together: of a deadlock, the ranks that wait for a collective, or for a group that is made.
        peers: of a deadlock, ranks that wait for a message, each with the rank on its other side.
    """

    kind: FailureKind
    rank: int | None
    message: str
    detail: str
    exception: str | None = None
    call: str | None = None
    rule: str | None = None
    tensor: str | None = None
    refusal: str | None = None
    limit: Limit | None = None
    line: str | None = None
    exit_code: int | None = None
    places: tuple[tuple[int, str], ...] = ()
    waits: tuple[tuple[int, str], ...] = ()
    returned: tuple[int, ...] = ()
    for_nothing: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    together: tuple[int, ...] = ()
    peers: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", cut(self.message))
        object.__setattr__(self, "detail", cut(self.detail, TEXT))

    @classmethod
    def of(cls, rank: int, raised: Raising) -> Failure:
        """Return the failure of a run that ended because a rank raised."""
        names = ("exception", "call", "rule", "tensor", "refusal", "limit", "line")
        fields = {name: getattr(raised, name) for name in names}
        return cls("raised", rank, f"rank {rank} {raised.what}", raised.detail, **fields)

    @property
    def manner(self) -> tuple[str, ...]:
        """How the run ended, without what differs from case to case. Failures of the same manner count as alike."""
        if self.refusal is not None:
            return REFUSED, self.refusal
        known = (self.exception, self.call, self.rule, self.tensor, self.exit_code)
        return self.kind, *(str(one) for one in known if one is not None)


@dataclasses.dataclass(frozen=True)
class Unreceived:
    """A message that nobody received, or a receive that no message matched.

    Attributes:
        kind: "message" or "receive".
        source: global rank of the sender; `None` for a receive from any rank.
        destination: global rank of the receiver.
        tag: the tag.
        group: global ranks of the group it was posted on.
        shape: shape of the tensor, at the side that posted.
        dtype: its dtype, without "torch.".
    """

    kind: str
    source: int | None
    destination: int
    tag: int
    group: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    def describe(self) -> str:
        """Describe it in one line."""
        source = "any rank" if self.source is None else f"rank {self.source}"
        what = "a message that nobody received" if self.kind == "message" else "a receive that got no message"
        return (
            f"{what}: from {source} to rank {self.destination}, tag {self.tag}, group {list(self.group)}, "
            f"{list(self.shape)} {self.dtype}"
        )


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What a simulated world does on purpose that a forgiving transport would not do.

    Attributes:
        transport: "buffered": a send completes when it is posted; "rendezvous": when its receive is posted too, so that
            a blocking send waits for it.
        delayed: messages that are held back until no rank can go on without one of them, by number, from 0 in the order
            of posting; "some": about half of them, which the seed chooses. Messages of one sender to one receiver with
            one tag on one group stay in order; all others overtake them.

    Raises:
        ValueError: `transport` or `delayed` has no such value.
    """

    transport: Literal["buffered", "rendezvous"] = "buffered"
    delayed: tuple[int, ...] | Literal["some"] = ()

    def __post_init__(self) -> None:
        if self.transport not in ("buffered", "rendezvous"):
            raise ValueError(f'transport is {self.transport!r}; it is "buffered" or "rendezvous"')
        if self.delayed != "some" and not (
            isinstance(self.delayed, tuple) and all(isinstance(one, int) and one >= 0 for one in self.delayed)
        ):
            raise ValueError(f'delayed is {self.delayed!r}; it is "some" or a tuple of message numbers from 0')


@dataclasses.dataclass(frozen=True)
class Run:
    """The outcome of a run. A world leaves empty what it cannot know.

    Attributes:
        results: what the program returned on each rank, in rank order; all `None` after a failure.
        failure: `None` if every rank returned.
        seconds: wall-clock time of the whole run, setting the world up included.
        unreceived: messages that nobody received and receives that no message matched, also of a run that failed.
        delayed: numbers of the messages that were held back (see `Conditions`).
        hazards: what goes well only on a forgiving transport, in the order in which it was seen; watched runs only.
        traffic: who sent how much to whom; watched runs only.
        memory: the most that each rank had allocated at once, in rank order; runs watched for memory only.
        findings: what worked in a simulated world and gloo refuses: a name and an example each.
        printed: pairs of a rank and the end of its output, for ranks that printed anything; the rank is `None` for the
            process that simulated ranks share.
        notes: a sentence for each thing that the program tried and that ranks of a simulated world cannot do.
    """

    results: tuple[Any, ...]
    failure: Failure | None
    seconds: float
    unreceived: tuple[Unreceived, ...] = ()
    delayed: tuple[int, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    traffic: Traffic | None = None
    memory: tuple[Memory, ...] = ()
    findings: tuple[tuple[str, str], ...] = ()
    printed: tuple[tuple[int | None, str], ...] = ()
    notes: tuple[str, ...] = ()


LOAD_SECONDS = 120.0
"""Seconds that a process may take to load what it is to run, by default."""


def _untold(what: str | None) -> None:
    """Do nothing: the default of `Load.told`."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What a process has to load before a program can run in it. Loading is no part of the run, nor of its deadline.

    Attributes:
        what: its name, also for messages.
        call: loads it, given its name; importable by name. It is not called again in a process that has loaded it.
        deadline: seconds that loading may take.
        told: called with the name when loading begins, and with `None` when it ends.
    """

    what: str
    call: Callable[[str], Any]
    deadline: float = LOAD_SECONDS
    told: Callable[[str | None], None] = _untold


class WorldUnavailable(RuntimeError):
    """The world could not be set up or kept up: nothing was learned about the implementation (verdict `inconclusive`).

    Args:
        message: one line.
        detail: all that is known, such as the traceback of an error in ringverify; may be empty.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message, detail)
        self.detail = detail

    def __str__(self) -> str:
        return str(self.args[0])


class OurError(WorldUnavailable):
    """A run ended by an error in ringverify itself or by a machine limit, not by what the implementation did."""

    @classmethod
    def of(cls, error: BaseException, limit: Limit | None) -> OurError:
        """Build the error from an exception that was raised on a rank and the machine limit that it reports, if any."""
        detail = "".join(traceback.format_exception(error)).rstrip()
        said = one_line(error)
        if limit is not None:
            return cls(f"{sentence(limit)}: {said}", detail)
        return cls(f"an error of ringverify itself, not of your code, on a rank: {said}; please report it", detail)


class LoadTooLong(OurError):
    """Loading had not finished when its deadline passed, and would not finish the next time either."""


class TooEarly(OurError):
    """A deadline passed while a rank was in the middle of an import, or in code of ringverify itself.

    Attributes:
        places: where ranks were then, as in `Failure`.
        importing: whether the rank was in an import.
    """

    places: tuple[tuple[int, str], ...] = ()
    importing: bool = False

    @classmethod
    def at(
        cls,
        deadline: float,
        rank: int,
        detail: str,
        *,
        importing: bool,
        places: tuple[tuple[int, str], ...] = (),
    ) -> TooEarly:
        """Build the error from where a rank was when the deadline passed."""
        doing = "importing" if importing else "in code of ringverify itself"
        error = cls(
            f"after {deadline:g} s rank {rank} was still {doing}: nothing was learned; allow more with --deadline",
            detail,
        )
        error.places, error.importing = places, importing
        return error


@dataclasses.dataclass(frozen=True)
class WorldRequest:
    """What a world is asked to run: the arguments of `World.run`, which describes them."""

    program: Callable[[Any], Any]
    argument: Any
    world_size: int
    seed: int
    deadline: float
    conditions: Conditions | None
    watch: bool | Literal["memory"]
    load: Load | None


class World(abc.ABC):
    """A place where ranks run. Each world implements `run_request`, and says in its docstring what is its own."""

    name: str

    def run(
        self,
        program: Callable[[Any], Any],
        argument: Any,
        *,
        world_size: int,
        seed: int,
        deadline: float,
        conditions: Conditions | None = None,
        watch: bool | Literal["memory"] = False,
        load: Load | None = None,
    ) -> Run:
        """Run `program(argument)` on ranks 0 … world_size − 1, `torch.distributed` initialised in each.

        Args:
            program: called once a rank. For worlds of processes it must be importable by name and its argument and
                result picklable; these pickles never leave the tool and its own processes.
            argument: handed to every rank; it must not be changed there.
            world_size: number of ranks, at least 1.
            seed: decides the order in which a simulated world lets its ranks run; others ignore it.
            deadline: seconds after which a run that has not ended is a failure of kind "deadline".
            conditions: what a simulated transport does not forgive, by default nothing; others ignore it.
            watch: have a simulated world report hazards and traffic, or ("memory") these and memory; others ignore it.
            load: what every process loads first.

        Raises:
            WorldUnavailable: the ranks could not be started or could not load what they need, or an error in ringverify
                ended the run, or an import was under way at its deadline.
            TypeError: the program or its argument cannot be sent to a process.
            ValueError: `world_size` is less than 1, `deadline` is not positive, or a world of programs is given none.
        """
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: expected at least 1")
        if not deadline > 0:
            raise ValueError(f"deadline={deadline}: expected a positive number of seconds")
        return self.run_request(WorldRequest(program, argument, world_size, seed, deadline, conditions, watch, load))

    @property
    def processes(self) -> Sequence[int]:
        """The ids of the processes on this machine that run ranks, besides this one."""
        return ()

    @abc.abstractmethod
    def run_request(self, asked: WorldRequest) -> Run:
        """Do what `run` says; the numbers asked for are possible ones."""

    def close(self) -> None:  # noqa: B027 (a simulated world keeps nothing running)
        """End what the world keeps running between runs. The next run starts it again."""
