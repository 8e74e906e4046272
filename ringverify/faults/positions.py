"""Faults of which positions a rank's queries and a block's keys are taken to have (B2-B4, C1, D11 in the reports)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ringref.problem import Problem
from ringref.sharding import ShardingName, key_positions, query_positions
from ringverify.faults import pattern
from ringverify.faults.fault import Faults
from ringverify.faults.place import Here
from ringverify.faults.ring import STEPS, Positional, Steps, multiplicity

Tensor = torch.Tensor
FAULTS = Faults()


# -- blocks ------------------------------------------------------------------------------------------------------------


def cut(positions: Tensor, like: Tensor) -> Tensor:
    """Cut positions, or repeat the last one, to the number of those that are masked as if they had them."""
    return positions[torch.arange(len(like)).clamp(max=len(positions) - 1)] if len(positions) else like


def keys_of(rank: Callable[[Here, int, int], int]) -> Steps:
    """Mask keys as if they had the positions of another rank's keys."""
    return replace(
        STEPS, keys=lambda here, hop, owner: cut(here.shards[rank(here, hop, owner) % here.size], here.shards[owner])
    )


def _rows_of(rank: Callable[[Here, int, int], int]) -> Steps:
    """As `keys_of`, of as many rows as that rank has: what a block has more is left out."""

    def cut_off(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        rows = len(here.shards[rank(here, hop, owner) % here.size])
        return multiplicity(steps, here, hop, owner) * (torch.arange(len(here.shards[owner])) < rows)

    return replace(keys_of(rank), pattern=cut_off)


FAULTS.add(
    "B2",
    "the block of hop h is masked as that of rank + h: the ring turns the other way",
    keys_of(lambda here, hop, owner: here.rank + hop),
)
FAULTS.cause(
    "the block of hop h is masked as that of rank + h: the ring turns the other way",
    _rows_of(lambda here, hop, owner: here.rank + hop),
    more=", and has as many rows as that",
)
FAULTS.add("B3", "the block of hop h is masked as that of rank h", keys_of(lambda here, hop, owner: hop))
FAULTS.add("O63", "every block is masked as that of the next hop", keys_of(lambda here, hop, owner: owner - 1))
FAULTS.cause("every block is masked as this rank's own block", keys_of(lambda here, hop, owner: here.rank))
FAULTS.cause("every block is masked as that of the hop before", keys_of(lambda here, hop, owner: owner + 1))
FAULTS.cause("every block is masked as that of rank 0", keys_of(lambda here, hop, owner: 0))
FAULTS.add(
    "D11",
    "every block is masked as that of the last hop",
    keys_of(lambda here, hop, owner: here.rank if here.replicated else here.rank + 1),
    when="backward",
)
FAULTS.add(
    "O124",
    "seven ranks: the block of the last hop is masked as that of the rank before its owner",
    replace(
        STEPS,
        keys=lambda here, hop, owner: here.shards[
            (owner - 1) % here.size
            if here.size == 7 and hop == 6 and len(here.shards[owner]) == len(here.shards[owner - 1])
            else owner
        ],
    ),
    narrow=True,
)


def _own_padding(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    own = cut(here.shards[here.rank], here.shards[owner])[None, :]
    padded = replace(steps, key_lengths=lambda problem, j: pattern.key_lengths(problem, own))
    return multiplicity(padded, here, hop, owner)


FAULTS.add(
    "B4",
    "padding does not travel: every block is masked by this rank's own key_lengths",
    replace(STEPS, pattern=_own_padding),
)


# -- queries and keys --------------------------------------------------------------------------------------------------


def _local_queries(here: Here) -> Tensor:
    return torch.arange(len(here.call.positions))


def _local_keys(here: Here, hop: int, owner: int) -> Tensor:
    return torch.arange(len(here.shards[owner]))


FAULTS.cause("key positions are local to the block instead of global", replace(STEPS, keys=_local_keys))
FAULTS.cause("query positions are local to the rank instead of global", replace(STEPS, queries=_local_queries))
FAULTS.cause(
    "positions are local to the shard instead of global", replace(STEPS, queries=_local_queries, keys=_local_keys)
)


CONSTRAINTS: dict[str, tuple[str, Positional]] = {
    "the causal mask": ("causal", pattern.causal),
    "the window": ("window", pattern.window),
    "documents": ("documents", pattern.documents),
}
"""Constraints by position: in words, the step and what is right."""


def _local_in(constraint: Positional, *, queries: bool, keys: bool) -> Positional:
    """Apply one constraint to places in the shards, of queries or keys or both; the others have global positions."""

    def masked(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
        places = torch.arange(i.size(0))[:, None], torch.arange(j.size(1))[None, :]
        return constraint(problem, places[0] if queries else i, places[1] if keys else j)

    return masked


for what, (step, constraint) in CONSTRAINTS.items():
    for of, (queries, keys) in {
        "queries": (True, False),
        "keys": (False, True),
        "queries and keys": (True, True),
    }.items():
        if queries and keys and step == "window":
            continue  # see `masking.local_window`
        local: dict[str, Any] = {step: _local_in(constraint, queries=queries, keys=keys)}
        FAULTS.cause(f"{what}: positions of {of} are local to the shard instead of global", replace(STEPS, **local))


def _placed(queries: Callable[[Here], Tensor], keys: Callable[[Here, int], Tensor] | None = None) -> Steps:
    """Mask queries that are sharded as if they had these positions, and keys by owner."""
    steps = replace(STEPS, queries=lambda here: here.call.positions if here.replicated else queries(here))
    return steps if keys is None else replace(steps, keys=lambda here, hop, owner: keys(here, owner))


FAULTS.add(
    "O64",
    "queries are placed one rank to the right",
    _placed(
        lambda here: (here.call.positions + max(1, len(here.call.positions))).clamp(max=max(0, here.problem.nq - 1))
    ),
)


def _queries_of(by: int) -> Steps:
    """Mask queries as if they had the positions of a neighbour's queries."""

    def queries(here: Here) -> Tensor:
        of = query_positions(here.call.sharding, here.problem.nq, here.size, here.problem.documents)
        return cut(torch.as_tensor(of[(here.rank + by) % here.size]), here.call.positions)

    return _placed(queries)


FAULTS.cause("queries are placed as those of the rank to the right", _queries_of(1))
FAULTS.cause("queries are placed as those of the rank to the left", _queries_of(-1))


# -- shardings ---------------------------------------------------------------------------------------------------------


def _tokens_reversed(here: Here, positions: Tensor) -> Tensor:
    """Reverse the second piece of a zigzag shard."""
    if here.call.sharding != "zigzag":
        return positions
    half = (len(positions) + 1) // 2
    return torch.cat([positions[:half], positions[half:].flip(0)])


FAULTS.add(
    "C1a",
    "zigzag: the tokens of the mirrored piece are taken in reverse",
    replace(
        STEPS,
        queries=lambda here: _tokens_reversed(here, here.call.positions),
        keys=lambda here, hop, owner: _tokens_reversed(here, here.shards[owner]),
    ),
)


def _mirrored_piece_shifted(here: Here) -> Tensor:
    positions = here.call.positions
    uneven = here.problem.nq % (2 * here.size)
    if here.call.sharding != "zigzag" or not uneven or len(positions) < 2:
        return positions
    second = torch.arange(len(positions), device=positions.device) >= (len(positions) + 1) // 2
    return torch.where(second, positions - 1, positions)


FAULTS.add(
    "O100",
    "zigzag: the mirrored piece is placed one position too early where pieces are uneven",
    replace(STEPS, queries=_mirrored_piece_shifted),
    narrow=True,
)


def _striped_forwards(here: Here, positions: Tensor, length: int, rank: int) -> Tensor:
    """Apply the striped permutation a second time in place of its inverse: right only where N = P * P."""
    if here.call.sharding != "striped" or length % here.size:
        return positions
    order = torch.arange(length, device=positions.device).view(-1, here.size).T.reshape(-1)
    share = length // here.size
    return order[order][rank * share : (rank + 1) * share]


FAULTS.add(
    "C1b",
    "striped: striping is applied again instead of being undone",
    replace(
        STEPS,
        queries=lambda here: _striped_forwards(here, here.call.positions, here.problem.nq, here.rank),
        keys=lambda here, hop, owner: _striped_forwards(here, here.shards[owner], here.problem.nk, owner),
    ),
)


def _in_order(shards: Sequence[Any], rank: int) -> Tensor:
    return sum(len(shard) for shard in shards[:rank]) + torch.arange(len(shards[rank]))


def another_sharding(name: ShardingName) -> Steps:
    """Mask as if positions were those of another sharding."""

    def queries(here: Here) -> Tensor:
        return cut(torch.as_tensor(query_positions(name, here.problem.nq, here.size)[here.rank]), here.call.positions)

    def keys(here: Here, owner: int) -> Tensor:
        return cut(torch.as_tensor(key_positions(name, here.problem.nk, here.size)[owner]), here.shards[owner])

    return _placed(queries, keys)


def declare_or_heed(sharding: str) -> str:
    """Say what to try where positions are those of another sharding than the declared one."""
    return (
        f'Declare sharding="{sharding}" (of a cache, key_sharding) if that is how your ranks hold the sequence, or '
        "mask by call.positions and call.key_positions"
    )


FAULTS.cause(
    "positions are those of contiguous shards",
    _placed(
        lambda here: _in_order(
            query_positions(here.call.sharding, here.problem.nq, here.size, here.problem.documents), here.rank
        ),
        lambda here, owner: _in_order(here.shards, owner),
    ),
    advice=declare_or_heed("contiguous"),
)


MISUNDERSTOOD = Faults()
"""Right code whose adapter or declaration is wrong: tried before everything else."""


def _unasked(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    i, j = steps.queries(here)[:, None], steps.keys(here, hop, owner)[None, :]
    return multiplicity(steps, here, hop, owner) * pattern.causal(here.problem, i, j)


MISUNDERSTOOD.cause(
    "a causal mask is applied though the problem is not causal",
    replace(STEPS, pattern=_unasked),
    advice='Mask only where call.causal is true, or declare causal="always"',
    masks=True,
)
for name in ("zigzag", "striped"):
    says = f"positions are those of {name} shards"
    MISUNDERSTOOD.cause(says, another_sharding(name), advice=declare_or_heed(name))
