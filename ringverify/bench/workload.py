"""What is computed: a pattern at one length, on a number of ranks, under the sharding that suits it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, get_args

from ringref.problem import Dilation, DtypeName, Problem
from ringref.sharding import ShardingName
from ringverify.errors import UsageError

PatternName = Literal["dense", "causal", "window", "documents", "uneven", "sinks", "dilation-split", "dilation-shared"]
PATTERNS: tuple[PatternName, ...] = get_args(PatternName)
DILATED: tuple[PatternName, ...] = PATTERNS[-2:]

WINDOW_SHARE = 8
"""A window reaches back over the length of the sequence divided by this."""
DOCUMENT_SHARES = (1, 6, 3, 8, 2)
"""Relative lengths of packed documents, chosen so that no document begins where a rank does."""


BRANCHES = ((8, 1), (4, 2), (2, 4))
"""Default branches of a dilation: what divides the sequence to give the segment length, and the dilation rate."""
Branches = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What all workloads of a run have in common.

    Attributes:
        batch: sequences.
        heads: of queries, keys and values.
        head_dim: of all three.
        dtype: of all three.
        branches: of dilations, segment lengths and rates; `None` is an eighth of the sequence at rate 1, a quarter at
            rate 2 and a half at rate 4.
    """

    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    dtype: DtypeName = "float32"
    branches: Branches | None = None


@dataclasses.dataclass(frozen=True)
class Workload:
    """One thing to compute on one number of ranks.

    Attributes:
        pattern: name of the pattern.
        problem: what to compute.
        sharding: sharding of our ring; an implementation that declares only others is given one of its own.
        world_size: number of ranks.
    """

    pattern: PatternName
    problem: Problem
    sharding: ShardingName
    world_size: int

    @property
    def title(self) -> str:
        """The workload in one line."""
        p = self.problem
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        causal = "" if self.pattern == "causal" else ", causal" if p.causal else ", not causal"
        if p.dilation is not None:
            causal = f" {','.join(f'{w}:{r}' for w, r in p.dilation.branches)}{causal}"
        return f"{self.pattern}{causal}, n={p.nq}, {ranks} {self.sharding}, {p.heads} × {p.head_dim} {p.dtype}"


def workload(pattern: PatternName, length: int, world_size: int, shape: Shape, causal: bool | None = None) -> Workload:
    """Return the workload of a pattern.

    Args:
        pattern: dense: all pairs. causal: balanced by a zigzag sharding. window: the last eighth of the sequence.
            documents: five packed documents of unlike lengths. uneven: one position less than asked for, so that no
            number of ranks divides it. sinks: causal, with learned sinks. dilation-split and dilation-shared: the
            branches, each head one or all of them.
        length: positions over all ranks.
        world_size: number of ranks.
        shape: batch, heads, head_dim, dtype, and branches of dilations.
        causal: whether a pattern other than dense and causal is causal; by default, only dilations are not.

    Raises:
        UsageError: too short for so many ranks, or a pattern that contradicts `causal`.
    """
    if pattern in ("dense", "causal") and causal is not None and causal != (pattern == "causal"):
        raise UsageError(f"--pattern {pattern} contradicts --{'' if causal else 'no-'}causal: leave one of them out")
    if length < 2 * world_size:
        raise UsageError(
            f"--length {length} is too short for {world_size} ranks: pass at least {2 * world_size}, two positions per "
            "rank"
        )
    masked = pattern not in ("dense", *DILATED) if causal is None else causal
    branches = shape.branches or tuple((max(length // part, 1), rate) for part, rate in BRANCHES)
    dilation = Dilation(branches, "split" if pattern == "dilation-split" else "shared")
    size = length - 1 if pattern == "uneven" else length
    problem = Problem(
        query_length=size,
        batch=shape.batch,
        heads=shape.heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        causal=masked,
        window=None if pattern != "window" else (length // WINDOW_SHARE, 0 if masked else length // WINDOW_SHARE),
        documents=_documents(length) if pattern == "documents" else None,
        dilation=dilation if pattern in DILATED else None,
        sinks=pattern == "sinks",
    )
    balanced = pattern in ("causal", "uneven", "sinks")
    return Workload(pattern, problem, "zigzag" if balanced else "contiguous", world_size)


def chosen_patterns(named: Sequence[PatternName], causal: bool | None, *, dilated: bool) -> tuple[PatternName, ...]:
    """Return the patterns of a run: those named, else dilations, or dense and causal as far as `--causal` allows."""
    if named:
        return tuple(named)
    if dilated:
        return DILATED
    return tuple(pattern for pattern in PATTERNS[:2] if causal is None or causal == (pattern == "causal"))


def _documents(length: int) -> tuple[int, ...]:
    ends = accumulate(DOCUMENT_SHARES)
    return (0, *(length * end // sum(DOCUMENT_SHARES) for end in ends))
