"""What a pass at length is worth, computed: which faults it would have shown, and with which probability."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringref.classes import ClassHead
from ringref.intervals import Part, parts
from ringref.rounding import LongBounds
from ringverify.scale.long_run import LongRun
from ringverify.scale.numbers import Positions

Float = NDArray[np.float64]

STRETCHES = (1, 256)
"""Neighbouring keys that are left out in thought."""
TRIED = 128
"""How often, at random places."""


def keys_that_would_be_missed(
    run: LongRun, head: ClassHead, key_classes: Positions, keys: Float, bounds: LongBounds
) -> str:
    """Say how many stretches of keys, had they been left out by the forward, would have moved an lse too far."""
    p, rng = run.problem, np.random.default_rng(run.case.seed + 1)
    allowed, seekers = bounds.lse(keys, head.lse), run.numbers.query_classes(0, 0, np.arange(p.nq))
    limit = np.log(np.where(allowed > 0, allowed, np.inf)) + np.where(keys > 0, head.lse, np.inf)
    exps, said = np.exp(head.scores), []
    cut = list(parts(p, 0, 0))
    for length in sorted({min(one, max(p.nk, 1)) for one in STRETCHES}):
        seen = 0
        for start in rng.integers(0, max(p.nk - length, 0) + 1, TRIED):
            for part in cut:
                first, last = np.searchsorted(part.keys, [start, start + length])
                if first < last and moved(part, (first, last), key_classes, exps, seekers, limit):
                    seen += 1
                    break
        said.append(f"{seen} of {TRIED} {'single keys' if length == 1 else f'runs of {length} keys'}")
    return f"had the forward left out keys at a random place, lse would have shown {' and '.join(said)}"


def moved(
    part: Part, stretch: tuple[int, int], key_classes: Positions, exps: Float, seekers: Positions, limit: Float
) -> bool:
    """Whether an lse would be off by more than is allowed without a stretch of keys, of which a row may attend a part.

    Args:
        part: what attends what.
        stretch: the first of its keys, and the one after the last.
        key_classes: class of each key.
        exps: exponentials of scores by class of query and of key.
        seekers: class of each query.
        limit: log of the largest sum of exponentials that may be missing, by query.
    """
    first, last = stretch
    counts = np.zeros((last - first + 1, exps.shape[1]))
    counts[np.arange(1, last - first + 1), key_classes[part.keys[first:last]]] = 1.0
    counts = counts.cumsum(axis=0)
    with np.errstate(divide="ignore"):
        # Rows that attend all of it have one answer a class; few attend a part of it.
        begin, end = np.searchsorted(part.last, last), np.searchsorted(part.first, first, side="right")
        at = part.queries[begin:end]
        if (np.log(exps @ counts[-1])[seekers[at]] > limit[at]).any():
            return True
        begin, end = np.searchsorted(part.last, first, side="right"), np.searchsorted(part.first, last)
        some = np.flatnonzero((part.last[begin:end] < last) | (part.first[begin:end] > first)) + begin
        rows = part.queries[some]
        attended = (
            counts[np.minimum(part.last[some], last) - first] - counts[np.maximum(part.first[some], first) - first]
        )
        left_out = np.log(np.einsum("rc,rc->r", exps[seekers[rows]], np.maximum(attended, 0.0)))
    return bool((left_out > limit[rows]).any())


def sampled_worth(sampled: Positions, length: int) -> str:
    """Say which faults the sampled rows would have shown, at a random place, and with which probability."""
    tile = min(256, length)
    between = np.diff(np.concatenate([[-1], sampled, [length]])) - 1
    missed = np.maximum(between - tile + 1, 0).sum() / (length - tile + 1)
    in_a_hundred, in_twenty = (1 - (1 - share) ** len(sampled) for share in (0.01, 0.05))
    return (
        f"{len(sampled)} rows were computed again, of every rank some: a fault in all rows of a rank would have been "
        f"seen, in 1 % of all rows with probability {in_a_hundred:.2f}, in 5 % {in_twenty:.2f}, in {tile} neighbours "
        f"{1 - missed:.2f}; and gradients of every key, as far as these rows give it any"
    )
