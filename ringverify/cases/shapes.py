"""Adapt cases to the shapes that an implementation requires, so that no case is drawn which it would refuse.

An implementation may require that a number divides its heads or the positions of a rank, or one of a few head
dimensions. Properties, shrinking and diagnosis make cases freely and then call `fitted`, which rounds heads and lengths
up to the next multiple, and dimensions up to the next one declared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ringref.problem import Dilation
from ringverify.cases.case import Case, even_multiple, multiple_on
from ringverify.implementation import Capabilities

NEEDS = ("heads_multiple", "key_heads_multiple", "head_dims", "value_dims", "length_multiple")
"""Capabilities that restrict shapes; `None` is no restriction."""

LONGEST_NEEDED = 512
"""Larger worlds are left out if `length_multiple` times their size exceeds this many positions."""

EVEN = (16, 32, 136)
"""Lengths of cases where every new shape is compiled, before they are rounded up; the last is longer than two tiles."""


def any_shape(c: Capabilities) -> bool:
    """Return whether every shape is accepted, and none is dear to try."""
    return c.shapes != "compiled" and all(getattr(c, name) is None for name in NEEDS)


def fitted(case: Case, c: Capabilities, *, worlds: Sequence[int] = ()) -> Case:
    """Return the case with the nearest shapes that an implementation accepts; the case itself if it declares none.

    Args:
        case: the case to adapt; only shapes, and the segment lengths of a dilation, change.
        c: what the implementation declares.
        worlds: further world sizes on which the same problem has to fit.
    """
    if any_shape(c):
        return case
    if c.shapes == "compiled":
        case = _in_few_shapes(case, c)
    p, sizes = case.problem, (case.world_size, *worlds)
    unit, key_unit = (
        math.lcm(*(multiple_on(each, size) for size in sizes)) for each in (c.heads_multiple, c.key_heads_multiple)
    )
    if p.hk == p.heads:
        heads = key_heads = _up(p.heads, math.lcm(unit, key_unit))
    else:
        key_heads = _up(p.hk, key_unit)
        heads = _up(p.heads, math.lcm(unit, key_heads))
    head_dim = _member(c.head_dims, p.head_dim)
    value_dim = _member(c.value_dims, head_dim if p.dv == p.head_dim else p.dv)
    length = length_unit(c, case.sharding, *sizes)
    nq, nk = _up(p.nq, length), _up(p.nk, length)
    changes: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "query_length": nq}
    # A field that was left to its default stays so if the default gives the same value: descriptions stay short.
    for name, value, default in (("key_heads", key_heads, heads), ("value_dim", value_dim, head_dim)):
        changes[name] = None if getattr(p, name) is None and value == default else value
    changes["key_length"] = None if p.key_length is None else nk
    if p.dilation is not None and not c.uneven_segments:
        branches = tuple((math.gcd(w, nq) or 1, r) for w, r in p.dilation.branches)
        changes["dilation"] = Dilation(branches, p.dilation.heads, p.dilation.head_offset)
    return case.replace(**changes)


def few_lengths(c: Capabilities, sharding: str, size: int) -> tuple[int, ...]:
    """Return the lengths of which cases are made where every new shape is compiled.

    First come one that leaves shards empty and an uneven one, as far as declared. Without `length_multiple`, worlds
    of 1, 2, 4 and 8 ranks share them. With it, the last one gives a rank two required blocks on small worlds.
    """
    unit = length_unit(c, sharding, size)
    odd = [*([1] if c.empty_shards else []), *([13] if c.uneven else [])]
    two = [2 * unit] if c.length_multiple is not None and EVEN[-1] < 2 * unit <= LONGEST_NEEDED else []
    return tuple(dict.fromkeys([*odd, *(_up(length, unit) for length in EVEN), *two]))


def _in_few_shapes(case: Case, c: Capabilities) -> Case:
    """Return the case in the nearest of few shapes, with what its pattern says of the last position.

    Shapes are: a batch of two with all that is declared of heads and dimensions, at the shortest even length; plain
    ones, one for each other length; and cross lengths either way. Longer cases keep their length.
    """
    p = case.problem
    lengths = few_lengths(c, case.sharding, case.world_size)
    even = [length for length in lengths if length >= EVEN[0]]
    nq, nk = (next((one for one in lengths if one >= n), n) for n in (p.nq, p.nk))
    if p.nq != p.nk and max(nq, nk) <= even[:2][-1]:
        nq, nk = (even[0], even[:2][-1]) if p.nq < p.nk else (even[:2][-1], even[0])
    rich = nq == nk == even[0]
    batch, heads, dim = (2, 4, (c.head_dims or (16,))[0]) if rich else (1, 2, (c.head_dims or (32,))[-1])
    if case.values == "selectors":
        dim = max(dim, nk)  # a dimension for each key
    changes: dict[str, Any] = {"batch": batch, "query_length": nq, "heads": heads, "head_dim": dim}
    changes["key_length"] = None if nq == nk else nk
    changes["key_heads"] = 2 if rich and c.gqa else None
    changes["value_dim"] = 8 if rich and c.value_dim else None
    if p.documents is not None:
        changes["documents"] = tuple(nq if end == p.nq and end else end for end in p.documents)
    if p.key_lengths is not None:
        kept = [nk if length == p.nk else min(length, nk) for length in p.key_lengths]
        changes["key_lengths"] = tuple(kept[place % len(kept)] for place in range(batch))
    return case.replace(**changes)


def length_unit(c: Capabilities, sharding: str, *world_sizes: int) -> int:
    """Return the number that must divide every length, on all of these world sizes."""
    found = 1
    for size in world_sizes:
        shard = size * (c.length_multiple or 1)
        found = math.lcm(found, 1 if c.uneven else math.lcm(shard, even_multiple(sharding, size)))
    return found


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _member(declared: tuple[int, ...] | None, wanted: int) -> int:
    """Return the smallest declared dimension of at least `wanted`, else the last; `wanted` where any is accepted."""
    return wanted if declared is None else min((one for one in declared if one >= wanted), default=declared[-1])
