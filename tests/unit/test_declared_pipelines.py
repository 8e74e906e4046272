"""A right pipeline of every declaration stays within the bound of that declaration, whatever the scores."""

import declared_pipelines
import pytest
from declared_pipelines import EVERYTHING, WAYS, accusations, emulated, largest_margins, online

from ringref.rounding import Pipeline
from ringverify.cases.inputs import make_inputs
from ringverify.cases.strategies import Scope, case_from

EXAMPLES = 2
"""Cases of each dtype and way here; `python tests/unit/declared_pipelines.py` tries thousands."""


@pytest.mark.parametrize("dtype", declared_pipelines.TORCH)
def test_no_right_pipeline_is_accused(dtype):
    """Half of the cases have scores of hundreds to hundreds of thousands; each declaration is tried every way."""
    assert [line for number in range(EXAMPLES * len(WAYS)) for line in accusations(dtype, number)] == []


@pytest.mark.parametrize("number", [1757, 35, 65, 77, 617])
def test_what_vanishes_in_float16_is_allowed(number):
    """Where out is subnormal in float16 it is rounded to a multiple of 2^-24, and the backward reads it so; partial
    results in the input dtype are. The first case was accused once, the others have small inputs."""
    assert list(accusations("float16", number)) == []


def test_every_declaration_is_among_them():
    """Sums, probabilities and sums over ranks in 16 bits, each both ways; and an accusation would be seen."""
    for dtype in ("bfloat16", "float16"):
        declared = [one for one in declared_pipelines.DECLARATIONS if one.dtype == dtype]
        for accumulates in ("float32", dtype):
            both = {(one.probabilities, one.reduces) for one in declared if one.accumulates == accumulates}
            assert len(both) == 4


def test_a_pipeline_that_does_something_else_is_accused(monkeypatch):
    """The gate can fail: sums in bfloat16 exceed what float32 sums are allowed, on ordinary cases."""
    case = case_from(1, EVERYTHING, Scope(dtypes=("bfloat16",), values=("normal",)))
    narrow, wide = (Pipeline("bfloat16", accumulates) for accumulates in ("bfloat16", "float32"))
    inputs = make_inputs(case)
    assert max(largest_margins(case, inputs, narrow, online).values()) <= 1
    found = emulated(case, inputs, narrow, online)
    monkeypatch.setattr(declared_pipelines, "emulated", lambda *_: found)
    assert max(largest_margins(case, inputs, wide, online).values()) > 1
