"""The pairs of a query and a key of a case: who holds each, where, and how often the mask lets it through.

Shapes: `(Nq, 1)` of queries, `(1, Nk)` of keys, `(B, H, Nq, Nk)` of counts, and what broadcasts to it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ringref import pattern
from ringref.sharding import Positions, pieces
from ringverify.diagnosis.grids import Grid, joined, largest_divisor
from ringverify.diagnosis.scene import Counts, Scene
from ringverify.faults.place import smallest_divisor

Ints = NDArray[np.int64]

Mask = NDArray[np.bool_]

Rows = TypeVar("Rows", Ints, Mask)

CONSTRAINTS = ("causal", "window", "documents", "key_lengths", "dilation")


@dataclasses.dataclass(frozen=True, eq=False)
class OneSide:
    """The queries or the keys of a case, each with its place.

    Attributes:
        p: positions, as a column of queries or a row of keys.
        rank: which rank holds each.
        place: the place of each in the shard.
        count: how many that rank holds.
        of: positions by rank and place, continued past the end of a shard: by ones, or as a striped one goes on.
        shards: positions of every rank.
        total: number of positions.
    """

    p: Ints
    rank: Ints
    place: Ints
    count: Ints
    of: Ints
    shards: list[Positions]
    total: int

    def at(self, rank: Ints | int, place: Ints) -> Ints:
        """Return the positions at places of ranks, counted on past the end."""
        rank, place = np.broadcast_arrays(np.asarray(rank) % len(self.shards), place)
        found: Ints = self.of[rank, place]
        return found


def side(shards: list[Positions], total: int, *, keys: bool, striped: bool = False) -> OneSide:
    """Return one side of a case."""
    p = np.arange(total)
    rank, place, count = (np.zeros(total, dtype=np.int64) for _ in range(3))
    longest = max((len(held) for held in shards), default=0)
    of = np.zeros((len(shards), 2 * longest + 2), dtype=np.int64)
    for number, held in enumerate(shards):
        rank[held], place[held], count[held] = number, np.arange(len(held)), len(held)
        of[number, : len(held)] = held
        last = held[-1] if len(held) else total - 1
        of[number, len(held) :] = last + 1 + np.arange(of.shape[1] - len(held))
        if striped:
            of[number] = number + len(shards) * np.arange(of.shape[1])
    p, rank, place, count = (x[None, :] if keys else x[:, None] for x in (p, rank, place, count))
    return OneSide(p, rank, place, count, of, shards, total)


class Pairs:
    """Every pair of a query and a key of a case."""

    def __init__(self, scene: Scene) -> None:
        self.problem, self.size, self.case = scene.problem, scene.size, scene.case
        queries, keys = scene.shards
        self.true: Counts = scene.truth.intermediates.m
        striped = scene.case.sharding == "striped"
        self.keys = side(keys, self.problem.nk, keys=True, striped=striped)
        if scene.replicated:  # every rank attends its own block with all queries
            queries = [np.arange(self.problem.nq)]
        self.queries = side(queries, self.problem.nq, keys=False, striped=striped)
        self.rank = self.keys.rank if scene.replicated else self.queries.rank
        self.owner = self.keys.rank
        self.hop = (self.rank - self.owner) % self.size
        self.halved = False
        self.ring = np.array(scene.case.ring_ranks)
        dilation = self.problem.dilation
        self.segment = (max(1, self.problem.nq, self.problem.nk), 1) if dilation is None else dilation.branches[0]
        self.in_branch: Counts | int = 1 if dilation is None else branch(self, 0, self.queries.p, self.keys.p)

    @functools.cached_property
    def of_branches(self) -> list[Pairs]:
        """The pairs of each branch of the dilation, `true` as far as it goes; without one, these pairs."""
        if self.problem.dilation is None:
            return [self]
        rest = self.counts(lambda name: None if name == "dilation" else (self.queries.p, self.keys.p))
        found = []
        for number, segment in enumerate(self.problem.dilation.branches):
            one = copy.copy(self)
            one.segment, one.in_branch = segment, branch(self, number, self.queries.p, self.keys.p)
            one.true = rest * one.in_branch
            found.append(one)
        return found

    def of_teams(self, grid: Grid) -> Pairs:
        """Return the pairs as teams see them whose joined shards go round a ring; these if every rank is a team."""
        teams = grid.teams(self.case)
        if len(teams) == self.size:
            return self
        return self._held_by(*(joined(x.shards, teams) for x in (self.queries, self.keys)))

    def of_pieces(self) -> Pairs:
        """Return the pairs as if each piece of a zigzag shard were held by a rank of its own; otherwise these."""
        if self.case.sharding != "zigzag" or len(self.queries.shards) != self.size:
            return self
        return self._held_by(*(pieces(x.total, 2 * self.size) for x in (self.queries, self.keys)))

    def of_halves(self) -> Pairs:
        """Return the pairs as a zigzag ring computes them under a causal mask, half a block a hop; otherwise these."""
        if self.case.sharding != "zigzag" or not self.problem.causal or self.problem.diagonal:
            return self
        one = copy.copy(self)
        one.halved = True
        return one

    def block(self, rank: int, owner: int) -> tuple[Positions, Positions]:
        """Return the queries of a rank and the keys of another that it computes together."""
        queries, keys = self.queries.shards[rank], self.keys.shards[owner]
        if self.halved and owner < rank:
            keys = keys[: len(pieces(self.keys.total, 2 * self.size)[owner])]
        elif self.halved and owner > rank:
            queries = queries[len(pieces(self.queries.total, 2 * self.size)[rank]) :]
        return queries, keys

    def _held_by(self, queries: list[Positions], keys: list[Positions]) -> Pairs:
        one = copy.copy(self)
        one.__dict__.pop("of_branches", None)
        one.size = len(keys)
        one.queries = side(queries, self.queries.total, keys=False)
        one.keys = side(keys, self.keys.total, keys=True)
        one.rank, one.owner = one.queries.rank, one.keys.rank
        one.hop = (one.rank - one.owner) % one.size
        return one

    @functools.cached_property
    def padding(self) -> Mask:
        """Keys that no query may attend, `(B, 1, 1, Nk)`."""
        p, j = self.problem, np.arange(self.problem.nk)
        lengths = np.array(p.key_lengths or (p.nk,) * p.batch)
        first, last = (0, p.nk) if p.documents is None else (p.documents[0], p.documents[-1])
        found: Mask = (j < first) | (j >= last) | (j >= lengths[:, None])
        return found[:, None, None, :]

    @functools.cached_property
    def within_bounds(self) -> Mask:
        """The pairs that a causal mask and a window let through, `(Nq, Nk)`."""
        plain = self.queries.p, self.keys.p
        found: Mask = self.counts(lambda name: plain if name in ("causal", "window") else None)[0, 0] > 0
        return found

    def present(self) -> tuple[str, ...]:
        """Return the constraints that the case has."""
        return tuple(name for name in CONSTRAINTS if getattr(self.problem, name))

    def counts(self, of: Callable[[str], tuple[Ints, Ints] | None]) -> Counts:
        """Return counts with each constraint made at the positions that are given for it; `None` leaves it out."""
        p = self.problem
        m = np.ones((p.batch, p.heads, p.nq, p.nk), dtype=np.int64)
        for name in self.present():
            if (at := of(name)) is not None:
                m *= _constraint(self, name, *(np.broadcast_to(x, (p.nq, p.nk)) for x in at))
        return m


def pairs_of(scene: Scene) -> Pairs:
    """Return the pairs of a case, which are made once."""
    return scene.once("pairs", lambda: Pairs(scene))


def _constraint(pairs: Pairs, name: str, i: Ints, j: Ints) -> Counts | Mask:
    p = pairs.problem
    match name:
        case "causal":
            return pattern.causal(i, j, diagonal=p.diagonal)
        case "window":
            assert p.window is not None
            return pattern.window(i, j, left=p.window[0], right=p.window[1], diagonal=p.diagonal)
        case "documents":
            return pattern.same_document(i, j, offsets=np.array(p.documents))
        case "key_lengths":
            return pattern.within_key_length(j, key_lengths=np.array(p.key_lengths)[:, None, None, None])
        case _:
            assert p.dilation is not None
            return pattern.branches_through(i, j, dilation=p.dilation, heads=p.heads)


def kept(pairs: Pairs, number: int) -> Mask:
    """Return which keys one branch of a dilation keeps, `(H, Nk)`: it lets them through to their own place."""
    j = pairs.keys.p.ravel()
    found: Mask = branch(pairs, number, j[:, None], j[None])[:, j, j] > 0
    return found


@dataclasses.dataclass(frozen=True)
class Otherwise:
    """A mask made in another way.

    Attributes:
        text: how, as a clause.
        counts: how often keys are attended then; `None` if it is the same mask in this case.
        cost: how far-fetched it is: a rule of one part less may cost one more.
        zeros: how often keys and values of 0 are attended, `(B, H, Nq)`.
        lse: the lse of rows that attend nothing then.
    """

    text: str
    counts: Callable[[Pairs], Counts | None]
    cost: float = 0
    zeros: Callable[[Pairs], Counts] | None = None
    lse: float = -np.inf


INNER: dict[str, Callable[[int], int]] = {
    "as many ranks as the smallest divisor of their number": smallest_divisor,
    "as many ranks as the largest divisor of their number": largest_divisor,
}
"""How many neighbours may be an inner ring in a ring of rings, by ranks; a prime number of ranks is one ring."""

NOT_COMPUTED = "nothing is computed: results are 0, lse too"

SIDES = ("left", "right")


def branch(pairs: Pairs, number: int, i: Ints, j: Ints) -> Counts:
    """Return whether one branch of a dilation lets pairs through, in the heads that run it."""
    p = pairs.problem
    assert p.dilation is not None
    i, j = (np.broadcast_to(x, (p.nq, p.nk)) for x in (i, j))
    if p.dilation.heads == "shared":
        one = dataclasses.replace(p.dilation, branches=(p.dilation.branches[number],))
        return pattern.branches_through(i, j, dilation=one, heads=p.heads)
    count = len(p.dilation.branches)
    runs = [pattern.branch_of_head(h, heads=p.heads, branches=count) == number for h in range(p.heads)]
    every = pattern.branches_through(i, j, dilation=p.dilation, heads=p.heads)
    return np.where(np.array(runs)[:, None, None], every, 0)
