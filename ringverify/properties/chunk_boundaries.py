"""`chunk_boundaries`: a dense sweep of small lengths, worlds, windows, documents, segments and rates.

Chunking bugs show where a shard, a segment or a document ends. With small sizes nearly every position is next to such
an end, and there are few enough cases to list them all. `sweep` is that list; a suite tries a seeded sample of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.shapes import LONGEST_NEEDED, any_shape, few_lengths, fitted, length_unit
from ringverify.cases.strategies import affordable_world_sizes, widest
from ringverify.implementation import Capabilities, sharding_name
from ringverify.properties.property import CAUSALS, Property, always, judge_everything

WORLD_SIZES = (1, 2, 3, 4, 5)
LONGEST = 13
SEGMENTS = (1, 2, 3, 4, 5, 7)
RATES = (1, 2, 3, 4)
Fields = tuple[()] | tuple[str, Any]
"""Name and value of the field of a problem that is its pattern; none for the whole square."""


class _Made(Sequence[Case]):
    """Cases that are made when they are asked for: of some tens of thousands, a suite tries a few hundred."""

    def __init__(self, make: Callable[..., Case], places: list[tuple[Any, ...]]) -> None:
        self._make, self._places = make, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        return self._make(*self._places[index])


@functools.lru_cache(maxsize=8)
def sweep(c: Capabilities) -> Sequence[Case]:
    """Return every small case at chunk boundaries that the declared capabilities allow, each once."""
    dtype = widest(c)[0]

    def make(size: int, sharding: str, n: int, causal: bool, fields: Fields = ()) -> Case:
        heads = 3 if fields and fields[0] == "dilation" else 1
        named = dict([fields]) if fields else {}
        problem = Problem(query_length=n, heads=heads, head_dim=2, dtype=dtype, causal=causal, **named)
        return fitted(Case(problem=problem, sharding=sharding, world_size=size), c)

    def allowed(case: Case) -> bool:
        return why_unsupported(case, c) is None and _small(case, c)

    some = [
        (size, sharding, n, causal)
        for size, sharding in itertools.product(affordable_world_sizes(c, WORLD_SIZES), map(sharding_name, c.shardings))
        for n, causal in itertools.product(_lengths(c, sharding, size), CAUSALS[c.causal])
    ]
    if c.uneven_segments and any_shape(c):
        # Whether such a case is allowed does not depend on its pattern, which is made of what is declared.
        some = [place for place in some if allowed(make(*place))]
        return _Made(make, [(*place, fields) for place in some for fields in _patterns(c, place[2], place[0])])
    made = (make(*place, fields) for place in some for fields in _patterns(c, place[2], place[0]))
    return list(dict.fromkeys(filter(allowed, made)))


def _lengths(c: Capabilities, sharding: str, size: int) -> Iterable[int]:
    """Lengths of the sweep: multiples of the required unit up to `LONGEST`, and at least the first one or two."""
    if c.shapes == "compiled":
        return few_lengths(c, sharding, size)[:3]
    unit = 1 if c.length_multiple is None else length_unit(c, sharding, size)
    return range(0, max(LONGEST, 2 * unit if 2 * unit <= LONGEST_NEEDED else unit) + 1, unit)


@functools.lru_cache(maxsize=128)
def _patterns(c: Capabilities, n: int, size: int) -> tuple[Fields, ...]:
    """Return pattern fields: none, windows, documents and key lengths around a shard's length, then dilations."""
    return tuple(dict.fromkeys(_every_pattern(c, n, -(-n // size))))


def _every_pattern(c: Capabilities, n: int, shard: int) -> Iterator[Fields]:
    yield ()
    edges = sorted({edge for edge in (1, shard - 1, shard, shard + 1, 2 * shard) if 0 <= edge <= n})
    if c.window:
        for edge in edges:
            yield "window", (edge, 0)
            yield "window", (edge, edge)
            yield "window", (None, edge)
    if c.documents:
        for edge in edges:
            yield "documents", (0, edge, n)
        yield "documents", tuple(range(0, n + 1, 1 + n // (LONGEST + 1)))
    if c.key_lengths:
        for edge in edges:
            yield "key_lengths", (edge,)
    for mode in c.dilation:
        for w, r in itertools.product(SEGMENTS, RATES):
            if w > n + 1:
                continue
            wider = (2 * w + 1, max(1, r - 1))
            if mode == "split":
                yield "dilation", Dilation(((w, r), wider))
            else:
                yield "dilation", Dilation(((w, r),), "shared", "cyclic")
                yield "dilation", Dilation(((w, r), wider), "shared", "block")
    if c.sinks:
        yield "sinks", True


def _small(case: Case, c: Capabilities) -> bool:
    """Return whether a case has the same length for queries and keys, and a length and world size of the sweep."""
    p = case.problem
    if p.nq != p.nk or case.world_size not in affordable_world_sizes(c, WORLD_SIZES):
        return False
    return p.nq in _lengths(c, case.sharding, case.world_size)


CHUNK_BOUNDARIES = Property(
    id="chunk_boundaries",
    meaning="results are right wherever shards, segments, windows and documents end: a dense sweep of small sizes",
    examples=220,
    cases=sweep,
    judge=judge_everything,
    unsupported=always,
    applies=_small,
)
