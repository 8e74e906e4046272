"""Which query attends which key, and how many times: one constraint at a time, as functions of positions.

The multiplicity `m[b, h, i, j]` is the product of the constraints a problem has; dilation counts branches and may
exceed 1. `multiplicity` is the vectorised form; `multiplicity_at` computes one element, written again from the
definition. The two share no code, so that comparing them shows an error in either.

Letters: i query position, j key position, h query head, b batch element; B, Hq, Nq, Nk as in `ringref.problem`.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Int64
from numpy.typing import NDArray

from ringref.problem import Dilation, Problem

Array = NDArray[np.int64]
Mask = NDArray[np.bool_]


def multiplicity(
    problem: Problem,
    query_positions: Int64[np.ndarray, " nq"] | None = None,
    key_positions: Int64[np.ndarray, " nk"] | None = None,
) -> Int64[np.ndarray, "B Hq nq nk"]:
    """Return how often query i attends key j in head h of batch element b.

    Args:
        problem: the problem whose pattern it is.
        query_positions: positions of the queries; by default all, `range(Nq)`.
        key_positions: positions of the keys; by default all, `range(Nk)`.

    Returns:
        int64 `(B, Hq, nq, nk)`, at least 0, freshly allocated.
    """
    i = (np.arange(problem.nq) if query_positions is None else query_positions)[:, None]
    j = (np.arange(problem.nk) if key_positions is None else key_positions)[None, :]

    attends = np.ones((i.shape[0], j.shape[1]), dtype=np.bool_)
    if problem.causal:
        attends &= causal(i, j, diagonal=problem.diagonal)
    if problem.window is not None:
        left, right = problem.window
        attends &= window(i, j, left=left, right=right, diagonal=problem.diagonal)
    if problem.documents is not None:
        attends &= same_document(i, j, offsets=np.array(problem.documents))

    m = np.empty((problem.batch, problem.heads, *attends.shape), dtype=np.int64)
    m[...] = attends
    if problem.key_lengths is not None:
        m *= within_key_length(j, key_lengths=np.array(problem.key_lengths)[:, None, None, None])
    if problem.dilation is not None:
        m *= branches_through(i, j, dilation=problem.dilation, heads=problem.heads)
    return m


def causal(i: Array, j: Array, *, diagonal: int) -> Mask:
    """`j <= i + (Nk - Nq)`: the last query attends the last key (bottom-right alignment)."""
    return j <= i + diagonal


def window(i: Array, j: Array, *, left: int | None, right: int | None, diagonal: int) -> Mask:
    """`-left <= j - (i + Nk - Nq) <= right`, both ends inclusive; `None` is unbounded."""
    distance = j - (i + diagonal)
    inside = np.ones(distance.shape, dtype=np.bool_)
    if left is not None:
        inside &= distance >= -left
    if right is not None:
        inside &= distance <= right
    return inside


def same_document(i: Array, j: Array, *, offsets: Array) -> Mask:
    """Both positions lie in one document `offsets[d] <= p < offsets[d + 1]`; outside all documents nothing attends."""
    # side="right" skips zero-length documents: of equal offsets, the last one begins the document that holds p.
    document_i = np.searchsorted(offsets, i, side="right")
    document_j = np.searchsorted(offsets, j, side="right")
    lies_in_one: Mask = (document_i > 0) & (document_i < len(offsets))
    same: Mask = document_i == document_j
    return lies_in_one & same


def within_key_length(j: Array, *, key_lengths: Array) -> Mask:
    """`j < key_lengths[b]`."""
    return j < key_lengths


def branches_through(i: Array, j: Array, *, dilation: Dilation, heads: int) -> Int64[np.ndarray, "Hq nq nk"]:
    """Count the branches through which query i attends key j in head h: both are covered, and share a segment."""
    if dilation.heads == "split":
        branch = [branch_of_head(head, heads=heads, branches=len(dilation.branches)) for head in range(heads)]
        w, r = np.array([dilation.branches[b] for b in branch]).T
        offset = np.array(branch) % r
        return _let_through(i, j, w=_by_head(w), r=_by_head(r), offset=_by_head(offset)).astype(np.int64)

    total = np.zeros((heads, i.shape[0], j.shape[1]), dtype=np.int64)
    for w, r in dilation.branches:
        head = np.arange(heads)
        offset = head % r if dilation.head_offset == "cyclic" else head // math.ceil(heads / r)
        total += _let_through(i, j, w=np.array(w), r=np.array(r), offset=_by_head(offset))
    return total


def branch_of_head(head: int, *, heads: int, branches: int) -> int:
    """The branch that a head runs in split mode: `H // G` heads per branch, the first `H % G` branches one more."""
    size, larger = divmod(heads, branches)
    in_larger = larger * (size + 1)
    return head // (size + 1) if head < in_larger else larger + (head - in_larger) // size


def _by_head(values: Array) -> Array:
    return values[:, None, None]


def _let_through(i: Array, j: Array, *, w: Array, r: Array, offset: Array) -> Bool[np.ndarray, "*H nq nk"]:
    covers_i: Mask = i % w % r == offset
    covers_j: Mask = j % w % r == offset
    one_segment: Mask = i // w == j // w
    return covers_i & covers_j & one_segment


def multiplicity_at(problem: Problem, b: int, h: int, i: int, j: int) -> int:
    """Return the multiplicity of one (batch element, head, query, key), straight from the definition; at least 0."""
    aligned = i + problem.nk - problem.nq
    if problem.causal and not j <= aligned:
        return 0
    if problem.window is not None:
        left, right = problem.window
        if left is not None and not -left <= j - aligned:
            return 0
        if right is not None and not j - aligned <= right:
            return 0
    if problem.documents is not None:
        cu = problem.documents
        if not any(cu[d] <= i < cu[d + 1] and cu[d] <= j < cu[d + 1] for d in range(len(cu) - 1)):
            return 0
    if problem.key_lengths is not None and not j < problem.key_lengths[b]:
        return 0
    if problem.dilation is None:
        return 1

    count = 0
    branches = problem.dilation.branches
    next_head = 0
    for branch, (w, r) in enumerate(branches):
        if problem.dilation.heads == "split":
            first_head = next_head
            next_head += problem.heads // len(branches) + (1 if branch < problem.heads % len(branches) else 0)
            if not first_head <= h < next_head:
                continue
            offset = branch % r
        elif problem.dilation.head_offset == "cyclic":
            offset = h % r
        else:
            offset = h // math.ceil(problem.heads / r)
        segment_i, place_i = divmod(i, w)
        segment_j, place_j = divmod(j, w)
        if place_i % r == offset and place_j % r == offset and segment_i == segment_j:
            count += 1
    return count
