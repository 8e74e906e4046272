"""What was tried: the features of all examples, counted alone and in pairs, and declared features that none had.

An example costs a few microseconds: its features are counted together, as one, and taken apart when a property ends.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import numpy as np

from ringverify.cases.case import Case
from ringverify.cases.comparing import GRADIENTS
from ringverify.cases.features import features_of, world_size_range
from ringverify.cases.strategies import WORLD_SIZES
from ringverify.check.counting import PROPERTY, counted
from ringverify.events import ABSENT, PRESENT, Feature, TriedEvent
from ringverify.implementation import Capabilities, sharding_name
from ringverify.properties.property import Property

FLAGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gqa": ("gqa", (PRESENT,)),
    "value_dim": ("value_dim", (PRESENT,)),
    "scale": ("scale", ("positive",)),
    "negative_scale": ("scale", ("negative",)),
    "window": ("window", ("left", "right", "both sides")),
    "documents": ("documents", ("everywhere", "with padding")),
    "key_lengths": ("key_lengths", (PRESENT,)),
    "cross_lengths": ("cross_lengths", ("more keys", "more queries")),
    "softcap": ("softcap", (PRESENT,)),
    "sinks": ("sinks", (PRESENT,)),
    "uneven": ("lengths", ("uneven",)),
    "empty_shards": ("lengths", ("empty shards",)),
    "subgroups": ("group", ("offset", "strided")),
    "poison_safe": ("values", ("poisoned_skips",)),
    "gradients": ("gradients", (PRESENT,)),
    "lse": ("lse", (PRESENT,)),
    "lse_gradient": ("cotangent", ("lse", "both")),
    "memory": (PROPERTY, ("memory",)),
    "traffic": (PROPERTY, ("traffic",)),
    "balance": (PROPERTY, ("balance",)),
    "incremental": (PROPERTY, ("incremental",)),
    "deterministic": (PROPERTY, ("determinism",)),
}
"""Capabilities that are declared or not: the dimension, and those of its values of which one must have been tried."""


@dataclasses.dataclass
class Tried:
    """How many cases there were of each kind; of one kind are cases whose features are all the same.

    Attributes:
        kinds: the number of cases by their features, as `features_of` gives them.
        shapes: shapes and dtypes of the tensors of all cases, each once.
    """

    kinds: Counter[tuple[Feature, ...]] = dataclasses.field(default_factory=Counter)
    shapes: set[str] = dataclasses.field(default_factory=set)

    def add(self, case: Case) -> None:
        """Count a case."""
        self.kinds[tuple(features_of(case).items())] += 1
        p = case.problem
        self.shapes.add(f"{p.batch}, {p.nq}, {p.nk}, {p.heads}, {p.hk}, {p.head_dim}, {p.dv}, {p.dtype}")

    def merged(self, other: Tried) -> Tried:
        """Return the counts of both together."""
        return Tried(self.kinds + other.kinds, self.shapes | other.shapes)


def tried_event(tried: Tried, property: Property, capabilities: Capabilities, *, implementation: str) -> TriedEvent:
    """Return the event of the examples of one property.

    The property itself is a feature of them, and so is whether it judges lse and gradients.
    """
    judged = {
        "lse": capabilities.lse and "lse" in property.results,
        "gradients": capabilities.gradients and not {*GRADIENTS}.isdisjoint(property.results),
    }
    more = [(name, PRESENT if is_judged else ABSENT) for name, is_judged in judged.items()]
    more.append((PROPERTY, property.id))
    names: dict[Feature, int] = {}
    rows = [[names.setdefault(feature, len(names)) for feature in (*kind, *more)] for kind in tried.kinds]
    has = np.zeros((len(rows), len(names)), dtype=np.int64)
    np.put_along_axis(has, np.array(rows), 1, axis=1)
    together = has.T @ (has * np.array([*tried.kinds.values()])[:, None])
    features = list(names)
    single = {feature: int(together[place, place]) for place, feature in enumerate(features)}
    pairs = {(features[a], features[b]): int(together[a, b]) for a, b in zip(*together.nonzero(), strict=True)}
    return counted(single, pairs, implementation)


def untried(capabilities: Capabilities, event: TriedEvent | None) -> Iterator[str]:
    """Yield the declared features that no example had, in a few words each.

    Args:
        capabilities: what the implementation declares.
        event: what was tried; `None` is nothing.
    """
    features = {} if event is None else event.features
    for name, dimension, values in _declared(capabilities):
        if not any(value in features.get(dimension, {}) for value in values):
            yield name


def _declared(c: Capabilities) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield what is declared: in words, and as a dimension with those of its values of which one has to be tried."""
    for size in dict.fromkeys(map(world_size_range, c.world_sizes or WORLD_SIZES)):
        yield f"world size {size}", "world size", (size,)
    for sharding in map(sharding_name, c.shardings):
        yield f"sharding {sharding}", "sharding", (sharding,)
    if c.causal != "never":
        yield "causal", "causal", (PRESENT,)
    if c.causal != "always":
        yield "not causal", "causal", (ABSENT,)
    for dtype in c.dtypes:
        yield f"dtype {dtype}", "dtype", (dtype,)
    for heads in c.dilation:
        yield f"dilation {heads}", "dilation", (heads,)
    for keyword, (dimension, values) in FLAGS.items():
        if getattr(c, keyword):
            yield keyword, dimension, values
