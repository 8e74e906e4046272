"""What a program leaves behind in this rank's `torch.distributed`; runs in the rank's own process.

Where a version of torch lacks a private interface that this needs (see `ringverify.worlds.torch_private`), every
run counts as leaving something behind: each then gets fresh processes, which is slow but correct.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ringverify.worlds import torch_private
from ringverify.worlds.processes.wire import MessageKey, Residue
from ringverify.worlds.refusals import message_to_itself


class MessageCount:
    """Counts the messages that this process posts, and reads off how many collectives it has started.

    `torch.distributed.send` and all its relatives end in a method of `ProcessGroup`, so counting there sees every
    message whichever way the program posts it, and costs a dictionary update.

    Args:
        numbers_messages: the backend numbers a group's collectives, sends and receives in one sequence, as gloo does;
            others number collectives alone.
    """

    def __init__(self, *, numbers_messages: bool) -> None:
        self._numbers_messages = numbers_messages
        self._messages: Counter[MessageKey] = Counter()
        self._posted: Counter[str] = Counter()
        self._default: Any = None
        self._complete = all(hasattr(dist.ProcessGroup, name) for name in ("send", "recv", "recv_anysource"))
        if self._complete:
            self._watch()

    def _watch(self) -> None:
        group_class: Any = dist.ProcessGroup
        send, recv, recv_anysource = group_class.send, group_class.recv, group_class.recv_anysource

        # The parameters are called as torch calls them, in case somebody passes them by name.
        def counted_send(group: Any, tensors: Any, dstRank: int, tag: int) -> Any:
            with _said_plainly(group, dstRank, sends=True):
                work = send(group, tensors, dstRank, tag)
            self._messages[group.group_name, group.rank(), dstRank, tag] += 1
            self._posted[group.group_name] += 1
            return work

        def counted_recv(group: Any, tensors: Any, srcRank: int, tag: int) -> Any:
            with _said_plainly(group, srcRank, sends=False):
                work = recv(group, tensors, srcRank, tag)
            self._messages[group.group_name, srcRank, group.rank(), tag] -= 1
            self._posted[group.group_name] += 1
            return work

        def counted_recv_anysource(group: Any, tensors: Any, tag: int) -> Any:
            work = recv_anysource(group, tensors, tag)
            self._messages[group.group_name, None, group.rank(), tag] -= 1
            self._posted[group.group_name] += 1
            return work

        group_class.send = counted_send
        group_class.recv = counted_recv
        group_class.recv_anysource = counted_recv_anysource

    def begin(self) -> None:
        """Start counting a run's messages."""
        self._messages.clear()
        self._default = dist.group.WORLD

    def residue(self) -> Residue:
        """Return what the last run has left behind."""
        messages = {key: surplus for key, surplus in self._messages.items() if surplus}
        try:
            intact = self._complete and self._default is not None and dist.group.WORLD is self._default
            collectives = {
                name: started - self._posted[name] * self._numbers_messages
                for name, started in torch_private.sequence_numbers().items()
            }
            return Residue(intact, torch_private.groups_made(), collectives, messages)
        except Exception:
            return Residue(False, 0, {}, messages)


@contextlib.contextmanager
def _said_plainly(group: Any, peer: int, *, sends: bool) -> Iterator[None]:
    """Replace the backend's error for a message to oneself, which speaks of a pair, an address and a port."""
    try:
        yield
    except RuntimeError as error:
        if peer != group.rank():
            raise
        raise message_to_itself(dist.get_rank(), sends=sends) from error
