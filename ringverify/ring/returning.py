"""What is added to by every rank that a block visits, follows it one message behind, and goes home in the end.

In a backward pass that is the dKV of a KV block. Where queries visit, it is their partial result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from ringverify.ring.plan.schedule import Moves
from ringverify.ring.transport import Transport, Wait

T = TypeVar("T")


class Returns(Generic[T]):
    """What is at this rank of that, and what is on its way to it or from it.

    Args:
        transport: between the ranks.
        moves: of this rank, at each boundary.
        room: by owner and boundary, memory for what arrives.
        message: the buffer of what leaves or arrives.

    Attributes:
        here: by owner, what is at this rank and not on its way.
    """

    def __init__(
        self,
        transport: Transport,
        moves: Sequence[Moves],
        room: Callable[[int, int], T],
        message: Callable[[T], torch.Tensor],
    ) -> None:
        self.here: dict[int, T] = {}
        self._transport, self._moves, self._room, self._message = transport, moves, room, message
        self._leaving: list[int] = []
        self._arriving: dict[int, T] = {}
        self._wait: Wait | None = None

    def exchange(self, boundary: int) -> None:
        """Let what is on its way arrive, and start what is due after a step."""
        self.arrive()
        if boundary >= len(self._moves):
            return
        moves = self._moves[boundary]
        self._leaving = [owner for owner, _ in moves.sends]
        for owner, _ in moves.receives:
            self._arriving[owner] = self._room(owner, boundary)
        self._wait = self._transport.start(
            [(self._message(self.here[owner]), to) for owner, to in moves.sends],
            [(self._message(self._arriving[owner]), source) for owner, source in moves.receives],
        )

    def arrive(self) -> None:
        """Let what is on its way arrive."""
        if self._wait is not None:
            self._wait()
        for gone in self._leaving:
            del self.here[gone]
        self.here |= self._arriving
        self._wait, self._leaving, self._arriving = None, [], {}
