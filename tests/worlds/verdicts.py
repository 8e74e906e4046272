"""The verdict of one property, by the path that the command takes."""

from ringverify.check.run import check
from ringverify.events import CounterexampleEvent, PropertyEvent
from ringverify.properties.catalogue import select
from ringverify.reports.progress import HIDDEN


def verdict_of(property, subject, options):
    """The verdict, and its explanation: what the counterexample shows, or the reason."""
    events = []
    check([subject], select([property], ()), options, events.append, HIDDEN)
    (told,) = [event for event in events if isinstance(event, PropertyEvent)]
    shown = [event.summary for event in events if isinstance(event, CounterexampleEvent)]
    return told.verdict, "".join(shown) or told.reason or ""
