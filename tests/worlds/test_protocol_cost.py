"""What the worker protocol costs a case, besides the implementation's own time."""

import pytest

from ringverify.lab.protocol_cost import cost


@pytest.mark.timeout(90)
def test_a_case_of_16_tokens_costs_a_program_less_than_10_ms():
    """Processor time of both sides, which other work on the machine hardly changes."""
    assert 0 < 1000 * cost(50) < 10
