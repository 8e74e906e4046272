"""What a rank has of process groups at the moment, in any world.

The private interfaces of torch that this needs are all in this file. Where a version of torch lacks one, the number
stays 0: nothing is learned, and nobody is accused.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d


def groups() -> int:
    """How many process groups this rank is a member of, the default one included."""
    world: Any = distributed_c10d._world
    return len(getattr(world, "pg_names", ()))


def operations() -> int:
    """A number that rises when a thread of this rank communicates.

    In the simulated world only the rank's own thread can; the number is that of attempts by others.
    """
    world: Any = distributed_c10d._world
    if (attempts := getattr(world, "strange_calls", None)) is not None:
        return int(attempts)
    try:
        return sum(group._get_sequence_number_for_group() for group in world.pg_names)
    except (AttributeError, RuntimeError):
        return 0
