"""The mask of one tile, built when the tile is computed and forgotten afterwards.

Written from the semantics and not from the oracle's pattern. A band needs nothing but indices. Where a sharding does
not fall into runs, the mask of a tile is looked up by position: causality and window, key lengths, documents and
dilation, with multiplicities as their logarithms, because adding log m to a score counts it m times. That is done on
the host, which then knows what a tile needs without asking a device.

Shape letters: B batch or 1, H query heads or 1, S queries, T keys, N positions, R branches.
"""

from __future__ import annotations

import functools
import math

import torch

from ringref.problem import Problem
from ringverify.ring.plan.geometry import band
from ringverify.ring.plan.heads import Branch, branches
from ringverify.ring.plan.tiles import Tile

NO_QUERY_LABEL = -1
NO_KEY_LABEL = -2
"""Labels of positions that no document or branch covers; they differ, so that they do not even meet each other."""


def planes(problem: Problem) -> int:
    """How many matrices a mask by position consists of at most: one for each batch element and head that differs."""
    batch = 1 if problem.key_lengths is None else problem.batch
    return batch * (1 if problem.dilation is None else problem.heads)


def held(dtype: torch.dtype, rows: int, keys: int, *, planes: int = 1) -> int:
    """Bytes that are alive at most while such a mask is built and used: two of it, booleans, and an int32 of counts."""
    return planes * rows * keys * (2 * dtype.itemsize + 2 * torch.int32.itemsize)


def band_bias(tile: Tile, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The bias `(S, T)` of a tile of kind band: 0 where `low <= j - i <= high`, −inf elsewhere."""
    shape = tuple(stop - start for start, stop in (tile.rows, tile.keys))
    sides = []
    if tile.low is not None:
        sides.append(torch.full(shape, -math.inf, dtype=dtype, device=device).tril_(tile.low - 1))
    if tile.high is not None:
        sides.append(torch.full(shape, -math.inf, dtype=dtype, device=device).triu_(tile.high + 1))
    match sides:
        case []:
            return torch.zeros(shape, dtype=dtype, device=device)
        case [side]:
            return side
    return sides[0].add_(sides[1])


def position_bias(
    problem: Problem,
    queries: torch.Tensor,
    keys: torch.Tensor,
    dtype: torch.dtype,
    heads: slice = slice(None),
) -> torch.Tensor | None:
    """The bias of any queries and keys by their positions, `(B, H, S, T)` or 1s there; `None` if all attend once.

    Args:
        problem: names the constraints.
        queries: global positions `(S,)`, int64, at least one.
        keys: global positions `(T,)`, int64, at least one.
        dtype: of the bias.
        heads: which query heads, H of them.
    """
    factors: list[torch.Tensor] = []
    low, high = band(problem)
    aligned_S = queries + problem.diagonal
    nearest, furthest = int(keys.min() - aligned_S.max()), int(keys.max() - aligned_S.min())
    if (high is not None and nearest > high) or (low is not None and furthest < low):
        return torch.full((1, 1, 1, 1), -math.inf, dtype=dtype, device=keys.device)
    # Numbers of size S × T are made of booleans only; a side that bounds no pair here needs none.
    if high is not None and furthest > high:
        factors.append(keys <= aligned_S[:, None] + high)
    if low is not None and nearest < low:
        factors.append(keys >= aligned_S[:, None] + low)
    if problem.key_lengths is not None:
        lengths = torch.tensor(problem.key_lengths, device=keys.device)
        factors.append(keys < lengths[:, None, None, None])
    times_HST = _times(problem, queries, keys, heads)
    if times_HST is not None:
        factors.append(times_HST > 0)
    if not factors:
        return None
    allowed = functools.reduce(torch.logical_and, factors)
    if bool(allowed.all()) and (times_HST is None or bool((times_HST == 1).all())):
        return None
    if times_HST is None or times_HST.dtype == torch.bool:
        often = torch.zeros((), dtype=dtype, device=keys.device)
    else:
        often = times_HST.to(dtype).log_()
    bias = torch.where(allowed, often, -math.inf)
    return bias[(None,) * (4 - bias.dim())]


def _times(problem: Problem, queries: torch.Tensor, keys: torch.Tensor, heads: slice) -> torch.Tensor | None:
    """How often pairs meet in documents or branches, boolean or int32 `(H or 1, S, T)`; `None` if there are none."""
    if problem.documents is None and problem.dilation is None:
        return None
    of = slice(None) if problem.dilation is None else heads
    labels_RHS = labels(problem, queries, NO_QUERY_LABEL)[:, of]
    labels_RHT = labels(problem, keys, NO_KEY_LABEL)[:, of]
    times_HST = labels_RHS[0, :, :, None] == labels_RHT[0, :, None, :]
    if len(labels_RHS) > 1:
        times_HST = times_HST.int()
        for labels_HS, labels_HT in zip(labels_RHS[1:], labels_RHT[1:], strict=True):
            times_HST += labels_HS[:, :, None] == labels_HT[:, None, :]
    return times_HST


def labels(problem: Problem, positions: torch.Tensor, nowhere: int) -> torch.Tensor:
    """What a query and a key must have in common, `(R, H, N)` int64: one attends the other once for each equal label.

    Args:
        problem: has documents or a dilation.
        positions: global positions, int64, shape `(N,)`.
        nowhere: the label of a position that is in no document, or that no branch covers.
    """
    if problem.documents is not None:
        offsets = torch.tensor(problem.documents, device=positions.device)
        # The number of offsets at or before a position. A zero-length document's number is passed over by all.
        document = torch.bucketize(positions, offsets, right=True)
        inside = (document > 0) & (document < len(problem.documents))
        return torch.where(inside, document, nowhere)[None, None]
    assert problem.dilation is not None
    of_heads: list[list[Branch]] = [[] for _ in range(problem.heads)]  # equally many each
    for branch, heads in branches(problem.dilation, problem.heads):
        for head in range(*heads.bounds()):
            of_heads[head].append(branch)
    segment_RH1, rate_RH1, offset_RH1 = torch.tensor(of_heads, device=positions.device).permute(2, 1, 0)[..., None]
    covered = positions % segment_RH1 % rate_RH1 == offset_RH1
    return torch.where(covered, positions // segment_RH1, nowhere)
