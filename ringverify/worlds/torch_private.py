"""Private interfaces of torch that worlds use. Those of the simulated world are in `simulated/torch_private.py`.

| interface | for what |
|---|---|
| `distributed_c10d._world`, `ProcessGroup._get_sequence_number_for_group` | process groups and their use |
| `torch.utils._python_dispatch.TorchDispatchMode` | seeing every operation on a thread |
| `OpOverload._schema`, `OpOverload._op` | what an operation does with its arguments; calling it directly |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]


def groups() -> int:
    """How many process groups this rank is a member of, the default one included; 0 where torch does not say."""
    return len(getattr(_bookkeeping(), "pg_names", ()))


def operations() -> int:
    """Return a number that rises when a thread of this rank communicates; it stays 0 where torch does not say.

    In the simulated world only a rank's own thread can communicate, and the number counts the attempts of others.
    """
    if (attempts := getattr(_bookkeeping(), "strange_calls", None)) is not None:
        return int(attempts)
    try:
        return sum(sequence_numbers().values())
    except (AttributeError, RuntimeError):
        return 0


def groups_made() -> int:
    """How many process groups this process has made so far.

    Raises:
        AttributeError: this version of torch does not count them.
    """
    count: int = _bookkeeping().group_count
    return count


def sequence_numbers() -> dict[str, int]:
    """How many operations each process group has started, by its name.

    Raises:
        AttributeError: this version of torch does not keep that.
        RuntimeError: the backend of a group does not count.
    """
    return {name: group._get_sequence_number_for_group() for group, name in _bookkeeping().pg_names.items()}


def schema_of(operation: Any) -> Any:
    """Return an operation's schema, or `None` for an operation that takes functions, which has none."""
    return getattr(operation, "_schema", None)


def direct_call(operation: Any) -> Callable[..., Any]:
    """Return the function that an operation of torch calls in the end, without the Python layers before it."""
    call: Callable[..., Any] = operation._op if type(operation) is torch._ops.OpOverload else operation
    return call


def _bookkeeping() -> Any:
    """What `torch.distributed` remembers of this process's groups; in the simulated world, of this rank's."""
    return distributed_c10d._world
