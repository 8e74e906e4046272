"""Which queries attend which keys of one block, and how often, from global positions alone.

Written from the semantics (causal, window, documents, key lengths, dilation) and not from the oracle's pattern. A
mask is built for one block at a time and says nothing where nothing has to be said: no mask for a block that every
query attends, `None` for a block that none does.

Shape letters: B batch or 1, H query heads or 1, S queries, T keys, N positions, R branches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringref.problem import Dilation, Problem
from ringverify.ring.plan import Held

NO_QUERY_LABEL = -1
NO_KEY_LABEL = -2
"""Labels of positions that no document or branch covers; they differ, so that they do not even meet each other."""


class Mask(NamedTuple):
    """The pattern of one block.

    Attributes:
        allowed_BHST: whether a query attends a key, bool, B and H may be 1; `None`: all do.
        multiplicity_BHST: how often, in the accumulation dtype; `None`: once wherever allowed.
    """

    allowed_BHST: torch.Tensor | None
    multiplicity_BHST: torch.Tensor | None


FULL = Mask(None, None)


def block_mask(problem: Problem, queries: Held, keys: Held, dtype: torch.dtype) -> Mask | None:
    """The pattern of one block, or `None` if no query attends any of its keys.

    Args:
        problem: names the constraints; its lengths are global.
        queries: the queries of one rank.
        keys: the keys of one block.
        dtype: dtype of the multiplicities.
    """
    if not queries.count or not keys.count:
        return None
    factors: list[torch.Tensor] = []

    # Causal and window are a band: left <= j - (i + Nk - Nq) <= right. A side that this block cannot cross is dropped.
    nearest = keys.low - (queries.high + problem.diagonal)
    farthest = keys.high - (queries.low + problem.diagonal)
    left, right = _band(problem)
    if (right is not None and nearest > right) or (left is not None and farthest < left):
        return None
    if right is not None and farthest > right:
        factors.append(keys.positions <= (queries.positions + (problem.diagonal + right))[:, None])
    if left is not None and nearest < left:
        factors.append(keys.positions >= (queries.positions + (problem.diagonal + left))[:, None])

    if problem.key_lengths is not None:
        if keys.low >= max(problem.key_lengths):
            return None
        if keys.high >= min(problem.key_lengths):
            lengths = torch.tensor(problem.key_lengths, device=keys.positions.device)
            factors.append(keys.positions < lengths[:, None, None, None])

    multiplicity: torch.Tensor | None = None
    if problem.documents is not None or problem.dilation is not None:
        labels_RHS = labels(problem, queries.positions, NO_QUERY_LABEL)
        labels_RHT = labels(problem, keys.positions, NO_KEY_LABEL)
        together_RHST = labels_RHS[..., :, None] == labels_RHT[..., None, :]
        if together_RHST.size(0) == 1:
            factors.append(together_RHST[0])
        else:
            times_HST = together_RHST.sum(dim=0)
            factors.append(times_HST > 0)
            multiplicity = times_HST.to(dtype)[None]

    if not factors:
        return FULL
    allowed = factors[0]
    for factor in factors[1:]:
        allowed = allowed & factor
    # A look at the values, worth it on a host: the arithmetic of an empty block costs more than this question.
    if not bool(allowed.any()):
        return None
    return Mask(allowed[(None,) * (4 - allowed.dim())], multiplicity)


def _band(problem: Problem) -> tuple[int | None, int | None]:
    """Bounds on `j - (i + Nk - Nq)`, both inclusive; `None` is unbounded."""
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0  # a window's right side is never negative, so causality is the narrower of the two
    return None if left is None else -left, right


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
    segment_RH1, rate_RH1, offset_RH1 = _branches(problem.dilation, problem.heads, positions.device)
    covered = positions % segment_RH1 % rate_RH1 == offset_RH1
    return torch.where(covered, positions // segment_RH1, nowhere)


def _branches(dilation: Dilation, heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Segment length, dilation rate and offset of every branch in every head, each `(R, H, 1)`.

    With heads split a head runs one branch, so there R is 1.
    """
    count = len(dilation.branches)
    rows: list[list[tuple[int, int, int]]]
    if dilation.heads == "split":
        size, larger = divmod(heads, count)
        rows = [[]]
        for number, (segment, rate) in enumerate(dilation.branches):
            rows[0] += [(segment, rate, number % rate)] * (size + (number < larger))
    elif dilation.head_offset == "cyclic":
        rows = [[(segment, rate, head % rate) for head in range(heads)] for segment, rate in dilation.branches]
    else:
        rows = [
            [(segment, rate, head // -(-heads // rate)) for head in range(heads)] for segment, rate in dilation.branches
        ]
    segment_RH1, rate_RH1, offset_RH1 = torch.tensor(rows, device=device)[..., None].unbind(dim=2)
    return segment_RH1, rate_RH1, offset_RH1
