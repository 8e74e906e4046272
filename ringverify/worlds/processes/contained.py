"""The simulated world in a process of its own, so that whatever ranks do to their process, the tool goes on.

Ranks that are threads share a process with one another and with whoever started them: a rank that ends the process ends
them all, and module state that one case leaves behind is there in the next. Here that process is a worker of a gloo
world of one, which is kept warm, is expendable, and is replaced after `close()`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from ringverify.worlds import whose
from ringverify.worlds.limits import limit_of
from ringverify.worlds.printing import Show
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.processes.wire import how_it_ended
from ringverify.worlds.world import Failure, Load, OurError, Run, World, WorldRequest, WorldUnavailable

UNWINDING = 3.0
"""Seconds that the simulated world is given, past a run's deadline, to end the run and report that."""

OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Environment variables that tell a rank's process which rank it is."""


@dataclasses.dataclass(frozen=True)
class _Simulation:
    asked: WorldRequest
    show: Show


class ContainedWorld(World):
    """A world of threads in another process. It reports of a run what `SimulatedWorld` does.

    Args:
        heard: called, as ranks print, with 0 and a piece of their output in bytes, each line with its rank.
    """

    name = "simulated"

    def __init__(self, heard: Callable[[int, bytes], None] | None = None) -> None:
        self._process = GlooWorld(heard=heard, called="the simulated world's process")
        self._show: Show = "kept" if heard is None else "labelled"

    def run_request(self, asked: WorldRequest) -> Run:
        """Run the program on threads of the other process."""
        load = asked.load or Load("", str)
        run = self._process.run(
            simulate,
            _Simulation(dataclasses.replace(asked, load=None), self._show),
            world_size=1,
            seed=0,
            deadline=asked.deadline + UNWINDING,
            load=dataclasses.replace(load, call=functools.partial(_load, asked.program, load.call)),
        )
        if run.failure is not None:
            whole = tuple((None, text) for _, text in run.printed)
            failure = _of_the_process(run.failure, asked.deadline)
            return Run((None,) * asked.world_size, failure, run.seconds, printed=whole)
        outcome = run.results[0]
        if isinstance(outcome, BaseException):
            self.close()
            raise outcome
        simulated: Run = outcome
        if simulated.failure is not None and simulated.failure.kind == "deadline":
            self.close()  # the interrupt may have left a module half imported
        if self._show == "labelled":  # `heard` has had all output, with what C code printed
            return simulated
        beside = tuple((None, text) for _, text in run.printed)  # printed by C code
        return dataclasses.replace(simulated, printed=(*simulated.printed, *beside)) if beside else simulated

    @property
    def processes(self) -> Sequence[int]:
        """The id of the process, if it runs."""
        return self._process.processes

    def close(self) -> None:
        """End the process. The next run starts a new one, which knows nothing of what ran here."""
        self._process.close()


def _load(program: Callable[[Any], Any], call: Callable[[str], Any], what: str) -> None:
    importlib.import_module("ringverify.worlds.simulated.world")  # the tool itself does not need it
    call(what)


def simulate(simulation: _Simulation) -> Run | BaseException:
    """Run a simulated world in this process; return what its `run` raises, for the tool's process to raise.

    Any exception but a refusal is taken for an error in ringverify, though ranks may have damaged this process.
    """
    # Imported here: the tool itself does not need it.
    from ringverify.worlds.simulated import SimulatedWorld

    for name in OF_A_RANK:  # they describe this process, not the ranks that are its threads
        os.environ.pop(name, None)
    with whose.ours():
        try:
            return SimulatedWorld(show=simulation.show).run_request(simulation.asked)
        except (WorldUnavailable, ValueError) as error:
            return error
        except Exception as error:
            return OurError.of(error, limit_of(error))


def _of_the_process(failure: Failure, deadline: float) -> Failure:
    """Turn the failure of the process into one of its ranks; which rank caused it is not known.

    Raises:
        WorldUnavailable: the simulation failed, not the program that it ran.
    """
    match failure.kind:
        case "died":
            message = f"the process of the simulated ranks {how_it_ended(failure.exit_code or 0)}"
        case "deadline":
            message = f"after {deadline:g} s the simulated ranks had not returned and could not be interrupted"
        case _:
            raise WorldUnavailable(f"in the simulated world's process, {failure.message}")
    return dataclasses.replace(failure, rank=None, message=message)
