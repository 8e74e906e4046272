"""What the gradient of learned sinks is, where all other results are right.

It is a sum over queries, `Σ w (dlse − dout·out)` with `w = exp(sink − lse)`: of other terms, of other queries, of other
batch elements, or given to other heads. All that may be put together is tried, what takes the fewest changes first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from ringref.rounding import UNDERFLOW
from ringref.sharding import pieces
from ringverify.cases.comparing import sinks_in_parts, worst
from ringverify.diagnosis.hypothesis import relative_rounding
from ringverify.diagnosis.pairs import Ints
from ringverify.diagnosis.scene import Array, Scene
from ringverify.faults.merging import TILES

Way = tuple[str, str, str, str]
"""Of what terms, of which queries, of which of the batch, and for which heads."""

RIGHT: Way = ("", "", "", "")

FEWEST = 3
"""Cases that have to be explained."""

Term = Callable[[Array, Array, Array, Array], Array]
"""What a query adds, `(B, H, N)`, of the weights of the sink and of all keys together, dlse and dout·out."""

TERMS: dict[str, Term] = {
    "": lambda w, share, dlse, delta: w * (dlse - delta),
    "lacks the cotangent of lse": lambda w, share, dlse, delta: -w * delta,
    "lacks dout·out": lambda w, share, dlse, delta: w * dlse,
    "has the cotangent of lse with the other sign": lambda w, share, dlse, delta: -w * (dlse + delta),
    "has the other sign": lambda w, share, dlse, delta: w * (delta - dlse),
    "is not multiplied by the weight of the sink": lambda w, share, dlse, delta: dlse - delta,
    "is multiplied by the weight of the sink twice": lambda w, share, dlse, delta: w**2 * (dlse - delta),
    "has the weight exp(sink − lse) of an lse without the sink": lambda w, share, dlse, delta: (
        w / share * (dlse - delta)
    ),
    "has dout·out of an out that the sink has not joined": lambda w, share, dlse, delta: w * (dlse - delta / share),
    "leaves out queries that attend no key": lambda w, share, dlse, delta: np.where(share > 0, w * (dlse - delta), 0.0),
}


def _own(scene: Scene, rank: int) -> Ints:
    return np.asarray(scene.shards[0][rank])


def _all(scene: Scene) -> Ints:
    return np.arange(scene.problem.nq)


Piece = Literal["early", "late"]


def _of_piece(which: Piece, scene: Scene, rank: int) -> Ints:
    """Return the queries of one zigzag piece of a rank, or of all: of the other one where it is empty."""

    def of(rank: int) -> Ints:
        rows = _own(scene, rank)
        early = len(pieces(scene.problem.nq, 2 * scene.size)[rank]) if scene.case.sharding == "zigzag" else 0
        parts = rows[:early], rows[early:]
        return parts[which == "late"] if all(map(len, parts)) else rows

    in_parts = sinks_in_parts(scene.case, scene.capabilities)
    return of(rank) if in_parts else np.concatenate([of(one) for one in range(len(scene.shards[0]))])


def _of_tile(tile: int, last: bool, scene: Scene, rank: int) -> Ints:
    """Return the queries of a rank's last tile, or of its first."""
    rows = _own(scene, rank)
    return rows[(len(rows) - 1) // tile * tile :] if last and len(rows) else rows[:tile]


QUERIES: dict[str, Callable[[Scene, int], Ints]] = {
    "": lambda scene, rank: _own(scene, rank) if sinks_in_parts(scene.case, scene.capabilities) else _all(scene),
    "is that of all queries on every rank": lambda scene, rank: _all(scene),
    "is that of the rank's own queries alone": lambda scene, rank: _own(scene, rank),
    "is that of the queries of rank 0": lambda scene, rank: _own(scene, 0),
    "is that of the queries of the rank before": lambda scene, rank: _own(scene, rank - 1),
    "is that of the queries of the rank after": lambda scene, rank: _own(scene, (rank + 1) % scene.size),
}
QUERIES |= {
    f"is that of the {which} zigzag piece of each rank alone": functools.partial(_of_piece, which)
    for which in get_args(Piece)
}
QUERIES |= {
    f"is that of the {which} {tile} queries of each rank alone, as if it were not added up over tiles": (
        functools.partial(_of_tile, tile, which == "last tile of")
    )
    for tile in TILES
    for which in ("first tile of", "last tile of")
}
BATCH: dict[str, Callable[[Array], Array]] = {
    "": lambda x: x.sum(axis=0),
    "is that of the first batch element": lambda x: x[0],
    "is the mean over the batch": lambda x: x.mean(axis=0),
}


def _in_turn(scene: Scene, x: Array, shape: tuple[int, int]) -> Array:
    """Return what heads have in the order of the other axis, where the ranks divide them."""
    return x if len(x) % scene.size else x.reshape(shape).T.ravel()


def _of_own_heads(scene: Scene, rank: int, x: Array) -> Array:
    """Return what a rank's block of heads has, and 0 of the others."""
    parts = np.array_split(x, scene.size)
    return np.concatenate([part if number == rank else 0.0 * part for number, part in enumerate(parts)])


HEADS: dict[str, Callable[[Scene, int, Array], Array]] = {
    "": lambda scene, rank, x: x,
    "is that of the next head": lambda scene, rank, x: np.roll(x, -1),
    "is that of the head before": lambda scene, rank, x: np.roll(x, 1),
    "lies in the order (head of the group, key head)": lambda scene, rank, x: x.reshape(scene.problem.hk, -1).T.ravel(),
    "lies in the order (key head, head of the group)": lambda scene, rank, x: x.reshape(-1, scene.problem.hk).T.ravel(),
    "lies in the order (head of the rank, rank)": lambda scene, rank, x: _in_turn(scene, x, (scene.size, -1)),
    "lies in the order (rank, head of the rank)": lambda scene, rank, x: _in_turn(scene, x, (-1, scene.size)),
    "is the mean over the heads": lambda scene, rank, x: np.full_like(x, x.mean()),
    "is multiplied by the number of ranks": lambda scene, rank, x: scene.size * x,
    "is divided by the number of ranks": lambda scene, rank, x: x / scene.size,
    "is multiplied by the scale": lambda scene, rank, x: scene.problem.scale_value * x,
    "is divided by the scale": lambda scene, rank, x: x / scene.problem.scale_value,
    "is 0": lambda scene, rank, x: 0 * x,
    "is 0 on each rank for the heads of others, not summed over ranks: heads are dealt out in blocks": _of_own_heads,
    "is 0 on each rank for the heads of others, not summed over ranks: heads are dealt out in turn": (
        lambda scene, rank, x: np.where(np.arange(len(x)) % scene.size == rank, x, 0.0)
    ),
}


def wrong(scene: Scene) -> bool:
    """Whether the gradient of sinks is not what it should be."""
    return worst(scene.case, scene.capabilities, scene.observation, ("dsinks",))[0] > 1


def cause(scenes: Sequence[Scene]) -> str | None:
    """Return what gives the gradients of sinks that were seen, in words; `None` if nothing does, or none is wrong."""
    told = [scene for scene in scenes if scene.inputs.sinks is not None]
    if len(told) < FEWEST or not any(wrong(scene) and not _explained(scene, RIGHT) for scene in told):
        return None  # too few, or nothing is off by more than what is predicted may be
    found = next((one for one in _ways() if all(_explained(scene, one) for scene in told)), None)
    return None if found is None else "the gradient of sinks " + ", and ".join(text for text in found if text)


def _ways() -> Iterator[Way]:
    """Yield all that may be changed together, the fewest first."""
    every = list(itertools.product(TERMS, QUERIES, BATCH, HEADS))
    yield from sorted((one for one in every if 0 < sum(map(bool, one)) < 3), key=lambda one: sum(map(bool, one)))


def _explained(scene: Scene, way: Way) -> bool:
    """Whether every rank has returned what is predicted, within rounding.

    What is added is rounded as results are, in proportion to its size, beside what is allowed in the right sum.
    """
    term, queries, batch, heads = way
    each, allowed = _terms(scene, term), scene.allowed.dsinks
    if allowed is None:
        return False
    of_head = relative_rounding(scene, "out") * np.abs(each).sum(axis=(0, 2)) + allowed.sum(axis=1)
    limit = float(of_head.max(initial=0.0)) + each.size * UNDERFLOW["float32"]
    for rank, result in enumerate(scene.observation.ranks):
        if result.dsinks is None:
            return False
        rows = each[:, :, QUERIES[queries](scene, rank)].sum(axis=2)
        if not (np.abs(result.dsinks - HEADS[heads](scene, rank, BATCH[batch](rows))) <= scene.size * limit).all():
            return False
    return True


def _terms(scene: Scene, term: str) -> Array:
    def computed() -> Array:
        x, truth = scene.inputs, scene.truth
        sinks, lse = np.asarray(x.sinks)[:, None], truth.lse
        w = np.exp(sinks - np.where(np.isfinite(lse), lse, np.inf))
        inner = truth.intermediates
        share = (inner.m * np.exp(np.where(inner.m > 0, inner.scores, -np.inf) - lse[..., None])).sum(axis=-1)
        dlse, delta = np.where(np.isfinite(lse), x.dlse, 0.0), (x.dout * truth.out).sum(axis=-1).swapaxes(1, 2)
        with np.errstate(all="ignore"):
            found = TERMS[term](w, share, dlse, delta)
        return np.where(np.isfinite(found), found, 0.0)

    return scene.once(("sink terms", term), computed)
