"""A right pipeline of every declaration stays within the bound of that declaration, whatever the scores."""

import declared_pipelines
import pytest
from declared_pipelines import EVERYTHING, WAYS, accusations, emulated, largest_margins, online

from ringref.problem import Problem
from ringref.rounding import Pipeline
from ringverify.cases.case import Case
from ringverify.cases.choices import SeededChoices
from ringverify.cases.inputs import make_inputs
from ringverify.cases.strategies import Scope, case_of

EXAMPLES = 2
"""Cases of each dtype and way here; `python tests/unit/declared_pipelines.py` tries thousands."""


@pytest.mark.parametrize("dtype", declared_pipelines.TORCH)
def test_no_right_pipeline_is_accused(dtype):
    """Half of the cases have scores of hundreds to hundreds of thousands; each declaration is tried every way."""
    assert [line for number in range(EXAMPLES * len(WAYS)) for line in accusations(dtype, number)] == []


VANISHING = {
    1757: Case(
        problem=Problem(
            batch=2, query_length=11, heads=1, head_dim=16, value_dim=3, dtype="float16", documents=(0, 10, 11),
            scale=1.0,
        ),
        sharding="zigzag", world_size=5, values="integers", seed=50300, schedule=33041,
    ),
    35: Case(
        problem=Problem(
            query_length=132, heads=2, head_dim=64, value_dim=33, dtype="float16", scale=0.7, softcap=1.0
        ),
        world_size=3, values="rising_blocks", cotangent="both", seed=49092, schedule=3305,
    ),
    65: Case(
        problem=Problem(
            batch=3, query_length=15, heads=3, head_dim=3, dtype="float16", key_lengths=(13, 7, 2), scale=0.7
        ),
        sharding="zigzag", world_size=5, values="falling_blocks", cotangent="lse", seed=62041, schedule=5995,
    ),
    77: Case(
        problem=Problem(
            batch=3, query_length=10, heads=2, head_dim=40, value_dim=4, dtype="float16", causal=True, window=(2, 1)
        ),
        sharding="zigzag", world_size=3, values="dominating_key", cotangent="both", seed=29569, schedule=25124,
    ),
    617: Case(
        problem=Problem(
            batch=2, query_length=7, heads=2, key_heads=1, head_dim=16, dtype="float16", causal=True, window=(2, 0)
        ),
        sharding="zigzag", world_size=5, values="large_scores", seed=26505, schedule=34271,
    ),
}  # fmt: skip
"""Cases whose small results vanish in float16; the number of each decides how its inputs and pipelines vary."""


@pytest.mark.parametrize("number", VANISHING)
def test_what_vanishes_in_float16_is_allowed(number):
    """Where out is subnormal in float16 it is rounded to a multiple of 2^-24, and the backward reads it so; partial
    results in the input dtype are. The first case was accused once, the others have small inputs."""
    assert list(accusations("float16", number, VANISHING[number])) == []


def test_every_declaration_is_among_them():
    """Sums, probabilities and sums over ranks in 16 bits, each both ways; and an accusation would be seen."""
    for dtype in ("bfloat16", "float16"):
        declared = [one for one in declared_pipelines.DECLARATIONS if one.dtype == dtype]
        for accumulates in ("float32", dtype):
            both = {(one.probabilities, one.reduces) for one in declared if one.accumulates == accumulates}
            assert len(both) == 4


def test_a_pipeline_that_does_something_else_is_accused(monkeypatch):
    """The gate can fail: sums in bfloat16 exceed what float32 sums are allowed, on ordinary cases."""
    case = case_of(SeededChoices(1), EVERYTHING, Scope(dtypes=("bfloat16",), values=("normal",)))
    narrow, wide = (Pipeline("bfloat16", accumulates) for accumulates in ("bfloat16", "float32"))
    inputs = make_inputs(case)
    assert max(largest_margins(case, inputs, narrow, online).values()) <= 1
    found = emulated(case, inputs, narrow, online)
    monkeypatch.setattr(declared_pipelines, "emulated", lambda *_: found)
    assert max(largest_margins(case, inputs, wide, online).values()) > 1
