"""Rectangles of queries and keys; several are one where they can be: fewer calls of a kernel, and fewer merges.

A rank that holds several runs meets a block in a rectangle for each pair of them. Where causality and nothing else
restricts them, those of its own block are a triangle again, and the two runs of a zigzag shard meet a whole block, or
its first half, as one rectangle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ringverify.ring.plan.rows import Span


class Rectangle(NamedTuple):
    """Queries and keys that attend each other within a band.

    Attributes:
        head_class: number of the class that the key heads belong to; see `head_classes`.
        batch: `[start, stop)` of the batch.
        heads: query heads.
        key_heads: the key heads they read, equally many queries heads each.
        queries: rows of the query's rank.
        keys: rows of the key's rank.
        low: a pair attends only if `j - i >= low`, indices within the spans; `None` is unbounded.
        high: only if `j - i <= high`.
        by_position: the mask has to be looked up by position instead.
    """

    head_class: int
    batch: tuple[int, int]
    heads: Span
    key_heads: Span
    queries: Span
    keys: Span
    low: int | None = None
    high: int | None = None
    by_position: bool = False


def joined(regions: Iterable[Rectangle]) -> tuple[Rectangle, ...]:
    """The same pairs in as few regions as neighbours in the list allow, in the order of the last one of each."""
    found: list[Rectangle] = []
    for region in regions:
        found.append(region)
        while len(found) > 1 and (both := _beside(*found[-2:]) or _below(*found[-2:])) is not None:
            found[-2:] = [both]
    return tuple(found)


def _beside(left: Rectangle, right: Rectangle) -> Rectangle | None:
    """One region if these are the earlier and the later keys of the same queries, and those attend all earlier ones."""
    keys = _after(left.keys, right.keys)
    if keys is None or left.queries != right.queries or left.high is not None or not _alike(left, right):
        return None
    return left._replace(keys=keys, high=None if right.high is None else right.high + left.keys.size)


def _below(upper: Rectangle, lower: Rectangle) -> Rectangle | None:
    """One region if these are earlier and later queries from the same first key on, and one diagonal bounds both."""
    queries = _after(upper.queries, lower.queries)
    if queries is None or not _alike(upper, lower):
        return None
    if upper.high is None or lower.high is None:
        same = upper.high is lower.high and upper.keys == lower.keys
        return upper._replace(queries=queries) if same else None
    # The last of the earlier queries attends no key beyond theirs, and so no later one of the other queries'.
    same = upper.keys[::2] == lower.keys[::2] and upper.keys.size == upper.queries.size + upper.high
    if not same or lower.high - upper.queries.size != upper.high:
        return None
    return upper._replace(queries=queries, keys=lower.keys)


def _after(first: Span, second: Span) -> Span | None:
    """Both as one span, if the second goes on where the first ends."""
    goes_on = first.step == second.step and second.start == first.start + first.step * first.size
    return first._replace(size=first.size + second.size) if goes_on else None


def _alike(one: Rectangle, other: Rectangle) -> bool:
    """Whether they are of the same heads and batch elements, and nothing but a diagonal bounds either."""
    plain = all(r.low is None and not r.by_position for r in (one, other))
    return plain and one[:4] == other[:4]
