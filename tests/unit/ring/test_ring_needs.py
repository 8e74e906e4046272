"""Who needs whom, computed for all pairs of ranks at once, against the regions of every single pair."""

import random

import numpy as np

from ringref.problem import Dilation, Problem
from ringverify.ring.plan import geometry
from ringverify.ring.plan import needs as needs_module
from ringverify.ring.plan.needs import needs
from ringverify.ring.plan.regions import regions
from ringverify.ring.plan.runs import runs


def backwards(length, world_size):
    """A sharding of no runs: positions dealt from the end."""
    return [np.arange(length - 1 - rank, -1, -world_size) for rank in range(world_size)]


def drawn(rng):
    """A problem, a sharding and a world size."""
    n, world_size = rng.randrange(40), rng.randrange(1, 7)
    sharding = rng.choice(["contiguous", "zigzag", "striped", backwards])
    said = {"causal": rng.random() < 0.5}
    if rng.random() < 0.6:
        said["window"] = (rng.choice([None, 0, 1, 3, 9]), rng.choice([None, 0, 1, 3, 9]))
    match rng.randrange(4):
        case 0:
            branches = tuple((rng.randrange(1, 15), rng.randrange(1, 6)) for _ in range(rng.randrange(1, 4)))
            said["dilation"] = Dilation(branches=branches, heads=rng.choice(["split", "shared"]))
        case 1:
            said["documents"] = tuple(sorted(rng.randrange(n + 1) for _ in range(rng.randrange(1, 6))))
        case 2:
            said["key_length"] = rng.randrange(40)
    if rng.random() < 0.3:
        said["key_lengths"] = (rng.randrange(said.get("key_length", n) + 1),)
    return Problem(query_length=n, heads=3, **said), sharding, world_size


def wrong_pairs(count):
    """Pairs of ranks for which `needs` says other than the regions, over so many problems."""
    rng, wrong = random.Random(0), []
    for _ in range(count):
        problem, sharding, world_size = drawn(rng)
        queries = [runs(sharding, problem.nq, world_size, rank) for rank in range(world_size)]
        keys = [runs(sharding, problem.nk, world_size, rank) for rank in range(world_size)]
        found = needs(problem, queries, keys)
        for rank, of in enumerate(queries):
            for owner, met in enumerate(regions(problem, of, keys)):
                if bool(found[rank, owner]) != (len(list(met)) > 0):
                    wrong.append((problem, sharding, world_size, rank, owner))
    return wrong


def test_a_rank_needs_an_owner_where_there_is_a_region():
    """Not once too often, or a block would travel for nothing, and not once too seldom."""
    assert wrong_pairs(1500) == []


def test_the_comparison_can_fail(monkeypatch):
    """A window that is taken for open on one side moves blocks that nobody needs."""
    right = geometry.bounds

    def open_on_one_side(problem, *them):
        return right(problem.replace(window=None), *them)

    monkeypatch.setattr(needs_module, "bounds", open_on_one_side)
    assert wrong_pairs(200)
