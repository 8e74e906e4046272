"""Faults of kernels that work on a block in tiles, or on some dimensions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ringverify.faults import arithmetic
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS, Steps, attend, multiplicity

Tensor = torch.Tensor
TILES = (2, 4, 8, 16, 32, 64, 128)
"""Keys, or dimensions, that a kernel works on at once."""


@functools.cache
def first_dimensions(limit: int) -> Steps:
    """Compute scores from the first dimensions only."""
    return replace(STEPS, scores=lambda q, k, scale: arithmetic.scores(q[..., :limit], k[..., :limit], scale))


@functools.cache
def last_tile(tile: int) -> Steps:
    """Attend only the last tile of each block, forward and backward alike."""

    def cut(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        m = multiplicity(steps, here, hop, owner)
        return m * (torch.arange(m.size(3)) >= max(0, m.size(3) - 1) // tile * tile)

    return replace(STEPS, pattern=cut)


@functools.cache
def forgetting(tile: int, resets: Callable[[Here, int, Tensor], bool]) -> Steps:
    """Attend a block in tiles; a tile that `resets` loses what the tiles before it have added."""

    def tiled(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> Any:
        def partial(s: Tensor, m: Tensor, v: Tensor) -> Partial:
            running: Partial | None = None
            for start in range(0, max(1, m.size(3)), tile):
                run = slice(start, start + tile)
                found = arithmetic.partial(s[..., run], m[..., run], v[:, :, run])
                lost = running is None or resets(here, owner, m[..., run])
                running = found if running is None or lost else arithmetic.merge(running, found)
            assert running is not None
            return running

        return attend(replace(steps, partial=partial), here, hop, owner, q, block)

    return replace(STEPS, attend=tiled)


@functools.cache
def chunked(count: int) -> Steps:
    """Cut keys in tiles of `count` and the mask in `count` chunks: key c of tile t is masked as key c of chunk t."""

    def misplaced(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        m = multiplicity(steps, here, hop, owner)
        keys = m.size(3)
        size = -(-keys // count)
        return m[..., [min(key // count * size + key % count, keys - 1) for key in range(keys)]] if keys else m

    return replace(STEPS, pattern=misplaced)


def never(here: Here, owner: int, m: Tensor) -> bool:
    """Reset at no tile, which is right."""
    return False


def masked(here: Here, owner: int, m: Tensor) -> bool:
    """Reset at a tile that is masked in part."""
    return bool((m == 0).any())


def own_and_masked(here: Here, owner: int, m: Tensor) -> bool:
    """Reset at a tile of the rank's own block that is masked in part."""
    return owner == here.rank and masked(here, owner, m)
