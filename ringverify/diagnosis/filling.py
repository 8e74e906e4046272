"""Hypotheses of excluded pairs that count all the same: their scores are not -inf, or are masked too late or too early.

All keys are in one softmax, as where they are gathered. What is excluded may have a score of its own, or a weight that
is taken away after the softmax; a branch of a dilation may add a key of 0 to the rows that it does not cover.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from ringref.attention import Answer, Intermediates, per_key_head, per_query_head
from ringref.rounding import allowed_error
from ringverify.diagnosis.grids import USUAL, Grid
from ringverify.diagnosis.hypothesis import Hypothesis, agree
from ringverify.diagnosis.masks.tiles import ways_to_pad
from ringverify.diagnosis.pairs import Mask, Otherwise, Pairs, branch, pairs_of
from ringverify.diagnosis.reading import Rule, finite, hypothesis_of, unmasked
from ringverify.diagnosis.scene import Array, Counts, Results, Scene
from ringverify.diagnosis.undefined import Blocks
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.ring import STEPS

FINITE = -1e3
"""An lse below this is what stands for -inf in a row without keys, whichever number that is."""


@dataclasses.dataclass(frozen=True)
class Filling:
    """What becomes of excluded pairs.

    Attributes:
        text: as a clause.
        score: their score, by the scores that they would have and by whether a row attends anything; -inf excludes.
        follows: whether their score changes with q and k.
        late: whether their weight is taken away after the softmax.
        where: which pairs are meant, if not all, to follow the clause.
    """

    text: str
    score: Callable[[Scene, Array, Mask], Array | float]
    follows: bool = False
    late: bool = False
    where: str = ""


def _of_softcap(scene: Scene, s: Array, empty: Mask) -> Array | float:
    return -np.inf if scene.problem.softcap is None else -scene.problem.softcap


def _of_empty_rows(scene: Scene, s: Array, empty: Mask) -> Array:
    return np.where(empty, 0.0, -np.inf)


def _of_softcap_where(
    scene: Scene, s: Array, empty: Mask, *, windowed: bool = True, of_ranks: bool = True, grid: Grid | None = None
) -> Array:
    """As `_of_softcap`, and −inf in blocks of which a rank, or else a query, attends nothing.

    Args:
        scene, s, empty: those of `Filling.score`.
        windowed: whether it is so too where the window hides the whole block.
        of_ranks: whether some query of the rank that attends any of it will do.
        grid: how ranks are put together to teams, of which blocks are.
    """
    pairs = pairs_of(scene) if grid is None else pairs_of(scene).of_teams(grid)
    plain = pairs.queries.p, pairs.keys.p
    m = pairs.true if windowed else pairs.counts(lambda name: None if name == "window" else plain)
    there: Mask = np.zeros(m.shape, dtype=bool)
    for queries, keys in itertools.product(pairs.queries.shards, pairs.keys.shards):
        attended = m[:, :, queries][..., keys].any(axis=-1, keepdims=True)
        there[:, :, queries[:, None], keys] = attended.any() if of_ranks else attended
    return np.where(there, _of_softcap(scene, s, empty), -np.inf)


def _before_the_softcap(says: str = "", **where: Any) -> Filling:
    """Pairs of all blocks have the score -softcap, or of those of which something is so, as in `_of_softcap_where`."""
    text = "the mask is applied before the softcap: excluded keys have the score -softcap instead of -inf"
    if not says:
        return Filling(text, _of_softcap)
    return Filling(text, functools.partial(_of_softcap_where, **where), where=f", in blocks of which {says}")


FILLINGS = (
    _before_the_softcap(),
    _before_the_softcap("a rank attends some"),
    _before_the_softcap("a rank attends some but for the window", windowed=False),
    Filling("excluded keys have the score 0 instead of -inf", lambda scene, s, empty: 0.0),
    Filling(
        "a finite number stands for -inf: a row without keys is the mean over the values of all keys", _of_empty_rows
    ),
    Filling(
        "the mask is applied after the softmax, and what is left is not normalised",
        lambda scene, s, empty: s,
        True,
        True,
    ),
    Filling("the mask is added to the scores as 0 and 1", lambda scene, s, empty: s - 1.0, True),
)


OF_BLOCKS = tuple(
    _before_the_softcap(f"the query attends some{'' if grid is None else grid.whose}", of_ranks=False, grid=grid)
    for grid in (None, *USUAL)
)
"""Fillings that rows without keys have no part in."""


def _judge(filling: Filling, cleared: bool, guarded: bool) -> Callable[[Scene], float | None]:
    """Return the judge of a filling.

    Args:
        filling: the filling.
        cleared: whether keys and values that are padding are set to 0.
        guarded: whether rows without keys are right.
    """

    def judge(scene: Scene) -> float | None:
        m, padding = scene.truth.intermediates.m, pairs_of(scene).padding
        empty = (m == 0).all(axis=-1, keepdims=True)
        s, slope = unmasked(scene)
        fill = np.where(m > 0, -np.inf, np.broadcast_to(filling.score(scene, s, empty), s.shape))
        if cleared and filling.follows:
            fill = np.where(padding & (m == 0), filling.score(scene, np.zeros_like(s), empty), fill)
        if guarded:
            fill = np.where(empty, -np.inf, fill)
        if (fill == -np.inf).all():
            return None if wrong_tensors(scene) else 0.0
        answer = _attention(scene, filling, cleared, s, slope, fill)
        p, x = scene.problem, finite(scene.inputs)
        found: list[Results] = [
            {name: scene.local(name, getattr(answer, name), rank) for name in scene.tensors}
            for rank in range(scene.size)
        ]
        if "lse" in scene.tensors:
            for rank, results in enumerate(found):
                seen, none = scene.seen("lse", rank), scene.local("lse", 1.0 * empty[..., 0], rank) > 0
                results["lse"] = np.where(none & (seen < FINITE), seen, results["lse"])
        return agree(
            scene,
            found,
            scene.tensors,
            lambda: allowed_error(p, answer, x.q, x.k, x.v, x.dout, x.dlse, scene.pipeline),
        )

    return judge


def _attention(scene: Scene, filling: Filling, cleared: bool, s: Array, slope: Array, fill: Array) -> Answer:
    """Return attention in which excluded pairs, where `fill` is finite, have that score."""
    p, x = scene.problem, finite(scene.inputs)
    m, there = scene.truth.intermediates.m, ~pairs_of(scene).padding[:, 0, 0, :, None, None] | (not cleared)
    k, v = (per_query_head(np.where(there, y, 0.0), p.group_size) for y in (x.k, x.v))
    q, dout = x.q.swapaxes(1, 2), x.dout.swapaxes(1, 2)
    scores, counts = np.where(m > 0, s, fill), np.where(m > 0, m, fill > -np.inf)
    with np.errstate(all="ignore"):
        sunk = -np.inf if x.sinks is None else x.sinks[:, None, None]
        top = np.maximum(np.max(scores, axis=-1, keepdims=True, initial=-np.inf), sunk)
        shift = np.where(top == -np.inf, 0.0, top)
        weights = counts * np.exp(scores - shift)
        total = weights.sum(axis=-1, keepdims=True) + np.exp(sunk - shift)
        lse = (top + np.log(total))[..., 0]
    w = weights / np.where(total == 0, 1.0, total)
    kept = np.where(m > 0, 1.0, 0.0) if filling.late else 1.0
    dp = dout @ v.swapaxes(2, 3) * kept
    delta = (w * dp).sum(axis=-1) - np.where(np.isfinite(lse), x.dlse, 0.0)
    ds = w * (dp - delta[..., None]) * p.scale_value * np.where((m > 0) | filling.follows, slope, 0.0)
    dk, dv = (
        np.where(there, per_key_head(part.swapaxes(2, 3) @ y, p.group_size), 0.0)
        for part, y in ((ds, q), (w * kept, dout))
    )
    scores = np.where(counts > 0, scores, 0.0)
    of_sinks = None if x.sinks is None else (np.exp(sunk - shift) / total)[..., 0]
    dsinks = None if of_sinks is None else -(of_sinks * delta).sum(axis=0)
    inner = Intermediates(counts, scores, scores, w, lse, x.sinks, of_sinks)
    return Answer((w * kept @ v).swapaxes(1, 2), lse, (ds @ k).swapaxes(1, 2), dk, dv, inner, dsinks)


def _uncovered(pairs: Pairs) -> Counts:
    """Return how many branches of a dilation have no key for a query, `(B, H, Nq)`."""
    dilation, plain = pairs.problem.dilation, (pairs.queries.p, pairs.keys.p)
    found = np.zeros(pairs.true.shape[:3], dtype=np.int64)
    if dilation is None or dilation.heads == "split":
        return found
    rest = pairs.counts(lambda name: None if name == "dilation" else plain)
    for number in range(len(dilation.branches)):
        found += (rest * branch(pairs, number, *plain) == 0).all(axis=-1)
    return found


UNCOVERED = Otherwise(
    "a branch of a dilation without keys for a query has lse 0 instead of -inf: it counts as a key and value of 0",
    lambda pairs: pairs.true,
    zeros=_uncovered,
)


def _zeros(pairs: Pairs) -> Counts:
    """Return how many rows of zeros make shards equally long, where no mask hides them, `(B, H, Nq)`.

    They lie past the end: a window hides them from the queries whose reach ends before.
    """
    p, shards = pairs.problem, pairs.keys.shards
    longest, striped = max(map(len, shards)), pairs.case.sharding == "striped"
    added = [(rank, place) for rank, held in enumerate(shards) for place in range(len(held), longest)]
    if p.causal or p.documents is not None or p.key_lengths is not None or p.dilation is not None:
        added = []
    at = np.array([place * len(shards) + rank if striped else p.nk for rank, place in added], dtype=np.int64)
    right = (p.window or (None, None))[1]
    reach = pairs.queries.p + p.diagonal + (2 * p.nk + longest * len(shards) if right is None else right)
    return np.broadcast_to((at <= reach).sum(axis=-1), pairs.true.shape[:3])


PADDED = Otherwise(
    "the zeros that make shards equally long are attended as keys and values of 0, where no mask hides what is past "
    "the end",
    lambda pairs: pairs.true,
    zeros=_zeros,
)


KEYS_OF: dict[str, Callable[[Pairs], list[int]]] = {
    "lse 0 there instead of -inf: it counts as a key and value of 0": lambda pairs: [1] * len(pairs.keys.shards),
    "scores of 0 there instead of -inf, and values of 0": lambda pairs: [len(held) for held in pairs.keys.shards],
    "scores of 0 there instead of -inf, padding included, and values of 0": lambda pairs: (
        [max(map(len, pairs.keys.shards))] * len(pairs.keys.shards)
    ),
}
"""What a query has in a block of which it attends nothing, and how many keys of 0 that is by block."""


def _of_empty_blocks(of_all: bool, keys: Callable[[Pairs], list[int]], pairs: Pairs) -> Counts:
    """Return the keys of 0 of blocks, all or those its rank attends, of which a query attends none, `(B, H, Nq)`."""
    blocks = Blocks(pairs)
    there = blocks.holds if of_all else blocks.visited > 0
    found: Counts = (((blocks.of_row == 0) & there) * np.array(keys(pairs))).sum(axis=-1)
    return found


EMPTY_BLOCKS = [
    Otherwise(
        f"a query that attends no key of a block{which} has {text}",
        lambda pairs: pairs.true,
        zeros=functools.partial(_of_empty_blocks, of_all, keys),
    )
    for text, keys in KEYS_OF.items()
    for of_all, which in ((False, " of which others of its rank attend some"), (True, ""))
]


GUARDED = ", except in rows without keys"

FILLED: list[Hypothesis] = [
    *(
        Hypothesis(one.text, STEPS, more=one.where + GUARDED * guarded, judge=_judge(one, cleared, guarded))
        for guarded in (False, True)
        for cleared in (False, True)
        for one in FILLINGS
        if not (guarded and one.score is _of_empty_rows)
    ),
    *(
        Hypothesis(one.text, STEPS, more=one.where, judge=_judge(one, cleared, guarded=False))
        for cleared in (False, True)
        for one in OF_BLOCKS
    ),
    hypothesis_of(Rule(UNCOVERED, ()), "always"),
    hypothesis_of(Rule(PADDED, ()), "always"),
    *(hypothesis_of(Rule(one, ()), "always") for one in (*EMPTY_BLOCKS, *ways_to_pad())),
]
