"""Messages, receives and collectives between the ranks of a run, and how they are matched.

Every operation of every rank passes `Exchange._posted` when its rank asks for it, `Exchange._done` when it can be
finished, and `Exchange._finished` when its rank has waited for it. The data of a send is copied when it is posted, on
either transport: buffered, where the send is then done, or rendezvous, where it is done when it meets its receive. A
message that is held back does neither until no rank can go on without it (`ringverify.worlds.simulated.delays`). A
receive writes its buffer, and a collective its outputs, when the rank waits for it (or asks whether it has completed,
and it has), never earlier: a rank that forgets to wait reads what was there before, on every run.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Literal

import torch

from ringverify.worlds.simulated.baton import Baton
from ringverify.worlds.simulated.delays import Delays
from ringverify.worlds.simulated.operations import (
    Collective,
    Combine,
    Joining,
    Mailbox,
    NewGroup,
    Operation,
    Pieces,
    Receive,
    Send,
    snapshot,
)
from ringverify.worlds.watch.watching import Watch
from ringverify.worlds.world import Conditions, Unreceived


@dataclasses.dataclass(frozen=True)
class Event:
    """One operation at one moment, as the observer of a run is told it.

    Attributes:
        moment: "posted" when its rank asks for it, "finished" when that rank has waited for it.
        operation: a `Send`, a `Receive` or a `Joining`. Keeping it keeps its tensors alive.
    """

    moment: Literal["posted", "finished"]
    operation: Operation


class Exchange:
    """All communication between the ranks of one run.

    Attributes:
        observe: called with an `Event` at every post and every finish, if set.
        findings: what worked here and gloo refuses, by name, with the first example of each.
    """

    def __init__(self, baton: Baton, world_size: int, conditions: Conditions, seed: int, watch: Watch | None) -> None:
        self.baton = baton
        self.observe: Callable[[Event], None] | None = None
        self.findings: dict[str, str] = {}
        self._watch = watch
        self._delays = Delays(conditions.delayed, seed)
        self._buffered = conditions.transport == "buffered"
        self._world_size = world_size
        self._mailboxes: dict[tuple[str, tuple[int, ...]], Mailbox] = {}
        self._sent = 0

    def mailbox(self, name: str, ranks: tuple[int, ...]) -> Mailbox:
        """Return a group's mailbox. Ranks that make groups in different orders get different ones, as in processes."""
        found = self._mailboxes.get((name, ranks))
        if found is None:
            found = Mailbox(name, ranks, is_world=len(ranks) == self._world_size)
            self._mailboxes[name, ranks] = found
        return found

    def meet(self, mailbox: Mailbox, place: int) -> None:
        """Wait until every rank of a group that is being made has asked for it."""
        self._check(mailbox, place, None)
        meeting, rank = mailbox.meeting, mailbox.ranks[place]
        meeting.arrived.add(rank)
        if len(meeting.arrived) < len(mailbox.ranks):
            self.baton.wait(rank, meeting)
            return
        meeting.done, mailbox.meeting = True, NewGroup(mailbox)
        for other in mailbox.ranks:
            self.baton.wake(other, meeting)

    def send(self, mailbox: Mailbox, source: int, destination: int, tag: int, tensor: torch.Tensor) -> Send:
        """Copy `tensor` and send the copy. Ranks are group ranks."""
        self._check(mailbox, source, destination)
        if self._watch is not None:
            self._watch.hide(mailbox.ranks[source])
        message = Send(mailbox, source, destination, tag, snapshot(tensor))
        message.number, self._sent = self._sent, self._sent + 1
        if self._watch is not None:
            self._watch.send(message, tensor)
        if not self._delays.hold(message):
            self._arrive(message)
        self._posted(message, may_pause=True)
        return message

    def receive(
        self, mailbox: Mailbox, destination: int, source: int | None, tag: int, buffer: torch.Tensor
    ) -> Receive:
        """Post `buffer` for the next message from `source` (`None`: any rank) with this tag. Ranks are group ranks."""
        self._check(mailbox, destination, source)
        receive = Receive(mailbox, destination, source, tag, buffer)
        if self._watch is not None:
            self._watch.receive(receive)
        senders = range(len(mailbox.ranks)) if source is None else (source,)
        queues = [mailbox.messages.get((sender, destination, tag)) for sender in senders]
        if arrived := [queue for queue in queues if queue]:
            self._match(receive, min(arrived, key=lambda queue: queue[0].number).popleft())
        else:
            mailbox.receives[destination].append(receive)
        self._posted(receive, may_pause=False)
        return receive

    def join(
        self,
        mailbox: Mailbox,
        place: int,
        name: str,
        inputs: Pieces,
        combine: Combine,
        write: Callable[[Pieces], None],
        buffers: tuple[Pieces, Pieces],
        *,
        blocking: bool,
    ) -> Joining:
        """Take part in the group's next collective.

        Args:
            mailbox: the group's.
            place: group rank.
            name: what the rank calls, with all that the ranks must agree on.
            inputs: what this rank puts in; already copied.
            combine: computes what each rank takes out, when the last has joined.
            write: writes what this rank takes out into its buffers.
            buffers: what `inputs` was copied from, and the buffers that are written.
            blocking: whether the rank waits for it at once.

        Raises:
            RuntimeError: another rank of the group calls something else here.
        """
        self._check(mailbox, place, None)
        number = mailbox.numbers[place]
        mailbox.numbers[place] += 1
        collective = mailbox.collectives.get(number)
        if collective is None:
            collective = mailbox.collectives[number] = Collective(mailbox, number, name)
        elif collective.name != name:
            others = [mailbox.ranks[at] for at, one in enumerate(collective.joined) if one is not None]
            raise RuntimeError(
                f"collective mismatch on group {list(mailbox.ranks)}, collective #{number}: "
                f"rank {mailbox.ranks[place]} calls {name}, but "
                f"rank {', '.join(map(str, others))} called {collective.name}"
            )
        part = Joining(collective, place, write)
        collective.inputs[place] = inputs
        collective.joined[place] = part
        if self._watch is not None:
            self._watch.join(part, inputs, *buffers, blocking=blocking)
        if all(collective.joined):
            del mailbox.collectives[number]
            if self._watch is not None:
                self._watch.complete(collective)
            self._combine(collective, combine)
        # A blocking call lets others run when it waits; there is no need to do so twice.
        self._posted(part, may_pause=part.done or not blocking)
        return part

    def finish(self, operation: Operation) -> None:
        """Wait until an operation is done and write its buffers.

        Raises:
            RuntimeError: sizes do not fit, or the calling thread is not the operation's rank.
        """
        if not self.baton.belongs(operation.rank):
            raise RuntimeError(_NOT_THIS_RANK.format(operation.rank))
        if operation.done:
            self.baton.check()
        else:
            self.baton.wait(operation.rank, operation)
        if not operation.finished:
            operation.finished = True
            if self._watch is not None:
                self._watch.finish(operation)
                self._watch.hide(operation.rank)
            try:
                if operation.error is None:
                    operation.deliver()
            except Exception as error:
                operation.error = error
            if self._watch is not None:
                self._watch.resume(operation.rank)
            self._finished(operation)
        if operation.error is not None:
            raise operation.error

    def poll(self, operation: Operation) -> bool:
        """Whether an operation is done, after letting others go on if it is not; if it is, its buffers are written."""
        if not self.baton.belongs(operation.rank):
            raise RuntimeError(_NOT_THIS_RANK.format(operation.rank))
        if not operation.done:
            self.baton.poll(operation.rank)
        if operation.done and not operation.finished and operation.error is None:
            self.finish(operation)
        return operation.done

    def relieve(self) -> bool:
        """Let some held-back messages arrive, if there are any; return whether there were."""
        arriving = self._delays.release()
        for message in arriving:
            self._arrive(message)
        return bool(arriving)

    def settle(self) -> None:
        """Let all held-back messages arrive, when all ranks have ended."""
        while self.relieve():
            pass

    @property
    def delayed(self) -> tuple[int, ...]:
        """Numbers of the messages that were held back."""
        return tuple(self._delays.numbers)

    def left(self) -> list[Send | Receive]:
        """Return messages that nobody received and receives that no message matched, group by group."""
        left: list[Send | Receive] = []
        for mailbox in self._mailboxes.values():
            messages = [one for queue in mailbox.messages.values() for one in queue]
            messages.sort(key=lambda one: one.number)
            left += messages
            left += [one for waiting in mailbox.receives for one in waiting]
        return left

    def addressed(self) -> set[int]:
        """Return the ranks to which messages were sent that they have not received."""
        return {one.mailbox.ranks[one.destination] for one in self.left() if isinstance(one, Send)}

    def unreceived(self) -> tuple[Unreceived, ...]:
        """Return the messages and receives of `left` as data."""
        found: list[Unreceived] = []
        for one in self.left():
            ranks = one.mailbox.ranks
            if isinstance(one, Send):
                ends, form = (one.rank, ranks[one.destination]), _form(one.payload)
                found.append(Unreceived("message", *ends, one.tag, ranks, *form))
            else:
                source, form = None if one.wanted is None else ranks[one.wanted], _form(one.buffer)
                found.append(Unreceived("receive", source, one.rank, one.tag, ranks, *form))
        return tuple(found)

    # -- the methods that every operation passes -----------------------------------------------------------------------

    def _posted(self, operation: Operation, *, may_pause: bool) -> None:
        if self.observe is not None:
            self.observe(Event("posted", operation))
        self.baton.acted.add(operation.rank)
        if may_pause:
            self.baton.pause(operation.rank)

    def _finished(self, operation: Operation) -> None:
        if self.observe is not None:
            self.observe(Event("finished", operation))

    def _done(self, operation: Operation) -> None:
        operation.done = True
        self.baton.wake(operation.rank, operation)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check(self, mailbox: Mailbox, place: int, peer: int | None) -> None:
        if not self.baton.belongs(mailbox.ranks[place]):
            raise RuntimeError(_NOT_THIS_RANK.format(mailbox.ranks[place]))
        self.baton.check()
        if peer is not None and not 0 <= peer < len(mailbox.ranks):
            raise RuntimeError(f"group rank {peer} is not in group {list(mailbox.ranks)} of {len(mailbox.ranks)} ranks")

    def _arrive(self, message: Send) -> None:
        mailbox = message.mailbox
        waiting = mailbox.receives[message.destination]
        if self._buffered:
            self._done(message)
        for receive in waiting:
            if receive.takes(message):
                waiting.remove(receive)
                self._match(receive, message)
                break
        else:
            assert message.source is not None
            channel = (message.source, message.destination, message.tag)
            mailbox.messages.setdefault(channel, collections.deque()).append(message)

    def _match(self, receive: Receive, message: Send) -> None:
        receive.message = message
        receive.source = message.source
        if self._watch is not None:
            self._watch.match(receive, message)
        self._done(receive)
        if not self._buffered:
            self._done(message)

    def _combine(self, collective: Collective, combine: Combine) -> None:
        error: Exception | None = None
        try:
            collective.outputs = combine(collective.inputs)
        except Exception as failed:
            error = RuntimeError(f"{collective.describe()}: {failed}")
        collective.inputs = []
        for part in collective.joined:
            assert part is not None
            part.error = error
            self._done(part)


_NOT_THIS_RANK = "only the thread of rank {0} may use the process groups of rank {0}, and only while the run lasts"


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
