"""Hazards, which a watched run reports: uses of communication that go well only on a forgiving transport.

A hazard raises no error. A buffer is written before its message has left, a result is read before it has arrived, a
handle is never waited for: on a transport that buffers, between ranks that take turns, all of that gives the right
values.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from ringverify.worlds.watch.watcher import watcher

HazardKind = Literal[
    "send_changed",
    "receive_read",
    "receive_changed",
    "overlap",
    "shared",
    "not_waited",
    "not_received",
    "mismatch",
    "wrong_group",
]


@dataclasses.dataclass(frozen=True)
class Hazard:
    """Something that a rank did and that goes well only by luck.

    Attributes:
        kind: "send_changed": a rank wrote to what it was sending; "receive_read", "receive_changed": it read or wrote
            what it was receiving; "overlap": it received into memory that another operation was using; "shared": it
            used memory that an operation of another rank was using, as ranks in processes cannot; "not_waited": it
            never waited for an operation; "not_received": a message that nobody received, or a receive that no
            message matched; "mismatch": the two sides disagree about dtype, number of elements or order, even if the
            bytes agree; "wrong_group": it communicated outside the group that is the ring.
        rank: global rank that did it.
        operation: the operation it concerns, such as "send to rank 1, tag 0".
        place: the user's line that did it, `file:line in function`. What was done behind torch's back (through numpy,
            say) is found only when the operation is waited for, and this is then that line.
        posted: the user's line that posted the operation; for an overlap, the operation that was posted first.
        message: all of it in one line, files by their base names.
        cause: what is done wrongly, in a sentence without ranks and lines; `None` where the message is as good.
    """

    kind: HazardKind
    rank: int
    operation: str
    place: str
    posted: str
    message: str
    cause: str | None = dataclasses.field(default=None, compare=False)


@contextlib.contextmanager
def only_group(group: Any) -> Iterator[None]:
    """Declare that inside the block this rank should communicate only on `group` or on groups of some of its ranks.

    Other communication is a hazard of kind "wrong_group" in a watched run of a simulated world; elsewhere this does
    nothing.

    Args:
        group: the process group that is the ring.
    """
    current = watcher()
    if current is None:
        yield
        return
    before = current.confine(group)
    try:
        yield
    finally:
        current.confine(before)
