"""What is right in 16 bits passes under its declaration, fails without it, and warns of nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sixteen_bits

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.check.hunting import hunt
from ringverify.check.searching import Hunt
from ringverify.implementation import Implementation
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.precision import errs_as_declared
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(120)


def hunted(attend: Implementation, property: str, examples: int) -> Hunt:
    """What is found of one property."""
    runner = Runner(attend, SimulatedWorld())
    return hunt(
        PROPERTIES[property],
        runner,
        examples=examples,
        seed=0,
        progress=lambda done: None,
        shrinking=False,
    )


def test_mean_errors_are_judged_of_what_came_back():
    """A call on a cache has no gradients, though they are declared."""
    capabilities = sixteen_bits.sdpa.capabilities
    case = Case(problem=Problem(query_length=24, head_dim=8, dtype="bfloat16"), world_size=2, values="normal")
    seen = Runner(sixteen_bits.sdpa, SimulatedWorld()).run(case, gradients=False)
    assert capabilities.gradients
    assert seen.ranks[0].dq is None
    assert errs_as_declared([(case, seen)], capabilities)


@pytest.mark.parametrize("property", ["gradients", "precision", "overflow"])
@pytest.mark.parametrize("attend", [sixteen_bits.sdpa, sixteen_bits.reduced], ids=lambda one: one.name)
def test_gradients_that_are_summed_over_ranks_in_bfloat16_pass_where_that_is_declared(attend, property):
    """All-gather and SDPA, and the same with everything else in float32."""
    assert hunted(attend, property, 6).counterexample is None


@pytest.mark.parametrize("property", ["gradients", "precision"])
def test_gradients_that_are_summed_over_ranks_in_bfloat16_fail_where_that_is_not_declared(property):
    """On eight ranks, element by element and in the mean."""
    found = hunted(sixteen_bits.reduced_undeclared, property, 30).counterexample
    assert found is not None
    assert set(found.violation.reason) & {"dk", "dv"}


@pytest.mark.nightly
def test_a_run_in_16_bits_says_nothing_beside_its_report():
    """No warning of an overflow, on scores that float16 and bfloat16 sums do not survive."""
    target = Path(sixteen_bits.__file__).with_suffix(".py")
    command = [sys.executable, "-m", "ringverify", "check", f"{target}:narrow"]
    command += ["--only", "overflow,dtypes,precision", "--max-examples", "8"]
    env = {**os.environ, "PYTHONPATH": str(target.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=env)
    assert done.stderr == ""
    assert done.returncode == 0, done.stdout
