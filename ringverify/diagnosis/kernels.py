"""Suspicions of kernels: tiles of keys that forget one another, dimensions past a limit, scores in half precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ringverify.cases.inputs import round_to
from ringverify.diagnosis.masks import masked
from ringverify.diagnosis.model import STEPS, Steps, merge, partial
from ringverify.diagnosis.scene import Array, Counts, Partial, Visit
from ringverify.diagnosis.suspicion import Suspicion

TILES = (2, 4, 8, 16, 32, 64, 128)
"""Keys, or dimensions, that a kernel works on at once."""


def _runs(m: Counts, tile: int) -> list[slice]:
    return [slice(start, start + tile) for start in range(0, m.shape[3], tile)]


def _reset(tile: int, resets: Callable[[Visit, Counts], bool]) -> Steps:
    """A block in tiles; where one of them `resets`, what the tiles before it have added is lost."""

    def tiled(at: Visit, s: Array, m: Counts, v: Array) -> Partial:
        if m.shape[3] <= tile:
            return partial(at, s, m, v)
        first, *rest = _runs(m, tile)
        running = partial(at, s[..., first], m[..., first], v[:, :, first])
        for run in rest:
            found = partial(at, s[..., run], m[..., run], v[:, :, run])
            running = found if resets(at, m[..., run]) else merge(at.scene, running, found)
        return running

    return replace(STEPS, partial=tiled)


def _last_tile(tile: int) -> Callable[[Visit], Counts]:
    """Only the last tile of a block is attended, forward and backward alike."""

    def cut(at: Visit) -> Counts:
        m = STEPS.pattern(at).copy()
        m[..., : max(0, m.shape[3] - 1) // tile * tile] = 0
        return m

    return cut


def _dimensions(limit: int) -> Steps:
    return replace(STEPS, products=lambda at, q, k: q[..., :limit] @ k[..., :limit].swapaxes(2, 3))


def _half_products(at: Visit, q: Array, k: Array) -> Array:
    """Products held in float16, before and after the scale: past 65504 they are infinite."""
    if at.problem.dtype != "float16":
        return q @ k.swapaxes(2, 3)
    scale = at.problem.scale_value
    return round_to(round_to(q @ k.swapaxes(2, 3), "float16") * scale, "float16") / scale


def _chunked(count: int) -> Callable[[Visit], Counts]:
    """Keys in tiles of `count`, the mask in `count` chunks: key c of tile t is masked as key c of chunk t."""

    def misplaced(at: Visit) -> Counts:
        m = STEPS.pattern(at)
        keys = m.shape[3]
        if not keys:
            return m
        size = -(-keys // count)
        return m[..., [min(key // count * size + key % count, keys - 1) for key in range(keys)]]

    return misplaced


KERNELS: list[Suspicion] = [
    *[
        Suspicion(f"dimensions past the first {limit} are left out of the scores", _dimensions(limit), when)
        for when in ("always", "backward", "forward")
        for limit in TILES[1:]
    ],
    *[
        Suspicion(
            f"a block of more than {tile} keys is attended in tiles of {tile}, and only its last tile counts",
            _reset(tile, lambda at, m: True),
        )
        for tile in TILES
    ],
    *[
        found
        for tile in TILES
        for found in masked(
            f"a block of more than {tile} keys is attended in tiles of {tile}, and only its last tile counts",
            _last_tile(tile),
        )[::3]
    ],
    *[
        Suspicion(
            f"own block in tiles of {tile} keys: every tile that is masked in part forgets the tiles before it",
            _reset(tile, lambda at, m: at.owner == at.rank and bool((m == 0).any())),
        )
        for tile in TILES
    ],
    *[
        Suspicion(
            f"tiles of {tile} keys: every tile that is masked in part forgets the tiles before it",
            _reset(tile, lambda at, m: bool((m == 0).any())),
        )
        for tile in TILES
    ],
    *[
        found
        for count in TILES[:4]
        for found in masked(f"the mask is cut in {count} chunks, the keys in tiles of {count}", _chunked(count))[::3]
    ],
    Suspicion("scores are held in float16: past 65504 they are infinite", replace(STEPS, products=_half_products)),
]
"""`[::3]`: on all blocks, in each direction."""
