"""Running a program in the simulated world, for the tests of that world."""

from collections.abc import Callable
from typing import Any

from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.world import Failure

WORLD = SimulatedWorld()


def results(program: Callable[[], Any], world_size: int, *, seed: int = 0) -> list[Any]:
    """What `program` returns on each rank. A failure fails the test, with all that is known."""
    run = WORLD.run(lambda _: program(), None, world_size=world_size, seed=seed, deadline=20)
    assert run.failure is None, f"{run.failure.message}\n{run.failure.detail}"
    return list(run.results)


def failure(program: Callable[[], Any], world_size: int, *, seed: int = 0, deadline: float = 20) -> Failure:
    """How `program` fails."""
    run = WORLD.run(lambda _: program(), None, world_size=world_size, seed=seed, deadline=deadline)
    assert run.failure is not None, f"it returned {run.results}"
    assert run.results == (None,) * world_size
    assert "\n" not in run.failure.message
    return run.failure
