"""Shield a run within a user's tests from what these have set in the process."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def undisturbed(folder: Path) -> Iterator[None]:
    """Reset for a while what tests and settings of a project may have changed in the process, then restore it.

    Args:
        folder: the working directory, which targets and files are relative to.
    """
    here, dtype = Path.cwd(), torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.callback(os.chdir, here)
        os.chdir(folder)
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))  # this turns gradients on too, even under no_grad
        stack.enter_context(warnings.catch_warnings())
        warnings.resetwarnings()  # under -W error, a warning of a library that ringverify uses would end the run
        yield
