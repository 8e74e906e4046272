"""The process group that is the ring, and this process's place in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


OUTSIDE = "this process is not in the group: only its ranks hold shards and call ring_attention"


class Ring(NamedTuple):
    """A process group and this process's place in it.

    Attributes:
        group: the process group, or `None` for the default group or a process on its own.
        rank: this rank within the group.
        world_size: ranks in the group.
    """

    group: ProcessGroup | None
    rank: int
    world_size: int

    @classmethod
    def of(cls, group: ProcessGroup | DeviceMesh | None) -> Ring:
        """The ring of a group.

        Raises:
            ValueError: this process is not in the group, the mesh has several dimensions, or there is a group but no
                torch.distributed (any more).
        """
        if isinstance(group, DeviceMesh) and group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names}: expected one; "
                "mesh['name'] is the part along a dimension"
            )
        if not dist.is_initialized():
            if group is not None:
                raise ValueError(
                    "a group was given, but torch.distributed is not initialised, or not any more: call "
                    "init_process_group and make the group after it; group=None is this process alone"
                )
            return cls(None, 0, 1)
        if isinstance(group, DeviceMesh):
            if group.get_coordinate() is None:
                raise ValueError(OUTSIDE)
            group = group.get_group()
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(OUTSIDE)
        return cls(group, rank, dist.get_world_size(group))

    @property
    def handle(self) -> Any:
        """The process group also where it is the default one; `None` for a process on its own."""
        return self.group if self.group is not None else dist.group.WORLD
