"""One rank's part in a communication, and the mailbox that the ranks of a group share."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import torch

from ringverify.worlds.stacks import NOWHERE

Pieces = Sequence[torch.Tensor]
"""What one rank puts into a collective, or takes out of it."""
Combine = Callable[[Sequence[Pieces]], Sequence[Pieces]]
"""Computes what each rank of a group takes out from what each puts in, both in group order."""


class Operation:
    """One rank's part in a communication.

    Attributes:
        mailbox: the mailbox of the group that it is posted on.
        rank: global rank.
        posted: the user's line that posted it, in a run that is watched.
        done: it can be finished without waiting.
        finished: the rank has waited for it, and its buffers are written.
        error: raised on its rank instead of writing the buffers.
        source: group rank of the sender, once a receive is matched.
    """

    __slots__ = ("done", "error", "finished", "mailbox", "posted", "rank", "source")

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self.mailbox = mailbox
        self.rank = rank
        self.posted = NOWHERE
        self.done = False
        self.finished = False
        self.error: Exception | None = None
        self.source: int | None = None

    @property
    def elements(self) -> int | None:
        """How many elements the message has that is waited for; `None` if it is none."""
        return None

    @property
    def peer(self) -> int | None:
        """Global rank of the other side of a message; `None` if it is none, or may come from any."""
        return None

    def describe(self) -> str:
        """Say what it is, to follow "waits for"."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """Say what it is, to follow "its"."""
        return self.describe().removeprefix("a ")

    def deliver(self) -> None:
        """Write the buffers of its rank."""


class Send(Operation):
    """A message that has been sent.

    Attributes:
        number: its number among all messages of the run, in the order of posting, from 0.
        payload: copy of the buffer from when it was posted; nobody changes it.
    """

    __slots__ = ("destination", "number", "payload", "tag")

    def __init__(self, mailbox: Mailbox, source: int, destination: int, tag: int, payload: torch.Tensor) -> None:
        super().__init__(mailbox, mailbox.ranks[source])
        self.source, self.destination, self.tag = source, destination, tag
        self.payload = payload
        self.number = 0

    @property
    def peer(self) -> int:
        """Global rank of the receiver."""
        return self.mailbox.ranks[self.destination]

    def describe(self) -> str:
        """Name the destination and the tag."""
        return f"a send to rank {self.mailbox.ranks[self.destination]}, tag {self.tag}{self.mailbox.suffix}"


class Receive(Operation):
    """A buffer that waits for a message."""

    __slots__ = ("buffer", "destination", "message", "tag", "wanted")

    def __init__(self, mailbox: Mailbox, destination: int, wanted: int | None, tag: int, buffer: torch.Tensor) -> None:
        super().__init__(mailbox, mailbox.ranks[destination])
        self.destination, self.wanted, self.tag = destination, wanted, tag
        self.buffer = buffer
        self.message: Send | None = None

    @property
    def elements(self) -> int | None:
        """How many elements the message has to have."""
        return self.buffer.numel()

    @property
    def peer(self) -> int | None:
        """Global rank of the sender that is wanted."""
        return None if self.wanted is None else self.mailbox.ranks[self.wanted]

    def describe(self) -> str:
        """Name the source and the tag."""
        source = "any rank" if self.wanted is None else f"rank {self.mailbox.ranks[self.wanted]}"
        return f"a receive from {source}, tag {self.tag}{self.mailbox.suffix}"

    def takes(self, message: Send) -> bool:
        """Whether a message matches this receive, by source and tag."""
        return self.tag == message.tag and self.wanted in (None, message.source)

    def deliver(self) -> None:
        """Write the message into the buffer.

        Raises:
            RuntimeError: the message is longer or shorter than the buffer.
        """
        assert self.message is not None
        payload, buffer = self.message.payload, self.buffer
        if payload.nbytes != buffer.nbytes:
            raise RuntimeError(
                f"rank {self.rank} receives into {shown(buffer)} ({buffer.nbytes} bytes), tag {self.tag}"
                f"{self.mailbox.suffix}, but rank {self.message.rank} sent {shown(payload)} ({payload.nbytes} bytes)"
            )
        write(buffer, payload)


class Joining(Operation):
    """One rank's part in a collective."""

    __slots__ = ("collective", "place", "write")

    def __init__(self, collective: Collective, place: int, write: Callable[[Pieces], None]) -> None:
        super().__init__(collective.mailbox, collective.mailbox.ranks[place])
        self.collective, self.place, self.write = collective, place, write

    def describe(self) -> str:
        """Name the collective, and the ranks that have not joined it."""
        missing = [
            rank for rank, one in zip(self.collective.mailbox.ranks, self.collective.joined, strict=True) if not one
        ]
        return f"{self.collective.describe()} {_missing(missing, self.collective.joined)}"

    @property
    def title(self) -> str:
        """Name the collective."""
        return self.collective.describe()

    def deliver(self) -> None:
        """Write what this rank takes out into its buffers."""
        assert self.collective.outputs is not None
        self.write(self.collective.outputs[self.place])


class Collective:
    """One collective of one group: what each rank put in, and, when all have joined, what each takes out."""

    __slots__ = ("inputs", "joined", "mailbox", "name", "number", "outputs")

    def __init__(self, mailbox: Mailbox, number: int, name: str) -> None:
        self.mailbox, self.number, self.name = mailbox, number, name
        self.inputs: list[Pieces] = [()] * len(mailbox.ranks)
        self.joined: list[Joining | None] = [None] * len(mailbox.ranks)
        self.outputs: Sequence[Pieces] | None = None

    @property
    def kind(self) -> str:
        """Name of the operation alone, such as "all_reduce"."""
        return self.name.split("(")[0].split(" of ")[0]

    def describe(self) -> str:
        """Name the operation, its number on the group (from 0) and the group."""
        return f"{self.name} #{self.number} of group {list(self.mailbox.ranks)}"


class NewGroup:
    """A group that is being made: its ranks wait for one another, as gloo's do when they connect.

    Attributes:
        mailbox: the mailbox of the group.
        arrived: global ranks that have asked for the group.
        done: all of its ranks have.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.arrived: set[int] = set()
        self.done = False
        self.elements = self.peer = None

    def describe(self) -> str:
        """Name the group, and the ranks that have not asked for it."""
        ranks = self.mailbox.ranks
        missing = [rank for rank in ranks if rank not in self.arrived]
        return f"new_group({list(ranks)}) {_missing(missing, ranks)}"


def _missing(missing: Sequence[int], ranks: Sequence[object]) -> str:
    return f"({len(missing)} of {len(ranks)} ranks missing: {', '.join(map(str, missing))})"


class Mailbox:
    """What the ranks of one group have posted on it and nobody has taken yet. All ranks of the group share it.

    Attributes:
        name: the name that the group has on every rank.
        ranks: global ranks, in group order.
        suffix: names the group in a message, if it is not the world.
        meeting: what its ranks wait for while the group is made; a new one each time that all of them have asked.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], *, is_world: bool) -> None:
        self.name = name
        self.ranks = ranks
        self.suffix = "" if is_world else f", group {list(ranks)}"
        self.messages: dict[tuple[int, int, int], collections.deque[Send]] = {}
        self.receives: list[list[Receive]] = [[] for _ in ranks]
        self.collectives: dict[int, Collective] = {}
        self.numbers = [0] * len(ranks)
        self.meeting = NewGroup(self)


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that belongs to no autograd graph."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Copy the bytes of `value` into `buffer`, which has as many bytes.

    Autograd does not notice, as with a real transport: writing to `.data` leaves the buffer's version counter alone.
    """
    if buffer.dtype == value.dtype:
        buffer.data.copy_(value.view(buffer.shape))
    else:
        buffer.data.view(torch.uint8).view(-1).copy_(value.view(torch.uint8).view(-1))


def shown(tensor: torch.Tensor) -> str:
    """Return a tensor's shape and dtype as text."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
