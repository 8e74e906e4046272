"""Messages that are held back: which ones, and which of them arrives next when no rank can go on without one.

A message that is held back holds back those behind it: from the same sender, to the same receiver, with the same tag,
on the same group.
"""

from __future__ import annotations

import collections
import random
from typing import Literal

from ringverify.worlds.simulated.operations import Mailbox, Send

_Channel = tuple[Mailbox, "int | None", int, int]


class Delays:
    """The messages of a run that have been sent and have not arrived.

    Attributes:
        numbers: numbers of the messages that were held back, without those that were only behind one.
    """

    def __init__(self, delayed: tuple[int, ...] | Literal["some"], seed: int) -> None:
        # Two generators, so that a run that is given another run's late messages by number also repeats their order.
        self._coin = random.Random(f"which messages are late, seed {seed}").random
        self._order = random.Random(f"which one arrives next, seed {seed}").random
        self._chosen = None if delayed == "some" else frozenset(delayed)
        self._channels: dict[_Channel, collections.deque[tuple[Send, bool]]] = {}
        self.numbers: list[int] = []

    def hold(self, message: Send) -> bool:
        """Hold back a message that has just been sent, if it is late or behind one that is; return whether it is."""
        late = self._coin() < 0.5 if self._chosen is None else message.number in self._chosen
        channel = (message.mailbox, message.source, message.destination, message.tag)
        if late:
            self.numbers.append(message.number)
            self._channels.setdefault(channel, collections.deque()).append((message, True))
        elif channel in self._channels:
            self._channels[channel].append((message, False))
        else:
            return False
        return True

    def release(self) -> list[Send]:
        """Return the messages that arrive next, together: one that was late, and those that were only behind it."""
        channels = list(self._channels)
        if not channels:
            return []
        channel = channels[int(self._order() * len(channels))]
        held = self._channels[channel]
        arriving = [held.popleft()[0]]
        while held and not held[0][1]:
            arriving.append(held.popleft()[0])
        if not held:
            del self._channels[channel]
        return arriving
