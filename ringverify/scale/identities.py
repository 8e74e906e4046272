"""Sums over all rows that agree with one another and with the inputs, on ordinary inputs and cotangents everywhere.

For each key head, over the queries i of its query heads and its keys j, in each dimension, of whatever pattern:

    Σ_i dout_i · out_i   = Σ_j dv_j · v_j      both are Σ_ij p_ij dout_i · v_j
    Σ_i dout_i           = Σ_j dv_j            over rows with keys: their weights add up to 1
    Σ_i dq_i · q_i       = Σ_j dk_j · k_j      both are scale Σ_ij ds_ij q_i · k_j, with the slope of a softcap in ds
    scale Σ_i dlse_i q_i = Σ_j dk_j            over rows with keys, without softcap: ds of a row add up to dlse_i

With a learned sink weights of a row add up to 1 − w_i, w_i = exp(sink − lse_i), and its ds to dlse_i less that of the
sink, w_i (dlse_i − dout_i·out_i), whose sum over all rows is dsink. Then three identities need the returned lse:

    Σ_i (1 − w_i) dout_i                                      = Σ_j dv_j
    scale Σ_i ((1 − w_i) dlse_i + w_i dout_i·out_i) q_i       = Σ_j dk_j        without softcap
    Σ_i w_i (dlse_i − dout_i·out_i)                           = dsink           `ringverify.scale.sinks`

A sum is wrong if any row gives too little or too much, so no row is left out as in a sample; whose row it is, it does
not tell. Every rank adds up its own rows. `ringref.rounding.LongBounds.sums` says how far two sums may be apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ringref.classes import pieces_of
from ringref.rounding import LongBounds
from ringverify.events import TensorName
from ringverify.scale.comparison import RankResults
from ringverify.scale.long_run import LongRun, counts_of
from ringverify.scale.numbers import Numbers, Positions
from ringverify.scale.sinks import SinkGradient

Float = NDArray[np.float64]

PIECE = 512
IDENTITIES: tuple[tuple[TensorName, str], ...] = (
    ("dv", "dv·v over all keys, expected the sum of dout·out over all queries"),
    ("dv", "dv over all keys, expected the sum of dout over all queries with keys"),
    ("dk", "dk·k over all keys, expected the sum of dq·q over all queries"),
    ("dk", "dk over all keys, expected the scaled sum of dlse·q over all queries with keys"),
)
"""The result that fails, and the sum in words."""


def identities(run: LongRun) -> None:
    """Hold sums over all rows to one another, and to sums of inputs."""
    p, numbers = run.problem, run.numbers
    queries = run.queries if run.case.sharding != "replicated_query" or run.rank == 0 else run.queries[:0]
    largest, whole_of = [[0.0, -float(p.dv), 0.0]], run.free_bounds(0.0).whole
    for b, h in np.ndindex(p.batch, p.heads):
        for at in pieces_of(queries, PIECE):
            dout = numbers.dout(b, h, at)
            q, whole = np.abs(numbers.q(b, h, at)).sum(axis=-1), whole_of(dout, run.dlse(b, h, at))
            largest.append([float(one.max()) for one in (q, -dout.sum(axis=-1), whole)])
    products, least, whole = np.max(run.gathered(np.max(largest, axis=0)), axis=0)
    bounds = run.free_bounds(products)
    sinks, known = SinkGradient(run, bounds, returned=True), "lse" in run.compared.returned
    for b, kh in np.ndindex(p.batch, p.hk):
        counts = [counts_of(p, b, h) for h in range(kh * p.group_size, (kh + 1) * p.group_size)]
        found = identity_sums(
            run.compared,
            numbers,
            bounds,
            (b, kh),
            counts,
            (queries, run.keys),
            partial(run.dlse, b),
            least=-least,
            whole=whole,
            sinks=sinks,
        )
        run.note()
        for which, sums in enumerate(found):
            left, right, squares, rows = run.summed(sums)
            holds = which % 2 == 0 or ((known or not p.sinks) and (which == 1 or p.softcap is None))
            if run.rank == 0 and holds:
                (name, says), allowed = IDENTITIES[which], bounds.sums(squares, rows)
                whose = [f"{says}, of element {b}, key head {kh}, dimension {d}" for d in range(len(left))]
                run.compared.compare_sums(name, right, left, allowed, whose, (which, b, kh))
                if which == 1 and b == kh == 0 and left.all():
                    share = float((allowed / left).min())
                    shown = f"sums of dv would have shown it from {share:.2g} of all rows on"
                    run.worth.append(f"had some rows given no gradients, {shown}")
    if known:
        sinks.compare()
    of_queries, of_keys = p.batch * p.heads * len(queries), p.batch * p.hk * len(run.keys)
    run.compared.rows |= {"out": of_queries, "dq": of_queries, "dk": of_keys, "dv": of_keys}


def identity_sums(
    results: RankResults,
    numbers: Numbers,
    bounds: LongBounds,
    head: tuple[int, int],
    counts: Sequence[tuple[Float, Float]],
    rows: tuple[Positions, Positions],
    dlse: Callable[[int, Positions], Float],
    *,
    least: float,
    whole: float,
    sinks: SinkGradient | None = None,
) -> list[Float]:
    """Return this rank's part of each identity's sums: left and right side, squared errors of rows, and their sizes.

    Args:
        results: what came back.
        numbers: the inputs.
        bounds: of the problem.
        head: element of the batch and key head.
        counts: of each query head, how many keys each query attends, and how many queries each key.
        rows: positions of the queries and keys that this rank answers for.
        dlse: the cotangent of lse of a query head at some positions.
        least: smallest sum of a row of dout, which is positive, over all ranks.
        whole: largest `LongBounds.whole` of a row, likewise.
        sinks: the gradient of learned sinks, to which rows are added whose lse came back.
    """
    p, (b, kh) = numbers.problem, head
    sums = [np.zeros((4, width)) for width in (p.dv, p.dv, p.head_dim, p.head_dim)]

    def add(which: int, side: int, terms: Float, errors: Float, size: Float | float = 0.0) -> None:
        found = sums[which]
        found[side] += terms.sum(axis=0)
        found[2] += (errors**2).sum(axis=0)
        found[3] += np.sum(size, axis=0)

    scale = abs(p.scale_value)
    for number, (of_queries, _) in enumerate(counts):
        h = kh * p.group_size + number
        for places, at in _pieces(rows[0]):
            some = (of_queries[at] > 0)[:, None]
            dout, change = numbers.dout(b, h, at) * some, dlse(h, at)[:, None] * some
            q, out, dq = numbers.q(b, h, at), *(results.actual(name, b, h, places) for name in ("out", "dq"))
            size = bounds.whole(dout, change[:, 0])
            relative = bounds.rows_in_sums(of_queries[at], bounds.share(dout, out, size))
            of_values, of_scores = (x[:, None] for x in relative)
            paired = scale * size[:, None] * np.abs(q)
            weighed, kept, to_sink = dout, change, np.zeros(1)
            if numbers.sinks is not None and "lse" in results.returned:
                lse = results.actual("lse", b, h, places)[:, 0]
                w = np.where(lse == -np.inf, 0.0, np.exp(numbers.sinks[h] - lse))[:, None]
                weighed, kept = (1 - w) * dout, (1 - w) * change + w * (dout * out).sum(axis=-1, keepdims=True)
                to_sink = w * np.expm1(bounds.lse(of_queries[at], lse))[:, None]
                if sinks is not None:
                    y = bounds.whole(numbers.dout(b, h, at), dlse(h, at))
                    sinks.add(b, h, at, of_queries[at], out, lse, y)
            add(0, 0, dout * out, of_values * dout + bounds.returned(out) * dout, dout)
            add(1, 0, weighed, (of_values + to_sink) * dout, dout)
            keyed = paired * bounds.key_size
            add(2, 0, dq * q, of_scores * keyed + bounds.returned(dq) * np.abs(q), keyed)
            add(3, 0, p.scale_value * kept * q, (of_scores + to_sink) * paired, paired)
    attending = np.sum([of[1] for of in counts], axis=0)
    for places, at in _pieces(rows[1]):
        k, v = numbers.k(b, kh, at), numbers.v(b, kh, at)
        dk, dv = results.actual("dk", b, kh, places), results.actual("dv", b, kh, places)
        summing = bounds.keys_in_sums(attending[at])[:, None]
        of_values = summing * np.abs(dv) + bounds.returned(dv)  # dv adds up positive numbers, of its own size
        mass = np.abs(dv).sum(axis=-1, keepdims=True) / least
        of_scores = summing * mass * scale * bounds.query_size * whole + bounds.returned(dk)
        for which, x, y, error in ((0, dv, v, of_values), (2, dk, k, of_scores)):
            add(which, 1, x * y, error * np.abs(y))
            add(which + 1, 1, x, error)
    return sums


def _pieces(positions: Positions) -> Iterator[tuple[Positions, Positions]]:
    for places in pieces_of(np.arange(len(positions)), PIECE):
        yield places, positions[places]
