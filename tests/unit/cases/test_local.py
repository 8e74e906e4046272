"""What a rank is given: nothing of it is shared with what it is compared with afterwards."""

from ringref.problem import Dilation, Problem
from ringverify.cases.local import _apart


def test_a_rank_that_changes_its_problem_changes_no_other():
    """Not even by force, and not inside the dilation; all other fields are numbers, texts and tuples of them."""
    problem = Problem(query_length=8, heads=2, causal=True, dilation=Dilation(((4, 2), (8, 1)), heads="split"))
    mine = _apart(problem)
    assert mine == problem
    object.__setattr__(mine.dilation, "heads", "shared")
    assert mine != problem
    assert problem.dilation.heads == "split"
    mine = _apart(problem)
    object.__setattr__(mine, "causal", False)
    assert problem.causal
    hash(problem)  # it holds nothing that could be changed in place
