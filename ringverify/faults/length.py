"""Faults that need length: right on every case of the ordinary suites, wrong from some number of positions on.

Where a fault begins is brought down by an offset, to lengths that a test can afford: a position that does not fit into
an integer is emulated by counting from below its end. They are no mutants of the catalogue, since no suite but `scale`
can find them. Each is a target: `ringverify.faults.length:positions_in_int16`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ringverify.faults.fault import Cause, Mutant
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import EVERYTHING, STEPS, Steps, returning, ring_of
from ringverify.faults.wire import Posted
from ringverify.implementation import Implementation

Tensor = torch.Tensor

BEGINS = 1024
"""The position at which those that depend on a position begin."""
FAR = 9
"""The hop at which those that depend on the number of ranks begin; the ordinary suites have up to eight ranks."""
MESSAGE = 1 << 14
"""Elements of a message that is not split."""
WIDE_TILE = 128
"""Keys of the smallest tile that an accumulator may drop."""
SMALL_SHARE = 0.125
"""Weight below which it does so; smaller by far in a real one, which has as many more tiles."""

AT_LENGTH: dict[str, Mutant] = {}
"""By name."""


def _add(name: str, says: str, steps: Steps) -> None:
    implementation = Implementation(ring_of(steps), f"mutant:{name}", EVERYTHING)
    AT_LENGTH[name] = Mutant(name, Cause(says, steps), "value", implementation)


def __getattr__(name: str) -> Implementation:
    """Return a mutant's implementation as an attribute of this module."""
    if name in AT_LENGTH:
        return AT_LENGTH[name].implementation
    raise AttributeError(f"no fault {name!r}; there are {', '.join(AT_LENGTH)}")


def _kept(dtype: torch.dtype, counted_from: int) -> Steps:
    """Mask by positions as a dtype has them."""

    def kept(positions: Tensor) -> Tensor:
        return (positions + counted_from).to(dtype).to(torch.int64) - counted_from

    return replace(
        STEPS,
        queries=lambda here: kept(here.call.positions),
        keys=lambda here, hop, owner: kept(here.shards[owner]),
    )


_add(
    "positions_in_int16",
    "positions are kept in int16, counted from 1,024 below its end",
    _kept(torch.int16, 2**15 - BEGINS),
)
_add(
    "positions_in_bfloat16",
    "positions are kept in bfloat16, which has no 257",
    _kept(torch.bfloat16, 0),
)
_add(
    "positions_in_float32",
    "positions are kept in float32, counted from 1,024 below 2^24",
    _kept(torch.float32, 2**24 - BEGINS),
)


def _overflowing(here: Here, name: str, x: Tensor) -> Tensor:
    if name not in ("k", "v"):
        return x
    rows = torch.arange(x.size(1), device=x.device)
    width = x.size(2) * x.size(3)
    offset = 2**31 - BEGINS * width
    flat = (here.shards[here.rank] * width + offset).to(torch.int32)  # negative where it does not fit
    return x[:, torch.where(flat < 0, 0, rows)]


_add(
    "offsets_in_int32",
    "rows of keys whose flat index exceeds 2^31 are read elsewhere, counted from 1,024 rows below that",
    replace(STEPS, given=_overflowing),
)
_add(
    "far_block_lost",
    "the block of the tenth hop is left out",
    replace(STEPS, skip=lambda here, hop, owner, m: hop == FAR or STEPS.skip(here, hop, owner, m)),
)
_add(
    "far_block_twice",
    "the block of the tenth hop counts twice in the forward",
    replace(
        STEPS,
        accumulate=lambda steps, here, hop, running, new: STEPS.accumulate(
            steps, here, hop, running, steps.merge(new, new) if hop == FAR else new
        ),
    ),
)
_add(
    "mask_off_by_one",
    "from position 1,024 on, a query does not attend its own key",
    replace(STEPS, causal=lambda problem, i, j: j <= i + problem.diagonal - (i >= BEGINS).long()),
)
_add(
    "window_forgets",
    "from position 1,024 on, a window ends at multiples of 1,024",
    replace(
        STEPS,
        window=lambda problem, i, j: STEPS.window(problem, i, j) & ((i < BEGINS) | (i // BEGINS <= j // BEGINS)),
    ),
)


def _rounded_lse(here: Here, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    long = here.call.positions >= BEGINS
    return out, torch.where(long, lse.to(torch.bfloat16).to(lse.dtype), lse)


_add("lse_in_bfloat16", "lse is returned in bfloat16 from position 1,024 on", returning(_rounded_lse))


def _without_the_small(steps: Steps, here: Here, hop: int, running: Partial | None, new: Partial) -> Partial:
    if running is not None and len(here.shards[(here.rank - hop) % here.size]) >= WIDE_TILE:
        small = torch.exp(new.lse - torch.logaddexp(running.lse, new.lse)) < SMALL_SHARE
        new = Partial(new.out, torch.where(small, -torch.inf, new.lse))
    found: Partial = STEPS.accumulate(steps, here, hop, running, new)
    return found


_add(
    "small_tiles_dropped",
    "a tile of 128 keys or more whose weight is below an eighth of the weight so far is dropped in the forward",
    replace(STEPS, accumulate=_without_the_small),
)


def _arrived(posted: Posted) -> Block:
    block = STEPS.arrive(posted)
    for x in block:
        x.view(-1)[MESSAGE:] = 0.0
    return block


_add(
    "message_cut",
    "a KV message of more than 16,384 elements is split, and its second part is lost",
    replace(STEPS, arrive=_arrived),
)
