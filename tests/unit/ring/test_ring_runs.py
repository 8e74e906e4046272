"""Runs against the positions they stand for: index sets, counted out one by one."""

import itertools
import random

import numpy as np
import pytest

from ringref.sharding import SHARDINGS, key_positions
from ringverify.ring.plan.runs import RowRun, progressions, runs


def entries(run):
    """`(position, row)` of every entry, in order; nothing for `None`."""
    if run is None:
        return []
    return [(run.first + run.step * x, run.row + run.stride * x) for x in range(run.size)]


def positions_of(found):
    """Positions in the order of rows; the rows must count up from 0 without a gap."""
    flat = [entry for run in found for entry in entries(run)]
    assert [row for _, row in flat] == list(range(len(flat)))
    return [position for position, _ in flat]


SMALL = [
    RowRun(first, step, size, row, stride)
    for first, step, size, (row, stride) in itertools.product(
        range(5), range(1, 5), range(1, 7), [(0, 1), (3, 1), (1, 2)]
    )
]
"""Every small run; two of them begin at a later row, one skips rows."""


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


def test_within_keeps_exactly_the_positions_between_its_bounds():
    """Every small run, every pair of bounds, those that cross included."""
    for run, low, high in itertools.product(SMALL, range(-1, 26, 2), range(-1, 26, 3)):
        expected = [entry for entry in entries(run) if low <= entry[0] < high]
        assert expected == entries(run.within(low, high)), (run, low, high)


def test_thinned_keeps_exactly_the_positions_of_a_residue():
    """Every small run, moduli that share a factor with its step and such that do not, residues beyond the modulus."""
    for run, modulus, residue in itertools.product(SMALL, range(1, 8), range(9)):
        expected = [entry for entry in entries(run) if entry[0] % modulus == residue % modulus]
        assert expected == entries(run.thinned(modulus, residue)), (run, modulus, residue)


def test_part_is_a_slice_by_index():
    """Every small run; indices before its beginning and after its end count for nothing."""
    for run, start, stop, by in itertools.product(SMALL, range(-2, 8), range(-2, 9), range(1, 4)):
        chosen = [x for x in range(max(start, 0), stop, by) if x < run.size]
        assert [entries(run)[x] for x in chosen] == entries(run.part(start, stop, by)), (run, start, stop, by)


def test_what_was_cut_may_be_cut_again():
    """Documents cut what a key length cut, and a branch thins what a segment cut: rows follow through all of it."""
    rng = random.Random(0)
    for _ in range(3000):
        run = RowRun(rng.randint(0, 9), rng.randint(1, 5), rng.randint(1, 20), rng.randint(0, 3), rng.randint(1, 2))
        kept, left = run, entries(run)
        for _ in range(3):
            low, high = rng.randint(0, 40), rng.randint(0, 110)
            modulus, residue = rng.randint(1, 6), rng.randint(0, 6)
            left = [entry for entry in left if low <= entry[0] < high and entry[0] % modulus == residue % modulus]
            kept = kept and kept.within(low, high)
            kept = kept and kept.thinned(modulus, residue)
        assert left == entries(kept)


def test_the_last_position_is_the_one_of_the_last_entry():
    """It decides whether a run lies within bounds at all."""
    assert all(run.last == entries(run)[-1][0] for run in SMALL)
