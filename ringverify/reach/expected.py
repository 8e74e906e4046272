"""Which outputs a token may reach: the pattern of a layer, composed over layers, and what faults make of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ringref.pattern import multiplicity
from ringref.problem import Problem
from ringref.sharding import Positions, key_positions

Matrix = NDArray[np.bool_]
"""`(N, N)`: whether output i depends on token j."""

DROPPED = {
    "causal": "the causal mask is dropped",
    "window": "the window is dropped",
    "documents": "the documents are dropped",
}
OWN_SHARD = "each rank attends only to its own shard"
LOCAL_MASK = "the mask counts a rank's queries from the rank's own first token"


@dataclasses.dataclass(frozen=True)
class Reach:
    """What one kind of attention layer reaches in a model.

    Attributes:
        pairs: whether output i depends on token j.
        share: the share of token j in output i if every layer attended evenly: where it is tiny, a change may drown.
    """

    pairs: Matrix
    share: NDArray[np.float64]


def attended(problem: Problem) -> Matrix:
    """Which query attends which key in a layer."""
    found: Matrix = multiplicity(problem).reshape(-1, problem.nq, problem.nk).max(0) > 0
    return found


def composed(step: Matrix, layers: int | None) -> Reach:
    """Compose a layer with itself; a token's own output always depends on it.

    Args:
        step: which query attends which key.
        layers: how many layers; `None`: as many as it takes until nothing more is reached.
    """
    passing = step | np.eye(len(step), dtype=bool)
    even = passing / passing.sum(1, keepdims=True)
    share = even
    for _ in range(1, layers if layers is not None else len(step)):
        further = even @ share
        if layers is None and np.array_equal(further > 0, share > 0):
            break
        share = further
    return Reach(share > 0, share)


def same_shard(shards: Sequence[Positions], length: int) -> Matrix:
    """Whether two tokens lie on one rank."""
    rank = ranks_of(shards, length)
    same: Matrix = rank[:, None] == rank[None, :]
    return same


def ranks_of(shards: Sequence[Positions], length: int) -> NDArray[np.int64]:
    """The rank that holds each token."""
    found = np.zeros(length, dtype=np.int64)
    for rank, positions in enumerate(shards):
        found[positions] = rank
    return found


def faults(
    problem: Problem, layers: int | None, shards: Sequence[Positions]
) -> Iterator[tuple[tuple[str, ...], Reach]]:
    """Make what each fault, or two of them, would reach.

    Yields:
        The causes, and the reach that they have.
    """
    same = same_shard(shards, problem.nq)
    present = [name for name in DROPPED if getattr(problem, name) not in (None, False)]
    for count in range(len(present) + 1):
        for names in itertools.combinations(present, count):
            left = attended(problem.replace(**{name: False if name == "causal" else None for name in names}))
            dropped = tuple(DROPPED[name] for name in names)
            if names:
                yield dropped, composed(left, layers)
            yield (OWN_SHARD, *dropped), composed(left & same, layers)
    for name in ("contiguous", "zigzag", "striped") if problem.causal else ():
        taken = np.concatenate(key_positions(name, problem.nq, len(shards)))
        if all(
            len(one) == len(two) for one, two in zip(shards, key_positions(name, problem.nq, len(shards)), strict=True)
        ):
            thought = np.empty(problem.nq, dtype=np.int64)
            thought[np.concatenate(shards)] = taken
            yield (f"the mask takes the shards for {name}",), composed(thought[None, :] <= thought[:, None], layers)
    if problem.causal:
        order, place = np.concatenate(shards), np.empty(problem.nq, dtype=np.int64)
        place[order] = np.arange(problem.nq)  # of a key among those gathered from all ranks
        within = np.empty(problem.nq, dtype=np.int64)
        for positions in shards:
            within[positions] = np.arange(len(positions))
        yield (LOCAL_MASK,), composed(place[None, :] <= within[:, None], layers)


def inferred(pairs: Matrix) -> Problem | None:
    """The pattern that the reach of one process has: everything, or causal; `None` if it is neither."""
    for causal in (False, True):
        problem = Problem(query_length=len(pairs), causal=causal)
        if np.array_equal(pairs, composed(attended(problem), None).pairs):
            return problem
    return None
