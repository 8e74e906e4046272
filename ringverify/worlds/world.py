"""What every world offers: run one program on every rank, and say what became of it.

A world knows nothing of attention. It gives each rank an initialised `torch.distributed`, runs the program there, and
returns each rank's result or the failure that ended the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol

FailureKind = Literal["raised", "deadlock", "deadline", "died"]


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a run ended without a result on every rank.

    Attributes:
        kind: "raised": a rank raised (`SystemExit` included); "deadlock": no rank can go on; "deadline": time ran out
            while a rank was still computing; "died": a rank's process ended without a word.
        rank: the rank that it began with, if it is one rank's.
        message: one line, for a table or a report.
        detail: all that is known: the rank's own traceback, who waits for whom, captured output.
    """

    kind: FailureKind
    rank: int | None
    message: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of a program.

    Attributes:
        results: what the program returned on each rank, in rank order; all `None` after a failure.
        failure: `None` if every rank returned.
        seconds: wall-clock time of the whole run, setting the world up included.
    """

    results: tuple[Any, ...]
    failure: Failure | None
    seconds: float


class WorldUnavailable(RuntimeError):
    """The world itself could not be set up: nothing was learned about the implementation (verdict `inconclusive`)."""


class World(Protocol):
    """A place where ranks run."""

    name: str

    def run(self, program: Callable[[Any], Any], argument: Any, *, world_size: int, seed: int, deadline: float) -> Run:
        """Run `program(argument)` on ranks 0 … world_size − 1, `torch.distributed` initialised in each.

        Args:
            program: called once a rank. For worlds of processes it must be importable by name and its argument and
                result picklable; process-internal pickles only.
            argument: handed to every rank; it must not be changed there.
            world_size: number of ranks, at least 1.
            seed: decides the order in which a simulated world lets its ranks run; others ignore it.
            deadline: seconds after which a run that has not ended is a failure of kind "deadline".

        Raises:
            WorldUnavailable: the ranks could not be started.
        """
        ...

    def close(self) -> None:
        """End what the world keeps running between runs."""
        ...
