"""The multiplicity: vectorised against one at a time, against an independent construction, and by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import dense_formula
import numpy as np
import pytest
from drawing import problems
from hypothesis import given
from hypothesis import strategies as st

from ringref.pattern import branch_of_head, branches_through, multiplicity, multiplicity_at
from ringref.problem import Dilation, Problem


def every_small_problem() -> Iterator[Problem]:
    """Lengths up to 5 against every causal, window, document, key length and dilation there is at that size."""
    sides = (None, 0, 1, 3)
    for nq, nk, causal in itertools.product(range(5), range(5), (False, True)):
        for window in (None, *itertools.product(sides, sides)):
            yield Problem(query_length=nq, key_length=nk, causal=causal, window=window)
        for length in range(nk + 1):
            yield Problem(batch=2, query_length=nq, key_length=nk, causal=causal, key_lengths=(length, nk))
    for n, causal in itertools.product(range(6), (False, True)):
        for count in (1, 2, 4):
            for cuts in itertools.combinations_with_replacement(range(n + 1), count):
                yield Problem(query_length=n, causal=causal, documents=cuts, window=(1, 1) if count == 4 else None)
        for branches in (((w, r),) for w in range(1, 7) for r in range(1, 4)):
            yield from _in_every_mode(n, causal, 3, (*branches, (2, 1)))
        for heads in range(1, 6):
            yield from _in_every_mode(n, causal, heads, ((n + 1, 2), (3, 3), (1, 1)))


def _in_every_mode(n: int, causal: bool, heads: int, branches: tuple[tuple[int, int], ...]) -> Iterator[Problem]:
    for mode, offset in (("split", "cyclic"), ("shared", "cyclic"), ("shared", "block")):
        yield Problem(
            query_length=n, causal=causal, heads=heads, dilation=Dilation(branches, heads=mode, head_offset=offset)
        )


def test_vectorised_and_scalar_multiplicity_agree_on_every_element_of_every_small_problem() -> None:
    """Two readings of the definition that share no logic, and a third in the tests."""
    seen, above_one = 0, 0
    for problem in every_small_problem():
        m = multiplicity(problem)
        assert m.dtype == np.int64
        assert m.shape == (problem.batch, problem.heads, problem.nq, problem.nk)
        for index in np.ndindex(m.shape):
            assert m[index] == multiplicity_at(problem, *index), (problem, index)
        np.testing.assert_array_equal(m, dense_formula.counts(problem).numpy())
        seen, above_one = seen + 1, above_one + int((m > 1).any())
    assert seen > 2000
    assert above_one > 50


@given(problem=problems(max_length=12))
def test_vectorised_and_scalar_multiplicity_agree_on_any_problem(problem: Problem) -> None:
    """Combinations that the exhaustive test above does not reach."""
    m = multiplicity(problem)
    scalar = [multiplicity_at(problem, *index) for index in np.ndindex(m.shape)]
    np.testing.assert_array_equal(m.reshape(-1), scalar)


@given(problem=problems(), data=st.data())
def test_positions_select_rows_and_columns(problem: Problem, data: st.DataObject) -> None:
    """Any positions in any order: a tile of the whole, which is how ranks ask."""
    queries = data.draw(st.lists(st.integers(0, problem.nq - 1)) if problem.nq else st.just([]))
    keys = data.draw(st.lists(st.integers(0, problem.nk - 1)) if problem.nk else st.just([]))
    i, j = np.array(queries, dtype=np.int64), np.array(keys, dtype=np.int64)
    np.testing.assert_array_equal(multiplicity(problem, i, j), multiplicity(problem)[:, :, i][:, :, :, j])


def of(problem: Problem, head: int = 0) -> list[str]:
    """The multiplicities of one head as text, a row a query."""
    return ["".join(map(str, row)) for row in multiplicity(problem)[0, head]]


@pytest.mark.parametrize(
    ("problem", "rows"),
    [
        (Problem(query_length=3, causal=True), ["100", "110", "111"]),
        (Problem(query_length=2, key_length=4, causal=True), ["1110", "1111"]),
        (Problem(query_length=4, key_length=2, causal=True), ["00", "00", "10", "11"]),
        (Problem(query_length=4, window=(1, 0)), ["1000", "1100", "0110", "0011"]),
        (Problem(query_length=4, window=(0, 1)), ["1100", "0110", "0011", "0001"]),
        (Problem(query_length=2, key_length=4, window=(1, 0)), ["0110", "0011"]),
        (Problem(query_length=3, window=(None, 0)), ["100", "110", "111"]),
        (Problem(query_length=3, window=(None, None)), ["111", "111", "111"]),
        (Problem(query_length=4, documents=(0, 1, 1, 4)), ["1000", "0111", "0111", "0111"]),
        (Problem(query_length=4, documents=(1, 3)), ["0000", "0110", "0110", "0000"]),
        (Problem(query_length=2, documents=(1,)), ["00", "00"]),
        (Problem(query_length=2, key_length=3, key_lengths=(2,)), ["110", "110"]),
        (Problem(query_length=4, dilation=Dilation(((4, 2),))), ["1010", "0000", "1010", "0000"]),
        (Problem(query_length=5, dilation=Dilation(((3, 2),))), ["10100", "00000", "10100", "00010", "00000"]),
        (Problem(query_length=3, dilation=Dilation(((3, 1), (2, 1)), heads="shared")), ["221", "221", "112"]),
        (
            Problem(query_length=3, causal=True, dilation=Dilation(((3, 1), (3, 2)), heads="shared")),
            ["200", "110", "212"],
        ),
    ],
)
def test_patterns_written_out_by_hand(problem: Problem, rows: list[str]) -> None:
    """Small enough to check with a pencil against the table of the definition."""
    assert rows == of(problem)


def test_dilation_offsets_go_round_the_heads_or_come_in_blocks() -> None:
    """Rate 2 over five heads: cyclic 0 1 0 1 0, block 0 0 0 1 1; which shows in the first position covered."""
    branch = ((4, 2),)
    for offset, covered in (("cyclic", [0, 1, 0, 1, 0]), ("block", [0, 0, 0, 1, 1])):
        dilation = Dilation(branch, heads="shared", head_offset=offset)
        m = branches_through(np.arange(4)[:, None], np.arange(4)[None, :], dilation=dilation, heads=5)
        assert covered == [int(np.flatnonzero(np.diagonal(m[head]))[0]) for head in range(5)]


def test_split_heads_use_the_offset_of_their_branch() -> None:
    """Branch b starts at b % r: branch 1 of rate 2 covers the odd places."""
    problem = Problem(query_length=4, heads=2, dilation=Dilation(((2, 1), (4, 2))))
    assert of(problem, head=0) == ["1100", "1100", "0011", "0011"]
    assert of(problem, head=1) == ["0000", "0101", "0000", "0101"]


@pytest.mark.parametrize(
    ("heads", "branches", "expected"),
    [
        (4, 2, [0, 0, 1, 1]),
        (5, 2, [0, 0, 0, 1, 1]),
        (5, 3, [0, 0, 1, 1, 2]),
        (2, 3, [0, 1]),
        (1, 1, [0]),
        (7, 3, [0, 0, 0, 1, 1, 2, 2]),
    ],
)
def test_split_mode_gives_the_first_branches_one_head_more(heads: int, branches: int, expected: list[int]) -> None:
    """`H // G` heads a branch, the first `H % G` branches one more."""
    assert expected == [branch_of_head(head, heads=heads, branches=branches) for head in range(heads)]


def test_a_branch_is_causal_in_positions_not_in_places() -> None:
    """Query 2 of the odd places sees position 1 and not 3, whatever their index in the dilated subsequence."""
    problem = Problem(query_length=6, heads=2, causal=True, dilation=Dilation(((6, 2),), heads="shared"))
    assert of(problem, head=1) == ["000000", "010000", "000000", "010100", "000000", "010101"]
