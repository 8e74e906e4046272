"""What of a block travels: sets of rows, parcels, and blocks of them."""

import random

import numpy as np
import torch

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringref.sharding import key_positions
from ringverify.ring.parcels import Block, Parcel, Part, everything
from ringverify.ring.plan import make_plan
from ringverify.ring.regions import Span
from ringverify.ring.rows import as_array, locate, same, union


def drawn_rows(rng):
    """Evenly spaced rows, or any."""
    if rng.random() < 0.5:
        return Span(rng.randrange(5), rng.randrange(1, 6), rng.randrange(1, 4))
    return np.array(sorted(rng.sample(range(20), rng.randrange(1, 9))))


def test_a_union_holds_every_row_once_and_its_parts_are_found_in_it():
    """Against sets of numbers."""
    rng = random.Random(0)
    for _ in range(500):
        many = [drawn_rows(rng) for _ in range(rng.randrange(1, 4))]
        together = union(many)
        expected = sorted(set().union(*(as_array(rows).tolist() for rows in many)))
        assert as_array(together).tolist() == expected
        for rows in many:
            assert as_array(together)[locate(rows, together)].tolist() == as_array(rows).tolist()


def test_rows_are_the_same_however_they_are_written():
    """A span of one has no step, and a list may be evenly spaced."""
    assert same(Span(3, 1, 1), Span(3, 1, 7))
    assert same(Span(1, 3, 2), np.array([1, 3, 5]))
    assert not same(Span(1, 3, 2), np.array([1, 3, 6]))


def test_a_parcel_takes_what_it_names_from_a_block_and_writes_it_back():
    """Rows of two classes of heads, one set of them not evenly spaced, head_dim other than value_dim."""
    problem = Problem(query_length=8, heads=3, head_dim=2, value_dim=5, batch=2)
    k, v = torch.randn(2, 8, 3, 2), torch.randn(2, 8, 3, 5)
    classes = Span(0, 2, 2), Span(1, 1)
    rows = Span(1, 3, 2), np.array([0, 1, 6])
    whole = Block.of_tensors(everything(problem, classes, 8), k, v)
    parcel = Parcel(problem, {number: Part(classes[number], rows[number]) for number in (0, 1)})
    cut = Block.of_flat(parcel, torch.empty(parcel.numel + 3))
    whole.copy_to(cut)
    assert cut.flat.numel() == 2 * (3 * 2 + 3 * 1) * (2 + 5)
    for number in (0, 1):
        for part, full in zip(cut.parts[number], (k, v), strict=True):
            assert torch.equal(part, full[:, as_array(rows[number])][:, :, classes[number].slice()])
    zeros = Block.of_tensors(whole.parcel, torch.zeros_like(k), torch.zeros_like(v))
    zeros.write(cut)
    again = Block.of_flat(parcel, torch.empty(parcel.numel))
    zeros.copy_to(again)
    assert torch.equal(again.flat, cut.flat)


def needed_keys(problem, sharding, world_size, owner, ranks):
    """Distinct `(key head, row)` of an owner that queries of some ranks attend, by the oracle's pattern."""
    shards = key_positions(sharding, problem.nk, world_size)
    m = np.asarray(multiplicity(problem))[0] > 0
    queries = np.concatenate([shards[rank] for rank in ranks])
    seen = m[:, queries][:, :, shards[owner]].any(axis=1)
    return int(seen.reshape(problem.hk, problem.group_size, -1).any(axis=1).sum())


def test_what_crosses_a_boundary_is_what_ranks_ahead_need_and_nothing_else():
    """Bytes received over bytes of the distinct keys that a rank needs or must relay: 1.00, by the oracle's pattern."""
    rng = random.Random(1)
    for _ in range(150):
        world_size, n = rng.randrange(2, 6), rng.randrange(4, 31)  # no block of 32 rows: none too small to cut
        branches = tuple((rng.randrange(2, 20), rng.randrange(1, 6)) for _ in range(rng.randrange(1, 4)))
        dilation = Dilation(branches=branches, heads=rng.choice(["split", "shared"]))
        key_heads = rng.choice([4, 2])
        problem = Problem(
            query_length=n, heads=4, key_heads=key_heads, head_dim=1, dilation=dilation, causal=rng.random() < 0.5
        )
        sharding = rng.choice(["contiguous", "zigzag", "striped"])
        for rank in range(world_size):
            plan = make_plan(problem, sharding, world_size, rank)
            for owner in range(world_size):
                for boundary in range(plan.schedule.reach[owner]):
                    ahead = [(owner + hop) % world_size for hop in range(boundary + 1, world_size)]
                    numel = plan.outward(owner, boundary).numel
                    assert numel == 2 * needed_keys(problem, sharding, world_size, owner, ahead)
