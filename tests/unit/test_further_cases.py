"""Cases that are run to tell hypotheses apart."""

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.diagnosis.further_cases import fresh, in_other_numbers


def test_the_longest_key_length_is_not_that_of_every_batch_entry():
    """What holds of one entry's length and what holds of the longest one are told apart."""
    smallest = Case(problem=Problem(query_length=2, causal=True, key_lengths=(1,)))
    for several in (fresh(smallest, smallest), in_other_numbers(smallest)):
        lengths = [case.problem.key_lengths for case in several]
        assert any(len(set(one)) > 1 for one in lengths)
        assert all(0 <= n <= case.problem.nk for case in several for n in case.problem.key_lengths)
