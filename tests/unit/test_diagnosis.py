"""The diagnosis names what is wrong with known mutants, and names nothing where nothing reproduces the numbers."""

import pytest
from hypothesis import given, settings

from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.cases.strategies import Scope, cases
from ringverify.diagnosis.diagnose import UNEXPLAINED, diagnose
from ringverify.diagnosis.model import STEPS
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.suspicion import Suspicion
from ringverify.mutants.catalogue import MUTANTS
from ringverify.mutants.plain import PLAIN
from ringverify.worlds.simulated import SimulatedWorld


def case_of(*, size=3, sharding="contiguous", values="normal", **problem):
    """Nine positions on three ranks."""
    plain = {"query_length": 9, "heads": 2, "head_dim": 3}
    return Case(problem=Problem(**plain | problem), world_size=size, sharding=sharding, values=values, seed=1)


def diagnosed(implementation, case, *, gradients):
    """The diagnosis of an implementation on one case and others like it."""
    with_world = SimulatedWorld()
    try:
        runner = Runner(implementation, with_world)
        return diagnose(lambda c: runner.run(c, gradients=gradients), [case, case], implementation.capabilities)
    finally:
        with_world.close()


CAUSAL = case_of(causal=True)
FORWARD = {
    "O14": (case_of(), "scale is 1/sqrt(D + 1)"),
    "A8b": (case_of(), "lse is in base 2"),
    "A9": (case_of(), "sum of the blocks' own softmaxes"),
    "B2": (CAUSAL, "the ring turns the other way"),
    "B8a": (case_of(causal=True, key_length=12), "aligned top-left instead of bottom-right"),
    "B9b": (case_of(window=(2, 1)), "one key too few on the left"),
    "B10": (case_of(documents=(0, 4, 9)), "documents ignored"),
    "O28": (case_of(heads=4, key_heads=2), "h % Hk"),
    "O42": (CAUSAL, "one key too many on blocks from other ranks"),
    "O65": (case_of(), "the block of the last hop is never merged"),
    "O69": (case_of(), "the block of rank 0 is counted twice"),
    "R6a": (case_of(), "attends its own block only"),
    "H3": (case_of(dilation=Dilation(branches=((4, 2),))), "depends on the segment"),
}
BACKWARD = {
    "F4a": (case_of(), "the block's own lse"),
    "O16": (case_of(), "scale is missing from dq"),
    "O31": (case_of(), "dk and dv swapped"),
    "O32": (case_of(), "dk on every rank equals dk + dv"),
    "D5b": (case_of(), "sent one hop too few"),
    "D11": (CAUSAL, "in the backward only"),
    "O20": (case_of(softcap=2.0), "derivative of the softcap missing"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mutant", FORWARD)
def test_a_fault_of_the_forward_is_named(mutant):
    """Told from everything else in the library by out and lse alone."""
    case, words = FORWARD[mutant]
    found = diagnosed(MUTANTS[mutant].implementation, case, gradients=False)
    assert found.explained
    assert words in found.text.split("; or ")[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mutant", BACKWARD)
def test_a_fault_of_the_backward_is_named(mutant):
    """The forward is right, and has to stay right under the suspicion."""
    case, words = BACKWARD[mutant]
    found = diagnosed(MUTANTS[mutant].implementation, case, gradients=True)
    assert found.explained
    assert words in found.text.split("; or ")[0]


@pytest.mark.parametrize("mutant", ["A10", "G6"])
def test_what_nothing_reproduces_is_not_named(mutant):
    """Faults of tiles, which the diagnosis knows nothing of."""
    found = diagnosed(MUTANTS[mutant].implementation, case_of(causal=True, query_length=15), gradients=False)
    assert (found.text, found.explained, found.hop) == (UNEXPLAINED, False, None)


def test_what_is_right_has_no_diagnosis():
    """There is nothing to explain."""
    assert diagnosed(PLAIN, CAUSAL, gradients=True) is None


def test_the_hop_is_that_of_the_block():
    """The last of three hops is missing."""
    assert diagnosed(MUTANTS["O65"].implementation, case_of(), gradients=False).hop == 2
    assert diagnosed(MUTANTS["O14"].implementation, case_of(), gradients=False).hop is None


@pytest.mark.timeout(60)
@settings(max_examples=25)
@given(cases(PLAIN.capabilities, Scope(cotangents=("both",), dtypes=("float64",))))
def test_with_nothing_suspected_the_model_is_the_oracle(case):
    """What the plain ring returns is what the steps predict, on every rank, gradients included."""
    world = SimulatedWorld()
    try:
        observation = Runner(PLAIN, world).run(case, gradients=True)
    finally:
        world.close()
    assert Suspicion("", STEPS).explains(Scene(case, PLAIN.capabilities, observation)) is not None
