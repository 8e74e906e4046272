"""Sampled rows, and all gradients of keys, which are sums over these rows, held to the dense oracle of these rows.

Shape letters: B batch, S sampled rows, T keys of a piece, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ringref.classes import pieces_of
from ringref.rounding import LongBounds
from ringref.sampled import SampledRows, merged
from ringref.sampled_variance import SampledVariance
from ringverify.properties.precision import LOW
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
    blocks = run.blocks()
    for block in blocks:
        for _, positions, k, v in _keys_of(run, block):
            found.see(positions, k, v)
    _merge(run, found)
    if numbers.sinks is not None:
        found.join(numbers.sinks)
    variance = _variance(run, found, bounds, blocks)
    counts = [[counts_of(p, b, h) for h in range(p.heads)] for b in range(p.batch)]
    most = max(float(one[0].max(initial=0)) for of in counts for one in of)
    reduced = run.capabilities.reduces == "input"  # sums over ranks round too, by what each rank adds
    if "dk" in run.compared.returned:
        for block in blocks:
            for rows, positions, k, v in _keys_of(run, block):
                of_keys, queries = (
                    found.differentiate(positions, k, v),
                    np.full(len(rows), float(len(at) * p.group_size)),
                )
                more = None if variance is None else variance.differentiate(positions, k, v)
                for b, kh in np.ndindex(p.batch, p.hk):
                    one = [x[b, :, kh] for x in of_keys]
                    judged = [None] * 2 if more is None or reduced else [(x[b, :, kh],) for x in more]
                    run.compare_keys(b, kh, rows, positions, one, most, queries, bounds, judged)
                run.note()
            if variance is not None:
                variance.end_block()
        found.dq, found.dq_size = run.summed(np.stack([found.dq, found.dq_size]))
        if variance is not None:
            of_ranks = np.stack([variance.dq_of_keys, variance.pulled, variance.dq_of_blocks])
            variance.dq_of_keys, variance.pulled, variance.dq_of_blocks = run.summed(of_ranks)
        for b, h in np.ndindex(p.batch, p.heads):
            known = run.compared.rows_known[b, h] = np.stack([np.full(p.nq, np.inf), np.zeros(p.nq)])
            known[:, at] = found.lse[b, h], found.towards[b, h]
    own = np.flatnonzero(np.isin(run.queries, at))
    place, sinks = np.searchsorted(at, run.queries[own]), SinkGradient(run, bounds)
    again = run.case.sharding == "replicated_query" and run.rank > 0  # the same rows as on rank 0
    of_out = of_dq = None
    if variance is not None and not again:
        of_out = variance.out.swapaxes(1, 2), variance.out_of_blocks.swapaxes(1, 2)
        of_dq = variance.dq(), p.scale_value**2 * variance.dq_of_blocks.swapaxes(1, 2)
    for b in range(p.batch):
        for h in range(p.heads):
            keys = counts[b][h][0][at][place]
            out, lse = found.out[b, place, h], found.lse[b, h, place]
            here = [None if x is None else [one[b, place, h] for one in x] for x in (of_out, of_dq)]
            run.compared.compare("out", b, h, own, at[place], out, bounds.out(keys, out), here[0])
            run.compared.compare("lse", b, h, own, at[place], lse[:, None], bounds.lse(keys, lse)[:, None])
            if "dq" in run.compared.returned:
                of_query = found.dq[b, place, h], found.dq_size[b, place, h], found.sizes[b, h, place]
                run.compare_dq(b, h, own, at[place], keys, out, of_query, bounds, here[1])
                sinks.add(b, h, at[place], keys, out, lse, of_query[2])
                _compare_zero(run, b, h, np.setdiff1d(np.arange(len(run.queries)), own))
    sinks.compare()
    if run.rank == 0:
        run.worth.append(sampled_worth(at, p.nq))


def _variance(
    run: LongRun, found: SampledRows, bounds: LongBounds, blocks: Sequence[Positions]
) -> SampledVariance | None:
    """Return the mean errors of the declared pipeline, those of out complete; `None` where no mean is judged."""
    pipeline = bounds.pipeline
    if pipeline.dtype not in LOW or pipeline.sums in LOW:
        return None
    variance = SampledVariance(found, pipeline)
    for block in blocks:
        for _, positions, k, v in _keys_of(run, block):
            variance.see(positions, k, v)
        variance.end_block()
    variance.out, variance.out_of_blocks = run.summed(np.stack([variance.out, variance.out_of_blocks]))
    return variance


def _compare_zero(run: LongRun, b: int, h: int, rows: Positions) -> None:
    """Rows whose cotangents are zero have a dq of zero, exactly."""
    for piece in pieces_of(rows, ROWS):
        zeros = np.zeros((len(piece), run.problem.head_dim))
        run.compared.compare("dq", b, h, piece, run.queries[piece], zeros, zeros)


def _keys_of(run: LongRun, block: Positions) -> Iterator[tuple[Positions, Positions, Float, Float]]:
    p = run.problem
    for rows in pieces_of(block, PIECE):
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
