"""Suspicions of masks: causal, window, documents, key lengths, on the right positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ringref import pattern
from ringref.problem import Problem
from ringref.sharding import pieces
from ringverify.diagnosis.model import STEPS
from ringverify.diagnosis.scene import Counts, Visit
from ringverify.diagnosis.suspicion import Suspicion, When

Pattern = Callable[[Visit], Counts]
WHENS: tuple[When, ...] = ("always", "backward", "forward")


def masked(says: str, of: Pattern) -> list[Suspicion]:
    """A pattern everywhere, on some blocks only, and each of these in one direction only."""
    right = STEPS.pattern

    def elsewhere(at: Visit) -> Counts:
        return of(at) if at.owner != at.rank else right(at)

    def at_home(at: Visit) -> Counts:
        return of(at) if at.owner == at.rank else right(at)

    scopes = [("", of), (" on blocks from other ranks", elsewhere), (" on the own block", at_home)]
    return [
        Suspicion(f"{says}{where}", replace(STEPS, pattern=changed), when, narrow=bool(where))
        for when in WHENS
        for where, changed in scopes
    ]


def _with(change: Callable[[Problem], Problem]) -> Pattern:
    return lambda at: pattern.multiplicity(change(at.problem), at.i, at.j)


def _without(**fields: Any) -> Pattern:
    """The pattern without a constraint."""
    return _with(lambda problem: problem.replace(**fields))


def _causal(by: int) -> Pattern:
    def shifted(at: Visit) -> Counts:
        if not at.problem.causal:
            return STEPS.pattern(at)
        near = pattern.causal(at.i[:, None], at.j[None, :], diagonal=at.problem.diagonal + by)
        return _without(causal=False)(at) * near

    return shifted


def _causal_by(allows: Callable[[Visit], Any]) -> Pattern:
    return lambda at: _without(causal=False)(at) * allows(at) if at.problem.causal else STEPS.pattern(at)


def _top_left(at: Visit) -> Any:
    return at.j[None, :] <= at.i[:, None]


def _by_block(at: Visit) -> Any:
    return np.array(at.owner <= at.rank)


def _inverted_blocks(at: Visit) -> Counts:
    if not at.problem.causal or at.owner == at.rank:
        return STEPS.pattern(at)
    return _without(causal=False)(at) * (at.owner > at.rank)


def _window(change: Callable[[int | None, int | None], tuple[int | None, int | None]]) -> Pattern:
    def changed(at: Visit) -> Counts:
        if at.problem.window is None:
            return STEPS.pattern(at)
        left, right = change(*at.problem.window)
        i, j = at.i[:, None], at.j[None, :]
        near = pattern.window(i, j, left=left, right=right, diagonal=at.problem.diagonal)
        return _without(window=None)(at) * near

    return changed


def _window_by(place: Callable[[Visit], tuple[Any, Any, int]], *, inverted: bool = False) -> Pattern:
    def changed(at: Visit) -> Counts:
        if at.problem.window is None:
            return STEPS.pattern(at)
        i, j, diagonal = place(at)
        left, right = at.problem.window
        near = pattern.window(i[:, None], j[None, :], left=left, right=right, diagonal=diagonal)
        return _without(window=None)(at) * (~near if inverted else near)

    return changed


def _moved(left: int, right: int) -> Pattern:
    def change(a: int | None, b: int | None) -> tuple[int | None, int | None]:
        return (None if a is None else a + left), (None if b is None else b + right)

    return _window(change)


def _documents(of: Callable[[Visit, Any], Any], *, outside: bool = False) -> Pattern:
    """Documents by a number for each position; `outside`: positions that lie in none are together all the same."""

    def changed(at: Visit) -> Counts:
        if at.problem.documents is None:
            return STEPS.pattern(at)
        di, dj = of(at, at.i)[:, None], of(at, at.j)[None, :]
        inside = np.ones_like(di, dtype=bool) if outside else (di > 0) & (di < len(at.problem.documents))
        together: Counts = _without(documents=None)(at) * ((di == dj) & inside)
        return together

    return changed


def _offsets(change: Callable[[Problem], tuple[int, ...]]) -> Pattern:
    return _with(lambda p: p if p.documents is None else p.replace(documents=change(p)))


def _number(at: Visit, positions: Any) -> Any:
    return np.searchsorted(np.array(at.problem.documents), positions, side="right")


def _number_late(at: Visit, positions: Any) -> Any:
    return np.searchsorted(np.array(at.problem.documents), positions, side="left")


def _number_by_ends(at: Visit, positions: Any) -> Any:
    return np.searchsorted(np.array(at.problem.documents)[1:], positions, side="right")


def _lengths(of: Callable[[Visit], Any], place: Callable[[Visit], Any] = lambda at: at.j) -> Pattern:
    """Padding by lengths `(B,)`."""

    def changed(at: Visit) -> Counts:
        if at.problem.key_lengths is None:
            return STEPS.pattern(at)
        there = place(at)[None, :] < of(at)[:, None]
        valid: Counts = _without(key_lengths=None)(at) * there[:, None, None, :]
        return valid

    return changed


def _key_lengths(at: Visit) -> Any:
    return np.array(at.problem.key_lengths)


def _half_blocks(at: Visit) -> Counts:
    """Zigzag's shortcut for causal masks: half of the keys of an earlier rank, half of the queries for a later."""
    m, p, size = STEPS.pattern(at).copy(), at.problem, at.scene.size
    if at.scene.case.sharding == "zigzag" and not p.causal and at.owner != at.rank:
        if at.owner < at.rank:
            m[..., len(pieces(p.nk, 2 * size)[at.owner]) :] = 0
        else:
            m[:, :, : len(pieces(p.nq, 2 * size)[at.rank])] = 0
    return m


def _equal_shares(at: Visit) -> Counts:
    m = STEPS.pattern(at).copy()
    m[..., at.problem.nk // at.scene.size :] = 0
    return m


def _without_key(number: Callable[[Visit], int]) -> Pattern:
    """One key left out, if there is another."""
    return lambda at: STEPS.pattern(at) * (at.j != number(at)) if at.problem.nk > 1 else STEPS.pattern(at)


def _local(at: Visit) -> tuple[Any, Any, int]:
    return np.arange(len(at.i)), np.arange(len(at.j)), 0


def _local_and_diagonal(at: Visit) -> tuple[Any, Any, int]:
    """Local indices beside the right difference of the global lengths."""
    return np.arange(len(at.i)), np.arange(len(at.j)), at.problem.diagonal


CAUSAL: list[Suspicion] = [
    *masked("causal mask missing", _without(causal=False)),
    *masked("causal mask shifted by one: every query sees one key too many", _causal(1)),
    *masked("causal mask shifted by one: every query sees one key too few", _causal(-1)),
    *masked("causal mask aligned top-left instead of bottom-right", _causal_by(_top_left)),
    *masked("causal mask decided by whole blocks", _causal_by(_by_block)),
    *masked("causal mask inverted between blocks: later ranks are attended, earlier are not", _inverted_blocks),
]
WINDOW: list[Suspicion] = [
    *masked("window ignored", _without(window=None)),
    *masked("window off by one: one key too few on the left", _moved(-1, 0)),
    *masked("window off by one: one key too many on the left", _moved(1, 0)),
    *masked("window off by one: one key too few on the right", _moved(0, -1)),
    *masked("window off by one: one key too many on the right", _moved(0, 1)),
    *masked("left side of the window ignored", _window(lambda left, right: (None, right))),
    *masked("right side of the window ignored", _window(lambda left, right: (left, None))),
    *masked("left and right of the window exchanged", _window(lambda left, right: (right, left))),
    *masked("window aligned top-left instead of bottom-right", _window_by(lambda at: (at.i, at.j, 0))),
    *masked("window uses local indices", _window_by(_local)),
    *masked("window uses local indices, moved by the whole lengths", _window_by(_local_and_diagonal)),
    *masked(
        "window inverted: keys outside it are attended",
        _window_by(lambda at: (at.i, at.j, at.problem.diagonal), inverted=True),
    ),
]
DOCUMENTS: list[Suspicion] = [
    *masked("documents ignored", _without(documents=None)),
    *masked("documents begin one token late", _documents(_number_late)),
    *masked("the first document is taken to start at 0", _offsets(lambda p: (0, *(p.documents or ())[1:]))),
    *masked(
        "the last document is taken to end with the sequence", _offsets(lambda p: (*(p.documents or ())[:-1], p.nk))
    ),
    *masked("what lies in no document attends itself", _documents(_number, outside=True)),
    *masked(
        "documents are taken to cover the sequence: what lies before the first belongs to it, and what lies after the "
        "last attends itself",
        _documents(_number_by_ends, outside=True),
    ),
]
KEY_LENGTHS: list[Suspicion] = [
    *masked("key_lengths ignored", _without(key_lengths=None)),
    *masked("key_lengths off by one: one padded key is attended", _lengths(lambda at: _key_lengths(at) + 1)),
    *masked("key_lengths off by one: the last valid key is left out", _lengths(lambda at: _key_lengths(at) - 1)),
    *masked(
        "key_lengths of the first batch element used for all",
        _lengths(lambda at: np.repeat(_key_lengths(at)[:1], at.problem.batch)),
    ),
    *masked("key_lengths of another batch element used", _lengths(lambda at: np.roll(_key_lengths(at), 1))),
    *masked("key_lengths compared with local indices", _lengths(_key_lengths, lambda at: np.arange(len(at.j)))),
]
SHARDS: list[Suspicion] = [
    *masked("the last key is never attended", _without_key(lambda at: at.problem.nk - 1))[::3],
    *masked("the first key is never attended", _without_key(lambda at: 0))[::3],
    *masked("the last key of every block is never attended", _without_key(lambda at: max(at.j, default=0)))[::3],
    *masked("the first key of every block is never attended", _without_key(lambda at: min(at.j, default=0)))[::3],
    *masked("half a block is attended although nothing is causal (zigzag)", _half_blocks)[::3],
    *masked("every rank is taken to hold n // world keys: the rest is dropped", _equal_shares)[::3],
]
