"""How messages between ranks travel: `p2p` posts them and computes meanwhile, `blocking` sends and receives in turn.

Both take the same lists: what to send to whom and what to receive from whom, equal lists on both sides of a pair in
the same order. An empty message is left out; both sides know its length, so both leave it out.

NCCL makes the communicator of a group in its first operation, and where that is `batch_isend_irecv` all ranks of the
group have to take part (torch's documentation of it). Ranks that neither send nor receive do not, as with documents
that end with a shard, or fewer tokens than ranks. So with NCCL the first exchange in a group begins with a collective
of one element, once for each group and device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TransportName = Literal["p2p", "blocking"]
TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)
Message = tuple[torch.Tensor, int]
"""A contiguous buffer, and the rank within the group that it goes to or comes from."""
Wait = Callable[[], None]
"""Returns when all messages have gone and arrived; until then their buffers may not be touched."""
_connected: weakref.WeakKeyDictionary[ProcessGroup, set[torch.device]] = weakref.WeakKeyDictionary()
"""On which devices the ranks of a group have met."""


class Transport:
    """Messages within one group.

    Args:
        group: the process group; `None` is the default group.
        rank: this rank within it.
        world_size: ranks in it.
        name: p2p or blocking.
        device: of the messages.
    """

    def __init__(
        self, group: ProcessGroup | None, rank: int, world_size: int, name: TransportName, device: torch.device
    ) -> None:
        self.group, self.rank, self.world_size, self.name = group, rank, world_size, name
        self.device = device

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Wait:
        """Start an exchange. With `blocking` it takes place when it is waited for, so all ranks wait in one order.

        All ranks of the group start their first one, those that have no messages too.
        """
        return self.expect(receives)(sends)

    def expect(self, receives: Sequence[Message]) -> Callable[[Sequence[Message]], Wait]:
        """Say what arrives in an exchange before what it sends has been computed; what is returned starts it.

        With `p2p` on CPU it may arrive from now on. A sender that has been told so has its message go at once. Else it
        offers it, and its answer, to a receiver that posts late, comes back while that still holds gloo's lock: where
        gloo's thread and the rank's share a processor, the one then tries for the lock until its time slice ends,
        milliseconds later, for which a token that is decoded has no time.
        """
        self._connect()
        receives = [message for message in receives if message[0].numel()]
        early = self.name == "p2p" and self.device.type == "cpu"
        awaited = [dist.irecv(buffer, group=self.group, group_src=source) for buffer, source in receives if early]

        def send(sends: Sequence[Message]) -> Wait:
            sends = [message for message in sends if message[0].numel()]
            if not sends and not receives:
                return _nothing
            if self.name == "blocking":
                return lambda: self._in_turn(sends, receives)
            if early:  # no backend there makes one operation of a batch: it posts one by one too
                sent = [dist.isend(buffer, group=self.group, group_dst=to) for buffer, to in sends]
                works = [work for work in (*sent, *awaited) if work is not None]
            else:
                posted = [dist.P2POp(dist.isend, buffer, group=self.group, group_peer=to) for buffer, to in sends]
                posted += [dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=one) for buffer, one in receives]
                works = dist.batch_isend_irecv(posted)
            return lambda: _wait(works)

        return send

    def _connect(self) -> None:
        """Let NCCL make the group's communicator, if it has not; see the module."""
        if self.world_size == 1 or not needs_all_ranks_first(self.group, self.device):
            return
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        devices = _connected.setdefault(group, set())
        if self.device not in devices:
            devices.add(self.device)
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def _in_turn(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """First what travels to the right, then what travels to the left; even ranks send first, odd ones receive.

        In each direction the ranks form a line or a ring of neighbours. Every odd rank can receive at once, so that a
        chain of waiting even ones (two of them are neighbours if the world is odd) always ends.
        """
        for step in (1, -1):
            if step == -1 and self.world_size == 2:  # the left neighbour is the right one
                return
            right, left = ((self.rank + step) % self.world_size, (self.rank - step) % self.world_size)
            out = [message for message in sends if message[1] == right]
            into = [message for message in receives if message[1] == left]
            order = (self._send, self._receive) if self.rank % 2 == 0 else (self._receive, self._send)
            for act in order:
                for buffer, other in out if act == self._send else into:
                    act(buffer, other)

    def _send(self, buffer: torch.Tensor, to: int) -> None:
        dist.send(buffer, group=self.group, group_dst=to)

    def _receive(self, buffer: torch.Tensor, source: int) -> None:
        dist.recv(buffer, group=self.group, group_src=source)


def needs_all_ranks_first(group: ProcessGroup | None, device: torch.device) -> bool:
    """Whether the first operation in a group on a device needs all of its ranks."""
    return device.type == "cuda" and "nccl" in dist.get_backend_config(group)


def _nothing() -> None:
    """Nothing to wait for."""


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
