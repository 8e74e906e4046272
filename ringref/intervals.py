"""The pattern as intervals: each constraint lets a query through to a range of keys, so all of them together do too.

Causality, windows, documents and key lengths each bound the attended keys of a query from below and above, by numbers
that never fall from one query to the next. A branch of a dilation covers some positions, and its segments are to those
what documents are to all. So a head is a sum over a few parts, each of them an interval for every query. This is the
pattern of `ringref.pattern` in a form whose size is linear in the length; tests hold the two to each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from ringref.pattern import branch_of_head
from ringref.problem import Problem

Array = NDArray[np.int64]


class Part(NamedTuple):
    """Some queries and keys of one head: query number x attends keys number `first[x]` to `last[x] - 1`, once each.

    Attributes:
        queries: positions of its queries, ascending.
        keys: positions of its keys, ascending.
        first: by query, where its interval begins in `keys`; never falls.
        last: where it ends; never falls. An interval with `last <= first` is empty.
    """

    queries: Int64[np.ndarray, " x"]
    keys: Int64[np.ndarray, " y"]
    first: Int64[np.ndarray, " x"]
    last: Int64[np.ndarray, " x"]


def parts(problem: Problem, batch: int, head: int) -> Iterator[Part]:
    """Yield the parts whose multiplicities add up to that of a query head in an element of the batch."""
    if problem.dilation is None:
        yield _part(problem, batch, np.arange(problem.nq), np.arange(problem.nk), problem.documents)
        return
    dilation, n = problem.dilation, problem.nq
    own = branch_of_head(head, heads=problem.heads, branches=len(dilation.branches))
    for branch, (w, r) in enumerate(dilation.branches):
        if dilation.heads == "split":
            if branch != own:
                continue
            offset = branch % r
        else:
            offset = head % r if dilation.head_offset == "cyclic" else head // math.ceil(problem.heads / r)
        everything = np.arange(n)
        covered = everything[everything % w % r == offset]
        yield _part(problem, batch, covered, covered, range(0, n + w, w))


def _part(problem: Problem, batch: int, queries: Array, keys: Array, documents: tuple[int, ...] | range | None) -> Part:
    """Return the part of these positions, `documents` being the offsets between which query and key have to lie."""
    least, beyond = np.zeros_like(queries), np.full_like(queries, problem.nk)
    aligned = queries + problem.diagonal
    if problem.causal:
        beyond = np.minimum(beyond, aligned + 1)
    if problem.window is not None:
        left, right = problem.window
        if left is not None:
            least = np.maximum(least, aligned - left)
        if right is not None:
            beyond = np.minimum(beyond, aligned + right + 1)
    if problem.key_lengths is not None:
        beyond = np.minimum(beyond, problem.key_lengths[batch])
    if documents is not None:
        offsets = np.array(documents)
        document = np.searchsorted(offsets, queries, side="right")  # 0 before all of them, len(offsets) after
        bounds = np.concatenate([offsets[:1], offsets, offsets[-1:]])
        least, beyond = np.maximum(least, bounds[document]), np.minimum(beyond, bounds[document + 1])
    return Part(queries, keys, np.searchsorted(keys, least), np.searchsorted(keys, beyond))
