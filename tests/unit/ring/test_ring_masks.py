"""The mask of one tile against the oracle's pattern, and where none is needed."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringverify.ring.masks import NO_KEY_LABEL, NO_QUERY_LABEL, band_bias, labels, position_bias
from ringverify.ring.plan.tiles import Tile

CPU = torch.device("cpu")


def counts(bias, shape):
    """How often a bias lets each pair meet; `None` is once."""
    if bias is None:
        return np.ones(shape, dtype=np.int64)
    return np.rint(bias.double().exp().expand(shape).numpy()).astype(np.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_band_is_zero_between_its_bounds_and_minus_infinity_elsewhere(dtype):
    """Every band of every small tile, bounds outside of it and sides without one included; never NaN."""
    for rows, keys in itertools.product(range(1, 6), repeat=2):
        ahead = torch.arange(keys) - torch.arange(rows)[:, None]
        for low, high in itertools.product([None, *range(-6, 7)], repeat=2):
            inside = torch.ones(rows, keys, dtype=torch.bool)
            inside &= ahead >= (-99 if low is None else low)
            inside &= ahead <= (99 if high is None else high)
            bias = band_bias(Tile((3, 3 + rows), (7, 7 + keys), "band", low, high), dtype, CPU)
            assert bias.dtype == dtype
            assert torch.equal(bias, torch.where(inside, 0.0, -math.inf).to(dtype)), (rows, keys, low, high)


def draw(rng):
    """A small problem with any of the constraints."""
    n, heads, batch = rng.choice([1, 3, 8, 12]), rng.choice([1, 2, 3, 5]), rng.choice([1, 2])
    fields = {"query_length": n, "heads": heads, "batch": batch, "causal": rng.random() < 0.4}
    if rng.random() < 0.4:
        fields["window"] = (rng.choice([None, 0, 1, 3, 20]), rng.choice([None, 0, 2, 20]))
    kind = rng.choice(["cross", "documents", "split", "cyclic", "block", "plain"])
    if kind == "cross":
        fields["key_length"] = rng.choice([1, 2, 5, 14])
    elif kind == "documents":
        fields["documents"] = tuple(sorted(rng.choices(range(n + 1), k=rng.choice([1, 2, 4, 6]))))
    elif kind != "plain":
        branches = tuple((rng.choice([1, 2, 3, 7, 30]), rng.choice([1, 2, 3])) for _ in range(rng.choice([1, 2, 3])))
        mode, offset = ("split", "cyclic") if kind == "split" else ("shared", kind)
        fields["dilation"] = Dilation(branches, heads=mode, head_offset=offset)
    if rng.random() < 0.3:
        fields["key_lengths"] = tuple(rng.randint(0, fields.get("key_length", n)) for _ in range(batch))
    return Problem(**fields)


def mismatches(seed):
    """Random problems, positions in random order, as a function may deal them: those whose mask is not the pattern."""
    rng = random.Random(seed)
    for _ in range(150):
        problem = draw(rng)
        queries = np.array(rng.sample(range(problem.nq), rng.randint(1, problem.nq)))
        keys = np.array(rng.sample(range(problem.nk), rng.randint(1, problem.nk)))
        expected = multiplicity(problem, queries, keys)
        bias = position_bias(problem, torch.from_numpy(queries), torch.from_numpy(keys), torch.float64)
        if not np.array_equal(expected, counts(bias, expected.shape)):
            yield problem
        if (bias is None) != bool((expected == 1).all()):
            yield problem
        assert bias is None or (bias.dim() == 4 and not bool(bias.isnan().any()))


@pytest.mark.parametrize("seed", range(4))
def test_a_mask_by_position_is_the_pattern(seed):
    """All constraints and their combinations; nothing at all where every pair meets once."""
    assert list(mismatches(seed)) == []


def test_the_comparison_sees_wrong_labels(monkeypatch):
    """Positions that nobody covers meeting one another, the usual mistake with labels."""
    monkeypatch.setattr("ringverify.ring.masks.NO_KEY_LABEL", NO_QUERY_LABEL)
    assert list(mismatches(0))


def test_a_mask_has_only_the_axes_that_it_needs():
    """Heads where branches differ by head, batch where lengths do, and with lengths alone not even queries."""
    positions = torch.arange(8)
    shapes = {
        (1, 1, 8, 8): Problem(query_length=8, heads=4, causal=True),
        (2, 1, 1, 8): Problem(query_length=8, heads=4, batch=2, key_lengths=(3, 8)),
        (2, 1, 8, 8): Problem(query_length=8, heads=4, batch=2, key_lengths=(3, 8), causal=True),
        (1, 4, 8, 8): Problem(query_length=8, heads=4, dilation=Dilation(((4, 1), (4, 2)))),
    }
    for shape, problem in shapes.items():
        assert position_bias(problem, positions, positions, torch.float32).shape == shape


def test_a_mask_is_built_for_the_heads_that_are_asked_for():
    """Those of one class of heads, which may be every other one."""
    positions = torch.arange(8)
    problem = Problem(query_length=8, heads=4, dilation=Dilation(((4, 1), (8, 2)), heads="shared"))
    whole = position_bias(problem, positions, positions, torch.float32)
    for heads in (slice(1, 4, 2), slice(2, 3)):
        assert torch.equal(position_bias(problem, positions, positions, torch.float32, heads), whole[:, heads])


def test_positions_that_never_meet_take_one_element():
    """Keys that all come after the queries, or all lie to the left of their windows, are told by their extremes."""
    early, late = torch.arange(8), torch.arange(100, 120)
    problem = Problem(query_length=128, causal=True, window=(40, 0))
    for queries, keys in ((early, late), (late, early)):
        bias = position_bias(problem, queries, keys, torch.float32)
        assert bias.tolist() == [[[[-math.inf]]]]


def test_documents_of_length_zero_and_a_first_document_that_starts_late():
    """Positions outside every document attend nothing, not even themselves; a label of theirs meets no other."""
    problem = Problem(query_length=8, documents=(1, 1, 4, 4, 6, 6))
    positions = torch.arange(8)
    attended = counts(position_bias(problem, positions, positions, torch.float32), (1, 1, 8, 8))[0, 0]
    assert attended.sum(axis=1).tolist() == [0, 3, 3, 3, 2, 2, 0, 0]
    nowhere = labels(problem, positions, NO_QUERY_LABEL)[0, 0]
    assert (nowhere == NO_QUERY_LABEL).nonzero().flatten().tolist() == [0, 6, 7]
    assert NO_QUERY_LABEL != NO_KEY_LABEL


def test_branches_add_up():
    """Three branches that all let a pair through make it count three times: log 3 is added to its score."""
    problem = Problem(query_length=4, dilation=Dilation(((4, 1), (2, 1), (8, 1)), heads="shared"))
    bias = position_bias(problem, torch.arange(4), torch.arange(4), torch.float64)
    assert bias is not None
    assert counts(bias, (1, 1, 4, 4))[0, 0].tolist() == [[3, 3, 2, 2], [3, 3, 2, 2], [2, 2, 3, 3], [2, 2, 3, 3]]
    assert torch.equal(bias[0, 0, 0, 0], torch.tensor(3.0, dtype=torch.float64).log())
