"""Report calls of `run_conformance` to the test that makes them. Importing this module does not import torch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

from ringverify.check.outcome import TriedProperty
from ringverify.events import Event, ImplementationEvent, TriedEvent, outcomes_of

Listener = Callable[[Sequence[Event]], None]
"""Receives all events of a call when it is over."""

_LISTENER: ContextVar[Listener | None] = ContextVar("listener to run_conformance", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hand the events of all calls that are made in this context to a listener."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(events: Sequence[Event]) -> None:
    """Hand the events of a call to the listener, if there is one."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(events)


def tried_in(events: Sequence[Event]) -> list[TriedProperty]:
    """Return what a call found for each property; after an interrupt, for the properties that were finished."""
    whole = next((event for event in events if isinstance(event, ImplementationEvent)), None)
    # Runs, seconds and what was tried are known only for the whole call; since they are added up again, one property
    # gets all of them.
    runs = {} if whole is None else {None: whole.runs or 0, "simulated": whole.simulated_runs or 0}
    features = [event for event in events if isinstance(event, TriedEvent)]
    return [
        TriedProperty(
            outcome=dataclasses.replace(outcome, tried=features.pop() if features else None),
            world="" if whole is None else whole.world or "",
            undeclared=() if whole is None else whole.undeclared or (),
            untried=() if whole is None else whole.untried or (),
            runs=runs.pop(outcome.verdict.world, 0),
            seconds_inside=0.0 if number or whole is None else whole.seconds_inside or 0.0,
        )
        for outcomes in outcomes_of(events).values()
        for number, outcome in enumerate(outcomes.values())
    ]
