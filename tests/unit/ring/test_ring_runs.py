"""Runs against the positions they stand for: index sets, counted out one by one."""

import itertools
import random

import numpy as np
import pytest

from ringref.sharding import SHARDINGS, key_positions
from ringverify.ring.plan.runs import RowRun, progressions, runs


def entries(run):
    """`(position, row)` of every entry, in order."""
    return [(run.first + run.step * x, run.row + x) for x in range(run.size)]


def positions_of(found):
    """Positions in the order of rows; the rows must count up from 0 without a gap."""
    flat = [entry for run in found for entry in entries(run)]
    assert [row for _, row in flat] == list(range(len(flat)))
    return [position for position, _ in flat]


SMALL = [RowRun(*run) for run in itertools.product(range(5), range(1, 5), range(1, 7), (0, 3))]
"""Every small run, from the first row on or from a later one."""


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_runs_are_the_positions_of_a_rank_in_the_order_of_its_rows(sharding):
    """All named shardings, up to 40 positions on up to 8 ranks, idle ones included."""
    for length, world_size in itertools.product(range(41), range(1, 9)):
        for rank, expected in enumerate(key_positions(sharding, length, world_size)):
            found = runs(sharding, length, world_size, rank)
            assert expected.tolist() == positions_of(found), (length, world_size, rank)
            assert all(run.size >= 1 and run.step >= 1 for run in found)


def test_a_named_sharding_gives_one_run_and_zigzag_two():
    """Two halves that touch are one run: the last rank of a zigzag, whose pieces are neighbours."""
    for length, world_size in itertools.product(range(41), range(1, 9)):
        for rank in range(world_size):
            for sharding in ("contiguous", "striped", "replicated_query"):
                assert len(runs(sharding, length, world_size, rank)) <= 1
            assert len(runs("zigzag", length, world_size, rank)) <= 2
        assert len(runs("zigzag", length, world_size, world_size - 1)) <= 1


def test_a_sharding_function_is_read_as_progressions():
    """Backwards, shuffled, and blocks of three dealt out in turn; an idle rank has no runs."""

    def backwards(length, world_size):
        return [np.arange(rank, length, world_size)[::-1] for rank in range(world_size)]

    def shuffled(length, world_size):
        return np.array_split(np.random.default_rng(length).permutation(length), world_size)

    def dealt(length, world_size):
        return [[p for p in range(length) if p // 3 % world_size == rank] for rank in range(world_size)]

    for sharding, length, world_size in itertools.product((backwards, shuffled, dealt), range(20), range(1, 6)):
        for rank, expected in enumerate(key_positions(sharding, length, world_size)):
            assert expected.tolist() == positions_of(runs(sharding, length, world_size, rank))


@pytest.mark.parametrize("seed", range(4))
def test_progressions_are_the_positions_they_were_made_from(seed):
    """Random lists: pieces of progressions rising, falling and standing still, one after another."""
    rng = random.Random(seed)
    for _ in range(500):
        positions = []
        for _ in range(rng.randint(0, 5)):
            start, step = rng.randint(0, 30), rng.choice([-3, -1, 0, 1, 1, 2, 7])
            positions += [start + 40 + step * x for x in range(rng.randint(1, 6))]
        found = list(progressions(np.array(positions, dtype=np.int64)))
        assert positions == positions_of(found)
        assert all(run.step >= 1 for run in found)


def test_one_progression_is_one_run():
    """However long; and two of them two, whatever lies between."""
    assert list(progressions(np.arange(5, 1000, 7))) == [RowRun(5, 7, 143, 0)]
    two = np.concatenate([np.arange(0, 50), np.arange(90, 100)])
    assert list(progressions(two)) == [RowRun(0, 1, 50, 0), RowRun(90, 1, 10, 50)]
    assert list(progressions(np.array([], dtype=np.int64))) == []


def test_the_last_position_is_the_one_of_the_last_entry():
    """It decides whether a run lies within bounds at all."""
    assert all(run.last == entries(run)[-1][0] for run in SMALL)
