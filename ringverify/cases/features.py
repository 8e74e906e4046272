"""What is special about a case, in a few words a dimension: what a run counts, to say what its verdict is about.

Each dimension has one value in each case, `ABSENT` where the case does without it: the counts of a dimension add up to
the number of cases.
"""

from __future__ import annotations

from itertools import pairwise

from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case, uneven_or_empty
from ringverify.events import ABSENT, PRESENT

WORLDS = ((1, "1"), (2, "2"), (4, "3-4"), (8, "5-8"))
"""Largest world size of each range, and the range; larger ones are `MORE_WORLDS`."""

MORE_WORLDS = "more than 8"
KEYS = ((1, "0-1"), (8, "2-8"), (32, "9-32"))
"""The same of the most keys on a rank. Kernels have tiles of 32 keys or more."""

DIMS = ((8, "1-8"), (32, "9-32"))
"""The same of the head dimension."""


def features_of(case: Case) -> dict[str, str]:
    """Return the features of a case: the value of each dimension, always for the same dimensions in the same order."""
    p, size = case.problem, case.world_size
    nq, nk, head_dim, dilation = p.nq, p.nk, p.head_dim, p.dilation
    held = -(-nk // size)
    uneven, empty = uneven_or_empty(case)
    sides = len({p.batch, -(-nq // size), p.heads, head_dim})
    return {
        "world size": world_size_range(size),
        "sharding": case.sharding,
        "causal": PRESENT if p.causal else ABSENT,
        "window": _window(p.window),
        "documents": ABSENT if p.documents is None else _documents(p.documents, nq),
        "key_lengths": ABSENT if p.key_lengths is None else PRESENT,
        "dilation": ABSENT if dilation is None else dilation.heads,
        "softcap": ABSENT if p.softcap is None else PRESENT,
        "sinks": PRESENT if p.sinks else ABSENT,
        "scale": ABSENT if p.scale is None else "negative" if p.scale < 0 else "positive",
        "cross_lengths": ABSENT if nq == nk else "more keys" if nk > nq else "more queries",
        "gqa": ABSENT if p.hk == p.heads else PRESENT,
        "value_dim": ABSENT if p.dv == head_dim else PRESENT,
        "dtype": p.dtype,
        "lengths": "empty shards" if empty else "uneven" if uneven else "even",
        "empty rows": PRESENT if leaves_rows_empty(p) else ABSENT,
        "keys on a rank": _range(held, KEYS, "more than 32"),
        "head_dim": _range(head_dim, DIMS, "more than 32"),
        "dimensions": "all equal" if sides == 1 else "all different" if sides == 4 else "some equal",
        "values": case.values,
        "memory": case.memory,
        "cotangent": case.cotangent,
        "group": case.group,
        "transport": case.transport,
        "delayed": PRESENT if case.delayed else ABSENT,
    }


def world_size_range(size: int) -> str:
    """Return the range of world sizes that a world size lies in."""
    return _range(size, WORLDS, MORE_WORLDS)


def _range(number: int, ranges: tuple[tuple[int, str], ...], more: str) -> str:
    for largest, name in ranges:
        if number <= largest:
            return name
    return more


def _window(window: tuple[int | None, int | None] | None) -> str:
    if window is None:
        return ABSENT
    left, right = window
    if left is None:
        return "unbounded" if right is None else "right"
    return "left" if right is None else "both sides"


def _documents(offsets: tuple[int, ...], length: int) -> str:
    return "everywhere" if (offsets[0], offsets[-1]) == (0, length) else "with padding"


def leaves_rows_empty(p: Problem) -> bool:
    """Return whether some query attends no key, without making the pattern.

    It may miss rows that only a dilation and key_lengths together empty.
    """
    n = p.nq
    if not n:
        return False
    keys = p.nk if p.key_lengths is None else min(p.key_lengths)
    left, right = p.window or (None, None)
    if not keys or ((p.causal or right is not None) and p.nk - n + (0 if p.causal else right or 0) < 0):
        return True
    if p.documents is not None:
        if p.documents[0] > 0 or p.documents[-1] < n:
            return True
        return any(
            start < end and max(start, 0 if left is None else end - 1 - left) >= keys
            for start, end in pairwise(p.documents)
        )
    if left is not None and p.nk - 1 - left >= keys:
        return True
    return p.dilation is not None and _uncovered(p.dilation, p.heads, n)


def _uncovered(d: Dilation, heads: int, n: int) -> bool:
    """Return whether no branch of some head covers some of `n` positions."""
    if d.heads == "split":
        used = enumerate(d.branches[:heads])
        return any(rate > 1 and (min(segment, n) > 1 or branch % rate > 0) for branch, (segment, rate) in used)
    if any(rate == 1 for _, rate in d.branches):
        return False
    for head in range(heads):
        offsets = [head % r if d.head_offset == "cyclic" else head // -(-heads // r) for _, r in d.branches]
        branches = [(w, r, offset) for (w, r), offset in zip(d.branches, offsets, strict=True)]
        if not all(any(p % w % r == offset for w, r, offset in branches) for p in range(n)):
            return True
    return False
