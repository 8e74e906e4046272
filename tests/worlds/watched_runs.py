"""Watched runs of the simulated world, and the lines of the programs that they run."""

import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from simulated_runs import WORLD

from ringverify.worlds.watch.hazards import Hazard
from ringverify.worlds.world import Conditions, Run

CONDITIONS = [
    Conditions(transport, delayed)
    for transport, delayed in itertools.product(("buffered", "rendezvous"), ((), "some", (0, 2)))
]
"""Both transports, with nothing late, about half of all messages, and two of them."""


def watched(
    program: Callable[[], Any],
    world_size: int = 2,
    *,
    seed: int = 0,
    conditions: Conditions | None = None,
    watch: Any = True,
) -> Run:
    """A watched run. A failure fails the test, with all that is known."""
    run = WORLD.run(
        lambda _: program(), None, world_size=world_size, seed=seed, deadline=20, conditions=conditions, watch=watch
    )
    assert run.failure is None, f"{run.failure.message}\n{run.failure.detail}"
    return run


def unwatched(program: Callable[[], Any], world_size: int = 2, *, seed: int = 0, **how: Any) -> Run:
    """A run that may fail."""
    return WORLD.run(lambda _: program(), None, world_size=world_size, seed=seed, deadline=20, **how)


def line(program: Callable[..., Any], mark: str) -> str:
    """`file:line in function` of the one line of a program that ends in this comment."""
    lines, start = inspect.getsourcelines(program)
    (at,) = [at for at, text in enumerate(lines) if text.rstrip().endswith(f"# {mark}")]
    return f"{inspect.getsourcefile(program)}:{start + at} in {program.__name__}"


def short(place: str) -> str:
    """The same as messages have it."""
    return os.path.basename(place.rsplit(" in ", 1)[0])


def everywhere(seeds: int = 2) -> Iterator[tuple[int, Conditions]]:
    """Seeds and conditions."""
    return itertools.product(range(seeds), CONDITIONS)


def by_rank(run: Run, rank: int) -> list[Hazard]:
    """The hazards of one rank."""
    return [hazard for hazard in run.hazards if hazard.rank == rank]


def other():
    """The other one of two ranks."""
    return 1 - dist.get_rank()


def zeroes_what_it_sends():
    """Writes to the memory of a send through a view of it."""
    block, arriving = torch.arange(6.0), torch.empty(6)
    view = block.view(2, 3)
    sending = dist.isend(block, other())  # post
    view[1].zero_()  # act
    dist.recv(arriving, other())
    sending.wait()
    return arriving
