"""Counts of features, and of pairs of them, as an event. Importing this module does not import torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ringverify.events import Feature, TriedEvent

PROPERTY = "property"
"""The dimension whose values are the ids of properties."""


def counted(
    single: Mapping[Feature, int], together: Mapping[tuple[Feature, Feature], int], implementation: str
) -> TriedEvent:
    """Return the event of these counts, values in alphabetical order, properties in that in which they were tried."""
    features: dict[str, dict[str, int]] = {}
    pairs: list[str] = []
    before: list[Feature] = []
    for dimension in dict.fromkeys(name for name, _ in single):
        counts = {value: count for (name, value), count in single.items() if name == dimension}
        features[dimension] = counts if dimension == PROPERTY else dict(sorted(counts.items()))
        mine = [(dimension, value) for value in features[dimension]]
        pairs += [" ".join(str(together.get((other, one), 0)) for other in before) for one in mine]
        before += mine
    return TriedEvent(implementation=implementation, features=features, pairs=tuple(pairs))


def joined(events: Iterable[TriedEvent | None], *, implementation: str) -> TriedEvent | None:
    """Return the sum of events, under one name; `None` if there are none."""
    single: Counter[Feature] = Counter()
    together: Counter[tuple[Feature, Feature]] = Counter()
    for event in filter(None, events):
        for dimension, counts in event.features.items():
            single.update({(dimension, value): count for value, count in counts.items()})
        together.update(event.together())
    return counted(single, together, implementation) if single else None
