"""The nccl world: every rank a process of its own with a GPU of its own. All else is as in the gloo world.

CUDA is initialised in the ranks only: the tool and the fork server do no more than count devices. Importing this module
does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.processes.rank import ThisMachine


def nccl_world(
    devices: Sequence[str] | None = None,
    *,
    backend: str = "nccl",
    heard: Callable[[int, bytes], None] | None = None,
) -> GlooWorld:
    """Return a `World` with one GPU per rank, each rank's the current CUDA device.

    Args:
        devices: the GPUs, as `CUDA_VISIBLE_DEVICES` names them; by default `my_devices()`.
        backend: with any other than "nccl", the same ranks run without GPUs.
        heard: called with a rank and a piece of its output in bytes, as it comes.
    """
    return GlooWorld(ThisMachine("nccl", backend, my_devices() if devices is None else tuple(devices)), heard)


def my_devices(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return this process's GPUs: all that it can see, or its share of them if it is a worker of pytest-xdist.

    A worker that died is replaced by one with the next number. Which worker it replaces is not known, so its share may
    be a living worker's too.
    """
    import torch

    everyone = visible_devices(torch.cuda.device_count(), environment)
    worker, workers = environment.get("PYTEST_XDIST_WORKER", ""), environment.get("PYTEST_XDIST_WORKER_COUNT", "")
    if not worker.startswith("gw") or not worker[2:].isdecimal() or not workers.isdecimal() or not int(workers):
        return everyone
    return share(everyone, int(worker[2:]) % int(workers), int(workers))


def visible_devices(count: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of `count` GPUs: those of `CUDA_VISIBLE_DEVICES`, if it is set, or their numbers."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if named is None else [name.strip() for name in named.split(",")]
    return tuple(names[:count])


def share(devices: Sequence[str], worker: int, workers: int) -> tuple[str, ...]:
    """Return one worker's share of devices. The shares of all workers are disjoint and hold all devices.

    Args:
        devices: all of them.
        worker: which worker, from 0.
        workers: how many workers there are.

    Raises:
        ValueError: `worker` is not in 0 … workers − 1.
    """
    if not 0 <= worker < workers:
        raise ValueError(f"worker={worker} of workers={workers}: expected 0 … workers − 1")
    first, last = (len(devices) * place // workers for place in (worker, worker + 1))
    return tuple(devices[first:last])
