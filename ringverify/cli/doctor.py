"""What this machine can run: versions, worlds, devices, peers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from ringverify.check.casefile import environment
from ringverify.check.planning import WorldName, open_world
from ringverify.describing import lacking
from ringverify.environments import ELSEWHERE, PACKAGES, why_missing
from ringverify.errors import Inconclusive
from ringverify.ring.kernels.choose import KERNELS
from ringverify.ring.kernels.kernel import Kernel, Setting
from ringverify.targets import BUILT_IN
from ringverify.worlds.world import Conditions, World, WorldUnavailable

DEADLINE = 30.0
"""Seconds that one trial may take."""

WORKS = "works"


def examine(say: Callable[[str], None], *, verbose: bool = False) -> int:
    """Try what a check needs, say in three lines what works, and return 0 if checks can run here, else 3.

    Args:
        say: takes a line of text.
        verbose: also report on each world, kernel and built-in implementation.
    """
    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else []
    say(f"{environment()}, {', '.join(devices) if devices else 'no GPU'}")
    tried: tuple[WorldName, ...] = ("simulated", "gloo")
    problems: dict[str, str | None] = {name: _try_world(name) for name in tried}
    works = not any(problems.values())
    if devices:
        problems["nccl"] = _try_world("nccl", device="cuda", most_ranks=len(devices))
    else:
        problems["nccl"] = "no GPU"
    say(f"worlds: {', '.join(f'{name} {problem or WORKS}' for name, problem in problems.items())}")
    try:
        missing = lacking(tuple(BUILT_IN))
    except Inconclusive as error:
        missing = dict.fromkeys(BUILT_IN, str(error))
    summary = "checks can run here" if works else "checks cannot run here"
    peers = f"; {len(missing)} of {len(BUILT_IN)} built-in implementations lack a package" if missing else ""
    absent = {one.name: why for one in PACKAGES if one.targets and (why := why_missing(one)) is not None}
    own = len({package.name for package in ELSEWHERE.values()})
    peers += f"; {len(absent)} of {own} packages lack an environment of their own" if absent else ""
    say(f"{summary}{peers}{'' if verbose else ' (more: ringverify doctor -v)'}")
    if verbose:
        say(f"processors      {os.cpu_count()}, torch uses {torch.get_num_threads()} threads")
        if not devices:
            say("cuda            no device: GPU checks end with exit code 3")
        for name, problem in problems.items():
            say(f"world {name:<10}{problem or WORKS}")
        for kernel in KERNELS:
            say(f"kernel {kernel.name:<15}{_kernel(kernel, bool(devices)) or 'can be used by the ring'}")
        for target in BUILT_IN:
            say(f"{target}: {missing.get(target, 'can be checked')}")
        for target, package in ELSEWHERE.items():
            say(f"{target}: {absent.get(package.name, 'can be checked')}")
    return 0 if works else Inconclusive.exit_code


def _kernel(kernel: Kernel, cuda: bool) -> str | None:
    """Return why the ring never chooses a kernel on this machine, or `None` if it does so for some call."""
    reasons = [
        kernel.why_not(Setting(device, dtype, torch.float32, 64, 64, 0.125, None))
        for device in (["cuda"] if cuda else []) + ["cpu"]
        for dtype in (torch.bfloat16, torch.float32)
    ]
    return None if None in reasons else reasons[-1]


@dataclasses.dataclass(frozen=True)
class _Program:
    """A small program of ranks that needs of a world what the suite's own runs need.

    Attributes:
        what: its name in messages, as in "a sub-group: …".
        program: what every rank runs, given the device of its tensors.
        results: what the ranks return, in rank order; there are as many ranks as results.
        conditions: adverse conditions that a simulated world puts it under, if any.
        watch: what a simulated world observes of it.
    """

    what: str
    program: Callable[[str], float]
    results: tuple[float, ...]
    conditions: Conditions | None = None
    watch: bool | Literal["memory"] = False


def sum_of_ranks(device: str) -> float:
    """All-reduce the rank numbers; return their sum."""
    number = torch.tensor([float(dist.get_rank())], device=device)
    dist.all_reduce(number)
    return float(number)


def sum_of_a_sub_group(device: str) -> float:
    """All-reduce the rank numbers over all ranks but rank 0; return their sum, on rank 0 its own number."""
    number = torch.tensor([float(dist.get_rank())], device=device)
    group = dist.new_group(list(range(1, dist.get_world_size())))
    if dist.get_rank():
        dist.all_reduce(number, group=group)
    return float(number)


def number_of_the_left_neighbour(device: str) -> float:
    """Send the rank number to the right; return the number that arrives from the left."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent = torch.tensor([float(rank)], device=device)
    received = torch.empty_like(sent)
    passing = [
        dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(passing):
        work.wait()
    return float(received)


_SUM = _Program("a sum", sum_of_ranks, (1.0, 1.0))
_EXCHANGE = _Program("an exchange", number_of_the_left_neighbour, (1.0, 0.0))
_SUB_GROUP = _Program("a sub-group", sum_of_a_sub_group, (0.0, 3.0, 3.0))
_RENDEZVOUS = dataclasses.replace(_EXCHANGE, what="a rendezvous", conditions=Conditions(transport="rendezvous"))
_WATCHED = dataclasses.replace(_EXCHANGE, what="a watched run", watch="memory")
_TRIALS: dict[WorldName, tuple[_Program, ...]] = {
    "simulated": (_SUM, _EXCHANGE, _SUB_GROUP, _RENDEZVOUS, _WATCHED),
    "gloo": (_SUM, _EXCHANGE, _SUB_GROUP),
    "nccl": (_SUM, _EXCHANGE, _SUB_GROUP),
}


def _try_world(name: WorldName, *, device: str = "cpu", most_ranks: int | None = None) -> str | None:
    """Return what fails in a world, or `None` if all trials work.

    Args:
        name: the world.
        device: device of the ranks' tensors.
        most_ranks: leave out trials that need more ranks.
    """
    try:
        world = open_world(name)
        try:
            for trial in _TRIALS[name]:
                if most_ranks is None or len(trial.results) <= most_ranks:
                    problem = _try(world, trial, device)
                    if problem is not None:
                        return f"{trial.what}: {problem}"
        finally:
            world.close()
    except (WorldUnavailable, Inconclusive) as error:
        return str(error)
    return None


def _try(world: World, trial: _Program, device: str) -> str | None:
    """Run a trial in an open world; return why it fails, or `None` if it works."""
    run = world.run(
        trial.program,
        device,
        world_size=len(trial.results),
        seed=0,
        deadline=DEADLINE,
        conditions=trial.conditions,
        watch=trial.watch,
    )
    if run.failure is not None:
        return run.failure.message
    if run.results != trial.results:
        return f"ranks returned {run.results}, expected {trial.results}"
    if trial.watch and (run.traffic is None or run.hazards):
        return "its traffic was not recorded" if run.traffic is None else run.hazards[0].message
    return None
