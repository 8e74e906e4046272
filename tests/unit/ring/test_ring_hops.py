"""How far every row of a block travels, against the oracle's pattern counted row by row."""

import random

import numpy as np
import pytest

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringref.sharding import SHARDINGS, key_positions, query_positions
from ringverify.ring.plan import geometry
from ringverify.ring.plan import needs as needs_module
from ringverify.ring.plan.heads import head_classes
from ringverify.ring.plan.needs import hops, largest
from ringverify.ring.plan.runs import runs, step_of


def dealt(length, world_size):
    """Blocks of three dealt out in turn: several runs of one step, and soon too many."""
    return [[p for p in range(length) if p // 3 % world_size == rank] for rank in range(world_size)]


def drawn(rng, longest=90):
    """A problem, a sharding and a world size."""
    n, world_size = rng.randrange(1, longest), rng.randrange(1, 8)
    sharding = rng.choice([*SHARDINGS[:3], dealt])
    said = {"causal": rng.random() < 0.5, "heads": 4, "key_heads": rng.choice([1, 2, 4])}
    if rng.random() < 0.4:
        said["window"] = (rng.choice([None, 0, 1, 3, 9, 30]), rng.choice([None, 0, 1, 3, 9, 30]))
    match rng.randrange(5):
        case 0 | 1 | 2:
            branches = tuple((rng.randrange(1, 40), rng.randrange(1, 6)) for _ in range(rng.randrange(1, 4)))
            said["dilation"] = Dilation(branches=branches, heads=rng.choice(["split", "shared"]))
        case 3:
            said["documents"] = tuple(sorted(rng.randrange(n + 1) for _ in range(rng.randrange(1, 9))))
    if rng.random() < 0.2:
        said["batch"] = 2
        said["key_lengths"] = (rng.randrange(n + 1), rng.randrange(n + 1))
    return Problem(query_length=n, **said), sharding, world_size


def counted(problem, sharding, world_size, owner):
    """Nearest and furthest hop by class of heads and row, from the multiplicity."""
    m = multiplicity(problem).any(axis=0)
    queries = query_positions(sharding, problem.nq, world_size)
    keys = key_positions(sharding, problem.nk, world_size)[owner]
    classes = head_classes(problem.dilation, problem.heads, problem.hk)
    near, far = np.zeros((2, len(classes), len(keys)), dtype=np.int64)
    for number, one in enumerate(classes):
        heads = [h for h in range(problem.heads) if h // problem.group_size in range(*one.key_heads.bounds())]
        for hop in range(1, world_size):
            attended = m[heads][:, queries[(owner + hop) % world_size]][..., keys].any(axis=(0, 1))
            far[number, attended] = hop
            near[number, attended & (near[number] == 0)] = hop
    return near, far


def wrong(count):
    """Blocks of which a row travels further or less far than the pattern says, over so many problems."""
    rng, found = random.Random(0), []
    for _ in range(count):
        problem, sharding, world_size = drawn(rng)
        queries = [runs(sharding, problem.nq, world_size, rank) for rank in range(world_size)]
        keys = [runs(sharding, problem.nk, world_size, rank) for rank in range(world_size)]
        for owner in range(world_size):
            got = hops(problem, queries, keys, owner)
            near, far = got.nearest, got.furthest
            nearest, furthest = counted(problem, sharding, world_size, owner)
            if step_of(*queries, *keys) is None:  # masks are looked up by position, for whole blocks
                right = (far >= furthest).all() and (near <= nearest)[furthest > 0].all()
            else:
                right = np.array_equal(near, nearest) and np.array_equal(far, furthest)
            if not right:
                found.append((problem, sharding, world_size, owner))
    return found


@pytest.mark.nightly
def test_every_row_travels_as_far_as_the_pattern_says():
    """All shardings, and a function that is regular or not; windows, segments, documents, key lengths, head groups."""
    assert wrong(1200) == []


def test_what_is_found_at_once_is_what_is_found_rank_by_rank():
    """Larger problems than one would count pair by pair: the vectorised form beside the plain one, byte by byte."""
    rng = random.Random(3)
    for _ in range(60):
        problem, sharding, world_size = drawn(rng, 1500)
        queries = [runs(sharding, problem.nq, world_size, rank) for rank in range(world_size)]
        keys = [runs(sharding, problem.nk, world_size, rank) for rank in range(world_size)]
        owner = rng.randrange(world_size)
        found, plain = hops(problem, queries, keys, owner), needs_module._rank_by_rank(problem, queries, keys, owner)
        assert all(np.array_equal(*pair) for pair in zip(found, plain, strict=True)), (problem, sharding, world_size)


def test_the_largest_of_intervals_is_found_for_every_place():
    """Of any length, nested, apart and crossing, beside each place asked on its own."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        length, count = rng.integers(1, 40), rng.integers(0, 12)
        first, last = np.sort(rng.integers(0, length, (2, count)), axis=0)
        weight = rng.integers(1, 9, count).astype(np.uint8)
        places = np.arange(length)[:, None]
        expected = np.where((first <= places) & (places <= last), weight, 0).max(axis=1, initial=0)
        assert largest(first, last, weight, length).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["largest", "attended", "cuttings"])
def test_the_comparison_can_fail(monkeypatch, name):
    """Intervals that are one too long, a band one too narrow, and one document for all."""
    where = geometry if name == "attended" else needs_module
    right = getattr(where, name)
    mistakes = {
        "largest": lambda first, last, weight, length: right(np.maximum(first - 1, 0), last, weight, length),
        "attended": lambda *them: (right(*them)[0], right(*them)[1] - 1),
        "cuttings": lambda problem: right(problem.replace(documents=None)),
    }
    monkeypatch.setattr(where, name, mistakes[name])
    assert wrong(60)
