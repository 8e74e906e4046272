"""Every row of every result, held to the class oracle: each rank its own rows, a piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ringref.classes import ClassHead, pieces_of
from ringref.rounding import LongBounds
from ringverify.scale.long_run import ROWS, LongRun, counts_of
from ringverify.scale.numbers import Positions
from ringverify.scale.sinks import SinkGradient
from ringverify.scale.worth import keys_that_would_be_missed

Float = NDArray[np.float64]


def every_row(run: LongRun) -> None:
    """Hold every row of every result to the class oracle."""
    p, group = run.problem, run.problem.group_size
    queries, keys = np.argsort(run.queries, kind="stable"), np.argsort(run.keys, kind="stable")
    every, every_key = np.arange(p.nq), np.arange(p.nk)
    bounds = bounds_of_classes(run)
    sinks = SinkGradient(run, bounds)
    for b in range(p.batch):
        for kh in range(p.hk):
            heads, counts = [], []
            key_classes = run.numbers.key_classes(b, kh, every_key)
            for h in range(kh * group, (kh + 1) * group):
                counts.append(counts_of(p, b, h))
                heads.append(_class_head(run, b, h, kh, (run.numbers.query_classes(b, h, every), key_classes)))
                _check_rows(run, heads[-1], b, h, queries, counts[-1][0], bounds, sinks)
                run.compared.rows_known[b, h] = np.stack([heads[-1].lse, heads[-1].towards])
            if "dk" in run.compared.returned:
                _check_keys(run, heads, b, kh, keys, counts, bounds)
            if run.rank == 0 and b == kh == 0 and "lse" in run.compared.returned:
                run.worth.append(keys_that_would_be_missed(run, heads[0], key_classes, counts[0][0], bounds))
    sinks.compare()


def bounds_of_classes(run: LongRun) -> LongBounds:
    """Return what may be wrong on queries and keys from codebooks."""
    queries, keys = run.numbers.codebooks
    return run.bounds(
        float((np.abs(queries) @ np.abs(keys).T).max()), float(np.abs(queries @ keys.T).max()), (queries, keys)
    )


def _class_head(run: LongRun, b: int, h: int, kh: int, classes: tuple[Positions, Positions]) -> ClassHead:
    p, numbers = run.problem, run.numbers
    queries, keys = zip(numbers.codebooks, classes, strict=True)
    dout = partial(numbers.dout, b, h) if "dq" in run.compared.returned else None
    dlse = run.dlse(b, h, np.arange(p.nq))
    return ClassHead(p, b, h, queries, keys, partial(numbers.v, b, kh), dout, dlse, sink=run.sink(h))


def _check_rows(
    run: LongRun,
    head: ClassHead,
    b: int,
    h: int,
    order: Positions,
    keys: Float,
    bounds: LongBounds,
    sinks: SinkGradient,
) -> None:
    """Verify rows of this rank; afterwards `head` knows what gradients of keys need of all rows."""
    for piece in pieces_of(order, ROWS):
        at = run.queries[piece]
        out, lse, dq, size = head.rows(at)
        run.compared.compare("out", b, h, piece, at, out, bounds.out(keys[at], out))
        run.compared.compare("lse", b, h, piece, at, lse[:, None], bounds.lse(keys[at], lse)[:, None])
        if "dq" in run.compared.returned:
            run.compare_dq(b, h, piece, at, keys[at], out, (dq, size, head.sizes[at]), bounds)
            sinks.add(b, h, at, keys[at], out, lse, head.sizes[at])
        run.note()
    if run.shared:
        others = np.ones(run.problem.nq, dtype=bool)
        others[run.queries] = False
        head.lse[others] = 0.0
        found = np.stack([head.lse, head.towards, head.sizes])
        head.lse[:], head.towards[:], head.sizes[:] = run.summed(found)


def _check_keys(
    run: LongRun,
    heads: Sequence[ClassHead],
    b: int,
    kh: int,
    order: Positions,
    counts: Sequence[tuple[Float, Float]],
    bounds: LongBounds,
) -> None:
    most, queries = max(float(of[0].max(initial=0)) for of in counts), np.sum([of[1] for of in counts], axis=0)
    for piece in pieces_of(order, ROWS):
        at = run.keys[piece]
        of_keys = [np.sum(of, axis=0) for of in zip(*(head.gradients_of_keys(at) for head in heads), strict=True)]
        run.compare_keys(b, kh, piece, at, of_keys, most, queries[at], bounds)
        run.note()
