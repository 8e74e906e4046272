"""The dense problems that a dilated one is made of, against the oracle's pattern; and `bench --dilation`."""

import random

import pytest

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringverify.bench.gathered import Gathered, dense_problems, pairs
from ringverify.bench.sides import Side, why_not
from ringverify.bench.workload import Shape, workload


def test_their_pairs_are_those_of_the_pattern():
    """200 dilations: segments that do not divide the sequence, rates that do not divide them, all head modes."""
    rng = random.Random(0)
    for _ in range(200):
        heads = rng.choice(["split", "shared"])
        problem = Problem(
            query_length=rng.randint(1, 30),
            batch=rng.randint(1, 2),
            heads=rng.randint(1, 5),
            head_dim=1,
            causal=rng.random() < 0.5,
            dilation=Dilation(
                tuple((rng.randint(1, 12), rng.randint(1, 5)) for _ in range(rng.randint(1, 3))),
                heads,
                "cyclic" if heads == "split" else rng.choice(["cyclic", "block"]),
            ),
        )
        assert pairs(problem) == multiplicity(problem).sum()


def test_equal_segments_are_one_call():
    """Eight heads of three branches: as many calls as branches, with every segment of a branch in one of them."""
    problem = workload("dilation-split", 64, 2, Shape()).problem
    assert dense_problems(problem) == [(8, 3, 8), (4, 3, 8), (2, 2, 8)]
    gathered = Gathered(problem)
    out = gathered.forward()
    assert [tuple(one.shape) for one in out] == [(8, 3, 8, 64), (4, 3, 8, 64), (2, 2, 8, 64)]
    gathered.backward(out)


@pytest.mark.parametrize("pattern", ["dense", "causal", "window"])
def test_without_a_dilation_there_is_no_dense_ring(pattern):
    """It would be the ring again."""
    dense = Side("dense-ring", "dense", "ring")
    assert why_not(dense, workload(pattern, 64, 2, Shape())) == "there is no dilation to leave out"
    assert why_not(dense, workload("dilation-shared", 64, 2, Shape())) is None
