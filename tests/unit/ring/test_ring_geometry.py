"""Entries of runs in pieces, and the band between two runs, against positions counted out one by one."""

import itertools
import random

import numpy as np
import pytest

from ringref.problem import Problem
from ringverify.ring.plan import geometry
from ringverify.ring.plan.geometry import Cutting, attended, bounds, cut, gathered, piece_overlaps
from ringverify.ring.plan.runs import RowRun


def pieces_of(*pieces, rate=1):
    """Pieces `(begin, end, residue)`."""
    begin, end, residue = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    return Cutting(begin, end, residue, np.zeros_like(begin), rate)


def entries(run, piece, rate):
    """Entries of a run that count in a piece."""
    begin, end, residue = piece
    at = [run.first + run.step * x for x in range(run.size)]
    return [x for x, p in enumerate(at) if begin <= p < end and p % rate == residue % rate]


def drawn(rng, step=None):
    """A run that may be as short as one entry."""
    return RowRun(rng.randrange(20), step or rng.randrange(1, 6), rng.choice([1, 1, 2, 5, 12]), rng.randrange(4))


def drawn_piece(rng, rate):
    """A piece that may hold nothing, before, within or behind a run."""
    begin = rng.randrange(50)
    return begin, begin + rng.choice([0, 1, 2, 7, 30, 90]), rng.randrange(rate)


def test_a_cut_holds_exactly_the_entries_of_a_piece():
    """Rates that share a factor with the step and such that do not; from the first to the last, evenly spaced."""
    rng = random.Random(0)
    for _ in range(3000):
        run, rate = drawn(rng), rng.randrange(1, 9)
        pieces = [drawn_piece(rng, rate) for _ in range(3)]
        cut_at = cut(gathered([(run,)], run.step).at((slice(None), None)), pieces_of(*pieces, rate=rate))
        by = geometry.thinning(run.step, rate)
        for piece, first, last in zip(pieces, *(of[0].tolist() for of in cut_at), strict=True):
            assert list(range(first, last + 1, by)) == entries(run, piece, rate), (run, piece, rate)


def test_a_limit_leaves_the_positions_below_it():
    """Of every run, none of some."""
    for first, step, size, limit in itertools.product(range(4), range(1, 4), range(1, 5), range(14)):
        (left,) = gathered([(RowRun(first, step, size, 0),)], step, limit).size.tolist()
        assert left == sum(first + step * x < limit for x in range(size))


def wrong_overlaps(count):
    """Pairs of runs of which other keys are said to be attended in a piece than the positions say."""
    rng, wrong = random.Random(1), []
    for _ in range(count):
        step, rate = rng.randrange(1, 6), rng.randrange(1, 7)
        queries, keys = drawn(rng, step), drawn(rng, step)
        window = rng.choice([None, (rng.randrange(9), rng.randrange(9)), (None, rng.randrange(9)), (0, 0)])
        problem = Problem(
            query_length=90, key_length=90 + rng.randrange(-9, 9), causal=rng.random() < 0.5, window=window
        )
        piece = drawn_piece(rng, rate)
        left, right = geometry.band(problem)
        rows, columns = entries(queries, piece, rate), entries(keys, piece, rate)
        seen = [
            j
            for j in columns
            if any(
                (-200 if left is None else left)
                <= keys.first + step * j - (queries.first + step * i + problem.diagonal)
                <= (200 if right is None else right)
                for i in rows
            )
        ]
        found = [
            range(first, last + 1, geometry.thinning(step, rate))
            for shared in piece_overlaps(
                problem, pieces_of(piece, rate=rate), gathered([(queries,)], step), gathered([(keys,)], step)
            )
            for first, last in zip(*(of.ravel().tolist() for of in shared.attended()), strict=True)
        ]
        if [x for of in found for x in of] != seen:
            wrong.append((problem, queries, keys, piece, rate))
    return wrong


def test_the_keys_attended_are_those_of_the_positions():
    """Of runs of any step in thinned pieces, under windows that are narrower than a step and sides that are open."""
    assert wrong_overlaps(4000) == []


def test_the_comparison_can_fail(monkeypatch):
    """Bounds that are not moved to the class of entries that a branch covers, and such that may cross."""
    right = bounds

    def unthinned(problem, queries, keys, rate):
        return right(problem, queries, keys, 1)

    monkeypatch.setattr(geometry, "bounds", unthinned)
    assert wrong_overlaps(500)


@pytest.mark.parametrize("together", [1, 2, 7])
def test_parts_of_the_work_are_the_work(monkeypatch, together):
    """Runs and pieces that are worked on apart are met as they are together."""
    rng = random.Random(2)
    problem = Problem(query_length=90, causal=True)
    queries, keys = (gathered([(drawn(rng, 2), drawn(rng, 2)) for _ in range(3)], 2) for _ in range(2))
    pieces = pieces_of(*((start, start + 7, 0) for start in range(0, 90, 7)))

    def found():
        shared = list(piece_overlaps(problem, pieces, queries, keys))
        key_run, begin = (np.concatenate(of) for of in zip(*((x.key_run, x.pieces.begin) for x in shared), strict=True))
        first, last = (np.concatenate(of, axis=1) for of in zip(*(x.attended() for x in shared), strict=True))
        return len(shared), [key_run.tolist(), begin.tolist(), first.tolist(), last.tolist()]

    once, whole = found()
    monkeypatch.setattr(geometry, "AT_ONCE", together)
    often, parts = found()
    assert once == 1 < often
    assert whole == parts


def test_an_empty_side_attends_nothing():
    """However far a bound reaches."""
    nowhere = np.array([geometry.NOWHERE]), np.array([-geometry.NOWHERE])
    some = np.array([0]), np.array([5])
    for low, high in itertools.product((-geometry.UNBOUNDED, 0), (0, geometry.UNBOUNDED)):
        for queries, keys in ((nowhere, some), (some, nowhere), (nowhere, nowhere)):
            first, last = attended(queries, keys, np.array([low]), np.array([high]))
            assert first > last
