"""Calls of `run_conformance` within a test, and who hears what comes of them. Importing this does not import torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

from ringverify.check.outcome import Told
from ringverify.reports.jsonl import Event

Listener = Callable[[Sequence[Event]], None]
"""Is handed all events of a call, when it is over."""

_LISTENER: ContextVar[Listener | None] = ContextVar("listener to run_conformance", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have somebody hear of the calls that are made meanwhile."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(events: Sequence[Event]) -> None:
    """Hand the events of a call to who listens, if anybody does."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(events)


def told_in(events: Sequence[Event]) -> list[Told]:
    """What a call came to, property by property; one that was interrupted came to those that were over."""
    (of_all,) = [event for event in events if event["event"] == "implementation"] or [{}]
    by_property: dict[str, list[Event]] = {}
    for event in events:
        if "property" in event:
            by_property.setdefault(event["property"], []).append(event)
    # They are known of the whole call, and added up again.
    runs = {None: of_all.get("runs", 0), "simulated": of_all.get("simulated_runs", 0)}
    return [
        Told(
            implementation=about[0]["implementation"],
            world=of_all.get("world", ""),
            undeclared=of_all.get("undeclared", []),
            events=about,
            runs=runs.pop(about[0].get("world"), 0),
            seconds_inside=0.0 if number else of_all.get("seconds_inside", 0.0),
        )
        for number, about in enumerate(by_property.values())
    ]
