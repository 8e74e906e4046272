"""Ways to misbehave that change settings of the whole process, and what makes a fault of a function."""

import functools
import os
import random
import sys
import warnings

import numpy as np
import torch
from right import attention

from ringverify import AttentionCall, implementation


def fault(function):
    """An implementation on three ranks, named like its function in plain words."""
    return implementation(name=function.__name__.replace("_", " "), world_sizes=(3,))(function)


@fault
def seeds_random_numbers(q, k, v, call: AttentionCall):
    """All generators that there are."""
    torch.manual_seed(call.rank)
    np.random.seed(call.rank)  # noqa: NPY002 - this is the generator that programs share
    random.seed(call.rank)
    return attention(q, k, v, call)


@fault
def changes_torch_settings(q, k, v, call: AttentionCall):
    """Default dtype, threads, gradient mode."""
    out = attention(q, k, v, call)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    return out


@fault
def changes_the_process(q, k, v, call: AttentionCall):
    """Folder, environment, module path, warnings."""
    os.chdir("/")
    os.environ["RANK"] = os.environ["LEFT_BEHIND"] = "17"
    sys.path.insert(0, "/nowhere")
    warnings.simplefilter("error")
    return attention(q, k, v, call)


@fault
def replaces_a_function_of_torch(q, k, v, call: AttentionCall):
    """With one that counts and then does the same, as profilers do."""
    if not hasattr(torch.einsum, "counted"):
        torch.einsum = _counted(torch.einsum)
    return attention(q, k, v, call)


def _counted(function):
    @functools.wraps(function)
    def counting(*arguments):
        counting.counted += 1
        return function(*arguments)

    counting.counted = 0
    return counting
