"""Where numbers were taken: versions, processors, load, and whether there is memory enough."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

import torch

import ringverify
from ringverify.bench.workload import Workload

BUSY = 0.5
"""Load for each processor above which others are at work, and numbers tell as much about them."""


def versions() -> dict[str, Any]:
    """What measured."""
    return {
        "ringverify": ringverify.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def machine() -> dict[str, Any]:
    """What it was measured on, before anything ran."""
    return {
        "cpu": _cpu(),
        "processors": processors(),
        "load_before": load(),
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float | None:
    """The load average of the last minute, where there is one."""
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return None


def available_bytes() -> int | None:
    """Memory that new processes can have, where the system says so."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


TENSORS_A_SIDE = 10
"""Of the size of q, over all its processes: q, k, v, out, their gradients and cotangents, and two buffers."""
PROCESS_BYTES = 300 << 20
"""What a process takes that has imported torch."""


def needed_bytes(workload: Workload, sides: int) -> int:
    """About what a workload takes if so many sides keep their inputs, each of which our ring's memory bounds below."""
    p = workload.problem
    itemsize = max(4, getattr(torch, p.dtype).itemsize)
    tensor: int = p.batch * p.nq * p.heads * p.head_dim * itemsize
    return sides * TENSORS_A_SIDE * tensor + (workload.world_size + 1) * PROCESS_BYTES


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
