"""What every world offers: run one program on every rank, and say what became of it.

A world knows nothing of attention. It gives each rank an initialised `torch.distributed`, runs the program there, and
returns each rank's result or the failure that ended the run.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any, Literal, Protocol

from ringverify.words import TEXT, cut
from ringverify.worlds.limits import Limit, sentence
from ringverify.worlds.raising import Raising
from ringverify.worlds.watch.hazards import Hazard
from ringverify.worlds.watch.memory import Memory
from ringverify.worlds.watch.traffic import Traffic

REFUSED = "refused"
"""The manner of a failure in which the transport refused a call for what only some world sizes ask."""

FailureKind = Literal["raised", "deadlock", "deadline", "died"]


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a run ended without a result on every rank. Texts that are too long are cut.

    Attributes:
        kind: "raised": a rank raised (`SystemExit` included); "deadlock": no rank can go on; "deadline": time ran out
            while a rank was still computing; "died": a rank's process ended without a word.
        rank: the rank that it began with, if it is one rank's.
        message: one line, for a table or a report.
        detail: all that is known: the rank's own traceback, who waits for whom, captured output.
        exception: type of the exception, if a rank raised one.
        call: the function by which the rank ended its process, if it called one.
        rule: of a rank that raised a `Charge`, what it did not keep to.
        tensor: the result that the charge is about, if it is one.
        refusal: the name of what the transport refused, where it is known to come and go with the number of ranks.
        limit: the limit of the machine that the rank met, if it was one.
        exit_code: how a process ended that did so without a word, negative for a signal.
        places: where ranks were when time ran out, each "at ring.py:41 in attend".
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
    exit_code: int | None = None
    places: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", cut(self.message))
        object.__setattr__(self, "detail", cut(self.detail, TEXT))

    @classmethod
    def of(cls, rank: int, raised: Raising) -> Failure:
        """The failure of a run that ended because a rank raised."""
        fields = {name: getattr(raised, name) for name in ("exception", "call", "rule", "tensor", "refusal", "limit")}
        return cls("raised", rank, f"rank {rank} {raised.what}", raised.detail, **fields)

    @property
    def manner(self) -> tuple[str, ...]:
        """How the run ended, without what differs from case to case: two failures of one manner are alike."""
        if self.refusal is not None:
            return REFUSED, self.refusal
        known = (self.exception, self.call, self.rule, self.tensor, self.exit_code)
        return self.kind, *(str(one) for one in known if one is not None)


@dataclasses.dataclass(frozen=True)
class Unreceived:
    """A message that nobody received, or a receive that nothing met.

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
        """One line."""
        source = "any rank" if self.source is None else f"rank {self.source}"
        what = "a message nobody received" if self.kind == "message" else "a receive nothing met"
        return (
            f"{what}: from {source} to rank {self.destination}, tag {self.tag}, group {list(self.group)}, "
            f"{list(self.shape)} {self.dtype}"
        )


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What a simulated world does on purpose that a friendly transport would not.

    Attributes:
        transport: "buffered": a send completes when it is posted; "rendezvous": when its receive is posted too, so that
            a blocking send waits for it.
        delayed: messages that are held back until no rank can go on without one of them, by number, from 0 in the order
            of posting; "some": about half of them, which the seed chooses. Messages of one sender to one receiver with
            one tag on one group stay in order; all others overtake them.

    Raises:
        ValueError: no such transport, or no such messages.
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
    """What came of a program. A world that cannot know a thing leaves it empty.

    Attributes:
        results: what the program returned on each rank, in rank order; all `None` after a failure.
        failure: `None` if every rank returned.
        seconds: wall-clock time of the whole run, setting the world up included.
        unreceived: messages that nobody received and receives that nothing met, whether the run failed or not.
        delayed: numbers of the messages that were held back (see `Conditions`).
        hazards: what only a forgiving transport forgives, in the order in which it was seen; of a watched run.
        traffic: who sent how much to whom; of a watched run.
        memory: the most that each rank had allocated at once, in rank order; of a run watched for it.
        findings: what worked in a simulated world and gloo refuses: a name and an example each.
        printed: what each rank printed that printed anything, cut at the front; `None` stands for the process that
            simulated ranks share.
        notes: what a simulated world noticed that its ranks could not do in it, a sentence each.
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
"""How long a process may take to load what it is to run, unless something else is said."""


def _untold(what: str | None) -> None:
    """Nobody wants to know."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What a process has to load before a program can run in it. It is no part of the run, nor of its deadline.

    Attributes:
        what: its name, for people.
        call: loads it, given its name; importable by name. A process that has loaded it is not asked again.
        deadline: seconds for it.
        told: called with its name when it begins, and with `None` at its end.
    """

    what: str
    call: Callable[[str], Any]
    deadline: float = LOAD_SECONDS
    told: Callable[[str | None], None] = _untold


class WorldUnavailable(RuntimeError):
    """The world could not be set up or kept up: nothing was learned about the implementation (verdict `inconclusive`).

    Args:
        message: one line.
        detail: all that is known, such as the traceback of an error of ours; may be empty.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message, detail)
        self.detail = detail

    def __str__(self) -> str:
        return str(self.args[0])


class OurError(WorldUnavailable):
    """A run ended, and not by anything that the implementation did: by an error of ours or a limit of the machine."""

    @classmethod
    def of(cls, error: BaseException, limit: Limit | None) -> OurError:
        """From the exception that was raised on a rank, and the limit that it tells of."""
        detail = "".join(traceback.format_exception(error)).rstrip()
        said = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if limit is not None:
            return cls(f"{sentence(limit)}: {said}", detail)
        return cls(f"an error of ringverify itself on a rank: {said}; please report it", detail)


class LoadTooLong(OurError):
    """What was to be loaded was still loading at the end of the time that it has, and would be the next time."""


class TooEarly(OurError):
    """A deadline ended a run that was in the middle of an import, or in code of ours.

    Attributes:
        places: where ranks were then, as in `Failure`.
        importing: whether it was an import.
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
        """From where a rank was then."""
        doing = "importing" if importing else "in code of ringverify itself"
        error = cls(
            f"after {deadline:g} s rank {rank} was still {doing}: nothing was learned; allow more with --deadline",
            detail,
        )
        error.places, error.importing = places, importing
        return error


class World(Protocol):
    """A place where ranks run."""

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
                result picklable; process-internal pickles only.
            argument: handed to every rank; it must not be changed there.
            world_size: number of ranks, at least 1.
            seed: decides the order in which a simulated world lets its ranks run; others ignore it.
            deadline: seconds after which a run that has not ended is a failure of kind "deadline".
            conditions: how unfriendly a simulated world is, by default not at all; others ignore it.
            watch: have a simulated world report hazards and traffic, or ("memory") these and memory; others ignore it.
            load: what every process loads first.

        Raises:
            WorldUnavailable: the ranks could not be started or could not load what they need, or code of ours ended
                the run, or an import was under way at its deadline.
        """
        ...

    def close(self) -> None:
        """End what the world keeps running between runs."""
        ...
