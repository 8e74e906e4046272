"""Faults of shards and tensor layouts (C in the reports)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ringverify.faults.arithmetic import scrambled
from ringverify.faults.fault import Faults
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import STEPS, Steps, multiplicity

FAULTS = Faults()


def _tokens_reversed(here: Here, positions: torch.Tensor) -> torch.Tensor:
    """Reverse the second piece of a zigzag shard."""
    if here.call.sharding != "zigzag":
        return positions
    half = (len(positions) + 1) // 2
    return torch.cat([positions[:half], positions[half:].flip(0)])


C1a = FAULTS.add(
    "C1a",
    "zigzag undone token by token",
    story="The mirrored piece is reversed within, where only the order of pieces is. Needs pieces of two tokens and a "
    "mask.",
    source="lucidrains/ring-attention-pytorch 054c9d5, 18a1f86",
    ring=replace(
        STEPS,
        queries=lambda here: _tokens_reversed(here, here.call.positions),
        keys=lambda here, hop, owner: _tokens_reversed(here, here.shards[owner]),
    ),
    cause="zigzag: the tokens of the mirrored piece are taken in reverse",
    also=("backward", "forward"),
)


def _striped_forwards(here: Here, positions: torch.Tensor, length: int, rank: int) -> torch.Tensor:
    """Apply the striped permutation a second time in place of its inverse: right only where N = P * P."""
    if here.call.sharding != "striped" or length % here.size:
        return positions
    order = torch.arange(length, device=positions.device).view(-1, here.size).T.reshape(-1)
    share = length // here.size
    return order[order][rank * share : (rank + 1) * share]


C1b = FAULTS.add(
    "C1b",
    "striped undone by striping again",
    story="The forward permutation in place of its inverse: the same only where n is the square of the world.",
    source="lucidrains/ring-attention-pytorch 78530bc",
    ring=replace(
        STEPS,
        queries=lambda here: _striped_forwards(here, here.call.positions, here.problem.nq, here.rank),
        keys=lambda here, hop, owner: _striped_forwards(here, here.shards[owner], here.problem.nk, owner),
    ),
    cause="striped: striping is applied again instead of being undone",
    also=("backward", "forward"),
)


C4a = FAULTS.add(
    "C4a",
    "reshape without permute on the way in",
    story="Sequence and heads exchanged by a view. Invisible with one head or one token a rank; forward and backward "
    "agree with one another.",
    source="DeepSpeed#5664, #8317",
    ring=replace(STEPS, widen=lambda here, x: scrambled(x.to(here.wide))),
    cause="elements permuted: heads and tokens of the inputs are exchanged by a reshape",
    also=("backward", "forward"),
)
C4b = FAULTS.add(
    "C4b",
    "reshape without permute on dq",
    story="The forward is right; dq has the right shape and its elements in the wrong places.",
    source="DeepSpeed#8317",
    ring=replace(STEPS, narrow=lambda here, x: scrambled(x.to(here.dtype))),
    cause="dq's elements are permuted: heads and tokens are exchanged by a reshape",
)


def _equal_shares(steps: Steps, here: Here, hop: int, owner: int) -> torch.Tensor:
    """Ignore the keys of a block past the first n // world_size."""
    m = multiplicity(steps, here, hop, owner)
    return m * (torch.arange(m.size(3), device=m.device) < here.problem.nk // here.size)


C5 = FAULTS.add(
    "C5",
    "what does not divide is dropped",
    story="Every rank is taken to hold n // world keys; the last keys of longer shards are nobody's. Needs n % world.",
    source="DeepSpeed#7384, #7842",
    ring=replace(STEPS, pattern=_equal_shares),
    cause="every rank is taken to hold n // world keys: the rest is dropped",
    also=("backward", "forward"),
)


def _refuse(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
    if here.problem.nk % here.size:
        raise ValueError(f"length {here.problem.nk} is not divisible by {here.size}")
    return STEPS.forward(steps, here, q, k, v)


C5b = FAULTS.add(
    "C5b",
    "what does not divide is refused",
    story="n % world raises, though uneven shards are claimed.",
    source="DeepSpeed#7842",
    kind="failure",
    ring=replace(STEPS, forward=_refuse),
)
