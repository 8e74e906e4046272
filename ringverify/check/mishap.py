"""Our own errors while a property is tried: the step that failed is skipped, and no violation is lost or invented."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from ringverify.errors import Inconclusive
from ringverify.events import PropertyEvent
from ringverify.worlds.limits import sentence
from ringverify.worlds.world import WorldUnavailable

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Mishap:
    """A step of a check that could not be done.

    Attributes:
        said: what could not be done and why, in one line.
        traceback: traceback of an error of ours; may be empty if a world or a limit of the machine prevented it.
    """

    said: str
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception, doing: str) -> Mishap:
        """Describe an exception.

        Args:
            error: the exception.
            doing: the step during which it was raised, such as "judging a case".
        """
        if isinstance(error, WorldUnavailable):
            return cls(str(error), error.detail)
        if isinstance(error, Inconclusive):
            return cls(str(error))
        lines = str(error).strip().splitlines() or [""]
        if isinstance(error, MemoryError):
            return cls(f"{sentence('memory')} while {doing}: {lines[0]}".rstrip(": "))
        said = f"an error of ringverify itself while {doing}, please report it: {type(error).__name__}: {lines[0]}"
        return cls(said.rstrip(": "), "".join(traceback.format_exception(error)).rstrip())


def attempt(mishaps: list[Mishap], doing: str, make: Callable[[], Made], otherwise: Made) -> Made:
    """Return `make()`; if it raises, append a mishap to `mishaps` and return `otherwise`.

    Args:
        mishaps: list to which a mishap is appended.
        doing: the step, as in `Mishap.of`.
        make: does the step.
        otherwise: result to use if it raises.
    """
    try:
        return make()
    except Exception as error:
        mishaps.append(Mishap.of(error, doing))
        return otherwise


def with_mishaps(event: PropertyEvent, mishaps: Sequence[Mishap]) -> PropertyEvent:
    """Return the event with the mishaps added: a verdict other than "fail" becomes "inconclusive"."""
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
