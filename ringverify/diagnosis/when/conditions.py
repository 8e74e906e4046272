"""The conditions in terms of which a failure is explained: statements about a case, each in a few words.

A condition has a cost: the longer its words and the rarer it is as the reason of a fault, the higher. Of several
explanations that fit all runs, the cheapest is the one to report.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from ringref.pattern import branches_through, multiplicity
from ringref.problem import Problem
from ringverify.cases.case import Case, even_multiple
from ringverify.cases.inputs import make_inputs
from ringverify.cases.running import shards
from ringverify.implementation import Capabilities

Feature = int | float | bool | str

Features = Mapping[str, Feature]
"""What conditions look at in a case, by name."""

LARGE = ("dominating_key", "large_scores", "rising_blocks", "falling_blocks", "float16_limits")
"""Families of values with scores far apart."""


HALF = ("bfloat16", "float16")
"""Dtypes of 16 bits."""


@dataclasses.dataclass(frozen=True)
class Condition:
    """A statement about a case.

    Attributes:
        text: it in words, to follow "needs": "at least 3 ranks".
        factors: names of the factors that it is about, such as "ranks".
        cost: how long and how rare it is; lower is preferred.
        about: names of the features that it looks at; it says the same of cases that are alike in them.
        meets: whether features meet it.
        said: False for what every case of interest meets, such as a length of two: it explains a run and is not news.
        most: the largest number that meets it, of a condition that says "at most".
        limit: how likely it is that a number in it stands for a relation of several ones: 0 if it has none but 1 or 2,
            1 if it says "at least", "even" or "odd", 2 if it says else.
        few: whether it says "at most" or "exactly": larger numbers do not meet it.
    """

    text: str
    factors: frozenset[str]
    cost: float
    about: tuple[str, ...]
    meets: Callable[[Features], bool]
    said: bool = True
    most: int | None = None
    limit: int = 0
    few: bool = False


@dataclasses.dataclass(frozen=True)
class Placed:
    """A case, and the positions that each rank holds."""

    case: Case
    queries: list[np.ndarray]
    keys: list[np.ndarray]

    @classmethod
    def of(cls, case: Case, capabilities: Capabilities) -> Placed:
        """Return the case with the positions of its sharding."""
        return cls(case, *shards(case, capabilities))

    @property
    def p(self) -> Problem:
        """The problem."""
        return self.case.problem

    @functools.cached_property
    def here(self) -> int:
        """Most keys on a rank."""
        return max(len(rows) for rows in self.keys)

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """The sides of the window; `None` where it is not bounded."""
        return self.p.window or (None, None)

    @property
    def bounds(self) -> list[int]:
        """The sides of a window that are bounded."""
        return [side for side in self.sides if side is not None]

    @property
    def documents(self) -> tuple[int, ...]:
        """The offsets of documents; 0 alone where there are none."""
        return self.p.documents or (0,)

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """The branches of a dilation."""
        return () if self.p.dilation is None else self.p.dilation.branches

    @property
    def padded(self) -> bool:
        """Whether some batch entry has padding."""
        return self.p.key_lengths is not None and min(self.p.key_lengths) < self.p.nk

    @functools.cached_property
    def lengths(self) -> set[tuple[int, int]]:
        """Numbers of queries and keys that ranks hold."""
        return {(len(queries), len(keys)) for queries, keys in zip(self.queries, self.keys, strict=True)}

    def crossing(self, first: int = 0) -> bool:
        """Whether the positions of one document lie on several ranks, of which none is before the first one."""
        on = [
            [bool(((rows >= a) & (rows < b)).any()) for rows in self.keys]
            for a, b in itertools.pairwise(self.documents)
        ]
        return any(sum(ranks) > 1 and not any(ranks[:first]) for ranks in on)

    def documents_here(self) -> int:
        """Return on how many documents the positions of a rank lie, at most."""
        cuts = np.array(self.documents)
        on = [np.unique(np.searchsorted(cuts, rows, side="right")) for rows in self.keys]  # 0 and all of them: outside
        return max(int(((found > 0) & (found < len(cuts))).sum()) for found in on)

    def bordering(self) -> bool:
        """Whether a document that has positions begins or ends where the shard of a rank other than 0 begins."""
        begins = {int(rows.min()) for rows in self.keys[1:] if len(rows)}
        ends = {cut for a, b in itertools.pairwise(self.documents) if a < b for cut in (a, b)}
        return not begins.isdisjoint(ends)

    def inside(self, cuts: tuple[int, ...]) -> bool:
        """Whether some rank holds positions before and after one of the cuts."""
        return any(bool((rows < cut).any() and (rows >= cut).any()) for rows in self.keys for cut in cuts if cut)

    @functools.cached_property
    def pairs(self) -> np.ndarray:
        """Which query attends which key: `(B, H, Nq, Nk)`, with one batch entry or head for all that are alike."""
        p = self.p
        if p.dilation is None:
            p = p.replace(heads=1, key_heads=None)
        return multiplicity(p if p.key_lengths else p.replace(batch=1)) > 0

    @functools.cached_property
    def attended(self) -> np.ndarray:
        """Numbers of keys that queries attend: `(B, H, Nq)`, as in `pairs`."""
        found: np.ndarray = self.pairs.sum(axis=-1)
        return found

    @functools.cached_property
    def owners(self) -> np.ndarray:
        """On which ranks a query attends keys: `(B, H, Nq, P)`, as in `pairs`."""
        return np.stack([self.pairs[..., held].any(axis=-1) for held in self.keys], axis=-1)

    @functools.cached_property
    def links(self) -> set[tuple[int, int]]:
        """Pairs of a rank and of one whose keys its queries attend."""
        return {
            (rank, int(owner))
            for rank, held in enumerate(self.queries)
            for owner in np.flatnonzero(self.owners[:, :, held].any(axis=(0, 1, 2)))
        }

    @functools.cached_property
    def blocks(self) -> list[np.ndarray]:
        """Which query of a rank attends which key of a rank, `(B, H, n, m)` as in `pairs`, for each two with tokens."""
        sides = itertools.product(self.queries, self.keys)
        return [self.pairs[:, :, rows][..., keys] for rows, keys in sides if len(rows) and len(keys)]

    def cut_from(self, distance: int) -> bool:
        """Whether a mask hides a block in part from a rank that is as far away, either way round."""
        ranks = range(size := self.case.world_size)
        return any(
            bool((block := self.pairs[:, :, self.queries[rank]][..., self.keys[owner]]).any()) and not block.all()
            for rank, owner in itertools.product(ranks, ranks)
            if min((rank - owner) % size, (owner - rank) % size) >= distance
        )

    def hides(self, mask: str) -> bool:
        """Whether a mask excludes a pair that nothing else does."""
        if getattr(self.p, mask) is None:
            return False
        without = Placed(self.case.replace(**{mask: None}), self.queries, self.keys)
        return bool((without.pairs != self.pairs).any())

    def through(self) -> bool:
        """Whether a document, or the sequence where there are none, begins before a rank's keys and ends after them."""
        spans = list(itertools.pairwise(self.p.documents or (0, self.p.nk)))
        return any(a < rows.min() and rows.max() + 1 < b for rows in self.keys if len(rows) for a, b in spans)

    def early_page(self) -> bool:
        """Whether a rank holds a page that is not full before another one that holds keys."""
        table = self.case.page_table
        if table is None:
            return False
        size = table.page_size
        filled = [[min(size, call.problem.nk - page * size) for page in held]
                  for call in self.case.calls for held in table.pages]  # fmt: skip
        return any(n < size and max(later, default=0) > 0 for pages in filled
                   for n, *later in (pages[at:] for at in range(len(pages))))  # fmt: skip

    def idle_block(self) -> bool:
        """Whether a rank attends no key of some rank, or has no queries, or that rank no keys."""
        return self.p.nq > 0 and self.p.nk > 0 and len(self.links) < self.case.world_size**2

    def elsewhere(self) -> bool:
        """Whether a query attends keys, but none of its own rank."""
        return any(
            bool((self.owners[:, :, held].any(axis=-1) & ~self.owners[:, :, held, rank]).any())
            for rank, held in enumerate(self.queries)
        )

    def hidden_from_own(self) -> bool:
        """Whether a query attends no key of its own rank."""
        return any(bool((~self.owners[:, :, held, rank]).any()) for rank, held in enumerate(self.queries))

    def opposite(self) -> bool:
        """Whether queries attend keys that are half of the ranks away."""
        size = self.case.world_size
        return any(2 * abs(rank - owner) == size for rank, owner in self.links)

    def blind(self, row: int) -> bool:
        """Whether a rank attends some block, but its first query (0) or its last (−1) does not."""
        return any(
            bool((self.owners[:, :, held].any(axis=2) & ~self.owners[:, :, held[row]]).any())
            for held in self.queries
            if len(held)
        )

    def blind_at_first(self) -> bool:
        """Whether a query attends nothing in the first block, hop by hop, of which its rank attends any."""
        for rank, held in enumerate(self.queries):
            for hop in range(self.case.world_size):
                attended = self.owners[:, :, held, (rank - hop) % self.case.world_size]
                if attended.any():
                    if not attended.all():
                        return True
                    break
        return False

    def keyless(self) -> bool:
        """Whether a query attends no key of a batch entry that has some."""
        lengths = np.array(self.p.key_lengths or (self.p.nk,))
        return bool((self.attended[lengths > 0] == 0).any())

    def keyless_beside(self) -> bool:
        """Whether a query attends no key, on a rank of which another query, or it in another batch entry, does."""
        seen = (self.attended[:, :, held] > 0 for held in self.queries)
        return any(bool(one.any()) and not one.all() for one in seen)

    def unattended(self) -> bool:
        """Whether no query of all heads that share a key head attends some key."""
        seen = np.asarray(self.pairs.any(axis=2))
        by_head = np.broadcast_to(seen, (len(seen), self.p.heads, self.p.nk))
        return not by_head.reshape(len(seen), self.p.hk, self.p.group_size, self.p.nk).any(axis=2).all()

    def blind_owner(self) -> bool:
        """Whether a rank's queries attend no key, if it has any, and its keys are attended."""
        return any(
            not self.pairs[:, :, queries].any() and bool(self.pairs[..., keys].any())
            for queries, keys in zip(self.queries, self.keys, strict=True)
        )

    @functools.cached_property
    def kept(self) -> list[np.ndarray]:
        """Which positions a branch keeps in which head, `(H, Nq)`: one for each branch, if heads share them."""
        d = self.p.dilation
        if d is None:
            return []
        shared = d.heads == "shared"
        alone = [dataclasses.replace(d, branches=(branch,)) for branch in self.branches] if shared else [d]
        i = np.arange(self.p.nq)
        # A branch that covers a query lets it through to its own place.
        return [branches_through(i[:, None], i[None], dilation=one, heads=self.p.heads)[:, i, i] > 0 for one in alone]

    def covered_by_some(self) -> bool:
        """Whether some branches of a dilation with shared heads cover a query, and others do not, in some head."""
        return any(bool((one != self.kept[0]).any()) for one in self.kept)

    def not_contiguous(self) -> bool:
        """Whether q, k or v of some rank is not contiguous in memory: an axis of one element is no matter."""
        p, layout = self.p, self.case.memory
        inputs = [(n, p.heads, p.head_dim) for n in map(len, self.queries)]
        inputs += [(n, p.hk, dim) for n in map(len, self.keys) for dim in (p.head_dim, p.dv)]
        return any(
            p.batch * n * heads * dim > 0
            and (
                layout == "expanded"
                or (layout == "transposed" and n > 1 and heads > 1)
                or (layout == "strided" and p.batch * n > 1)
                or (layout == "packed" and p.batch * n * heads > 1)
            )
            for n, heads, dim in inputs
        )

    def idle_branch(self) -> bool:
        """Whether a rank holds positions, and a branch keeps none of them in some head."""
        held = (one[:, rows] for one in self.kept for rows in self.queries if len(rows))
        return any(not kept.any(axis=1).all() for kept in held)

    def unlike_hops(self, side: int | None) -> bool:
        """Whether a side of a window ends another number of shards away by the longest shard than by the shortest."""
        least, others = min(len(rows) for rows in self.keys), self.case.world_size - 1
        hops = {min(others, -(-(side or 0) // n)) for n in (least, self.here) if least}
        return len(hops) > 1

    def dealt_otherwise_by_chunk(self) -> bool:
        """Whether `torch.chunk`, whose pieces are as long as the first but for the last ones, would deal otherwise."""
        pieces, n = even_multiple(self.case.sharding, self.case.world_size), self.p.nk
        longer = n % pieces  # pieces that are one longer than the others
        return self.case.sharding in ("contiguous", "zigzag") and longer > 0 and (longer < pieces - 1 or n < pieces)


IDLE_BLOCK = "a rank that attends no key of some rank"
HIDDEN_BLOCK = "a block of keys that a mask hides from a whole rank"
SKIPPING = (IDLE_BLOCK, HIDDEN_BLOCK)
"""Conditions of what goes wrong where a block may be skipped."""

MASKED = "causal+window+documents+key_lengths+dilation+cross lengths"

FLAGS: dict[str, tuple[str, str, float, Callable[[Placed], bool]]] = {
    "causal": ("causal", "causal", 1.0, lambda one: one.p.causal),
    "not_causal": ("not causal", "causal", 1.1, lambda one: not one.p.causal),
    "window": ("window", "window", 1.0, lambda one: one.p.window is not None),
    "no_window": ("no window", "window", 1.2, lambda one: one.p.window is None),
    "left": ("a window bounded on the left", "window", 1.2, lambda one: one.sides[0] is not None),
    "right": ("a window bounded on the right", "window", 1.2, lambda one: one.sides[1] is not None),
    "zero_side": ("a window that is 0 on one side", "window", 1.3,
        lambda one: 0 in one.sides[: 1 if one.p.causal else 2]),
    "zero_left": ("a window that is 0 on the left", "window", 1.28, lambda one: one.sides[0] == 0),
    "no_left": ("a window unbounded on the left", "window", 1.25,
        lambda one: one.p.window is not None and one.sides[0] is None),
    "no_right": ("a window unbounded on the right", "window", 1.25,
        lambda one: one.p.window is not None and one.sides[1] is None),
    "forward": ("a window bounded on the right, without causal", "window", 1.6,
        lambda one: one.sides[1] is not None and not one.p.causal),
    "narrow": ("a window narrower than a rank's shard", "window+length", 1.3,
        lambda one: any(side < one.here for side in one.bounds)),
    "narrow_left": ("a window shorter to the left than a rank's shard", "window+length", 1.3,
        lambda one: one.sides[0] is not None and one.sides[0] < one.here),
    "narrow_right": ("a window shorter to the right than a rank's shard", "window+length", 1.3,
        lambda one: one.sides[1] is not None and one.sides[1] < one.here),
    "wide": ("a window wider than a rank's shard", "window+length", 1.4,
        lambda one: one.p.window is not None and all(side >= one.here for side in one.bounds)),
    "far": ("a window that reaches past the next shard", "window+length", 1.4,
        lambda one: one.case.world_size > 2 and any(side > one.here for side in one.bounds)),
    "far_left": ("a window that reaches past the next shard to the left", "window+length", 1.42,
        lambda one: one.case.world_size > 2 and (one.sides[0] or 0) > one.here),
    "far_right": ("a window that reaches past the next shard to the right", "window+length", 1.42,
        lambda one: one.case.world_size > 2 and (one.sides[1] or 0) > one.here),
    "below_ranks_left": ("a window shorter to the left than the number of ranks", "window+ranks", 1.44,
        lambda one: one.sides[0] is not None and one.sides[0] < one.case.world_size),
    "below_ranks_right": ("a window shorter to the right than the number of ranks", "window+ranks", 1.44,
        lambda one: one.sides[1] is not None and one.sides[1] < one.case.world_size),
    "cut_by_ranks_left": ("a window whose left side the ranks do not divide", "window+ranks", 1.43,
        lambda one: one.sides[0] is not None and one.sides[0] % one.case.world_size != 0),
    "cut_by_ranks_right": ("a window whose right side the ranks do not divide", "window+ranks", 1.43,
        lambda one: one.sides[1] is not None and one.sides[1] % one.case.world_size != 0),
    "cut_left": ("a window whose left side is no multiple of a rank's shard", "window+length", 1.35,
        lambda one: one.sides[0] is not None and one.sides[0] % (one.here or 1) != 0),
    "cut_right": ("a window whose right side is no multiple of a rank's shard", "window+length", 1.4,
        lambda one: one.sides[1] is not None and one.sides[1] % (one.here or 1) != 0),
    "hiding_window": ("a window that hides something", "window+length+causal", 1.3, lambda one: one.hides("window")),
    "unlike_hops_left": ("a window that ends fewer shards to the left by the longest shard than by the shortest",
        "window+length+ranks+even shards", 1.44, lambda one: one.unlike_hops(one.sides[0])),
    "unlike_hops_right": ("a window that ends fewer shards to the right by the longest shard than by the shortest",
        "window+length+ranks+even shards", 1.44, lambda one: one.unlike_hops(one.sides[1])),
    "past_all": ("a window that reaches further back than all other shards together", "window+length+ranks", 1.45,
        lambda one: one.case.world_size > 1 and (one.sides[0] or 0) > (one.case.world_size - 1) * one.here),
    "documents": ("documents", "documents", 1.0, lambda one: one.p.documents is not None),
    "no_documents": ("no documents", "documents", 1.2, lambda one: one.p.documents is None),
    "several_documents": ("several documents", "documents", 1.2, lambda one: len(one.documents) > 2),
    "hiding_documents": ("documents that hide something", "documents+length+window+causal", 1.25,
        lambda one: one.hides("documents")),
    "crossing": ("a document on several ranks", "documents+length", 1.3, Placed.crossing),
    "inner_boundary": ("a document that begins or ends inside a rank's shard", "documents+length", 1.3,
        lambda one: one.inside(one.documents)),
    "inner_begin": ("a document that begins inside a rank's shard", "documents+length", 1.4,
        lambda one: one.inside(one.documents[:-1])),
    "bordering": ("a document that begins or ends where the shard of a rank other than the first begins",
        "documents+length", 1.42, Placed.bordering),
    "crossing_later": ("a document on several ranks that does not begin on the first", "documents+length+ranks", 1.41,
        lambda one: one.crossing(first=1)),
    "uneven_begin": ("a document that begins at a position that is no multiple of the ranks", "documents+ranks", 1.45,
        lambda one: any(begin % one.case.world_size for begin in one.documents[:-1])),
    "empty_document": ("a document without positions", "documents", 1.4,
        lambda one: any(a == b for a, b in itertools.pairwise(one.documents))),
    "outside": ("positions outside all documents", "documents", 1.5,
        lambda one: one.p.documents is not None and (one.documents[0] > 0 or one.documents[-1] < one.p.nk)),
    "before_documents": ("positions before the first document", "documents", 1.52,
        lambda one: one.documents[0] > 0),
    "after_documents": ("positions after the last document", "documents", 1.52,
        lambda one: one.p.documents is not None and one.documents[-1] < one.p.nk),
    "through": ("a document, or the sequence, that begins before a rank's shard and ends after it",
        "documents+ranks+length", 1.48, Placed.through),
    "key_lengths": ("key_lengths", "key_lengths", 1.0, lambda one: one.p.key_lengths is not None),
    "no_key_lengths": ("no key_lengths", "key_lengths", 1.2, lambda one: one.p.key_lengths is None),
    "padded": ("key_lengths below the length", "key_lengths", 1.1, lambda one: one.padded),
    "padded_rank": ("key_lengths that leave a rank without keys", "key_lengths+length+ranks", 1.4,
        lambda one: one.padded and any(len(r) > 0 and min(one.p.key_lengths or ()) <= r.min() for r in one.keys)),
    "cut_lengths": ("a key length that the ranks do not divide", "key_lengths+ranks", 1.42,
        lambda one: any(length % one.case.world_size for length in one.p.key_lengths or ())),
    "inner_end": ("a key length that ends inside a rank's shard", "key_lengths+length+ranks", 1.41,
        lambda one: one.inside(one.p.key_lengths or ())),
    "no_key_entry": ("a batch entry without keys", "key_lengths", 1.4,
        lambda one: one.p.key_lengths is not None and 0 in one.p.key_lengths),
    "past_shortest": ("a query with keys past the shortest of key_lengths", "key_lengths+batch", 1.395,
        lambda one: one.p.key_lengths is not None and bool(one.pairs[..., min(one.p.key_lengths) :].any())),
    "ragged": ("key_lengths that differ between batch entries", "key_lengths+batch", 1.4,
        lambda one: one.p.key_lengths is not None and len(set(one.p.key_lengths)) > 1),
    "dilation": ("dilation", "dilation", 1.0, lambda one: one.p.dilation is not None),
    "no_dilation": ("no dilation", "dilation", 1.2, lambda one: one.p.dilation is None),
    "split": ("dilation with split heads", "dilation", 1.2,
        lambda one: one.p.dilation is not None and one.p.dilation.heads == "split"),
    "shared": ("dilation with shared heads", "dilation", 1.2,
        lambda one: one.p.dilation is not None and one.p.dilation.heads == "shared"),
    "long_segment": ("dilation with a segment on several ranks", "dilation+length", 1.4,
        lambda one: one.case.world_size > 1 and any(segment > one.here for segment, _ in one.branches)),
    "cut_segment": ("a segment length that does not divide a rank's shard", "dilation+length", 1.4,
        lambda one: any(one.here % segment for segment, _ in one.branches)),
    "unaligned_segment": ("a segment length that neither divides a rank's shard nor is a multiple of it",
        "dilation+length", 1.42, lambda one: any(
            one.here % segment and segment % max(1, one.here) for segment, _ in one.branches)),
    "inner_segment": ("a segment of the dilation that begins inside a rank's shard", "dilation+length", 1.43,
        lambda one: any(one.inside(tuple(range(segment, one.p.nk, segment))) for segment, _ in one.branches)),
    "cut_by_rate": ("a dilation rate that does not divide a rank's shard", "dilation+length", 1.44,
        lambda one: any(one.here % rate for _, rate in one.branches)),
    "short_segment": ("a segment shorter than a rank's shard", "dilation+length", 1.45,
        lambda one: any(one.here > segment for segment, _ in one.branches)),
    "short_segment_last": ("a segment length that does not divide the length", "dilation+length", 1.42,
        lambda one: any(one.p.nk % segment for segment, _ in one.branches)),
    "unlike_branches": ("branches of a dilation that differ", "dilation", 1.4, lambda one: len(set(one.branches)) > 1),
    "rate_again": ("two branches of a dilation with the same rate", "dilation", 1.41,
        lambda one: len({rate for _, rate in one.branches}) < len(one.branches)),
    "segment_again": ("two branches of a dilation with segments of the same length", "dilation", 1.42,
        lambda one: len({segment for segment, _ in one.branches}) < len(one.branches)),
    "shorter_last": ("a last segment of the dilation that is shorter than one before it", "dilation+length", 1.43,
        lambda one: any(one.p.nk % segment and one.p.nk > segment for segment, _ in one.branches)),
    "fewer_last": ("a last segment of the dilation with fewer positions that count than one before it",
        "dilation+length", 1.44, lambda one: any(
            one.p.nk > segment and 0 < -(-(one.p.nk % segment) // rate) < -(-segment // rate)
            for segment, rate in one.branches)),
    "cut_rate": ("a dilation rate that does not divide its segment", "dilation", 1.45,
        lambda one: any(segment % rate for segment, rate in one.branches)),
    "cut_segments": ("a dilation rate that does not divide its segment, and a second segment", "dilation+length", 1.48,
        lambda one: any(segment % rate and one.p.nq > segment for segment, rate in one.branches)),
    "above_rate": ("dilation with shared heads, more of them than a rate above 1", "dilation+heads", 1.35,
        lambda one: one.p.dilation is not None and one.p.dilation.heads == "shared"
        and any(1 < r < one.p.heads for _, r in one.branches)),
    "by_blocks": ('head_offset "block"', "dilation", 1.25,
        lambda one: one.p.dilation is not None and one.p.dilation.head_offset == "block"),
    "cyclic": ('dilation with shared heads and head_offset "cyclic"', "dilation", 1.3,
        lambda one: one.p.dilation is not None and (one.p.dilation.heads, one.p.dilation.head_offset) == (
            "shared", "cyclic")),
    "cut_offsets": ("a dilation rate below the number of heads that does not divide it", "dilation+heads", 1.48,
        lambda one: any(rate < one.p.heads and one.p.heads % rate for _, rate in one.branches)),
    "covered_by_some": ("a query that one branch of a dilation covers and another does not", "dilation", 1.48,
        Placed.covered_by_some),
    "uneven_branches": ("a number of heads that the branches of a dilation do not divide", "dilation+heads", 1.45,
        lambda one: len(one.branches) > 0 and one.p.heads % len(one.branches) != 0),
    "many_branches": ("more branches of a dilation than heads", "dilation+heads", 1.5,
        lambda one: len(one.branches) > one.p.heads),
    "idle_branch": ("a rank of whose positions a branch of the dilation keeps none", "dilation+heads+length+ranks",
        1.46, Placed.idle_branch),
    "void_branch": ("a branch of the dilation that keeps no position in some head", "dilation+heads", 1.45,
        lambda one: any(not kept.any(axis=1).all() for kept in one.kept)),
    "softcap": ("softcap", "softcap", 1.0, lambda one: one.p.softcap is not None),
    "no_softcap": ("no softcap", "softcap", 1.2, lambda one: one.p.softcap is None),
    "sinks": ("learned sinks", "sinks", 1.0, lambda one: one.p.sinks),
    "no_sinks": ("no learned sinks", "sinks", 1.2, lambda one: not one.p.sinks),
    "sinkless": ("a head without a sink, or with one of −inf", "sinks+values", 1.25,
        lambda one: (sinks := make_inputs(one.case).sinks if one.p.sinks else None) is None
        or bool(np.isneginf(sinks).any())),
    "scale": ("a scale of its own", "scale", 1.0,
        lambda one: one.p.scale is not None and one.p.scale != one.p.head_dim**-0.5),
    "negative_scale": ("a negative scale", "scale", 1.2, lambda one: one.p.scale_value < 0),
    "scaled": ("a scale other than 1", "scale+dims", 1.15, lambda one: one.p.scale_value != 1),
    "rounded_scale": ("a scale that is no power of two", "scale+dims", 1.4,
        lambda one: abs(math.frexp(one.p.scale_value)[0]) != 0.5),
    "cross": ("queries and keys of different lengths", "cross lengths", 1.1, lambda one: one.p.nq != one.p.nk),
    "other_remainder": ("numbers of queries and keys that differ by no multiple of the ranks", "cross lengths+ranks",
        1.19, lambda one: (one.p.nq - one.p.nk) % one.case.world_size != 0),
    "more_keys": ("more keys than queries", "cross lengths", 1.2, lambda one: one.p.nk > one.p.nq),
    "more_queries": ("more queries than keys", "cross lengths", 1.2, lambda one: one.p.nq > one.p.nk),
    "gqa": ("fewer key heads than heads (GQA)", "key heads", 1.05, lambda one: one.p.hk != one.p.heads),
    "other_value_dim": ("value_dim other than head_dim", "dims", 1.1, lambda one: one.p.dv != one.p.head_dim),
    "same_dims": ("value_dim equal to head_dim", "dims", 1.25, lambda one: one.p.dv == one.p.head_dim),
    "wide_values": ("value_dim above head_dim", "dims", 1.3, lambda one: one.p.dv > one.p.head_dim),
    "narrow_values": ("value_dim below head_dim", "dims", 1.3, lambda one: one.p.dv < one.p.head_dim),
    "empty_rows": ("a query without keys", "empty rows+cross lengths", 1.3, lambda one: 0 in one.attended),
    "keyless": ("a query without keys in a batch entry that has keys", "empty rows+key_lengths", 1.35, Placed.keyless),
    "keyless_beside": ("a query without keys, on a rank where some query has any", f"empty rows+{MASKED}", 1.36,
        Placed.keyless_beside),
    "keyless_after_first": ("a query without keys on a rank other than the first", f"empty rows+ranks+{MASKED}", 1.37,
        lambda one: not one.case.replicated and any(0 in one.attended[:, :, held] for held in one.queries[1:])),
    "hidden": ("a query from which a mask hides some of its keys", MASKED, 1.4,
        lambda one: bool(((one.attended > 0) & (one.attended < one.p.nk)).any())),
    "opposite": ("a query with keys on the opposite rank, half of the ranks away", f"ranks+{MASKED}", 1.45,
        Placed.opposite),
    "idle_block": (IDLE_BLOCK, f"ranks+length+even shards+{MASKED}", 2.2, Placed.idle_block),
    "hidden_block": (HIDDEN_BLOCK, f"ranks+{MASKED}", 1.45,
        lambda one: any(not block.any() for block in one.blocks)),
    "cut_block": ("a block of keys that a mask hides from a rank in part", f"ranks+length+{MASKED}", 1.47,
        lambda one: any(block.any() and not block.all() for block in one.blocks)),
    "cut_far": ("a block of keys at least 2 ranks away, either way round, that a mask hides from a rank in part",
        f"ranks+length+{MASKED}", 1.49, lambda one: one.cut_from(2)),
    "abroad": ("a query with keys on another rank", f"ranks+{MASKED}", 1.3,
        lambda one: any(rank != owner for rank, owner in one.links)),
    "of_later": ("a query with keys on a later rank", f"ranks+sharding+{MASKED}", 1.42,
        lambda one: any(rank < owner for rank, owner in one.links)),
    "of_earlier": ("a query with keys on an earlier rank", f"ranks+sharding+{MASKED}", 1.42,
        lambda one: any(rank > owner for rank, owner in one.links)),
    "elsewhere": ("a query with keys on other ranks only", f"ranks+{MASKED}", 1.46, Placed.elsewhere),
    "hidden_own": ("a query without keys on its own rank", f"ranks+{MASKED}", 1.45, Placed.hidden_from_own),
    "own_hidden": ("a rank whose queries attend keys, and none of its own", f"ranks+{MASKED}", 1.47,
        lambda one: any((rank, rank) not in one.links for rank, _ in one.links)),
    "hidden_rank": ("a query without keys on some rank that holds any", f"ranks+{MASKED}", 1.465,
        lambda one: bool((~one.owners[..., [len(held) > 0 for held in one.keys]]).any())),
    "some_ranks": ("a query with keys on some ranks only", f"ranks+{MASKED}", 1.46,
        lambda one: bool(
            (one.owners.any(-1) & (one.owners.sum(-1) < sum(len(held) > 0 for held in one.keys))).any())),
    "blind_beside": ("a block that a query of a rank attends, and another query of it does not",
        f"ranks+length+{MASKED}", 1.455, lambda one: any(
            bool((some := block.any(axis=-1)).any()) and not some.all() for block in one.blocks)),
    "first_blind": ("a block that a query of a rank attends, and the rank's first query does not",
        f"ranks+length+{MASKED}", 1.47, lambda one: one.blind(0)),
    "last_blind": ("a block that a query of a rank attends, and the rank's last query does not",
        f"ranks+length+{MASKED}", 1.47, lambda one: one.blind(-1)),
    "blind_at_first": ("a query without keys in the first block, hop by hop, of which its rank attends any",
        f"ranks+length+cross lengths+{MASKED}", 1.49, Placed.blind_at_first),
    "unattended": ("a key that no query attends", f"length+key heads+{MASKED}", 1.46, Placed.unattended),
    "blind_owner": ("a rank whose queries attend no key, and whose keys queries of another rank attend",
        f"ranks+length+cross lengths+{MASKED}", 1.46, Placed.blind_owner),
    "blind_rank": ("a rank whose queries attend no key", f"ranks+length+even shards+cross lengths+{MASKED}", 1.455,
        lambda one: any(len(rows) > 0 and not one.pairs[:, :, rows].any() for rows in one.queries)),
    "blind_entry": ("a block that a batch entry attends, and the first batch entry does not", "key_lengths+batch+ranks",
        1.45, lambda one: any(block.any() and not block[0].any() for block in one.blocks)),
    "beyond_first": ("a key that some batch entry attends, and the first one does not", "key_lengths+batch", 1.43,
        lambda one: bool((one.pairs.any(axis=2) & ~one.pairs[:1].any(axis=2)).any())),
    "hidden_first": ("a query from which a mask hides the first key", MASKED, 1.55,
        lambda one: one.p.nk > 0 and not one.pairs[..., 0].all()),
    "hidden_last": ("a query from which a mask hides the last key", MASKED, 1.55,
        lambda one: one.p.nk > 0 and not one.pairs[..., -1].all()),
    "single": ("a query with a single key", f"length+{MASKED}", 1.4, lambda one: 1 in one.attended),
    "uneven": ("shards of different lengths", "even shards", 1.2, lambda one: len(one.lengths) > 1),
    "uneven_keys": ("ranks with different numbers of keys", "even shards", 1.22,
        lambda one: len({keys for _, keys in one.lengths}) > 1),
    "several_short": ("at least 2 ranks that hold keys, and fewer than another one", "even shards+ranks+length", 1.29,
        lambda one: sum(0 < len(held) < one.here for held in one.keys) > 1),
    "several_shorter": ("at least 2 ranks with fewer keys than another one", "even shards+ranks+length", 1.3,
        lambda one: sum(len(held) < one.here for held in one.keys) > 1),
    "short": ("a rank that holds keys, and fewer than another one", "even shards+ranks+length", 1.28,
        lambda one: any(0 < len(held) < one.here for held in one.keys)),
    "shorter_than_before": ("a last rank that holds keys, and fewer than the one before it",
        "even shards+ranks+length", 1.29, lambda one: 0 < len(one.keys[-1]) < len(one.keys[len(one.keys) - 2])),
    "uneven_queries": ("ranks with different numbers of queries", "even shards", 1.24,
        lambda one: len({rows for rows, _ in one.lengths}) > 1),
    "uneven_pairs": ("ranks 0 and 1, 2 and 3, or the next two, with different numbers of keys",
        "even shards+ranks+length", 1.32,
        lambda one: any(len(a) != len(b) for a, b in zip(one.keys[::2], one.keys[1::2], strict=False))),
    "cut_by_chunk": ("contiguous or zigzag shards that torch.chunk would cut otherwise", "even shards+ranks+length",
        1.33, Placed.dealt_otherwise_by_chunk),
    "even": ("shards of equal lengths", "even shards", 1.6, lambda one: len(one.lengths) == 1),
    "odd_shard": ("a rank with an odd number of keys", "length", 1.35, lambda one: any(n % 2 for _, n in one.lengths)),
    "single_key": ("a rank that holds a single key", "even shards+ranks+length", 1.37,
        lambda one: any(keys == 1 for _, keys in one.lengths)),
    "single_query": ("a rank that holds a single query", "even shards+ranks+length", 1.38,
        lambda one: any(rows == 1 for rows, _ in one.lengths)),
    "full": ("tokens on every rank", "even shards+length", 1.15,
        lambda one: all(itertools.chain(*one.lengths))),
    "empty_shard": ("a rank without queries, or without keys", "even shards", 1.3,
        lambda one: 0 in itertools.chain(*one.lengths)),
    "no_keys": ("a rank without keys", "even shards", 1.35, lambda one: any(keys == 0 for _, keys in one.lengths)),
    "no_queries": ("a rank without queries", "even shards", 1.35,
        lambda one: any(rows == 0 for rows, _ in one.lengths)),
    "ring_of_pairs": ("at least 3 ranks of an odd number, or 3 pairs of an even one", "ranks", 1.45,
        lambda one: one.case.world_size >= (3 if one.case.world_size % 2 else 6)),
    "cut_heads": ("a number of heads that the ranks do not divide", "heads+ranks", 1.45,
        lambda one: one.p.heads % one.case.world_size != 0),
    "cut_key_heads": ("a number of key heads that the ranks do not divide", "key heads+ranks", 1.5,
        lambda one: one.p.hk % one.case.world_size != 0),
    "dealt_heads": ("at least 2 ranks, of a number that divides the heads", "heads+ranks", 1.48,
        lambda one: one.case.world_size > 1 and one.p.heads % one.case.world_size == 0),
    "dealt_key_heads": ("at least 2 ranks, of a number that divides the key heads", "key heads+ranks", 1.49,
        lambda one: one.case.world_size > 1 and one.p.hk % one.case.world_size == 0),
    "common_heads": ("numbers of ranks and of heads with a common divisor", "heads+ranks", 1.5,
        lambda one: math.gcd(one.case.world_size, one.p.heads) > 1),
    "common_key_heads": ("numbers of ranks and of key heads with a common divisor", "key heads+ranks", 1.52,
        lambda one: math.gcd(one.case.world_size, one.p.hk) > 1),
    "apart_key_heads": ("numbers of ranks and of key heads of which none divides the other", "key heads+ranks", 1.54,
        lambda one: one.p.hk % one.case.world_size != 0 and one.case.world_size % one.p.hk != 0),
    "heads_a_rank": ("at least 2 heads a rank, of a number that the ranks divide", "heads+ranks", 1.5,
        lambda one: one.p.heads % one.case.world_size == 0 and one.p.heads > one.case.world_size),
    "key_heads_a_rank": ("at least 2 key heads a rank, of a number that the ranks divide", "key heads+ranks", 1.5,
        lambda one: one.p.hk % one.case.world_size == 0 and one.p.hk > one.case.world_size),
    "cut_by_teams": ("a number of key heads that as many ranks as divide ranks and heads do not divide", "heads+ranks",
        1.53, lambda one: one.p.hk % math.gcd(one.case.world_size, one.p.heads) != 0),
    "several_teams": ("at least 3 teams of as many ranks as divide ranks and key heads", "key heads+ranks", 1.5,
        lambda one: one.case.world_size // math.gcd(one.case.world_size, one.p.hk) > 2),
    "several_teams_by_heads": ("at least 3 teams of as many ranks as divide ranks and heads", "heads+ranks", 1.49,
        lambda one: one.case.world_size // math.gcd(one.case.world_size, one.p.heads) > 2),
    "below_diagonal": ("at least 2 ranks, or not causal", "causal+ranks", 1.6,
        lambda one: one.case.world_size > 1 or not one.p.causal),
    "calls": ("several calls on one cache", "calls", 1.0, lambda one: len(one.case.chunks) > 1),
    "token": ("a call of one query", "calls", 1.1,
        lambda one: one.case.apart is not None and any(call.problem.nq == 1 for call in one.case.calls)),
    "chunk": ("a call of several queries after earlier tokens", "calls", 1.15,
        lambda one: one.case.apart is not None and any(
            call.problem.nk > call.problem.nq > 1 for call in one.case.calls)),
    "other_pages": ("pages that do not lie in the order of the sequence", "pages+sharding", 1.1,
        lambda one: any(bool((np.diff(keys) < 0).any()) for keys in one.keys)),
    "short_page": ("a page that is not full", "pages+sharding+length", 1.2,
        lambda one: one.case.page_table is not None and any(
            call.problem.nk % one.case.page_table.page_size for call in one.case.calls)),
    "early_page": ("a page that is not full before another one of its rank that holds keys",
        "pages+sharding+length", 1.25, Placed.early_page),
    "strides": ("inputs that are not contiguous in memory", "strides", 1.0, Placed.not_contiguous),
    "half": ("a 16-bit dtype", "dtype", 1.0, lambda one: one.p.dtype in HALF),
    "choice": ("at least 2 keys for a query", "length", 0.98, lambda one: one.attended.max(initial=0) > 1),
    "differing": ("at least 2 keys for a query, with queries other than 0", "values+length", 1.05,
        lambda one: one.case.values != "zero_queries" and one.attended.max(initial=0) > 1),
    "large": ("large or dominating scores", "values", 1.0, lambda one: one.case.values in LARGE),
    "of_lse": ("a cotangent of lse", "cotangent", 1.0, lambda one: one.case.cotangent != "out"),
    "of_out": ("a cotangent of out", "cotangent", 1.1, lambda one: one.case.cotangent != "lse"),
    "subgroup": ("a group smaller than the world", "group", 1.0, lambda one: one.case.group != "world"),
    "moved": ("a group whose ranks have other numbers in the world", "group", 1.1,
        lambda one: one.case.ring_ranks != tuple(range(one.case.world_size))),
    "one_parity": ("a group of ranks that are all odd, or all even, in the world", "group", 1.12,
        lambda one: one.case.world_size > 1 and len({rank % 2 for rank in one.case.ring_ranks}) == 1),
    "alone": ("a group of one rank", "ranks", 1.15, lambda one: one.case.world_size == 1),
    "delayed": ("messages held back", "schedule", 1.0, lambda one: bool(one.case.delayed)),
    "rendezvous": ("sends that wait for their receive", "schedule", 1.0, lambda one: one.case.transport != "buffered"),
}  # fmt: skip
"""Statements that hold or do not: the words, the factors (with + between them), the cost, and when it holds."""

MASKS = ("causal", "window", "documents", "key_lengths", "dilation")
"""Constraints of which one may do instead of another."""

HIDING = (
    "hidden", "hidden_block", "cut_block", "hidden_own", "hidden_rank", "some_ranks", "first_blind", "last_blind",
    "hidden_first", "hidden_last",
)  # fmt: skip
"""Statements about what masks hide, whichever these are."""

NUMERIC = ("odd_shard", "below_ranks_left", "below_ranks_right", "apart_key_heads")
"""Statements in which a number may stand for a relation of several ones."""

OF_TOKENS = {"empty_shard": "a rank without tokens"}
"""Statements in other words, where every rank holds as many keys as queries."""

ELSEWISE = {"choice": ("window", "key_lengths")}
"""Factors that make a statement false, beside those that it is about, by what it looks at."""

MADE_BY = {"even shards": ("length", "cross lengths"), "empty rows": MASKS, "pages": ("page table",)}
"""Factors that are varied, by one that is not, and follows from them."""


def changing(condition: Condition) -> list[str]:
    """Return the factors that are varied to make a statement false."""
    about = {made for factor in condition.factors for made in MADE_BY.get(factor, (factor,))}
    return sorted({*about, *ELSEWISE.get(condition.about[0], ())})


ALTERNATIVES = {
    2: (*MASKS, "softcap", "scale", "sinks", "cross", "gqa", "uneven_keys"),
    3: (*MASKS, "uneven_keys"),
    4: (*MASKS, "uneven_keys"),
}
"""Statements of which one may do instead of others, by how many: padding of unequal shards shows as masks do."""

COUNTS: dict[str, tuple[str, str, str, float]] = {
    "ranks": ("rank", "ranks", "ranks", 1.0),
    "keys_here": ("key on a rank", "keys on a rank", "length", 1.0),
    "queries_here": ("query on a rank", "queries on a rank", "length", 1.02),
    "keys_everywhere": ("key on every rank", "keys on every rank", "length", 1.04),
    "keys": ("key", "keys", "length", 1.05),
    "queries": ("query", "queries", "length", 1.07),
    "heads": ("head", "heads", "heads", 1.0),
    "key_heads": ("key head", "key heads", "key heads", 1.03),
    "group_size": ("head a key head", "heads a key head", "key heads", 1.1),
    "batch": ("batch entry", "batch entries", "batch", 1.0),
    "branches": ("branch of a dilation", "branches of a dilation", "dilation", 1.2),
    "document_count": ("document", "documents", "documents", 1.25),
    "documents_here": ("document on a rank", "documents on a rank", "documents", 1.35),
    "left_side": ("key to the left in the window", "keys to the left in the window", "window", 1.4),
    "right_side": ("key to the right in the window", "keys to the right in the window", "window", 1.4),
}
"""Numbers of things: singular and plural, the factor and the cost."""

SIZES: dict[str, tuple[str, str, float]] = {
    "head_dim": ("head_dim", "dims", 1.0),
    "value_dim": ("value_dim", "dims", 1.02),
    "rate": ("dilation rate", "dilation", 1.1),
    "segment": ("segment length", "dilation", 1.2),
}
"""Sizes: the name, the factor and the cost."""

REACHED: dict[str, tuple[str, float]] = {
    "blocks": ("a query with keys on at least {} ranks", 1.35),
    "distance": ("a query with keys at least {} ranks away", 1.4),
    "readers": ("a key that queries of at least {} ranks attend", 1.43),
    "back": ("a query with keys at least {} ranks before its own", 1.42),
    "ahead": ("a query with keys at least {} ranks after its own", 1.42),
    "hop_right": ("a query with keys that a ring which sends to the right brings at hop {} or later", 1.46),
    "hop_left": ("a query with keys that a ring which sends to the left brings at hop {} or later", 1.47),
}
"""How far the attended keys of some query lie apart: the words, with the number in them, and the cost."""

LEAST = 2
"""Smallest number of ranks, or distance of ranks, that is news."""

DIVIDED = ("keys_here", "keys", "queries_here", "queries", "head_dim", "value_dim")
"""Numbers of which it may matter whether 4, 8 or 16 divides them."""

PARITY = ("ranks", "heads", "key_heads", *DIVIDED)
"""Numbers of which it may matter whether they are even."""

CHOICES: dict[str, tuple[str, str]] = {
    "sharding": ("{} sharding", "sharding"),
    "query_sharding": ("{} queries", "sharding"),
    "key_sharding": ("{} keys", "sharding"),
    "dtype": ("{}", "dtype"),
    "memory": ("{} inputs", "strides"),
    "values": ("{} values", "values"),
    "cotangent": ("cotangent {}", "cotangent"),
    "group": ("{} group", "group"),
    "schedule": ("schedule {}", "schedule"),
}
"""Statements about a name."""


APART = ("query_sharding", "key_sharding")
"""Choices of a case whose queries and keys have a sharding each."""

SPANNED = (*CHOICES, *COUNTS, *SIZES)
"""Features of which every value that cases have makes statements, beside those of `REACHED`."""

RELATED = (
    ("batch", "batch entries", "keys_here", "keys on a rank", "length"),
    ("keys_here", "keys on a rank", "heads", "heads", "heads"),
    ("heads", "heads", "head_dim", "dims a head", "dims"),
    ("ranks", "ranks", "heads", "heads", "heads"),
)
"""Sizes of neighbouring axes, of which one may be taken for another, each with its words; the factor of the second."""


class _Looked(Features):
    """Features of a case; those of which few are ever asked are found out when they are."""

    def __init__(self, seen: Placed, known: dict[str, Feature]) -> None:
        self._seen, self._known = seen, known

    def __getitem__(self, name: str) -> Feature:
        if name not in self._known:
            self._known[name] = (LATER[name] if name in LATER else FLAGS[name][3])(self._seen)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._known, **LATER, **FLAGS})

    def __len__(self) -> int:
        return len(list(self))


LATER: dict[str, Callable[[Placed], Feature]] = {
    "blocks": lambda one: int(one.owners.sum(axis=-1).max(initial=0)),
    "distance": lambda one: max((abs(rank - owner) for rank, owner in one.links), default=0),
    "readers": lambda one: int(
        np.sum([one.pairs[:, :, held].any(axis=(0, 1, 2)) for held in one.queries], axis=0).max(initial=0)
    ),
    "back": lambda one: max((rank - owner for rank, owner in one.links), default=0),
    "ahead": lambda one: max((owner - rank for rank, owner in one.links), default=0),
    "hop_right": lambda one: max(((rank - owner) % one.case.world_size for rank, owner in one.links), default=0),
    "hop_left": lambda one: max(((owner - rank) % one.case.world_size for rank, owner in one.links), default=0),
    "attended": lambda one: int(one.attended.max(initial=0)),
}
"""How many keys a query attends at most, on how many ranks, and how far away these are."""


@functools.lru_cache(maxsize=2048)
def features(case: Case, capabilities: Capabilities) -> Features:
    """Return what conditions look at in a case."""
    p = case.problem
    seen = Placed.of(case, capabilities)
    found: dict[str, Feature] = {
        "ranks": case.world_size,
        "keys": p.nk,
        "queries": p.nq,
        "keys_here": seen.here,
        "queries_here": max(len(rows) for rows in seen.queries),
        "keys_everywhere": min(len(rows) for rows in seen.keys),
        "heads": p.heads,
        "key_heads": p.hk,
        "group_size": p.group_size,
        "head_dim": p.head_dim,
        "value_dim": p.dv,
        "batch": p.batch,
        "dtype": p.dtype,
        "memory": case.memory,
        "values": case.values,
        "cotangent": case.cotangent,
        "group": case.group,
        "schedule": case.schedule,
    }
    found |= {"sharding": case.sharding} if case.apart is None else dict(zip(APART, case.apart, strict=True))
    # A side that is not bounded, or a dilation that is not there, has no number: no condition on it holds.
    found |= {
        name: side for name, side in zip(("left_side", "right_side"), seen.sides, strict=True) if side is not None
    }
    if p.documents is not None:
        found["document_count"] = len(p.documents) - 1
        found["documents_here"] = seen.documents_here()
    if seen.branches:
        found |= {"rate": max(r for _, r in seen.branches), "segment": max(w for w, _ in seen.branches)}
        found["branches"] = len(seen.branches)
    return _Looked(seen, found)


# -- the vocabulary ----------------------------------------------------------------------------------------------------


def conditions(spans: Mapping[str, Collection[Feature]], c: Capabilities) -> list[Condition]:
    """Return the statements that the cases at hand can tell apart, those about numbers with every limit that they span.

    Args:
        spans: by the name of a feature in `SPANNED`, the values that it has in these cases; of `REACHED`, those that
            are left out have no statements.
        c: what the implementation declares; where it has no cross lengths, a key is called a token.
    """
    masks = sum((c.causal != "never", c.window, c.documents, c.key_lengths, bool(c.dilation)))
    # Where one kind of mask alone is declared, that one is named.
    found = [one for one in (*_flags(), *_relations()) if masks > 1 or one.about[0] not in HIDING]
    if not c.cross_lengths:
        words = ((one, OF_TOKENS.get(one.about[0])) for one in found)
        found = [one if text is None else dataclasses.replace(one, text=text) for one, text in words]
    for name in CHOICES:
        for value in sorted(map(str, spans.get(name, ()))):
            found += _choices(name, value)
    for name, (text, cost) in REACHED.items():
        for n in sorted(int(n) for n in spans.get(name, ()) if int(n) >= LEAST):
            meets = functools.partial(_at_least, name, n)
            factors = frozenset({"ranks", *MASKS})
            found.append(Condition(text.format(n), factors, cost + n / 1e4, (name,), meets, limit=int(n > LEAST)))
    shardings = ("replicated",) if spans.get(APART[0]) else spans.get("sharding", ())
    replicated = any(str(one).startswith("replicated") for one in shardings)
    for name in (*COUNTS, *SIZES):
        if not c.cross_lengths and (name == "queries" or (name == "queries_here" and not replicated)):
            continue  # the number of keys is the same
        numbers = sorted(map(int, spans.get(name, ())))
        if name == "keys_everywhere":  # that there is one is "tokens on every rank"
            numbers = [n for n in numbers if n > 0]
        found += _numbers(name, numbers, token=not c.cross_lengths)
    return found


@functools.cache
def _flags() -> tuple[Condition, ...]:
    return (*_single_flags(), *_alternatives())


def _single_flags() -> Iterator[Condition]:
    for name, (text, of, cost, _) in FLAGS.items():
        factors, meets = frozenset(of.split("+")), functools.partial(_flag, (name,))
        yield Condition(text, factors, cost, (name,), meets, limit=int(name in NUMERIC))


def _alternatives() -> Iterator[Condition]:
    for count, names in ALTERNATIVES.items():
        for several in itertools.combinations(names, count):
            text = " or ".join(FLAGS[name][0] for name in several)
            factors = frozenset(FLAGS[name][1] for name in several)
            yield Condition(text, factors, 0.9 * count, several, functools.partial(_flag, several))
    text = "a mask (causal, window, documents, key_lengths or dilation)"
    yield Condition(text, frozenset(MASKS), 2.75, MASKS, functools.partial(_flag, MASKS))


def _flag(names: tuple[str, ...], one: Features) -> bool:
    return any(bool(one.get(name, False)) for name in names)


def _at_least(name: str, n: int, one: Features) -> bool:
    return int(one[name]) >= n


def _relations() -> Iterator[Condition]:
    """Yield the statements that compare the sizes of two axes."""
    for first, a, second, b, factor in RELATED:
        factors = frozenset({factor, "length" if first == "keys_here" else first})
        for text, cost, meets in (
            (f"numbers of {a} and of {b} that differ", 1.6, operator.ne),
            (f"more {a} than {b}", 1.7, operator.gt),
            (f"fewer {a} than {b}", 1.7, operator.lt),
        ):
            yield Condition(text, factors, cost, (first, second), functools.partial(_related, first, second, meets))


def _related(first: str, second: str, meets: Callable[[Any, Any], bool], one: Features) -> bool:
    return first in one and second in one and meets(one[first], one[second])


def _choices(name: str, value: str) -> Iterator[Condition]:
    """Yield the statements that a name is this one, and that it is another one."""
    text, factor = CHOICES[name]
    about, shown = frozenset({factor}), text.format(value.replace("_", " "))
    yield Condition(shown, about, 1.15, (name,), lambda one: one.get(name) == value)
    if name in ("sharding", "dtype"):
        yield Condition(f"{factor} other than {value}", about, 1.3, (name,), lambda one: one.get(name, value) != value)


def _numbers(name: str, numbers: list[int], *, token: bool) -> Iterator[Condition]:
    """Yield the statements about a number: at least, at most, exactly, even, odd, and what divides it."""
    if name in SIZES:
        many, factor, cost = SIZES[name]
        single, number = many, many
    else:
        single, many, factor, cost = COUNTS[name]
        if token:
            single, many = (re.sub(r"^key(?! head)", "token", text) for text in (single, many))
        number = f"number of {many}".replace(" on a rank", " in the longest shard")

    def one_of(
        text: str,
        more: float,
        meets: Callable[[int], bool],
        *,
        said: bool = True,
        most: int | None = None,
        limit: int = 2,
        few: bool = False,
    ) -> Condition:
        def holds(one: Features) -> bool:
            return name in one and meets(int(one[name]))

        return Condition(text, frozenset({factor}), cost + more, (name,), holds, said, most, limit, few)

    def compared(words: str, n: int) -> str:
        if name in SIZES:
            return f"{many} {words} {n}"
        if words == "exactly":
            return f"{words} {n} {single if n == 1 else many}".replace(" on a rank", " in the longest shard")
        if " on " in many and words == "at least":
            return f"{n} {many.replace(' on ', ' or more on ')}"
        return f"{words} {n} {single if n == 1 else many}"

    for n in sorted({*numbers[1:], *(number + 1 for number in numbers[:-1])}):
        # That there are tokens at all, and two of them for a softmax to choose from, is so in every case of interest.
        about = FLAGS.keys() & {factor}  # of documents and windows there may be none: that there is one is news
        said = bool(about) or not (n < 2 or (n == 2 and name in ("keys", "queries")))
        yield one_of(compared("at least", n), n / 1e4, functools.partial(operator.le, n), said=said, limit=int(n > 2))
    if name == "keys_everywhere":  # that it is few of them is news of none
        return
    if name in ("left_side", "right_side"):  # a limit of theirs stands for one beside the length of a shard
        numbers = [n for n in numbers if n < 2]
    for n in numbers[:-1]:
        yield one_of(compared("at most", n), 0.8 - n / 1e4, functools.partial(operator.ge, n), most=n, few=True)
    for n in numbers:
        yield one_of(compared("exactly", n), 0.75, functools.partial(operator.eq, n), few=True)
    if name in PARITY:
        article = "" if name in SIZES else "an "
        yield one_of(f"{article}even {number}", 0.3, lambda value: value % 2 == 0, limit=1)
        yield one_of(f"{article}odd {number}", 0.3, lambda value: value % 2 == 1, limit=1)
    if name == "ranks":
        yield one_of("an odd number of ranks, at least 3", 0.29, lambda value: value % 2 == 1 and value > 1, limit=1)
        yield one_of("a number of ranks other than 2", 0.45, lambda value: value != 2, limit=1)
        yield one_of("a number of ranks that is no power of two", 0.5, lambda value: value.bit_count() > 1)
        # Up to 8 ranks, the even numbers from 4 on are the products of smaller ones.
        yield one_of("4, 6 or 8 ranks, or more such", 0.29, lambda value: value % 2 == 0 and value > 2, limit=1)
    if name in DIVIDED:
        subject = number if name in SIZES else f"a {number} that is"
        for n in (4, 8, 16) if name != "queries" else ():
            yield one_of(f"{subject} not a multiple of {n}", 0.4 + n / 200, lambda value, n=n: value % n != 0)  # type: ignore[misc]
            yield one_of(f"{subject} a multiple of {n}", 0.6 + n / 200, lambda value, n=n: value % n == 0)  # type: ignore[misc]
