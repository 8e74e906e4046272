"""The map of a counterexample: levels of errors by query and key and by position and head, small whatever the case."""

import dataclasses
import json

import numpy as np
import pytest
from diagnosed import diagnosed

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case
from ringverify.diagnosis.region import MOST, _level, outline
from ringverify.events import as_json
from ringverify.faults.ring import EVERYTHING


def region(mutant, **how):
    """What the map of a mutant says."""
    return as_json(diagnosed(mutant, **how).region.told())


def wrong(digits):
    """The cells that are not 0, by row and column."""
    return {(y, x) for y, row in enumerate(digits) for x, digit in enumerate(row) if digit != "0"}


BLOCKS = [[rank, position, position] for position, rank in enumerate([0, 0, 0, 1, 1, 1, 2, 2, 2])]


def test_keys_that_the_mask_excludes_are_cells_outside_the_pattern():
    """The causal mask lets one key too many through on blocks from other ranks: each row's weights are then wrong."""
    found = region("O42", tensor="out", causal=True)
    assert found["queries"] == found["keys"] == BLOCKS
    assert found["pattern"] == ["1" * n + "0" * (9 - n) for n in range(1, 10)]
    assert wrong(found["pairs"]) == {(2, key) for key in range(4)} | {(5, key) for key in range(7)}
    assert wrong(found["rows"]) == {(row, head) for row in (2, 5) for head in (0, 1)}


@pytest.mark.parametrize("tensor", ["dk", "dv"])
@pytest.mark.by_day(1)
def test_what_each_query_adds_to_each_key_is_told_of_gradients(tensor):
    """dk and dv come from the own queries only, so the parts of all others are missing."""
    found = region("F1b", tensor=tensor)
    assert wrong(found["pairs"]) == {(q, k) for q in range(9) for k in range(9) if q // 3 != k // 3}
    assert wrong(found["rows"]) == {(k, head) for k in range(9) for head in (0, 1)}


def test_axes_run_rank_by_rank():
    """So that a block is a rectangle, whatever the sharding."""
    found = region("O65", tensor="out", sharding="striped", causal=True)
    order = [position for rank in range(3) for position in range(rank, 9, 3)]
    assert [piece[1] for piece in found["queries"]] == order
    m = multiplicity(Problem(query_length=9, causal=True))[0, 0]
    assert found["pattern"] == ["".join(str(m[i, j]) for j in order) for i in order]


def test_replicated_queries_have_all_queries_on_every_rank():
    """And keys of their own."""
    case = Case(problem=Problem(query_length=4), world_size=2, sharding="replicated_query")
    found = as_json(outline(case, EVERYTHING).told())
    assert found["queries"] == [[rank, position, position] for rank in (0, 1) for position in range(4)]
    assert found["keys"] == [[0, 0, 0], [0, 1, 1], [1, 2, 2], [1, 3, 3]]
    assert found["pairs"] is found["rows"] is found["tensor"] is None


@pytest.mark.nightly
def test_dq_has_rows_only():
    """Which key a part of dq belongs to is not to be had from it."""
    found = region("F1a", tensor="dq", causal=True)
    assert found["pairs"] is None
    assert {row for row, _ in wrong(found["rows"])} == set(range(3, 9))


def test_a_head_that_reads_the_wrong_keys_is_a_column():
    """Query head h reads key head h % Hk: of four heads the middle ones are wrong."""
    found = region("O28", tensor="out", heads=4, key_heads=2)
    assert {head for _, head in wrong(found["rows"])} == {1, 2}


@pytest.mark.parametrize(("mutant", "tensor"), [("O65", "out"), ("F1b", "dk")])
@pytest.mark.by_day(1)
def test_an_implementation_that_is_not_linear_is_not_believed(mutant, tensor):
    """What probes say has to add up to what was seen; if not, there are rows and no pairs."""

    def twice(result):
        return dataclasses.replace(result, **{tensor: 2 * getattr(result, tensor)})

    found = region(mutant, tensor=tensor, spoilt=twice)
    assert found["pairs"] is None
    assert wrong(found["rows"])


@pytest.mark.parametrize("length", [1, 23, 24, 25, 100, 1001])
@pytest.mark.parametrize("size", [1, 5, 8])
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped"])
def test_a_map_is_small_and_complete(length, size, sharding):
    """However long a case: every position is in one piece of its rank, and the pattern's ones are where pairs are."""
    case = Case(problem=Problem(query_length=length, causal=True), world_size=size, sharding=sharding)
    found = outline(case, EVERYTHING)
    told = as_json(found.told())
    assert max(len(told["queries"]), len(told["keys"]), *map(len, told["pattern"])) <= MOST
    assert len(json.dumps(told)) < 4000
    positions = np.concatenate([piece.positions for piece in found.keys])
    assert sorted(positions.tolist()) == list(range(length))
    for y, query in enumerate(found.queries):
        for x, key in enumerate(found.keys):
            assert found.pattern[y, x] == (query.positions.max() >= key.positions.min())


def test_what_counts_several_times_is_told():
    """A pair that two branches let through."""
    dilation = Dilation(branches=((4, 1), (4, 1)), heads="shared")
    found = outline(Case(problem=Problem(query_length=4, dilation=dilation)), EVERYTHING)
    assert found.told().pattern == ("2222",) * 4


def test_there_is_no_map_of_more_ranks_than_can_be_drawn():
    """Nor of a pattern that is too large, but then of who holds what."""
    assert outline(Case(problem=Problem(query_length=99), world_size=MOST + 1), EVERYTHING) is None
    large = outline(Case(problem=Problem(query_length=2**13), world_size=2), EVERYTHING)
    assert large.pattern is None
    assert len(large.queries) == MOST


def test_levels_are_powers_of_ten():
    """0 is allowed, 1 is up to ten times what is, and what is no number is 9."""
    margins = {0.0: 0, 1.0: 0, 1.5: 1, 10.0: 1, 10.5: 2, 1e8: 8, 1e9: 9, 1e300: 9, np.inf: 9}
    assert {margin: _level(np.array([0.0, margin])) for margin in margins} == margins
    assert _level(np.zeros(0)) == 0
