"""Finds communications whose sides disagree about the number of elements, the dtype or the order of messages.

They may disagree even where the numbers of bytes agree. A shape is no part of a message: a flat send into a shaped
receive of as many elements is well defined.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

import torch

from ringverify.worlds.simulated.operations import Collective, Joining, Pieces, Receive, Send, shown
from ringverify.worlds.watch.hazards import Hazard

_Form = tuple[torch.Size, torch.dtype]


class Matching:
    """Compares the sides of every communication of a run."""

    def __init__(self) -> None:
        self._misfits: list[tuple[Receive, Send]] = []
        self._forms: dict[Joining, tuple[list[_Form], list[_Form]]] = {}
        self._found: list[Hazard] = []

    def hazards(self) -> list[Hazard]:
        """Return all disagreements."""
        return [*self._found, *self._of_messages()]

    def match(self, receive: Receive, message: Send) -> None:
        """Compare a receive with the message that it has been matched with."""
        if _form(receive.buffer) != _form(message.payload):  # with shapes, which tell whether only the order is wrong
            self._misfits.append((receive, message))

    def join(self, part: Joining, inputs: Pieces, outputs: Pieces) -> None:
        """Note what a rank that joins a collective puts in and takes out."""
        self._forms[part] = [_form(one) for one in inputs], [_form(one) for one in outputs]

    def complete(self, collective: Collective) -> None:
        """Compare what the ranks of a collective put in and take out, once all of them have joined."""
        parts = [part for part in collective.joined if part is not None]
        forms = [self._forms.pop(part) for part in parts]
        match collective.kind:
            case "all_to_all" | "all_to_all_single":
                for at, part in enumerate(parts):
                    for giver, (brought, _), taken in zip(parts, forms, forms[at][1], strict=False):
                        if at < len(brought) and _differ(brought[at], taken):
                            self._disagree(part, taken, giver, brought[at], "takes {} out of")
            case "scatter":
                for giver, (brought, _) in zip(parts, forms, strict=True):
                    for part, (_, takes), form in zip(parts, forms, brought, strict=False):
                        if _differ(takes[0], form):
                            self._disagree(part, takes[0], giver, form, "takes {} out of")
            case _:
                for part, (inputs, _) in zip(parts[1:], forms[1:], strict=True):
                    for form, first in zip(inputs, forms[0][0], strict=False):
                        if _differ(form, first):
                            self._disagree(part, form, parts[0], first, "brings {} to")
                            break

    def _disagree(self, part: Joining, form: _Form, other: Joining, other_form: _Form, does: str) -> None:
        place, other_place = part.posted, other.posted
        message = (
            f"rank {part.rank} {does.format(_text(form))} {part.title} (at {place.short}), "
            f"but rank {other.rank} brings {_text(other_form)} (at {other_place.short})"
        )
        self._found.append(Hazard("mismatch", part.rank, part.title, str(place), str(other_place), message))

    def _of_messages(self) -> Iterator[Hazard]:
        channels: dict[object, list[tuple[Receive, Send]]] = collections.defaultdict(list)
        for receive, message in self._misfits:
            channels[message.mailbox, message.source, message.destination, message.tag].append((receive, message))
        for receive, message in self._misfits:
            pairs = channels[message.mailbox, message.source, message.destination, message.tag]
            expected = collections.Counter(_form(one.buffer) for one, _ in pairs)
            order = expected == collections.Counter(_form(one.payload) for _, one in pairs)
            if not order and not _differ(_form(receive.buffer), _form(message.payload)):
                continue
            place, posted = receive.posted, message.posted
            text = (
                f"rank {receive.rank} receives {shown(receive.buffer)} with its {receive.title} (at {place.short}), "
                f"but rank {message.rank} sent {shown(message.payload)} (at {posted.short})"
            )
            if order:
                text += ": both sides have the same messages in a different order"
            yield Hazard("mismatch", receive.rank, receive.title, str(place), str(posted), text)


def _form(tensor: torch.Tensor) -> _Form:
    return tensor.shape, tensor.dtype


def _differ(one: _Form, other: _Form) -> bool:
    """Whether two forms differ in the number of elements or in the dtype."""
    return one[0].numel() != other[0].numel() or one[1] != other[1]


def _text(form: _Form) -> str:
    return f"{list(form[0])} {str(form[1]).removeprefix('torch.')}"
