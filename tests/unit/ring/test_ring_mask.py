"""The ring's mask against the written semantics, one pair of positions at a time."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from ringref.problem import Dilation, Problem
from ringref.sharding import SHARDINGS, key_positions, query_positions
from ringverify.ring.mask import FULL, block_mask
from ringverify.ring.plan import Held


def held(positions):
    """What a rank that holds these positions knows of them."""
    positions = torch.as_tensor(positions, dtype=torch.int64)
    low, high = (int(positions.min()), int(positions.max())) if len(positions) else (0, 0)
    return Held(positions, len(positions), low, high)


def document_of(problem, position):
    """The last document that starts at or before a position and has not ended by then, or None."""
    cu = problem.documents
    found = [d for d in range(len(cu) - 1) if cu[d] <= position < cu[d + 1]]
    return found[0] if found else None


def through(dilation, branch, offset, i, j):
    """Whether a branch lets a query position and a key position through."""
    w, r = dilation.branches[branch]
    return i // w == j // w and i % w % r == offset and j % w % r == offset


def multiplicity(problem, b, h, i, j):
    """How often query i attends key j, DESIGN section 3 word by word."""
    if problem.causal and not j <= i + (problem.nk - problem.nq):
        return 0
    if problem.window is not None:
        left, right = problem.window
        distance = j - (i + problem.nk - problem.nq)
        if (left is not None and distance < -left) or (right is not None and distance > right):
            return 0
    if problem.documents is not None and (
        document_of(problem, i) is None or document_of(problem, i) != document_of(problem, j)
    ):
        return 0
    if problem.key_lengths is not None and j >= problem.key_lengths[b]:
        return 0
    dilation = problem.dilation
    if dilation is None:
        return 1
    count = len(dilation.branches)
    if dilation.heads == "split":
        sizes = [problem.heads // count + (1 if b < problem.heads % count else 0) for b in range(count)]
        branch = next(b for b in range(count) if h < sum(sizes[: b + 1]))
        return int(through(dilation, branch, branch % dilation.branches[branch][1], i, j))
    total = 0
    for branch, (_, r) in enumerate(dilation.branches):
        offset = h % r if dilation.head_offset == "cyclic" else h // math.ceil(problem.heads / r)
        total += through(dilation, branch, offset, i, j)
    return total


def table(problem, queries, keys):
    """Multiplicities of a block, (B, H, S, T)."""
    m = np.zeros((problem.batch, problem.heads, len(queries), len(keys)), dtype=np.int64)
    for b, h, s, t in itertools.product(*(range(n) for n in m.shape)):
        m[b, h, s, t] = multiplicity(problem, b, h, int(queries[s]), int(keys[t]))
    return m


def told(problem, queries, keys):
    """The same from the ring's mask."""
    shape = (problem.batch, problem.heads, len(queries), len(keys))
    mask = block_mask(problem, held(queries), held(keys), torch.float64)
    if mask is None:
        return np.zeros(shape, dtype=np.int64)
    allowed = torch.ones(shape, dtype=torch.bool) if mask.allowed_BHST is None else mask.allowed_BHST.expand(shape)
    times = allowed.long() if mask.multiplicity_BHST is None else mask.multiplicity_BHST.long() * allowed
    assert bool(allowed.any()), "a block without a pair is None"
    return times.expand(shape).numpy()


def draw(rng):
    """A small problem with any of the constraints."""
    n = rng.choice([1, 2, 3, 5, 7, 8, 12])
    heads, batch = rng.choice([1, 2, 3, 5]), rng.choice([1, 2])
    fields = {"query_length": n, "heads": heads, "batch": batch, "causal": rng.random() < 0.4}
    if rng.random() < 0.4:
        fields["window"] = (rng.choice([None, 0, 1, 3, 20]), rng.choice([None, 0, 2, 20]))
    kind = rng.choice(["cross", "documents", "split", "cyclic", "block", "plain"])
    if kind == "cross":
        fields["key_length"] = rng.choice([1, 2, 3, 5, 9])
    elif kind == "documents":
        fields["documents"] = tuple(sorted(rng.choices(range(n + 1), k=rng.choice([1, 2, 4, 6]))))
    elif kind != "plain":
        branches = tuple((rng.choice([1, 2, 3, 4, 7, 30]), rng.choice([1, 2, 3])) for _ in range(rng.choice([1, 2, 3])))
        mode, offset = ("split", "cyclic") if kind == "split" else ("shared", kind)
        fields["dilation"] = Dilation(branches, heads=mode, head_offset=offset)
    if rng.random() < 0.3:
        fields["key_lengths"] = tuple(rng.randint(0, fields.get("key_length", n)) for _ in range(batch))
    return Problem(**fields)


@pytest.mark.parametrize("seed", range(40))
def test_every_pair_is_attended_as_often_as_the_definition_says(seed):
    """Blocks of all ranks under every sharding, all constraints."""
    rng = random.Random(seed)
    problem = draw(rng)
    world_size = rng.choice([1, 2, 3, 5])
    for sharding in SHARDINGS:
        queries = query_positions(sharding, problem.nq, world_size)
        keys = key_positions(sharding, problem.nk, world_size)
        for rank, owner in itertools.product(range(world_size), repeat=2):
            expected = table(problem, queries[rank], keys[owner])
            assert np.array_equal(expected, told(problem, queries[rank], keys[owner])), (problem, sharding, rank, owner)


def test_documents_of_length_zero_and_a_first_document_that_starts_late():
    """Positions outside every document attend nothing, not even themselves."""
    problem = Problem(query_length=8, documents=(1, 1, 4, 4, 6, 6))
    attended = told(problem, range(8), range(8))[0, 0]
    assert np.array_equal(np.flatnonzero(attended.sum(axis=1) == 0), [0, 6, 7])
    assert np.array_equal(attended.sum(axis=1)[1:6], [3, 3, 3, 2, 2])


def test_a_block_without_constraints_has_no_mask():
    """Neither has a causal block that lies wholly in the past, nor a window that spans it."""
    assert block_mask(Problem(query_length=8), held(range(4)), held(range(4, 8)), torch.float32) == FULL
    assert block_mask(Problem(query_length=8, causal=True), held(range(4, 8)), held(range(4)), torch.float32) == FULL
    wide = Problem(query_length=8, window=(7, 7), key_lengths=(8,))
    assert block_mask(wide, held(range(8)), held(range(8)), torch.float32) == FULL


@pytest.mark.parametrize(
    "problem",
    [
        Problem(query_length=8, causal=True),
        Problem(query_length=8, window=(0, 0)),
        Problem(query_length=8, documents=(0, 4, 8)),
        Problem(query_length=8, key_lengths=(4,)),
        Problem(query_length=8, dilation=Dilation(((4, 1),))),
    ],
)
def test_a_block_that_no_query_attends_is_none(problem):
    """So that its arithmetic is skipped."""
    assert block_mask(problem, held(range(4)), held(range(4, 8)), torch.float32) is None


def test_branches_add_up():
    """Three branches that all let a pair through make it count three times."""
    problem = Problem(query_length=4, dilation=Dilation(((4, 1), (2, 1), (8, 1)), heads="shared"))
    assert told(problem, range(4), range(4))[0, 0].tolist() == [[3, 3, 2, 2], [3, 3, 2, 2], [2, 2, 3, 3], [2, 2, 3, 3]]
