"""Suspicions of positions: the right mask at the wrong place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ringref import pattern
from ringref.problem import Problem
from ringref.sharding import Positions
from ringverify.diagnosis.masks import WHENS
from ringverify.diagnosis.model import STEPS
from ringverify.diagnosis.scene import Counts, Visit
from ringverify.diagnosis.suspicion import Suspicion

Place = Callable[[Visit], Positions]


def fitted(positions: Positions, count: int, instead: Positions) -> Positions:
    """So many positions of a shard that may have fewer: its last one is repeated."""
    return positions[np.arange(count).clip(max=len(positions) - 1)] if len(positions) else instead


def placed(
    says: str, *, i: Place = lambda at: at.i, j: Place = lambda at: at.j, keys_only: bool = False
) -> list[Suspicion]:
    """The whole pattern at other positions; `keys_only` concerns key lengths alone."""

    def of(at: Visit) -> Counts:
        problem = at.problem
        if not keys_only:
            return pattern.multiplicity(problem, i(at), j(at))
        if problem.key_lengths is None:
            return STEPS.pattern(at)
        padding: Problem = Problem(
            query_length=problem.nq, key_length=problem.nk, batch=problem.batch, key_lengths=problem.key_lengths
        )
        rest = pattern.multiplicity(problem.replace(key_lengths=None), at.i, at.j)
        heads: Counts = pattern.multiplicity(padding, at.i, j(at))
        return rest * heads

    return [Suspicion(says, replace(STEPS, pattern=of), when) for when in WHENS]


def _keys_of(rank: Callable[[Visit], int]) -> Place:
    """The positions of another rank's keys."""
    return lambda at: fitted(at.scene.shards[1][rank(at) % at.scene.size], len(at.j), at.j)


def _queries_of(rank: Callable[[Visit], int]) -> Place:
    return lambda at: (
        at.i if at.scene.replicated else fitted(at.scene.shards[0][rank(at) % at.scene.size], len(at.i), at.i)
    )


def _next_to_the_right(at: Visit) -> Positions:
    if at.scene.replicated:
        return at.i
    moved: Positions = (at.i + max(1, len(at.i))).clip(max=max(0, at.problem.nq - 1))
    return moved


def _reversed_piece(at: Visit, positions: Positions) -> Positions:
    if at.scene.case.sharding != "zigzag":
        return positions
    half = (len(positions) + 1) // 2
    return np.concatenate([positions[:half], positions[half:][::-1]])


def _striped_twice(at: Visit, positions: Positions, length: int, rank: int) -> Positions:
    size = at.scene.size
    if at.scene.case.sharding != "striped" or length % size:
        return positions
    order = np.arange(length).reshape(-1, size).T.reshape(-1)
    mine = length // size
    return order[order][rank * mine : (rank + 1) * mine]


def _contiguous(at: Visit, positions: Positions, rank: int, of_keys: bool) -> Positions:
    """Positions as they would be in contiguous shards of these sizes."""
    if at.scene.replicated and not of_keys:
        return positions
    before = sum(len(shard) for shard in at.scene.shards[int(of_keys)][:rank])
    return before + np.arange(len(positions))


def declare_or_heed(sharding: str) -> str:
    """What to try where the positions are those of another sharding than the declared one."""
    return f'Declare sharding="{sharding}" if that is how your ranks hold the sequence, or mask by call.positions'


POSITIONS: list[Suspicion] = [
    *placed("key positions are local to the block instead of global", j=lambda at: np.arange(len(at.j))),
    *placed("query positions are local to the rank instead of global", i=lambda at: np.arange(len(at.i))),
    *placed(
        "positions are local to the shard instead of global",
        i=lambda at: np.arange(len(at.i)),
        j=lambda at: np.arange(len(at.j)),
    ),
    *placed("every block is masked as this rank's own block", j=_keys_of(lambda at: at.rank)),
    *placed(
        "the block of hop h is masked as that of rank + h: the ring turns the other way",
        j=_keys_of(lambda at: at.rank + at.hop),
    ),
    *placed("the block of hop h is masked as that of rank h", j=_keys_of(lambda at: at.hop)),
    *placed("every block is masked as that of the next hop", j=_keys_of(lambda at: at.owner - 1)),
    *placed("every block is masked as that of the hop before", j=_keys_of(lambda at: at.owner + 1)),
    *placed(
        "every block is masked as that of the last hop",
        j=_keys_of(lambda at: at.rank if at.scene.replicated else at.rank + 1),
    ),
    *placed("every block is masked as that of rank 0", j=_keys_of(lambda at: 0)),
    *placed("queries are placed one rank to the right", i=_next_to_the_right),
    *placed("queries are placed as those of the rank to the right", i=_queries_of(lambda at: at.rank + 1)),
    *placed("queries are placed as those of the rank to the left", i=_queries_of(lambda at: at.rank - 1)),
    *placed(
        "padding does not travel: every block is masked by this rank's own key_lengths",
        j=_keys_of(lambda at: at.rank),
        keys_only=True,
    ),
    *placed(
        "zigzag: the tokens of the mirrored piece are taken in reverse",
        i=lambda at: _reversed_piece(at, at.i),
        j=lambda at: _reversed_piece(at, at.j),
    ),
    *placed(
        "striped: striping is applied again instead of being undone",
        i=lambda at: at.i if at.scene.replicated else _striped_twice(at, at.i, at.problem.nq, at.rank),
        j=lambda at: _striped_twice(at, at.j, at.problem.nk, at.owner),
    ),
    *[
        replace(one, advice=declare_or_heed("contiguous"))
        for one in placed(
            "positions are those of contiguous shards",
            i=lambda at: _contiguous(at, at.i, at.rank, False),
            j=lambda at: _contiguous(at, at.j, at.owner, True),
        )
    ],
]
