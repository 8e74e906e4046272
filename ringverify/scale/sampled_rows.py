"""Sampled rows, and all gradients of keys, which are sums over these rows, held to the dense oracle of these rows.

Shape letters: B batch, S sampled rows, T keys of a piece, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ringref.classes import pieces_of
from ringref.sampled import SampledRows, merged
from ringverify.scale.comparison import stacked
from ringverify.scale.long_run import ROWS, LongRun, counts_of
from ringverify.scale.numbers import Positions
from ringverify.scale.sinks import SinkGradient
from ringverify.scale.worth import sampled_worth

Float = NDArray[np.float64]

PIECE = 512
"""Keys that all sampled rows are compared with at a time."""


def sampled_rows(run: LongRun) -> None:
    """Hold sampled rows, and all gradients of keys, which are sums over these rows, to the dense oracle."""
    p, at, numbers = run.problem, run.sampled, run.numbers
    q = stacked(numbers.q, p.batch, p.heads, at)
    bounds = run.free_bounds(float(np.abs(q).sum(axis=-1).max(initial=0.0)))
    dout = stacked(numbers.dout, p.batch, p.heads, at)
    dlse = np.stack([np.stack([run.dlse(b, h, at) for h in range(p.heads)]) for b in range(p.batch)])
    found = SampledRows(p, at, q, dout, dlse)
    order = np.argsort(run.keys, kind="stable")
    for _, positions, k, v in _own_keys(run, order):
        found.see(positions, k, v)
    _merge(run, found)
    if numbers.sinks is not None:
        found.join(numbers.sinks)
    counts = [[counts_of(p, b, h) for h in range(p.heads)] for b in range(p.batch)]
    most = max(float(one[0].max(initial=0)) for of in counts for one in of)
    if "dk" in run.compared.returned:
        for rows, positions, k, v in _own_keys(run, order):
            of_keys, queries = (
                found.differentiate(positions, k, v),
                np.full(len(rows), float(len(at) * p.group_size)),
            )
            for b, kh in np.ndindex(p.batch, p.hk):
                one = [x[b, :, kh] for x in of_keys]
                run.compare_keys(b, kh, rows, positions, one, most, queries, bounds)
            run.note()
        found.dq, found.dq_size = run.summed(np.stack([found.dq, found.dq_size]))
        for b, h in np.ndindex(p.batch, p.heads):
            known = run.compared.rows_known[b, h] = np.stack([np.full(p.nq, np.inf), np.zeros(p.nq)])
            known[:, at] = found.lse[b, h], found.towards[b, h]
    own = np.flatnonzero(np.isin(run.queries, at))
    place, sinks = np.searchsorted(at, run.queries[own]), SinkGradient(run, bounds)
    for b in range(p.batch):
        for h in range(p.heads):
            keys = counts[b][h][0][at][place]
            out, lse = found.out[b, place, h], found.lse[b, h, place]
            run.compared.compare("out", b, h, own, at[place], out, bounds.out(keys, out))
            run.compared.compare("lse", b, h, own, at[place], lse[:, None], bounds.lse(keys, lse)[:, None])
            if "dq" in run.compared.returned:
                of_query = found.dq[b, place, h], found.dq_size[b, place, h], found.sizes[b, h, place]
                run.compare_dq(b, h, own, at[place], keys, out, of_query, bounds)
                sinks.add(b, h, at[place], keys, out, lse, of_query[2])
                _compare_zero(run, b, h, np.setdiff1d(np.arange(len(run.queries)), own))
    sinks.compare()
    if run.rank == 0:
        run.worth.append(sampled_worth(at, p.nq))


def _compare_zero(run: LongRun, b: int, h: int, rows: Positions) -> None:
    """Rows whose cotangents are zero have a dq of zero, exactly."""
    for piece in pieces_of(rows, ROWS):
        zeros = np.zeros((len(piece), run.problem.head_dim))
        run.compared.compare("dq", b, h, piece, run.queries[piece], zeros, zeros)


def _own_keys(run: LongRun, order: Positions) -> Iterator[tuple[Positions, Positions, Float, Float]]:
    p = run.problem
    for rows in pieces_of(order, PIECE):
        at = run.keys[rows]
        k, v = (stacked(make, p.batch, p.hk, at) for make in (run.numbers.k, run.numbers.v))
        yield rows, at, k, v


def _merge(run: LongRun, found: SampledRows) -> None:
    """Put together what each rank saw of its own keys."""
    of_rows = [x.swapaxes(1, 2)[..., None] for x in (found.values, found.lse)]
    everyone = np.stack(run.gathered(np.concatenate([found.out, *of_rows], axis=-1)))
    together, lse = everyone[..., :-1], everyone[..., -1].swapaxes(2, 3)
    together, found.lse = merged(together, lse, np.ones(len(lse)))
    found.out, found.values = together[..., :-1], together[..., -1].swapaxes(1, 2)
