"""Features of drawn cases, and how often each was drawn when every case was made of one integer of Hypothesis.

`drawn_features.json` holds, for each row of `WAYS`, the number of cases that were drawn then and in how many of them
each feature was.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from ringref.pattern import multiplicity
from ringref.sharding import SHARDINGS
from ringverify.cases.case import COTANGENTS, MEMORY, TRANSPORTS, Case
from ringverify.cases.strategies import CONSTRAINTS, GENERAL_VALUES, HEAD_DIMS, Scope
from ringverify.implementation import Capabilities
from ringverify.ring.declared import ring

RECORDED = Path(__file__).with_suffix(".json")

SHAPES_NEEDED = Capabilities(
    gqa=True, value_dim=True, window=True, dtypes=("bfloat16", "float32"), head_dims=(64, 128), value_dims=(32, 64),
    length_multiple=32, heads_multiple="world_size",
)  # fmt: skip
EVEN = Capabilities(
    sharding=("zigzag", "striped"), causal="always", gqa=True, dilation=("split",), uneven_segments=False,
    cross_lengths=True, scale=True, world_sizes=(2, 3, 6),
)  # fmt: skip
PACKED = Capabilities(documents=True, key_lengths=True, softcap=True, uneven=True, sharding=("striped", "contiguous"))
WATCHED = Scope(
    memory=MEMORY, cotangents=COTANGENTS, groups=("offset", "strided"), transports=TRANSPORTS, delayed=((), "some"),
    world_sizes=(1, 2, 3, 4), values=("normal", "integers"), longest=16,
)  # fmt: skip

EVERYTHING = dataclasses.replace(ring.capabilities, sharding=SHARDINGS, balance=None)
"""Of the ring, what there was when features were recorded."""
WAYS: dict[str, tuple[Capabilities, Scope]] = {
    "plain": (Capabilities(), Scope()),
    "everything": (EVERYTHING, Scope(values=GENERAL_VALUES)),
    "everything, empty rows": (EVERYTHING, Scope(want_empty_rows=True, cotangents=("out", "both"))),
    "everything, watched": (EVERYTHING, WATCHED),
    "shapes needed": (SHAPES_NEEDED, Scope()),
    "even": (EVEN, Scope()),
    "packed": (PACKED, Scope()),
    "packed, empty rows": (PACKED, Scope(want_empty_rows=True)),
}


def features(case: Case) -> Iterator[str]:
    """Name what a case has: each field's value or kind, lengths beside the ranks', and pairs of the main ones."""
    p, size = case.problem, case.world_size
    there = [name for name in CONSTRAINTS if getattr(p, name) is not None]
    main = [f"{size} ranks", case.sharding, f"causal={p.causal}", *there]
    yield from main
    yield from map(" with ".join, itertools.combinations(main, 2))
    for name in ("values", "memory", "cotangent", "group", "transport", "delayed"):
        yield f"{name}={getattr(case, name)}"
    yield f"{p.dtype}"
    yield f"batch={p.batch}"
    yield f"heads={p.heads}/{p.hk}"
    yield f"head_dim={p.head_dim}"
    yield "value_dim=head_dim" if p.dv == p.head_dim else f"value_dim={p.dv}, another"
    yield f"{len(there)} constraints"
    yield f"length={p.nq}" if p.nq <= 2 * size + 1 else f"length of {math.ceil(math.log2(p.nq))} bits"
    yield f"length is {['a multiple of ranks', 'a multiple, one more', 'another'][min(2, p.nq % size)]}"
    for name, holds in (
        ("fewer queries than ranks", p.nq < size),
        ("more queries than keys", p.nq > p.nk),
        ("more keys than queries", p.nk > p.nq),
        ("all dimensions equal", p.batch == p.heads == p.hk == p.head_dim == p.dv),
        ("dimensions pairwise distinct", len({p.batch, p.nq, p.heads, p.head_dim}) == 4),
        ("more than a tile", p.nq > 32 and p.head_dim not in HEAD_DIMS),
        ("a row without keys", bool((multiplicity(p).sum(axis=3) == 0).any())),
        ("a large seed", case.seed >= 2**15),
        ("a large schedule", case.schedule >= 2**15),
    ):
        if holds:
            yield name
    yield f"scale={p.scale}"
    yield f"softcap={p.softcap}"
    if p.window is not None:
        for name, side in zip(("left", "right"), p.window, strict=True):
            yield f"{name}={side if side is None or side <= 3 else 'far'}"
    if p.documents is not None:
        yield f"{len(p.documents)} offsets"
        yield from _named({"all documents": p.documents[0] == 0 and p.documents[-1] == p.nq})
        yield from _named({"an empty document": len(set(p.documents)) < len(p.documents)})
    if p.key_lengths is not None:
        yield from _named({"no keys": 0 in p.key_lengths, "all keys": p.nk in p.key_lengths})
    if p.dilation is not None:
        segments = [w for w, _ in p.dilation.branches]
        yield f"{p.dilation.heads}/{p.dilation.head_offset}"
        yield f"{len(segments)} branches"
        yield f"a rate of {max(rate for _, rate in p.dilation.branches)}"
        yield from _named({"a segment past the end": max(segments) > p.nq, "segments of one": min(segments) == 1})
        yield from _named({"a segment that divides nothing": any(p.nq % w for w in segments)})


def _named(conditions: dict[str, bool]) -> Iterator[str]:
    return (name for name, holds in conditions.items() if holds)


def counted(cases: Iterable[Case]) -> Counter[str]:
    """In how many cases each feature is."""
    found: Counter[str] = Counter()
    for case in cases:
        found.update(set(features(case)))
    return found


def recorded() -> dict[str, tuple[int, dict[str, int]]]:
    """For each way, the number of cases drawn and the counts of their features."""
    return {way: (one["cases"], one["features"]) for way, one in json.loads(RECORDED.read_text("utf-8")).items()}
