"""What is said of when a case fails is held against further runs, where no cause foretells these."""

import itertools
import random

import pytest

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.diagnosis.when.board import Board
from ringverify.diagnosis.when.conditions import Placed
from ringverify.diagnosis.when.needs import UNSAID, needs
from ringverify.diagnosis.when.scattering import held_against_runs
from ringverify.implementation import Capabilities

DECLARED = Capabilities(sharding=("contiguous",), uneven=True, causal="both", window=True, documents=True)


def said(fails, problem, size=3, **how):
    """What one factor at a time says, and what is left of it after further runs."""
    case = Case(problem=Problem(**problem), world_size=size, values="normal")
    before = needs(case, fails, DECLARED, most_ranks=8, **how)
    return before, held_against_runs(before, gradients=False, left=lambda: 60.0)


def texts(found):
    """What is said to be needed."""
    return [one.text for one in found.requires]


def share_foretold(found, fails):
    """How many of further cases do as is said."""
    x = found.exploration
    cases = list(itertools.islice(x.varying.scattered(x.failing(), random.Random(9)), 200))
    return sum(fails(one) == all(needed.holds(one) for needed in found.requires) for one in cases) / len(cases)


def test_one_of_several_reasons_and_an_odd_number_of_ranks():
    """The last hop of a ring of both directions takes the wrong positions: masks and padding show it."""

    def fails(case):
        p = case.problem
        positional = p.causal or p.window is not None or p.documents is not None or p.nk % case.world_size != 0
        return case.world_size > 1 and case.world_size % 2 == 1 and positional

    _, after = said(fails, {"query_length": 4})
    assert "an odd number of ranks, at least 3" in texts(after)
    assert "causal or window or documents or ranks with different numbers of keys" in texts(after)
    assert share_foretold(after, fails) == 1


def test_what_was_seen_by_chance_is_refuted():
    """The time ended before anything was varied but ranks and length."""

    def fails(case):
        return case.problem.causal and case.problem.nk > 5

    runs = itertools.count()
    before, after = said(fails, {"query_length": 7, "causal": True}, left=lambda: 12 - next(runs))
    assert not before.complete
    assert share_foretold(after, fails) > max(0.95, share_foretold(before, fails))


def test_a_relation_without_words_is_no_matter_of_nothing():
    """Lengths and masks that stand for one another are not called irrelevant if cases pass with all that is said."""

    def fails(case):
        p = case.problem
        return p.causal and (p.nk * 7 + 3 * case.world_size + len(p.documents or ())) % 5 < 3

    _, after = said(fails, {"query_length": 5, "causal": True}, size=2)
    assert not {"length", "ranks", "documents", "masks"} & set(after.irrelevant)


def test_that_cases_pass_for_a_reason_without_words_is_said():
    """Though few do: one is enough that passes whatever its values, and none if another seed makes it fail."""

    def relation(case):
        p = case.problem
        return (p.nk * 5 + 3 * case.world_size**2 + sum(p.documents or ())) % 13 != 2

    problem = {"query_length": 5, "causal": True}
    before, after = said(lambda case: case.problem.causal and relation(case), problem, size=2)
    assert (texts(before), texts(after)) == (["causal"], ["causal", f"{UNSAID} (passes with 1 rank)"])
    assert not relation(after.exploration.case.replace(world_size=1))
    by_chance = said(lambda case: case.problem.causal and (relation(case) or case.seed > 2), problem, size=2)[1]
    assert texts(by_chance) == ["causal"]


def test_that_nothing_is_attended_is_no_reason():
    """Windows and documents that hide all keys hide the fault too: no condition has to explain that."""

    def fails(case):
        attended = Placed.of(case, DECLARED).attended
        return case.problem.causal and case.world_size >= 3 and bool(attended.any())

    _, after = said(fails, {"query_length": 4, "causal": True})
    assert texts(after) == ["causal", "at least 3 ranks"]


def test_reasons_that_go_together_are_told_apart_among_all_cases_that_were_drawn():
    """Where a rank holds three documents, there are three, and a mask hides a part of a block."""

    def fails(case):
        p, held = case.problem, Placed.of(case, DECLARED).keys
        spans = list(itertools.pairwise(p.documents or (0,)))
        return any(sum(bool(((rows >= a) & (rows < b)).any()) for a, b in spans) > 2 for rows in held)

    _, after = said(fails, {"query_length": 6, "documents": (0, 1, 2, 6)}, size=2)
    assert texts(after) == ["3 documents or more on a rank"]
    assert share_foretold(after, fails) == 1


def board_of(cases, runs):
    """A board with cases of which some were run."""
    board = Board(DECLARED)
    board.add([*runs, *cases], runs)
    return board


def test_a_condition_that_few_runs_lack_alone_is_left_out_next():
    """Of two conditions, one was left out twice and the other once."""

    def case(n, *, causal, size):
        return Case(problem=Problem(query_length=n, causal=causal), world_size=size, values="normal")

    runs = {case(n, causal=True, size=size): size > 2 for n in (6, 7, 8) for size in (2, 3, 4)}
    runs |= {case(n, causal=False, size=3): False for n in (6, 7)}
    left = [case(9, causal=causal, size=size) for causal, size in ((False, 2), (True, 2), (False, 4))]
    board = board_of(left, runs)
    assert sorted(one.text for one in board.explanation(runs)) == ["at least 3 ranks", "causal"]
    assert board.lacking_one(runs, ()) == left[2]
    assert board.lacking_one(runs, (left[2],)) == left[1]
    assert board.lacking_one(runs, (left[1], left[2])) is None  # what lacks both teaches little


def test_the_case_that_is_least_like_those_that_failed_is_run_next():
    """It meets what is said, and lacks most of what else they have in common; one that lacks nothing is no use."""
    plain = Case(problem=Problem(query_length=6, causal=True, window=(1, 0)), world_size=3, values="normal")
    runs = {plain.replace(window=(left, 0), world_size=size): size > 2 for left in (1, 2) for size in (2, 3)}
    alike, least = plain.replace(seed=plain.seed + 1), plain.replace(window=None, causal=False)
    board = board_of([alike, plain.replace(window=(3, 1)), least], runs)
    assert [one.text for one in board.explanation(runs)] == ["at least 3 ranks"]
    assert board.least_alike(runs, ()) == least
    assert board_of([alike], runs).least_alike(runs, ()) is None


@pytest.mark.parametrize("values", ["large_scores", "normal"])
def test_where_values_matter_no_further_run_explains_anything(values):
    """Cases pass by their values: what distinguishes them would be found by chance."""

    def fails(case):
        return case.values == values

    before = needs(Case(problem=Problem(query_length=4), world_size=2, values=values), fails, DECLARED, most_ranks=4)
    assert held_against_runs(before, gradients=False, left=lambda: 60.0) is before
