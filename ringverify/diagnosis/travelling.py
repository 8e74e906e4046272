"""Suspicions of what travels: blocks that do not arrive, gradients that are not added up or do not come home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ringverify.diagnosis.model import STEPS, Block, Steps, collect, sum_of
from ringverify.diagnosis.scene import Array, Part, Scene, Visit, visits
from ringverify.diagnosis.suspicion import Suspicion

Times = Callable[[Visit], float]


def _several(at: Visit) -> bool:
    return at.scene.size > 1


WHICH: dict[str, Times] = {
    "come from the rank's own queries only": lambda at: at.hop == 0,
    "lack the rank's own part": lambda at: at.hop > 0 or not _several(at) or at.scene.replicated,
    "lack the part of the last hop": lambda at: not at.last,
    "lack the part of hop 1": lambda at: at.hop != 1,
    "lack the part of hop 2": lambda at: at.hop != 2,
    "have the part of hop 1 twice": lambda at: 2 if at.hop == 1 else 1,
    "have the part of hop 2 twice": lambda at: 2 if at.hop == 2 else 1,
    "have the part of the last hop twice": lambda at: 2 if at.last else 1,
    "have the rank's own part twice": lambda at: 2 if at.hop == 0 and _several(at) else 1,
    "are those of the last hop alone: nothing is added up": lambda at: (
        at.hop == at.scene.size - 1 or at.scene.replicated
    ),
    "lack the parts of rank 0": lambda at: at.rank > 0 or at.owner == 0,
}


def _dropped_by_those_that_skip(scene: Scene, parts: dict[tuple[int, int], Part]) -> list[Part]:
    """A rank that sees nothing of a block passes on zeros, and so drops what ranks before it had added."""
    kept = dict(parts)
    for rank in range(scene.size):
        for at in visits(scene, rank):
            if not STEPS.pattern(at).any():
                for hop in range(at.hop):
                    before = (at.owner + hop) % scene.size, at.owner
                    kept[before] = Part(*(0 * x for x in parts[before]))
    return collect(scene, kept)


def _not_added_by_those_that_skip(scene: Scene, parts: dict[tuple[int, int], Part]) -> list[Part]:
    return collect(scene, parts)


def _of_neighbour(by: int) -> Callable[[Scene, dict[tuple[int, int], Part]], list[Part]]:
    def sent(scene: Scene, parts: dict[tuple[int, int], Part]) -> list[Part]:
        right = collect(scene, parts)
        if scene.replicated:
            return right
        size = scene.size
        return [
            Part(*(_like(x, y) for x, y in zip(right[(r + by) % size], right[r], strict=True))) for r in range(size)
        ]

    return sent


def _like(x: Array, room: Array, axis: int = 2) -> Array:
    """Cut, or continued with zeros, to the length of another."""
    found = np.zeros((*x.shape[:axis], room.shape[axis], *x.shape[axis + 1 :]))
    count = min(x.shape[axis], room.shape[axis])
    place = (slice(None),) * axis + (slice(0, count),)
    found[place] = x[place]
    return found


def _unpacked_as_a_pair(scene: Scene, parts: dict[tuple[int, int], Part]) -> list[Part]:
    """Two buffers that each hold dk and dv, the one sent and the one received, are taken for dk and for dv."""
    right, size = collect(scene, parts), scene.size
    if scene.replicated or size == 1 or any(part.dk.shape != part.dv.shape for part in right):
        return right
    sums = [part.dk + part.dv for part in right]
    return [Part(sums[r], _like(sums[(r + 1) % size], sums[r])) for r in range(size)]


def _the_same_way(scene: Scene, parts: dict[tuple[int, int], Part]) -> list[Part]:
    """Rank r works on block r + hop while it has the gradient of block r - hop: both go the same way."""
    right, size = collect(scene, parts), scene.size
    if scene.replicated:
        return right
    met = [[parts[(owner + hop) % size, (owner + 2 * hop) % size] for hop in range(size)] for owner in range(size)]
    return [
        Part(*(sum_of([_like(part[of], right[owner][of]) for part in met[owner]]) for of in (0, 1)))
        for owner in range(size)
    ]


def _last_on_the_way(by: Callable[[Part], Part]) -> Steps:
    return replace(
        STEPS,
        collect=lambda scene, parts: [
            by(part) if scene.size > 1 and not scene.replicated else part for part in collect(scene, parts)
        ],
    )


def _one(name: str, times: Times) -> Steps:
    """Parts of dk alone, or of dv alone, counted so many times."""

    def changed(scene: Scene, parts: dict[tuple[int, int], Part]) -> list[Part]:
        counted = {}
        for rank in range(scene.size):
            for at in visits(scene, rank):
                part, factor = parts[rank, at.owner], float(times(at))
                counted[rank, at.owner] = part._replace(**{name: factor * getattr(part, name)})
        return collect(scene, counted)

    return replace(STEPS, collect=changed)


TRAVEL: list[Suspicion] = [
    *[Suspicion(f"dk and dv {says}", replace(STEPS, part_times=times)) for says, times in WHICH.items()],
    *[Suspicion(f"dq: its parts {says}", replace(STEPS, dq_times=times)) for says, times in WHICH.items()],
    *[
        Suspicion(f"dq, dk and dv {says}", replace(STEPS, part_times=times, dq_times=times))
        for says, times in WHICH.items()
    ],
    *[
        Suspicion(f"{name}: its parts {says}", _one(name, times))
        for says, times in WHICH.items()
        for name in ("dk", "dv")
    ],
    Suspicion(
        "a rank that skips a hop passes on zeros: dk and dv lose what ranks before it had added",
        replace(STEPS, collect=_dropped_by_those_that_skip),
    ),
    Suspicion("dk and dv are those of rank r + 1: sent one hop too few", replace(STEPS, collect=_of_neighbour(1))),
    Suspicion("dk and dv are those of rank r - 1: sent one hop too many", replace(STEPS, collect=_of_neighbour(-1))),
    Suspicion(
        "dk equals dk + dv, and dv is that sum of rank r + 1: the buffers sent and received are unpacked as dk and dv",
        replace(STEPS, collect=_unpacked_as_a_pair),
    ),
    Suspicion(
        "blocks are taken from one side and their gradients sent to the same one: right on two ranks, on more "
        "dk and dv hold parts of other blocks",
        replace(STEPS, collect=_the_same_way),
    ),
    Suspicion("dk and dv never come home: they are 0", _last_on_the_way(lambda part: Part(0 * part.dk, 0 * part.dv))),
    Suspicion("replicated queries: dq is not summed over ranks", replace(STEPS, sum_dq=lambda scene, dq: dq)),
]


def _block(of: Callable[[Visit, Block], Block]) -> Steps:
    return replace(STEPS, block=lambda at: of(at, STEPS.block(at)))


def _from_others(keep_k: bool, keep_v: bool) -> Steps:
    """Blocks of other ranks are zeros, as a buffer is before anything arrives."""

    def of(at: Visit, block: Block) -> Block:
        if at.hop == 0:
            return block
        return block[0] * keep_k, block[1] * keep_v

    return _block(of)


def _of_rank(rank: Callable[[Visit], int]) -> Steps:
    """Keys and values of another rank, cut or continued with zeros."""

    def of(at: Visit, block: Block) -> Block:
        size = at.scene.size
        found = STEPS.block(Visit(at.scene, at.rank, at.hop, rank(at) % size))
        return _like(found[0], block[0], axis=1), _like(found[1], block[1], axis=1)

    return _block(of)


def _transposed(at: Visit, block: Block) -> Block:
    if block[0].shape[1] != block[0].shape[2]:
        return block
    return block[0].swapaxes(1, 2), block[1].swapaxes(1, 2)


def _last(at: Visit) -> int:
    return at.owner if at.scene.replicated else at.owner + 1


BLOCKS_THAT_ARRIVE: list[Suspicion] = [
    Suspicion("keys and values of other ranks are zeros: they are read before they arrive", _from_others(False, False)),
    Suspicion("values of other ranks are zeros: they are read before they arrive", _from_others(True, False)),
    Suspicion("keys of other ranks are zeros: they are read before they arrive", _from_others(False, True)),
    Suspicion(
        "keys and values of other ranks are zeros: they are read before they arrive",
        _from_others(False, False),
        "backward",
    ),
    Suspicion(
        "values of other ranks are zeros: they are read before they arrive", _from_others(True, False), "backward"
    ),
    Suspicion("keys of other ranks are zeros: they are read before they arrive", _from_others(False, True), "backward"),
    Suspicion("the rank's own keys and values are used at every hop", _of_rank(lambda at: at.rank)),
    Suspicion("the rank's own keys and values are used at every hop", _of_rank(lambda at: at.rank), "backward"),
    Suspicion("the ring starts from the last block received instead of the rank's own", _of_rank(_last), "backward"),
    Suspicion("the ring starts from the last block received instead of the rank's own", _of_rank(_last)),
    Suspicion("keys and values are transposed: tokens for heads", _block(_transposed), "backward"),
    Suspicion("keys and values are transposed: tokens for heads", _block(_transposed)),
]
