"""Cases that are run to tell hypotheses apart."""

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.diagnosis.further_cases import fresh, in_other_numbers, like


def test_the_longest_key_length_is_not_that_of_every_batch_entry():
    """What holds of one entry's length and what holds of the longest one are told apart."""
    smallest = Case(problem=Problem(query_length=2, causal=True, key_lengths=(1,)))
    for several in (fresh(smallest, smallest), in_other_numbers(smallest)):
        lengths = [case.problem.key_lengths for case in several]
        assert any(len(set(one)) > 1 for one in lengths)
        assert all(0 <= n <= case.problem.nk for case in several for n in case.problem.key_lengths)


def test_positions_lie_before_and_after_all_documents_however_small_the_failing_cases_are():
    """What is taken for a document of its own there is told from the last document, taken to go on."""
    smallest = Case(problem=Problem(query_length=1, documents=(0, 0)))
    several = [case.problem for case in like(smallest, smallest)]
    assert any(p.documents and 0 < p.documents[0] < p.documents[-2] < p.documents[-1] < p.nk for p in several)
