"""The plan of dilated attention in a dense sweep of small values: every pair as often as the pattern says."""

import itertools

import numpy as np
import pytest

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringref.sharding import key_positions
from ringverify.ring.dilated import DilatedRingAttention
from ringverify.ring.plan import regions as regions_module
from ringverify.ring.plan.regions import regions
from ringverify.ring.plan.runs import runs


def counted(problem, sharding, world_size):
    """How often the regions of all ranks let every query attend every key, `(heads, queries, keys)`."""
    shards = key_positions(sharding, problem.nq, world_size)
    held = [runs(sharding, problem.nq, world_size, rank) for rank in range(world_size)]
    total = np.zeros((problem.heads, problem.nq, problem.nk), dtype=np.int64)
    met = [regions(problem, queries, held) for queries in held]
    for rank, owner in itertools.product(range(world_size), repeat=2):
        for region in met[rank][owner]:
            rows = shards[rank][region.queries.slice()]
            keys = shards[owner][region.keys.slice()]
            ahead = np.arange(len(keys)) - np.arange(len(rows))[:, None]
            attends = np.ones(ahead.shape, dtype=np.int64)
            if region.high is not None:
                attends &= ahead <= region.high
            if region.low is not None:
                attends &= ahead >= region.low
            total[np.ix_(range(*region.heads.bounds()), rows, keys)] += attends
    return total


def wrong(lengths, worlds, shardings, causals=(False, True)):
    """Every combination whose pairs are not those of the pattern."""
    found = []
    for n, w, r, mode, causal in itertools.product(lengths, range(1, 13), range(1, 6), ("split", "shared"), causals):
        dilation = Dilation(branches=((w, r), (5, 2)), heads=mode)
        problem = Problem(query_length=n, heads=2, dilation=dilation, causal=causal)
        expected = np.asarray(multiplicity(problem))[0]
        found += [
            (n, p, w, r, mode, causal, sharding)
            for p, sharding in itertools.product(worlds, shardings)
            if not np.array_equal(counted(problem, sharding, p), expected)
        ]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "lengths",
    [
        (3, 5),
        *(pytest.param(range(*ends), marks=pytest.mark.nightly) for ends in itertools.pairwise((0, 6, 13, 18, 22, 25))),
    ],
    ids=str,
)
def test_every_length_world_segment_and_rate_is_right(lengths):
    """All n ≤ 24, p ≤ 6, w ≤ 12, r ≤ 5, both head modes, causal or not, beside a second branch."""
    assert wrong(lengths, range(1, 7), ["contiguous"]) == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sharding", ["zigzag", "striped"])
def test_other_shardings_are_right(sharding):
    """A prime, a power of two, and one less than the ranks."""
    assert wrong([3, 11, 16, 23], [2, 3, 4, 6], [sharding]) == []


def test_the_sweep_can_fail(monkeypatch):
    """A dilation offset that moves with the segment, as one published package had it."""
    right = regions_module.cuttings

    def moving(problem):
        return tuple(one._replace(residue=(one.residue + one.begin // 5) % one.rate) for one in right(problem))

    monkeypatch.setattr(regions_module, "cuttings", moving)
    assert wrong([11], [2], ["contiguous"], [False])


def test_the_module_says_what_is_wrong_with_its_lists():
    """One line each, with both lists."""
    with pytest.raises(ValueError, match=r"segment_lengths=\[8, 16\] and dilation_rates=\[1\]: expected one rate for"):
        DilatedRingAttention((8, 16), (1,))
    with pytest.raises(TypeError, match="leave it out"):
        DilatedRingAttention((8,), (1,), dilation=None)
    with pytest.raises(ValueError, match="branch"):
        DilatedRingAttention((), ())
