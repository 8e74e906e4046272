"""Errors of our own while a property is tried: they cost what was being done, and no verdict on an implementation."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from ringverify.errors import Inconclusive
from ringverify.events import PropertyEvent
from ringverify.worlds.world import WorldUnavailable

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Mishap:
    """Something that could not be done.

    Attributes:
        said: what, and why not, in a line.
        traceback: of an error of ours; empty where a world or a limit of the machine was in the way.
    """

    said: str
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception, doing: str) -> Mishap:
        """From an exception.

        Args:
            error: the exception.
            doing: what was being done: "judging a case".
        """
        if isinstance(error, WorldUnavailable):
            return cls(str(error), error.detail)
        if isinstance(error, Inconclusive):
            return cls(str(error))
        lines = str(error).strip().splitlines() or [""]
        said = f"an error of ringverify itself while {doing}, please report it: {type(error).__name__}: {lines[0]}"
        return cls(said.rstrip(": "), "".join(traceback.format_exception(error)).rstrip())


def attempt(mishaps: list[Mishap], doing: str, make: Callable[[], Made], otherwise: Made) -> Made:
    """What `make` makes, or if it raises something else, with the mishap noted.

    Args:
        mishaps: where it is noted.
        doing: what it makes, as in `Mishap.of`.
        make: makes it.
        otherwise: what there is instead.
    """
    try:
        return make()
    except Exception as error:
        mishaps.append(Mishap.of(error, doing))
        return otherwise


def with_mishaps(event: PropertyEvent, mishaps: Sequence[Mishap]) -> PropertyEvent:
    """The event of a property, with what it costs: a verdict that is no violation is none any more."""
    if not mishaps:
        return event
    said = dict.fromkeys([event.reason, *(one.said for one in mishaps)])
    tracebacks = [event.traceback, *(one.traceback for one in mishaps)]
    return dataclasses.replace(
        event,
        verdict="fail" if event.verdict == "fail" else "inconclusive",
        reason="; ".join(text for text in said if text is not None),
        traceback="\n\n".join(text for text in tracebacks if text) or None,
    )
