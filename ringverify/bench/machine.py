"""The machine on which a benchmark runs: versions, processors, load, and whether its memory suffices."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

import torch

import ringverify
from ringverify.bench.workload import Shape, Workload

BUSY = 0.5
"""Load average per processor above which other programs are at work, and distort the numbers."""


def versions() -> dict[str, Any]:
    """Return the versions of ringverify, torch and Python, and the platform."""
    return {
        "ringverify": ringverify.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def machine() -> dict[str, Any]:
    """Return the processors, their load before anything ran, and the CUDA device, if any."""
    return {
        "cpu": _cpu(),
        "processors": processors(),
        "load_before": load(),
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float | None:
    """Return the load average of the last minute, or `None` where the system has none."""
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return None


TENSORS_A_SIDE = 10
"""Tensors of the size of q that a side holds in all its processes: q, k, v, out, gradients, dout and two buffers."""
PROCESS_BYTES = 300 << 20
"""Bytes of a process that has imported torch."""


def needed_bytes(workload: Workload, sides: int) -> int:
    """Estimate the bytes of a workload while so many sides keep their inputs, each with about what our ring holds."""
    p = workload.problem
    itemsize = max(4, getattr(torch, p.dtype).itemsize)
    tensor: int = p.batch * p.nq * p.heads * p.head_dim * itemsize
    return sides * TENSORS_A_SIDE * tensor + (workload.world_size + 1) * PROCESS_BYTES


def cache_bytes(shape: Shape, cached: int, ranks: int) -> int:
    """Estimate the bytes of keys and values in the caches of all ranks, once more for those that travel."""
    itemsize: int = getattr(torch, shape.dtype).itemsize
    return 4 * shape.batch * cached * shape.heads * shape.head_dim * itemsize + (ranks + 1) * PROCESS_BYTES


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
