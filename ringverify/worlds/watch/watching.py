"""Watches a run: every operation when it is posted, matched and finished, and every buffer in between."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringverify.worlds.simulated.matching import Matching
from ringverify.worlds.simulated.operations import Collective, Joining, Operation, Pieces, Receive, Send
from ringverify.worlds.stacks import UserLine, place_of_user
from ringverify.worlds.watch.dispatching import RankMode
from ringverify.worlds.watch.extents import overlap, poison, poisoned, same_bytes
from ringverify.worlds.watch.hazards import Hazard, HazardKind
from ringverify.worlds.watch.memory import Memory
from ringverify.worlds.watch.memory_meter import MemoryMeter
from ringverify.worlds.watch.traffic import Traffic, TrafficMeter
from ringverify.worlds.watch.watcher import watched_by


class _Post:
    """An operation that its rank has posted and not waited for.

    Attributes:
        operation: the operation.
        sends: buffers that must not change, each with a copy of its content.
        receives: buffers that must not be touched.
        told: kinds of hazards that have been reported for it.
    """

    __slots__ = ("operation", "receives", "sends", "told")

    def __init__(
        self,
        operation: Operation,
        sends: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        receives: Pieces = (),
    ) -> None:
        self.operation, self.sends, self.receives = operation, sends, receives
        self.told: set[HazardKind] = set()


class _WatchedRank:
    """One rank under watch."""

    def __init__(self, watch: Watch, rank: int, *, memory: bool) -> None:
        self.rank = rank
        self.posts: dict[Operation, _Post] = {}
        self.traffic = TrafficMeter(rank)
        self.memory = MemoryMeter(rank) if memory else None
        self.mode = RankMode(watch.tell, self.memory)
        self.ring: tuple[int, ...] | None = None

    def confine(self, group: Any) -> Any:
        """Report communication outside a group, or a tuple of global ranks, as a hazard; `None`: report none."""
        before = self.ring
        self.ring = group if group is None or isinstance(group, tuple) else tuple(dist.get_process_group_ranks(group))
        return before

    def measure(self, *, inside: bool) -> None:
        """Begin or end a part of the program whose memory counts."""
        if self.memory is not None:
            self.memory.region(inside=inside)

    def sent(self) -> int:
        """Bytes that the rank has put into messages and collectives so far."""
        return sum(flow.sent for flow in self.traffic.flows())


class Watch:
    """Watches the ranks of one run.

    Args:
        world_size: number of ranks.
        memory: count the memory that they allocate, too.
    """

    def __init__(self, world_size: int, *, memory: bool) -> None:
        self._ranks = [_WatchedRank(self, rank, memory=memory) for rank in range(world_size)]
        self._world_size = world_size
        self._matching = Matching()
        self._hazards: dict[str, Hazard] = {}

    # -- results of the run --------------------------------------------------------------------------------------------

    def hazards(self, left: Sequence[Send | Receive], *, failed: bool) -> tuple[Hazard, ...]:
        """Return all hazards of the run.

        Args:
            left: messages that nobody received and receives that no message matched.
            failed: the run was cut short, so that what was left undone is no hazard.
        """
        for hazard in self._matching.hazards():
            self._report(hazard)
        if not failed:
            for rank in self._ranks:
                for operation in sorted(rank.posts, key=lambda one: not isinstance(one, Receive)):
                    self._left(operation, "not_waited", "rank {rank} never waited for its {what}")
            for one in left:
                text = (
                    "nobody received rank {rank}'s {what}"
                    if isinstance(one, Send)
                    else "rank {rank}'s {what} got no message"
                )
                self._left(one, "not_received", text)
        # Where ranks share memory, whatever else they seem to do may have been done by another rank.
        return tuple(sorted(self._hazards.values(), key=lambda hazard: hazard.kind != "shared"))

    def traffic(self) -> Traffic:
        """Return all traffic of the run."""
        return Traffic(tuple(flow for rank in self._ranks for flow in rank.traffic.flows()))

    def memory(self) -> tuple[Memory, ...]:
        """Return the peak of every rank, if memory is counted."""
        return tuple(rank.memory.memory() for rank in self._ranks if rank.memory is not None)

    # -- on the thread of a rank ---------------------------------------------------------------------------------------

    def enter(self, rank: int) -> None:
        """Start watching the calling thread, on which a rank's program begins."""
        watched_by(self._ranks[rank])
        self._ranks[rank].mode.sync()

    def leave(self, rank: int) -> None:
        """Stop watching the calling thread: the rank's program has ended."""
        self._ranks[rank].mode.sync(over=True)
        watched_by(None)

    def hide(self, rank: int) -> None:
        """Do not watch a rank's thread until it posts or resumes: the world itself uses torch there."""
        self._ranks[rank].mode.hide()

    def resume(self, rank: int) -> None:
        """Watch a rank's thread again: its program goes on."""
        self._ranks[rank].mode.sync()

    def send(self, message: Send, buffer: torch.Tensor) -> None:
        """Note a send that is being posted."""
        rank, post = self._post(message)
        peer = message.mailbox.ranks[message.destination]
        rank.traffic.posted("send", peer, message.mailbox.ranks, sent=buffer.nbytes, received=0)
        self._check_sends(rank, post, [buffer])
        post.sends = [(buffer, message.payload)]
        rank.posts[message] = post
        rank.mode.add(post, [buffer], readable=True)
        rank.mode.sync()

    def receive(self, receive: Receive) -> None:
        """Note a receive that is being posted, and poison its buffer."""
        rank, post = self._post(receive)
        ranks, buffer = receive.mailbox.ranks, receive.buffer
        peer = None if receive.wanted is None else ranks[receive.wanted]
        rank.traffic.posted("receive", peer, ranks, sent=0, received=buffer.nbytes)
        self._check_receives(rank, post, [buffer])
        post.receives = [buffer]
        rank.posts[receive] = post
        poison(buffer)
        rank.mode.add(post, [buffer], readable=False)
        rank.mode.sync()

    def join(self, part: Joining, pieces: Pieces, inputs: Pieces, outputs: Pieces, *, blocking: bool) -> None:
        """Note that a rank joins a collective; `pieces` are copies of its `inputs`."""
        rank, post = self._post(part)
        sent, received = (sum(tensor.nbytes for tensor in tensors) for tensors in (inputs, outputs))
        collective = part.collective
        rank.traffic.posted(collective.kind, None, collective.mailbox.ranks, sent=sent, received=received)
        self._matching.join(part, inputs, outputs)
        self._check_sends(rank, post, inputs)
        self._check_receives(rank, post, outputs)
        if blocking:
            return
        # What is reduced in place is an output.
        kept = [(one, piece) for one, piece in zip(inputs, pieces, strict=True) if not _among(one, outputs)]
        post.sends, post.receives = kept, outputs
        rank.posts[part] = post
        for output in outputs:
            poison(output)
        rank.mode.add(post, [one for one, _ in kept], readable=True)
        rank.mode.add(post, outputs, readable=False)
        rank.mode.sync()

    def match(self, receive: Receive, message: Send) -> None:
        """Note that a receive has been matched with its message."""
        self._matching.match(receive, message)

    def complete(self, collective: Collective) -> None:
        """Note that all ranks have joined a collective."""
        self._matching.complete(collective)

    def finish(self, operation: Operation) -> None:
        """Check an operation's buffers just before they are written: its rank has waited, or has seen it complete."""
        rank = self._ranks[operation.rank]
        rank.traffic.waited()
        post = rank.posts.pop(operation, None)
        if post is None:
            return
        if not post.told:
            for buffer, payload in post.sends:
                if not same_bytes(buffer, payload):
                    self.tell(post, "send_changed", place_of_user(sys._getframe()), found=True)
            for buffer in post.receives:
                if not poisoned(buffer):
                    self.tell(post, "receive_changed", place_of_user(sys._getframe()), found=True)
        rank.mode.remove(post)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _post(self, operation: Operation) -> tuple[_WatchedRank, _Post]:
        operation.posted = place_of_user(sys._getframe(2))
        rank = self._ranks[operation.rank]
        if rank.ring is not None:
            self._check_group(rank, operation)
        return rank, _Post(operation)

    def _check_group(self, rank: _WatchedRank, operation: Operation) -> None:
        ranks, place = operation.mailbox.ranks, operation.posted
        if rank.ring is not None and not set(ranks) <= set(rank.ring):
            default = len(ranks) == self._world_size
            group = "the default group" if default else f"the group {list(ranks)}"
            cause = f"communication of the ring runs on {'the default group' if default else 'another group'}"
            message = (
                f"rank {rank.rank} uses {group} where the ring is the group {list(rank.ring)}, "
                f"for its {operation.title}, at {place.short}"
            )
            self._report(Hazard("wrong_group", rank.rank, operation.title, str(place), str(place), message, cause))

    def _check_sends(self, rank: _WatchedRank, post: _Post, buffers: Pieces) -> None:
        for buffer in buffers:
            self._check_others(post, buffer, "sends from", readable=True)
            other: _Post | None = rank.mode.in_the_way(buffer, readable=True)
            if other is not None:
                cause = "a buffer is sent while a receive into it is in flight"
                self._overlap(post, other, "sends memory that", "is about to write", cause)

    def _check_receives(self, rank: _WatchedRank, post: _Post, buffers: Pieces) -> None:
        for buffer in buffers:
            self._check_others(post, buffer, "receives into", readable=False)
            other: _Post | None = rank.mode.in_the_way(buffer, readable=False)
            if other is not None:
                twice = _among(buffer, other.receives)
                doing, what = ("is about to write", "a receive into") if twice else ("is still reading", "a send of")
                cause = f"a buffer is received into while {what} it is in flight"
                self._overlap(post, other, "receives into memory that", doing, cause)
        if len(buffers) > 1:
            starts = [buffer.data_ptr() for buffer in buffers if buffer.numel()]
            if len(set(starts)) < len(starts):
                what, where = post.operation.title, post.operation.posted
                message = f"rank {rank.rank} receives twice into the same memory with its {what}, at {where.short}"
                cause = "several messages are received into the same memory"
                self._report(Hazard("overlap", rank.rank, what, str(where), str(where), message, cause))

    def _check_others(self, post: _Post, buffer: torch.Tensor, does: str, *, readable: bool) -> None:
        """Report memory that another rank's operation is using: ranks are threads here, and share what is global."""
        for one in self._ranks:
            found: _Post | None = None
            if one.rank != post.operation.rank:
                found = one.mode.in_the_way(buffer, readable=readable)
            if found is not None:
                rank, what, where = post.operation.rank, post.operation.title, post.operation.posted
                message = (
                    f"rank {rank} {does} memory that rank {one.rank}'s {found.operation.title} (posted at "
                    f"{found.operation.posted.short}) is using, with its {what}, at {where.short}"
                )
                cause = (
                    "ranks share memory, which they cannot in processes of their own: if a buffer is kept in a module "
                    "or an object for the whole process, declare processes=True"
                )
                places = str(where), str(found.operation.posted)
                self._report(Hazard("shared", rank, what, *places, message, cause))

    def _overlap(self, post: _Post, other: _Post, does: str, doing: str, cause: str) -> None:
        rank, what = post.operation.rank, post.operation.title
        post.told.add("overlap")
        other.told.add("overlap")
        message = (
            f"rank {rank} {does} its {other.operation.title} (posted at {other.operation.posted.short}) {doing}, "
            f"with its {what}, at {post.operation.posted.short}"
        )
        places = str(post.operation.posted), str(other.operation.posted)
        self._report(Hazard("overlap", rank, what, *places, message, cause))

    def tell(self, post: _Post, kind: HazardKind, place: UserLine, *, found: bool = False) -> None:
        """Report that a buffer in flight was touched.

        Args:
            post: the operation that the buffer belongs to.
            kind: how it was touched.
            place: the user's line.
            found: it was touched before that line, where it was only found out.
        """
        if kind in post.told:
            return
        post.told.add(kind)
        rank, what, posted = post.operation.rank, post.operation.title, post.operation.posted
        message = (
            f"rank {rank} {_DID[kind]} the buffer of its {what} (posted at {posted.short}) before it completed, "
            f"{'found at' if found else 'at'} {place.short}"
        )
        cause = f"a buffer is {_DONE[kind]} is in flight"
        self._report(Hazard(kind, rank, what, str(place), str(posted), message, cause))

    def _left(self, operation: Operation, kind: HazardKind, message: str) -> None:
        place, what = operation.posted, operation.title
        told = message.format(rank=operation.rank, what=what) + f", posted at {place.short}"
        self._report(Hazard(kind, operation.rank, what, str(place), str(place), told, _LEFT.get(kind)))

    def _report(self, hazard: Hazard) -> None:
        self._hazards.setdefault(hazard.message, hazard)


_DONE = {
    "send_changed": "written to while a send of it",
    "receive_changed": "written to while a receive into it",
    "receive_read": "read while a receive into it",
}
_LEFT = {"not_waited": "a send or receive is not waited for, so that what arrives may not be there when it is read"}
_DID = {"send_changed": "changed", "receive_changed": "wrote to", "receive_read": "read"}


def _among(tensor: torch.Tensor, others: Pieces) -> bool:
    return any(other is tensor or overlap(other, tensor) for other in others)
