"""Who sent how much to whom: messages and bytes of a watched run."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple


class Flow(NamedTuple):
    """What one rank exchanged with one peer by one kind of operation in one hop.

    Attributes:
        rank: global rank.
        hop: the rank's own count of its rounds of exchange, from 0: a rank that posts an operation after it has waited
            for one begins a new round. What is posted together, or before anything is waited for, is one hop.
        operation: "send", "receive", or a collective's name such as "all_gather".
        peer: global rank of the other side; `None` for a collective, and for a receive from any rank.
        group: global ranks of the group it was posted on.
        messages: number of operations.
        sent: bytes that the rank put in.
        received: bytes that it took out, or is to take out.
    """

    rank: int
    hop: int
    operation: str
    peer: int | None
    group: tuple[int, ...]
    messages: int
    sent: int
    received: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Everything that the ranks of a run exchanged.

    Attributes:
        flows: sorted by rank, then by hop; within a hop in the order of posting.
    """

    flows: tuple[Flow, ...] = ()

    def sent(self, rank: int) -> int:
        """Bytes that a rank put into messages and collectives."""
        return sum(flow.sent for flow in self.flows if flow.rank == rank)

    def received(self, rank: int) -> int:
        """Bytes that a rank took out of messages and collectives."""
        return sum(flow.received for flow in self.flows if flow.rank == rank)

    def messages(self, rank: int) -> int:
        """How many messages a rank sent; collectives are not counted."""
        return sum(flow.messages for flow in self.flows if flow.rank == rank and flow.operation == "send")

    def hops(self, rank: int) -> tuple[tuple[Flow, ...], ...]:
        """Return what a rank exchanged, one tuple per hop."""
        by_hop: dict[int, list[Flow]] = collections.defaultdict(list)
        for flow in self.flows:
            if flow.rank == rank:
                by_hop[flow.hop].append(flow)
        return tuple(tuple(by_hop[hop]) for hop in sorted(by_hop))

    def peers(self, rank: int) -> frozenset[int]:
        """Return the ranks that a rank sent messages to or received them from; collectives are left out."""
        return frozenset(flow.peer for flow in self.flows if flow.rank == rank and flow.peer is not None)

    def collectives(self, rank: int) -> frozenset[str]:
        """The kinds of collectives that a rank took part in."""
        return frozenset(
            flow.operation for flow in self.flows if flow.rank == rank and flow.operation not in ("send", "receive")
        )

    def describe(self) -> list[str]:
        """Return a line for each rank, and one for each of its hops."""
        lines = []
        for rank in sorted({flow.rank for flow in self.flows}):
            count = self.messages(rank)
            messages = "1 message" if count == 1 else f"{count} messages"
            lines.append(f"rank {rank}: {messages}, {self.sent(rank)} bytes out, {self.received(rank)} bytes in")
            for flows in self.hops(rank):
                lines.append(f"  hop {flows[0].hop}: " + "; ".join(_shown(flow) for flow in flows))
        return lines


def _shown(flow: Flow) -> str:
    times = "" if flow.messages == 1 else f"{flow.messages} × "
    match flow.operation:
        case "send":
            return f"{times}send to {flow.peer}, {flow.sent} bytes"
        case "receive":
            source = "anyone" if flow.peer is None else flow.peer
            return f"{times}receive from {source}, {flow.received} bytes"
        case name:
            return f"{times}{name} on {list(flow.group)}, {flow.sent} bytes out, {flow.received} bytes in"


class TrafficMeter:
    """Counts the traffic of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._hop = -1
        self._has_waited = True
        self._counts: dict[tuple[int, str, int | None, tuple[int, ...]], list[int]] = {}

    def posted(self, operation: str, peer: int | None, group: tuple[int, ...], *, sent: int, received: int) -> None:
        """Count an operation that the rank has posted."""
        if self._has_waited:
            self._hop += 1
            self._has_waited = False
        counts = self._counts.setdefault((self._hop, operation, peer, group), [0, 0, 0])
        counts[0] += 1
        counts[1] += sent
        counts[2] += received

    def waited(self) -> None:
        """Note that the rank has waited for an operation, so that its next post begins a new hop."""
        self._has_waited = True

    def flows(self) -> list[Flow]:
        """Return what was counted."""
        return [
            Flow(self._rank, hop, operation, peer, group, *counts)
            for (hop, operation, peer, group), counts in self._counts.items()
        ]
