"""Shrink a failing case to a small one that fails for the same reason.

Greedy descent: fewer ranks first, then shorter sequences, fewer heads, smaller dimensions, fewer constraints, float32,
simpler values, contiguous memory, small seeds. Each step proposes a simpler case and keeps it if it is within the
declared capabilities and still fails in the same way; then the search starts over, until no step helps. Steps change
the case rather than the random choices behind it, as Hypothesis would. So "the same case on two ranks" is one step, a
case that was not drawn shrinks too, and few runs are needed in a slow world.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from ringref.problem import Dilation
from ringref.sharding import PageTable
from ringverify.cases.case import GROUPS, MEMORY, VALUES, Case, sharding_names, why_unsupported
from ringverify.cases.shapes import fitted
from ringverify.implementation import Capabilities


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """The result of shrinking.

    Attributes:
        case: the smallest failing case found.
        tried: number of cases run.
        complete: whether no step makes it smaller; if not, the budget or the time ended first.
    """

    case: Case
    tried: int
    complete: bool


def shrink(
    case: Case,
    still_fails: Callable[[Case], bool],
    capabilities: Capabilities,
    *,
    budget: int = 400,
    seconds: float = 20.0,
    applies: Callable[[Case], bool] = lambda case: True,
) -> Shrunk:
    """Shrink a failing case.

    Args:
        case: the failing case.
        still_fails: runs another case, and says whether it fails for the same reason.
        capabilities: what the implementation declares; other cases are not tried.
        budget: most cases to try.
        seconds: most time to take.
        applies: whether a case can test the violated property; other cases are not tried.
    """
    tried: set[Case] = {case}
    until = time.monotonic() + seconds
    moved = True
    while moved:
        moved = False
        for candidate in (fitted(simpler, capabilities) for simpler in _simpler(case, capabilities)):
            if candidate in tried or why_unsupported(candidate, capabilities) is not None or not applies(candidate):
                continue
            if len(tried) > budget or time.monotonic() > until:
                return Shrunk(case, len(tried) - 1, complete=False)
            tried.add(candidate)
            if still_fails(candidate):
                case, moved = candidate, True
                break
    return Shrunk(case, len(tried) - 1, complete=True)


def _simpler(case: Case, capabilities: Capabilities) -> Iterator[Case]:
    """Yield cases simpler than this one, the greatest simplification first."""
    p = case.problem
    for group in GROUPS[: GROUPS.index(case.group)]:
        yield case.replace(group=group)
    for size in range(1, case.world_size):
        yield from _resized(case, world_size=size)
    if p.nq != p.nk:
        for length in (min(p.nq, p.nk), max(p.nq, p.nk)):
            yield from _with_lengths(case, length, length)
        for length in _below(p.nk):
            yield from _with_lengths(case, p.nq, length)
        for length in _below(p.nq):
            yield from _with_lengths(case, length, p.nk)
    if case.chunks:
        yield from _fewer_calls(case)
    for length in _below(p.nq):
        yield from _with_lengths(case, length, length)
    yield from _smaller_shapes(case)
    yield from _fewer_constraints(case)
    for name in sharding_names(case, capabilities):
        if name == case.sharding:
            break
        yield case.replace(sharding=name)
    if case.page_table is not None:
        table = case.page_table
        yield case.replace(page_table=PageTable(table.page_size, tuple(tuple(sorted(held)) for held in table.pages)))
        for size in range(1, table.page_size):
            yield case.replace(page_table=PageTable(size, table.pages))
    if p.dtype != "float32":
        yield case.replace(dtype="float32")
    for values in VALUES[: VALUES.index(case.values)]:
        yield case.replace(values=values)
    for memory in MEMORY[: MEMORY.index(case.memory)]:
        yield case.replace(memory=memory)
    if case.cotangent == "both":
        yield case.replace(cotangent="out")
        yield case.replace(cotangent="lse")
    if case.transport != "buffered":
        yield case.replace(transport="buffered")
    if case.delayed:
        yield case.replace(delayed=())
    if case.delayed != "some":
        half = len(case.delayed) // 2
        if half:
            yield case.replace(delayed=case.delayed[:half])
            yield case.replace(delayed=case.delayed[half:])
        for drop in range(len(case.delayed)):
            yield case.replace(delayed=case.delayed[:drop] + case.delayed[drop + 1 :])
    if case.schedule:
        yield case.replace(schedule=0)
    for seed in range(min(case.seed, 4)):
        yield case.replace(seed=seed)


def _fewer_calls(case: Case) -> Iterator[Case]:
    """Yield one of the calls alone, fewer calls, and calls of fewer queries."""
    chunks = case.chunks
    yield from case.calls
    for place, now in enumerate(chunks):
        for count in _below(now):
            fewer = (*chunks[:place], *([count] if count else []), *chunks[place + 1 :])
            for shorter in _with_lengths(case, sum(fewer), sum(fewer)):
                yield shorter.replace(chunks=fewer)
        if place:
            yield case.replace(chunks=(*chunks[: place - 1], chunks[place - 1] + now, *chunks[place + 1 :]))


def _resized(case: Case, world_size: int) -> Iterator[Case]:
    """Yield the case on fewer ranks: with the same length, with the same length per rank, and with another seed."""
    p = case.problem
    kept = [case.replace(world_size=world_size)]
    lengths = (p.nq * world_size // case.world_size, p.nk * world_size // case.world_size)
    kept += list(_with_lengths(kept[0], *lengths))
    yield from kept
    yield kept[0].replace(seed=case.seed + 1)


def _below(value: int) -> Iterator[int]:
    """Yield smaller lengths, ascending: 0 to 4, a half, three quarters, and one and two less."""
    yield from sorted({*range(min(value, 5)), value // 2, value - value // 4, value - 2, value - 1} - {value, -1, -2})


def _with_lengths(case: Case, nq: int, nk: int) -> Iterator[Case]:
    """Yield the case with other lengths; documents and key lengths are clipped to fit, then also scaled."""
    p = case.problem
    if (nq, nk) == (p.nq, p.nk):
        return
    changes: dict[str, object] = {"query_length": nq, "key_length": None if nq == nk else nk}
    if p.documents is not None:
        if nq != nk:
            return
        changes["documents"] = tuple(min(offset, nq) for offset in p.documents)
    if p.key_lengths is not None:
        changes["key_lengths"] = tuple(min(length, nk) for length in p.key_lengths)
    if p.dilation is not None and nq != nk:
        return
    shorter = case.replace(**changes)
    yield shorter
    if p.documents is not None and p.nq:
        yield case.replace(**{**changes, "documents": tuple(offset * nq // p.nq for offset in p.documents)})
    if p.key_lengths is not None and p.nk:
        yield case.replace(**{**changes, "key_lengths": tuple(length * nk // p.nk for length in p.key_lengths)})


def _smaller_shapes(case: Case) -> Iterator[Case]:
    p = case.problem
    if p.batch > 1:
        lengths = p.key_lengths
        for kept in range(p.batch) if lengths is not None else (0,):
            yield case.replace(batch=1, key_lengths=None if lengths is None else (lengths[kept],))
        yield case.replace(batch=p.batch - 1, key_lengths=None if lengths is None else lengths[:-1])
    if p.heads > 1 or p.hk > 1:
        for heads, key_heads in sorted({(1, 1), (2, 1), (2, 2), (p.hk, p.hk), (p.group_size, 1), (p.heads - 1, 1)}):
            if (heads, key_heads) < (p.heads, p.hk) and key_heads and heads % key_heads == 0 and key_heads <= p.hk:
                yield case.replace(heads=heads, key_heads=None if heads == key_heads else key_heads)
    if p.dv != p.head_dim:
        yield case.replace(value_dim=None)
        for dim in (1, 2, 3, 4):
            if dim < p.dv:
                yield case.replace(value_dim=dim)
    for dim in (1, 2, 3, 4, 8):
        if dim < p.head_dim:
            yield case.replace(head_dim=dim, value_dim=None if p.dv == p.head_dim else p.dv)
    for name, value in (("key_heads", p.heads), ("value_dim", p.head_dim), ("key_length", p.query_length)):
        if getattr(p, name) == value:
            yield case.replace(**{name: None})


def _fewer_constraints(case: Case) -> Iterator[Case]:
    p = case.problem
    for name in ("dilation", "documents", "window", "key_lengths", "softcap", "scale"):
        if getattr(p, name) is not None:
            yield case.replace(**{name: None})
    if p.sinks:
        yield case.replace(sinks=False)
    if p.causal:
        yield case.replace(causal=False)
    if p.window is not None:
        left, right = p.window
        for side in (0, 1, 2):
            if left is None or side < left:
                yield case.replace(window=(side, right))
            if right is None or side < right:
                yield case.replace(window=(left, side))
    for place, length in enumerate(p.key_lengths or ()):
        for shorter in sorted({0, 1, length // 2, length - 1}):
            if 0 <= shorter < length and p.key_lengths is not None:
                yield case.replace(key_lengths=(*p.key_lengths[:place], shorter, *p.key_lengths[place + 1 :]))
    if p.documents is not None and len(p.documents) > 2:
        for drop in range(len(p.documents)):
            yield case.replace(documents=p.documents[:drop] + p.documents[drop + 1 :])
    if p.dilation is not None:
        for dilation in _simpler_dilation(p.dilation):
            yield case.replace(dilation=dilation)


def _simpler_dilation(dilation: Dilation) -> Iterator[Dilation]:
    branches = dilation.branches
    if len(branches) > 1:
        for drop in range(len(branches)):
            yield dataclasses.replace(dilation, branches=branches[:drop] + branches[drop + 1 :])
    if dilation.head_offset != "cyclic":
        yield dataclasses.replace(dilation, head_offset="cyclic")
    for place, (segment, rate) in enumerate(branches):
        for smaller in sorted({(s, r) for s in (1, 2, 3, segment - 1, segment) for r in (1, 2, rate)}):
            if smaller != (segment, rate) and 1 <= smaller[0] <= segment and smaller[1] <= rate:
                yield dataclasses.replace(dilation, branches=(*branches[:place], smaller, *branches[place + 1 :]))
