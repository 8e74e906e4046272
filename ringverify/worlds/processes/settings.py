"""Restores the state of a rank's process before each program, whatever the program before it did.

A process runs programs of one implementation, which may set things once, when it is imported. So what concerns only the
implementation, such as warning filters or its own environment variables, is left alone. Closed standard streams cannot
be restored, since something else may have taken their numbers: such a process is not used again.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys

import numpy as np
import torch

from ringverify.worlds.processes.wire import RunRequest


class Settings:
    """The present state of this process, to be restored before each program.

    Args:
        environment: the environment variables of the rank; set here.
        device: its CUDA device, if it has one.
    """

    def __init__(self, environment: dict[str, str], device: int | None) -> None:
        self._environment = environment
        self._device = device
        self._streams = (sys.stdin, sys.stdout, sys.stderr)
        self._files = _standard_files()
        os.environ.update(environment)

    def restore(self, job: RunRequest) -> None:
        """Restore the state, with the module path and the working directory that a job names."""
        sys.path[:] = job.path
        importlib.invalidate_caches()
        if job.directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(job.directory)
        os.environ.update(self._environment)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the global generator is what a program may have used
        torch.default_generator.manual_seed(0)
        if self._device is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)

    def can_be_restored(self) -> bool:
        """Whether this process's standard streams still are what they were."""
        streams = (sys.stdin, sys.stdout, sys.stderr)
        same = all(now is before for now, before in zip(streams, self._streams, strict=True))
        return same and not any(one and one.closed for one in streams) and _standard_files() == self._files


def _standard_files() -> list[tuple[int, int] | None]:
    found: list[tuple[int, int] | None] = []
    for number in range(3):
        try:
            status = os.fstat(number)
            found.append((status.st_dev, status.st_ino))
        except OSError:
            found.append(None)
    return found
