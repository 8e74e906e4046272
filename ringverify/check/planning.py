"""Decide in which world and with how many ranks an implementation is run, or refuse, before any work is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch

from ringverify.errors import Inconclusive, UsageError
from ringverify.implementation import Capabilities, Implementation
from ringverify.targets import is_program
from ringverify.worlds.external.world import ExternalWorld
from ringverify.worlds.processes import nccl, torchrun
from ringverify.worlds.processes.rank import too_few_gpus
from ringverify.worlds.world import World

WorldName = Literal["simulated", "gloo", "nccl", "external"]

PROCESS_WORLD_SIZES = (1, 2, 3, 4)
"""Default world sizes with a process for each rank: enough for bugs of direction and order, and few processes."""


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Which implementation is run in which world.

    Attributes:
        target: the target that names the implementation.
        implementation: the implementation, its declared world sizes restricted to those of this run.
        declared: the capabilities of the implementation, not restricted.
        world: name of the world in which its ranks run.
        most_ranks: largest world that can be run; `None` if there is no limit.
        watched: the implementation to run in the simulated world beside, for properties that need that world; `None`
            if `world` is simulated itself, or the ranks cannot run there: over nccl, under torchrun, `processes=True`.
    """

    target: str
    implementation: Implementation
    declared: Capabilities
    world: WorldName
    most_ranks: int | None
    watched: Implementation | None = None


def planned(
    target: str,
    implementation: Implementation,
    *,
    world: WorldName | None,
    world_sizes: tuple[int, ...] | None,
    crew: torchrun.Crew | None,
) -> RunPlan:
    """Plan the run of one implementation.

    Args:
        target: the target that names it.
        implementation: the implementation with all that it declares.
        world: the world asked for; `None` chooses by what is declared.
        world_sizes: the world sizes asked for; `None` means all that suit.
        crew: the processes that host ranks, if torchrun started this one.

    Raises:
        UsageError: the world or sizes asked for contradict what is declared.
        Inconclusive: this machine or torchrun has too few ranks for the sizes asked for.
    """
    declared = implementation.capabilities.world_sizes
    chosen = _world(target, implementation, world, crew)
    most = crew.size if crew is not None else len(nccl.my_devices()) if chosen == "nccl" else None
    asked = world_sizes
    if world_sizes is None:
        if chosen in ("simulated", "external"):
            return RunPlan(target, implementation, implementation.capabilities, chosen, most)
        world_sizes = PROCESS_WORLD_SIZES if declared is None else declared
        if most is not None:
            offered = {*world_sizes, most} if declared is None else {*world_sizes}
            world_sizes = tuple(sorted(size for size in offered if 0 < size <= most)) or world_sizes[:1]
    sizes = world_sizes if declared is None else tuple(size for size in world_sizes if size in declared)
    if asked is not None and sizes != asked:  # what is left out in silence would be taken for tried
        others = ", ".join(str(size) for size in asked if size not in sizes)
        raise UsageError(
            f"{implementation.name} declares world sizes {declared}, and not {others} of --world-sizes "
            f"{','.join(map(str, asked))}: ask for declared ones, or declare what it can do"
        )
    if most is not None and max(sizes) > most:
        raise Inconclusive((too_few_gpus if crew is None else torchrun.too_few)(max(sizes), most))
    capabilities = dataclasses.replace(implementation.capabilities, world_sizes=sizes)
    restricted = dataclasses.replace(implementation, capabilities=capabilities)
    watched = None
    if chosen == "gloo" and crew is None and not capabilities.processes:
        watched = implementation if asked is None else restricted
    return RunPlan(target, restricted, implementation.capabilities, chosen, most, watched)


def _world(
    target: str, implementation: Implementation, asked: WorldName | None, crew: torchrun.Crew | None
) -> WorldName:
    if is_program(target):
        if crew is not None or asked not in (None, "external"):
            where = "under torchrun" if crew is not None else f"--world {asked}"
            raise UsageError(f"{where}: {target} runs in a process of its own and makes its own ranks; leave it out")
        return "external"
    if crew is not None:
        return crew.name
    if asked is None:
        return "gloo" if implementation.capabilities.processes else "simulated"
    if asked == "simulated" and implementation.capabilities.processes:
        raise UsageError(
            f"{implementation.name} declares processes=True, so its ranks cannot be threads of one process: "
            "use --world gloo, or leave --world out"
        )
    return asked


def open_world(name: WorldName, heard: Callable[[int, bytes], None] | None = None) -> World:
    """Open the world of that name; `heard`, if given, is called with a rank and the bytes that it prints."""
    match name:
        case "simulated":
            from ringverify.worlds.processes.contained import ContainedWorld

            return ContainedWorld(heard)
        case "gloo":
            from ringverify.worlds.processes.gloo import GlooWorld

            return GlooWorld(heard=heard)
        case "nccl":
            return nccl.nccl_world(heard=heard)
        case "external":
            return ExternalWorld(heard)


def find_device(device: str) -> None:
    """Check that this machine has the device.

    Raises:
        UsageError: torch knows no such device.
        Inconclusive: this machine does not have it.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UsageError(f"unknown device {device!r}: expected cpu, cuda or cuda:N") from None
    if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
        raise Inconclusive(f"no {kind} device here: run on a machine that has one, or use --device cpu")
