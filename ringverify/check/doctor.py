"""What this machine can run: versions, worlds, devices, peers."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from ringverify.check.casefile import environment
from ringverify.check.planning import WorldName, open_world
from ringverify.errors import Inconclusive, UsageError
from ringverify.ring.kernels.choose import KERNELS
from ringverify.ring.kernels.kernel import Kernel, Setting
from ringverify.targets import BUILT_IN, load
from ringverify.worlds.world import WorldUnavailable

WORKS = "works"


def examine(say: Callable[[str], None], *, verbose: bool = False) -> int:
    """Try what a check needs, say in three lines what works, and return 0 if checks can run here, else 3.

    Args:
        say: takes a line of text.
        verbose: also say what each world, kernel and built-in implementation came to.
    """
    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else []
    say(f"{environment()}, {', '.join(devices) if devices else 'no GPU'}")
    tried: tuple[WorldName, ...] = ("simulated", "gloo")
    problems: dict[str, str | None] = {name: _try_world(name) for name in tried}
    works = not any(problems.values())
    if devices:
        problems["nccl"] = _try_world("nccl", world_size=min(2, len(devices)), device="cuda")
    else:
        problems["nccl"] = "no GPU"
    say(f"worlds: {', '.join(f'{name} {problem or WORKS}' for name, problem in problems.items())}")
    lacking = {target: reason for target in BUILT_IN if (reason := _cannot_be_checked(target)) is not None}
    summary = "checks can run here" if works else "checks cannot run here"
    peers = f"; {len(lacking)} of {len(BUILT_IN)} built-in implementations lack a package" if lacking else ""
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
            say(f"{target}: {lacking.get(target, 'can be checked')}")
    return 0 if works else Inconclusive.exit_code


def _cannot_be_checked(target: str) -> str | None:
    """Why a built-in implementation cannot be checked on this machine, or `None` if it can."""
    try:
        load(target)
    except (Inconclusive, UsageError) as error:
        return str(error)
    return None


def _kernel(kernel: Kernel, cuda: bool) -> str | None:
    """Why the ring never chooses that kernel on this machine, or `None` if for some call it may."""
    reasons = [
        kernel.why_not(Setting(device, dtype, torch.float32, 64, 64, 0.125, None))
        for device in (["cuda"] if cuda else []) + ["cpu"]
        for dtype in (torch.bfloat16, torch.float32)
    ]
    return None if None in reasons else reasons[-1]


def _try_world(name: WorldName, *, world_size: int = 2, device: str = "cpu") -> str | None:
    """Why ranks cannot add their numbers in that world, or `None` if they can."""
    try:
        world = open_world(name)
        try:
            run = world.run(sum_of_ranks, device, world_size=world_size, seed=0, deadline=30.0)
        finally:
            world.close()
    except (WorldUnavailable, Inconclusive) as error:
        return str(error)
    if run.failure is not None:
        return run.failure.message
    expected = (sum(range(world_size)),) * world_size
    return None if run.results == expected else f"{world_size} ranks add up to {run.results}"


def sum_of_ranks(device: str) -> float:
    """The sum of all ranks' numbers, as every rank sees it."""
    number = torch.tensor([float(dist.get_rank())], device=device)
    dist.all_reduce(number)
    return float(number)
