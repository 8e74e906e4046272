"""Cases that are run to tell hypotheses apart: like a failing case, and other in one choice or in every number."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator
from typing import Any

from ringref.problem import Dilation
from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.inputs import selectable
from ringverify.cases.shapes import fitted, length_unit
from ringverify.implementation import Capabilities

VARIED = 6
"""Variants of a failing case that are taken, as unlike each other as there are."""


def runnable(cases: Iterable[Case], capabilities: Capabilities) -> list[Case]:
    """Return each case once, in a shape that an implementation accepts, but for those that it does not declare."""
    found = dict.fromkeys(_in_shape(case, capabilities) for case in cases)
    return [case for case in found if _possible(case, capabilities)]


def _possible(case: Case, capabilities: Capabilities) -> bool:
    """Whether an implementation declares what a case asks for, and its values can be made."""
    return why_unsupported(case, capabilities) is None and (case.values != "selectors" or selectable(case))


def _in_shape(case: Case, capabilities: Capabilities) -> Case:
    """Return the case in a shape that an implementation accepts; of equal shards, if it declares no others."""
    case = fitted(case, capabilities)
    unit = length_unit(capabilities, case.sharding, case.world_size)
    nq, nk = (-(-length // unit) * unit for length in (case.problem.nq, case.problem.nk))
    longer = _if_legal(case, query_length=nq, key_length=None if nq == nk else nk)
    return case if capabilities.uneven else next(longer, case)


def cost(case: Case) -> int:
    """Return about how much work it is to predict a case."""
    p = case.problem
    threads = 4 if case.replicated else 1  # its ranks cannot be predicted one after the other
    return p.batch * p.heads * p.nq * p.nk * case.world_size * threads


def unlike(cases: Iterable[Case]) -> list[Case]:
    """Return up to `VARIED` of the cases, each with the most choices that none before has."""
    left, found, seen = list(cases), list[Case](), set[tuple[str, object]]()
    while left and len(found) < VARIED:
        best = max(left, key=lambda case: len(_choices(case) - seen))
        if _choices(best) <= seen:
            break
        left.remove(best)
        found.append(best)
        seen |= _choices(best)
    return found


def _choices(case: Case) -> set[tuple[str, object]]:
    """Return what a fault may depend on in a case, without the numbers that are another in every case."""
    p = case.problem
    return {
        ("ranks", case.world_size),
        ("sharding", case.sharding),
        ("group", case.group),
        ("causal", p.causal),
        ("heads", (p.heads > 1, p.hk != p.heads)),
        ("lengths", (p.nq > p.nk) - (p.nq < p.nk)),
        ("even", p.nq % case.world_size == p.nk % case.world_size == 0),
        ("long", p.nk > 4 * case.world_size),
        *((name, getattr(p, name) is not None) for name in ("window", "documents", "key_lengths", "dilation")),
    }


def like(smallest: Case, first: Case) -> Iterator[Case]:
    """Yield cases like the smallest and the first: other inputs, one choice changed, or larger, to part hypotheses."""
    yield first.replace(values=smallest.values, seed=first.seed + 1)
    yield first.replace(values="normal", seed=first.seed + 3)
    yield smallest.replace(values="normal", seed=smallest.seed + 1)
    yield smallest.replace(values="normal", cotangent="both")
    yield first.replace(values=smallest.values, world_size=1)
    yield from _plainer(first.replace(values=smallest.values))
    yield from _varied(smallest, first.replace(values=smallest.values))
    if smallest.problem.documents is not None:
        third = first.problem.nq // 3
        yield first.replace(values=smallest.values, documents=(min(1, third), third, max(third, first.problem.nq - 1)))
        if (grown := _grown(smallest, world_size=4, length=12, heads=1)) is not None:
            n = grown.problem.nq
            yield grown.replace(documents=(0, n))  # a document on all of several ranks
            yield grown.replace(documents=(1, n // 2 - 1, n - 3))  # positions before and after all documents
    if smallest.problem.key_lengths is not None and smallest.problem.batch > 1:
        for lengths in ((9, 5), (5, 9)):  # of tiles of which one batch entry has a part
            grown = _grown(smallest, world_size=2, length=14, heads=1)
            if grown is not None:
                yield from _if_legal(grown, batch=2, key_lengths=lengths, values="normal")
    sizes = ((4, 17, 4, smallest.values), (3, 12, 6, "normal"), (2, 8, 2, "normal"), (4, 16, 2, "normal"))
    for size, length, heads, values in sizes:
        grown = _grown(smallest, world_size=size, length=length, heads=heads)
        if grown is not None:
            yield grown.replace(values=values, seed=first.seed + 2)
    if smallest.problem.nk > smallest.world_size * 2:
        # Blocks that are long enough to be cut into tiles: with another length, the last tile has another size.
        grown = _grown(smallest, world_size=smallest.world_size, length=3 * smallest.problem.nk // 2, heads=1)
        if grown is not None:
            yield grown
    yield first.replace(values="normal", seed=first.seed + 2)


def _varied(smallest: Case, first: Case) -> Iterator[Case]:
    """Yield the first case with one choice changed, to separate faults that depend on it from those that do not."""
    p = first.problem
    if smallest.replicated:
        yield from _if_legal(first, sharding="contiguous")
    for sharding in ("contiguous", "zigzag", "striped"):
        grown = _grown(smallest, world_size=2, length=12, heads=2)
        if grown is not None and sharding != smallest.sharding:
            yield from _if_legal(grown, sharding=sharding, seed=first.seed + 2)
    if smallest.memory != "contiguous":
        yield from _if_legal(first, memory="contiguous")
    if p.scale is None:
        yield from _if_legal(first, scale=0.3)
    if p.window is not None:
        yield from _if_legal(first, window=(2, 1))
        if (grown := _grown(smallest, world_size=3, length=12, heads=1)) is not None:
            rows = -(-grown.problem.nk // grown.world_size)
            yield from _if_legal(grown, window=(3 * rows // 2, p.window[1] and 3 * rows // 2))  # reaches half a shard
    if p.softcap is not None:
        yield from _if_legal(first, values="large_scores")
    yield from _if_legal(first, cotangent="both")
    # One constraint more or less tells a fault of the ring from a fault of a mask.
    yield from _if_legal(first, causal=not p.causal)
    if p.key_lengths is not None or p.documents is not None:
        yield from _if_legal(first, key_lengths=None, documents=None, causal=True)
    if not smallest.problem.nk:
        # Instead of no keys: keys that no query attends, and keys that the queries of some ranks do not attend.
        p = smallest.problem
        yield from _if_legal(smallest, query_length=p.nq, key_length=4, key_lengths=(0,) * p.batch)
        yield from _if_legal(smallest, query_length=12, key_length=4, causal=True, world_size=3)
    if (kept := smallest.problem.dilation) is not None:
        # Where the rate does not divide the segment length, places in a segment are not places in the sequence.
        branches = ((7, 3), (6, 2), (5, 4))[: max(2, len(kept.branches))]
        grown = _grown(smallest, world_size=3, length=18, heads=4)
        if grown is not None:
            yield from _if_legal(
                grown, dilation=Dilation(branches, heads=kept.heads, head_offset=kept.head_offset), seed=first.seed + 2
            )


def _plainer(first: Case) -> Iterator[Case]:
    """Yield the first case with one thing less that a fault may depend on: other faults may have it there too."""
    p = first.problem
    for name in ("window", "documents", "key_lengths", "softcap", "dilation", "key_heads", "value_dim"):
        if getattr(p, name) is not None:
            yield from _if_legal(first, **{name: None})
    if p.batch > 1:
        yield from _if_legal(first, batch=1, key_lengths=p.key_lengths and p.key_lengths[:1])
    if p.nq != p.nk:
        yield from _if_legal(first, query_length=p.nk, key_length=None)
    if p.dtype != "float32":
        yield from _if_legal(first, dtype="float32")
    for size in {2, first.world_size - 1}:
        if 1 < size != first.world_size:
            yield from _if_legal(first, world_size=size)
    even = -(-max(p.nq, p.nk) // (2 * first.world_size)) * 2 * first.world_size
    if p.nq == p.nk != even:
        yield from _if_legal(first, query_length=even, key_length=None)


def fresh(smallest: Case, first: Case) -> Iterator[Case]:
    """Yield larger cases with other numbers of ranks and tokens than those that told hypotheses apart so far."""
    for seed, (size, length) in enumerate(((3, 11), (2, 9), (4, 14), (5, 13)), 5):
        for case in (smallest, first):
            p, nk = case.problem, length + case.problem.diagonal
            padded: dict[str, Any] = {}
            if p.key_lengths is not None:
                padded["key_lengths"] = tuple(range(nk - 2, -1, -3)[: max(2, p.batch)])
                padded["batch"] = len(padded["key_lengths"])
            yield from _if_legal(
                case, world_size=size, query_length=length, key_length=nk, values="normal",
                head_dim=max(4, p.head_dim), seed=first.seed + seed, **padded
            )  # fmt: skip


def in_other_numbers(smallest: Case) -> Iterator[Case]:
    """Yield cases with the constraints of the smallest, and other numbers of ranks, positions and what bounds them."""
    p = smallest.problem
    for seed, (size, length) in enumerate(((3, 10), (2, 9), (4, 14), (3, 11), (2, 12), (5, 13), (4, 9), (3, 16))):
        draw = random.Random(seed)
        nk = length + p.diagonal
        if nk < 1:
            continue
        changes: dict[str, Any] = {}
        if p.window is not None:
            left, right = (None if side is None else draw.randint(0, length // 2) for side in p.window)
            changes["window"] = left, right
        if p.documents is not None:
            ends = sorted(draw.sample(range(1, length), draw.randint(1, 3)))
            changes["documents"] = (draw.choice((0, 0, 0, 1)), *(end for end in ends if end > 1), length - seed % 2)
        if p.key_lengths is not None:  # of two entries, one length is the longest, and not the other's
            changes["batch"] = batch = max(p.batch, 1 + seed % 2)
            changes["key_lengths"] = tuple(draw.randint(0 if n else nk // 2, nk) for n in range(batch))
        if p.dilation is not None:  # of several branches, what is read of a pair is a sum
            w, r = draw.randint(2, length), draw.randint(1, 3)
            changes["dilation"] = dataclasses.replace(p.dilation, branches=((max(w, r), r),))
        yield from _if_legal(
            smallest, world_size=size, query_length=length, key_length=None if nk == length else nk, **changes,
            value_dim=p.value_dim and max(p.value_dim, 8), head_dim=max(p.head_dim, 8), values="normal", seed=seed,
        )  # fmt: skip


def in_other_heads(smallest: Case) -> Iterator[Case]:
    """Yield cases in which heads and key heads have different divisors in common with the number of ranks."""
    for size, heads, key_heads in ((4, 4, 2), (6, 4, 4), (6, 4, 2), (4, 6, 3), (6, 4, 1), (2, 12, 3)):
        yield from _if_legal(
            smallest, world_size=size, query_length=2 * size, key_length=None, documents=None, key_lengths=None,
            heads=heads, key_heads=key_heads, head_dim=max(4, smallest.problem.head_dim), values="normal",
        )  # fmt: skip


def with_scores_far_below_0(smallest: Case) -> Iterator[Case]:
    """Yield cases of which some query has a key, and all its scores are far below 0."""
    for causal in (True, False):
        yield from _if_legal(
            smallest, query_length=6 if causal else 2, key_length=None, causal=causal, key_lengths=None, batch=2,
            documents=None, window=None, dilation=None, head_dim=max(2, smallest.problem.head_dim),
            values="large_scores",
        )  # fmt: skip


def _if_legal(case: Case, **changes: Any) -> Iterator[Case]:
    """Yield the case with some fields changed, unless they contradict other fields."""
    try:
        yield case.replace(**changes)
    except ValueError:
        return


def _grown(case: Case, *, world_size: int, length: int, heads: int) -> Case | None:
    """Return a larger case (ranks, positions, heads, dimensions), same constraints; `None` if they do not fit."""
    p = case.problem
    lengths = max(p.nq, length), max(p.nk, length)
    if p.nq != p.nk:
        lengths = (length, length + p.nk - p.nq) if p.nk > p.nq else (length + p.nq - p.nk, length)
    grouped = p.hk != p.heads
    many = heads if p.heads > 1 or grouped else 1
    equal = p.head_dim == p.dv
    dim = max(p.head_dim, 3)
    try:
        return case.replace(
            world_size=max(case.world_size, world_size),
            query_length=lengths[0],
            key_length=None if lengths[0] == lengths[1] else lengths[1],
            heads=max(many, p.heads) if not grouped else heads,
            key_heads=2 if grouped else None,
            head_dim=dim,
            value_dim=None if equal else max(p.dv, 2),
        )
    except ValueError:
        return None
