"""What a set of vectors covers of the written semantics, and what it lacks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from ringref.pattern import multiplicity
from ringref.problem import Problem
from ringref.sharding import SHARDING_NAMES
from ringverify.vectors.inputs import make
from ringverify.vectors.story import Story, flags

CONSTRAINTS = (
    "causal", "window", "documents", "key_lengths", "cross_lengths", "gqa", "value_dim", "scale", "softcap",
    "sinks", "dilation:split", "dilation:cyclic", "dilation:block",
)  # fmt: skip
DILATIONS = {name for name in CONSTRAINTS if name.startswith("dilation")}


def constraints(problem: Problem) -> set[str]:
    """Which rows of the semantics a problem is about."""
    found = set(flags(problem, "out")) - {"uneven_segments", "negative_scale"}
    if problem.dilation is not None and problem.dilation.heads == "shared":
        found = found - {"dilation:shared"} | {f"dilation:{problem.dilation.head_offset}"}
    return found


def meaningless(pair: Iterable[str]) -> bool:
    """Whether two constraints have no agreed meaning together."""
    both = set(pair)
    return len(both & DILATIONS) == 2 or (len(both & {"documents", "cross_lengths"} | both & DILATIONS) == 2)


def lacking(stories: Iterable[Story]) -> list[str]:
    """What the vectors do not cover, in words."""
    every = list(stories)
    sets = [constraints(story.problem) for story in every]
    found = [f"{name} alone" for name in CONSTRAINTS if {name} not in sets]
    for pair in itertools.combinations(CONSTRAINTS, 2):
        if not meaningless(pair) and not any(set(pair) <= one for one in sets):
            found.append(" with ".join(pair))
    for name in CONSTRAINTS:
        with_lse = [story for story, one in zip(every, sets, strict=True) if name in one and story.cotangent != "out"]
        if not with_lse:
            found.append(f"{name} with a cotangent of lse")
    covered = set(itertools.chain.from_iterable(map(features, every)))
    return found + [feature for feature in FEATURES if feature not in covered]


FEATURES = (
    "window unbounded on the left", "window unbounded on the right", "documents of no length",
    "documents that begin late", "documents that end early", "no document", "no valid key",
    "some rows are empty", "all rows are empty", "empty rows with cotangents",
    "no queries", "no keys", "one query", "one key", "more queries than keys", "more keys than queries",
    "a branch counts twice", "a branch counts three times", "a segment is short", "a rate above its segment",
    "heads that groups do not divide", "more branches than heads", "block offsets rounded up",
    "scores past float16", "a gap past float32", "a gap past float64", "lse is exactly 0", "NaN that nobody attends",
    "exact in bfloat16", "exact in float16", "exact in float32", "exact in float64",
    *(f"{dtype} with a cotangent of lse" for dtype in ("float64", "float32", "bfloat16", "float16")),
    *(f"{s} on {n}" for s in SHARDING_NAMES for n in (2, 3, 4)),
    *(f"{s} uneven" for s in SHARDING_NAMES),
    *(f"{s} with empty shards" for s in SHARDING_NAMES),
    "eight ranks", "one rank",
)  # fmt: skip


def features(story: Story) -> Iterator[str]:
    """Everything else that one vector shows."""
    p = story.problem
    yield from _of_the_mask(p)
    if p.dilation is not None:
        yield from _of_the_dilation(p)
    m = multiplicity(p)
    keys = m.sum(axis=3)
    if keys.size:
        if (keys == 0).any():
            yield "some rows are empty"
            if story.cotangent == "both":
                yield "empty rows with cotangents"
        if not keys.any():
            yield "all rows are empty"
    yield from (f"a branch counts {word}" for n, word in ((2, "twice"), (3, "three times")) if (m == n).any())
    yield from _of_the_numbers(story, m)
    if story.cotangent != "out":
        yield f"{p.dtype} with a cotangent of lse"
    if story.exact:
        yield f"exact in {p.dtype}"
    for layout in story.layouts:
        pieces = layout.world_size * (2 if layout.sharding == "zigzag" else 1)
        yield f"{layout.sharding} on {layout.world_size}"
        yield {8: "eight ranks", 1: "one rank"}.get(layout.world_size, "")
        if p.nq % pieces or p.nk % pieces:
            yield f"{layout.sharding} uneven"
        if min(p.nq, p.nk) < layout.world_size:
            yield f"{layout.sharding} with empty shards"


def _of_the_mask(p: Problem) -> Iterator[str]:
    if p.window is not None:
        yield from (
            f"window unbounded on the {s}" for s, w in zip(("left", "right"), p.window, strict=True) if w is None
        )
    if p.documents is not None:
        offsets = p.documents
        yield "documents of no length" if len(set(offsets)) < len(offsets) else ""
        yield "documents that begin late" if offsets[0] > 0 else ""
        yield "documents that end early" if offsets[-1] < p.nq else ""
        yield "no document" if len(offsets) == 1 else ""
    if p.key_lengths is not None:
        yield "no valid key" if 0 in p.key_lengths else ""
    yield {0: "no queries", 1: "one query"}.get(p.nq, "")
    yield {0: "no keys", 1: "one key"}.get(p.nk, "")
    yield "more queries than keys" if p.nq > p.nk else "more keys than queries" if p.nk > p.nq else ""


def _of_the_dilation(p: Problem) -> Iterator[str]:
    assert p.dilation is not None
    branches = p.dilation.branches
    if any(p.nq % w for w, _ in branches):
        yield "a segment is short"
    if any(r > w for w, r in branches):
        yield "a rate above its segment"
    if p.dilation.heads == "split":
        yield "more branches than heads" if len(branches) > p.heads else ""
        yield "heads that groups do not divide" if p.heads > len(branches) and p.heads % len(branches) else ""
    if p.dilation.head_offset == "block" and any(p.heads % r for _, r in branches):
        yield "block offsets rounded up"


def _of_the_numbers(story: Story, m: np.ndarray) -> Iterator[str]:
    p, x = story.problem, make(story)
    if not m.any():
        return
    if np.isnan(x.k).any():
        yield "NaN that nobody attends"
        return
    keys = np.repeat(x.k, p.group_size, axis=2)
    scores = p.scale_value * np.einsum("bihd,bjhd->bhij", x.q, keys)
    attended = np.where(m > 0, scores, np.nan)
    if p.dtype == "float16" and np.nanmax(np.abs(attended)) > np.finfo(np.float16).max:
        yield "scores past float16"
    if story.values in ("rising", "falling", "steep_rising", "steep_falling"):
        rows = attended[(m > 0).any(axis=-1)]
        gap = np.max(np.nanmax(rows, axis=-1) - np.nanmin(rows, axis=-1))
        yield "a gap past float32" if gap > np.log(np.finfo(np.float32).max) else ""
        yield "a gap past float64" if gap > np.log(np.finfo(np.float64).max) else ""
    if ((attended == 0).sum(axis=-1) == 1)[m.sum(axis=-1) == 1].any():
        yield "lse is exactly 0"
