"""Where a case is wrong, as a small map: errors by query and key, and by position and head.

Axes run rank by rank, so that a block is a rectangle; in a long case they are cut into pieces. An error is given as a
level: the number of powers of ten by which it exceeds what is allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringref.pattern import multiplicity
from ringref.problem import Problem
from ringref.rounding import margins
from ringref.sharding import Positions
from ringverify import events
from ringverify.cases.case import Case
from ringverify.cases.running import shards
from ringverify.diagnosis.hypothesis import relative_rounding
from ringverify.diagnosis.probing import PROBES, Asked, parts
from ringverify.diagnosis.scene import Array, Scene
from ringverify.events import AXES, TensorName
from ringverify.implementation import Capabilities

Levels = NDArray[np.int64]

MOST = 24
"""Pieces of an axis, at most: a larger picture is hard to read, and every piece takes a run."""

MOST_HEADS = 16
"""Columns of heads, at most; more heads are joined."""

HIGHEST = 9
"""The highest level, also of an infinite error and of NaN."""

MOST_PAIRS = 2**24
"""Pairs of positions, over batch and heads, up to which the pattern is computed."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive rows of a rank's shard.

    Attributes:
        rank: the rank.
        rows: their indices in the rank's shard.
        positions: their global positions, ascending.
    """

    rank: int
    rows: Positions
    positions: Positions


@dataclasses.dataclass(frozen=True, eq=False)
class FailureMap:
    """A map of a case, and of what is wrong in it.

    Attributes:
        queries: the pieces of the query axis, rank by rank.
        keys: the pieces of the key axis, rank by rank.
        pattern: how often a query of a piece attends a key of a piece, `(queries, keys)`: the largest multiplicity over
            batch and heads; `None` for a case that is too large.
        tensor: the result that is wrong; `None` where no values came back.
        pairs: levels of errors by query and key, `(queries, keys)`: for out and lse in the key's weight, for dk and dv
            in what the query adds to the key's gradient; `None` where that cannot be told.
        rows: levels of errors in the result itself, by piece of its axis and by head.
    """

    queries: tuple[Piece, ...]
    keys: tuple[Piece, ...]
    pattern: Levels | None
    tensor: TensorName | None = None
    pairs: Levels | None = None
    rows: Levels | None = None

    def told(self) -> events.Region:
        """Return the map as the field of an event: one digit for a cell, one string for a row."""
        return events.Region(
            tensor=self.tensor,
            queries=_ends(self.queries),
            keys=_ends(self.keys),
            pattern=_digits(self.pattern),
            pairs=_digits(self.pairs),
            rows=_digits(self.rows),
        )


def outline(case: Case, capabilities: Capabilities) -> FailureMap | None:
    """Return the map of a case without values; `None` for more ranks than can be drawn.

    It is `None` as well if a declared sharding function returns no partition of the positions.
    """
    try:
        axes = [_pieces(axis) for axis in shards(case, capabilities)]
    except ValueError:
        return None
    if None in axes:
        return None
    queries, keys = (axis or () for axis in axes)
    return FailureMap(queries, keys, _pattern(case.problem, queries, keys))


def region(scene: Scene, tensor: TensorName, asked: Asked) -> FailureMap | None:
    """Return where a result is wrong, as a map; `None` for more ranks than can be drawn."""
    plain = outline(scene.case, scene.capabilities)
    if plain is None:
        return None
    rows = _rows(scene, tensor, plain.keys if tensor in ("dk", "dv") else plain.queries)
    pairs = _by_key(scene, plain, asked) if tensor in ("out", "lse") else None
    if tensor in ("dk", "dv"):
        pairs = _by_query(scene, tensor, plain, asked)
    if pairs is not None and not pairs.any():
        pairs = None  # the error is not one between a query and a key
    return dataclasses.replace(plain, tensor=tensor, pairs=pairs, rows=rows)


def _pieces(axis: Sequence[Positions]) -> tuple[Piece, ...] | None:
    """Cut an axis into pieces, of one position each if they are few; `None` for more ranks than can be drawn."""
    if len(axis) > MOST:
        return None
    total = sum(len(held) for held in axis)
    found = []
    for rank, held in enumerate(axis):
        count = len(held) if total <= MOST else min(len(held), MOST // len(axis))
        for rows in np.array_split(np.arange(len(held)), count) if count else ():
            found.append(Piece(rank, rows, held[rows]))
    return tuple(found)


def _pattern(problem: Problem, queries: tuple[Piece, ...], keys: tuple[Piece, ...]) -> Levels | None:
    if problem.batch * problem.heads * problem.nq * problem.nk > MOST_PAIRS:
        return None
    found = np.zeros((len(queries), len(keys)), dtype=np.int64)
    for y, query in enumerate(queries):
        m = multiplicity(problem, query.positions).max(axis=(0, 1, 2))
        for x, key in enumerate(keys):
            found[y, x] = min(HIGHEST, m[key.positions].max())
    return found


def _rows(scene: Scene, tensor: TensorName, pieces: tuple[Piece, ...]) -> Levels:
    """Return the levels of errors in a result by piece and head; heads are joined where they are many."""
    axes = AXES[tensor]
    of_keys, head = tensor in ("dk", "dv"), axes.index("head")
    row = axes.index("key" if of_keys else "query")
    heads = np.array_split(np.arange(scene.problem.hk if of_keys else scene.problem.heads), MOST_HEADS)
    heads = [some for some in heads if len(some)]
    found = np.zeros((len(pieces), len(heads)), dtype=np.int64)
    for y, piece in enumerate(pieces):
        wrong = scene.margins(tensor, piece.rank)
        by_row_and_head = np.moveaxis(wrong, (row, head), (0, 1))[piece.rows].max(axis=0)
        for x, some in enumerate(heads):
            found[y, x] = _level(by_row_and_head[some])
    return found


def _by_key(scene: Scene, plain: FailureMap, asked: Asked) -> Levels | None:
    """Return the levels of errors in the weights by query and key; `None` if the weights are not known."""
    if (told := asked.weights) is None:
        return None
    weights, limits = told
    right = scene.truth.intermediates.probabilities
    found = np.zeros((len(plain.queries), len(plain.keys)), dtype=np.int64)
    for y, query in enumerate(plain.queries):
        seen = weights[query.rank][:, :, query.rows]
        limit = limits[:, :, query.positions]
        wrong = margins(seen, right[:, :, query.positions], limit, scene.problem.dtype)
        for x, key in enumerate(plain.keys):
            found[y, x] = _level(wrong[..., key.positions])
    return found


def _by_query(scene: Scene, tensor: TensorName, plain: FailureMap, asked: Asked) -> Levels | None:
    """Return the levels of errors in what queries add to dk or dv, by piece; `None` if the parts do not add up."""
    if scene.replicated or not 0 < len(plain.queries) <= PROBES or not asked.finite(tensor):
        return None
    told = parts(scene, asked.probe, tensor, [query.positions for query in plain.queries])
    if told is None:
        return None
    found = np.zeros((len(plain.queries), len(plain.keys)), dtype=np.int64)
    for y, of_piece in enumerate(told):
        for x, key in enumerate(plain.keys):
            seen, true, limit = of_piece[key.rank]
            limit = limit + relative_rounding(scene, tensor) * np.abs(seen)
            found[y, x] = _level(margins(seen, true, limit, scene.problem.dtype)[:, key.rows])
    return found


def _level(margin: Array) -> int:
    """Return 0 for allowed errors, 1 for errors up to ten times as large, and so on."""
    worst = float(margin.max(initial=0.0))
    if worst <= 1:
        return 0
    return int(min(HIGHEST, np.ceil(np.log10(worst)))) if np.isfinite(worst) else HIGHEST


def _ends(pieces: tuple[Piece, ...]) -> events.Pieces:
    return tuple((piece.rank, int(piece.positions[0]), int(piece.positions[-1])) for piece in pieces)


def _digits(levels: Levels | None) -> events.Digits | None:
    return None if levels is None else tuple("".join(map(str, row)) for row in levels.tolist())
