"""What a training step computes is what inference computes: each fault of `modes` is found, and nothing right is."""

from __future__ import annotations

import dataclasses

import lenses
import overlapping
import pytest
import right
import torch

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.check.explaining import held_against_others, when_it_fails
from ringverify.check.hunting import hunt
from ringverify.check.searching import Hunt
from ringverify.faults.catalogue import MUTANTS
from ringverify.implementation import Implementation
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.modes import SUBSETS
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(90)
MODES = PROPERTIES["modes"]


def hunted(attend: Implementation, examples: int = 30, property: str = "modes") -> Hunt:
    """What is found of one property."""
    runner = Runner(attend, SimulatedWorld())
    return hunt(PROPERTIES[property], runner, examples=examples, seed=0, progress=lambda done: None)


@pytest.mark.parametrize(
    ("attend", "reason", "summary"),
    [
        (overlapping.all_or_nothing, "raised", "where only q requires gradients, rank 0 raised AssertionError"),
        (MUTANTS["O140"].implementation, "differs", "out under torch.no_grad differs from that of a training step"),
        (MUTANTS["O142"].implementation, "differs", "dv where only q and v require gradients differs"),
        (MUTANTS["O144"].implementation, "differs", "out under torch.inference_mode differs"),
        (MUTANTS["O146"].implementation, "unasked", "dk appears on rank 0, where only q requires gradients"),
    ],
    ids=lambda one: one.name if isinstance(one, Implementation) else "",
)
@pytest.mark.by_day(1)
def test_another_mode_that_gives_something_else_is_found_where_training_is_right(attend, reason, summary):
    """On two ranks and two tokens at most, in words that name the mode."""
    assert hunted(attend, 10, "gradients").counterexample is None
    shown = hunted(attend).counterexample
    assert shown is not None
    assert shown.violation.reason[0] == reason
    assert summary in shown.violation.summary
    assert shown.case.world_size <= 2
    assert shown.case.problem.nq <= 2


@pytest.mark.nightly
def test_how_a_call_has_to_be_made_is_said_with_what_else_it_takes():
    """Among other calls of the smallest case, those fail where k requires no gradient."""
    shown = hunted(MUTANTS["O142"].implementation).counterexample
    assert shown is not None
    there = Runner(MUTANTS["O142"].implementation, SimulatedWorld())
    needs = held_against_others(there, shown.violation, when_it_fails(MODES, there, shown.case, shown.violation), ())
    assert needs.told().requires[0] == "v that requires a gradient, and k that requires none"
    assert needs.told().requires[1:] != ()


@pytest.mark.parametrize(
    "attend", [right.attend, right.attend_with_lse, overlapping.layer, lenses.half_of_dv], ids=lambda one: one.name
)
@pytest.mark.by_day(2)
def test_what_is_the_same_in_every_mode_is_let_through(attend):
    """Whether or not it is right: what is wrong in all of them breaks another property."""
    assert hunted(attend, 15).counterexample is None


def _asked(case: Case, attend: Implementation) -> list[set[str]]:
    """Sets of the inputs that require gradients, in each call of a judgement."""
    seen = []

    def noting(q, k, v, call):
        seen.append({name for name, x in zip("qkv", (q, k, v), strict=True) if x.requires_grad})
        modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), q.is_inference()))
        return attend(q, k, v, call)

    modes: list[tuple[bool, bool, bool]] = []
    judged = MODES.judge(case, Runner(dataclasses.replace(attend, function=noting), SimulatedWorld()))
    assert judged.violation is None
    training = (True, False, False)
    rest = [training] * (len(modes) - 3)
    assert modes == [training, (False, False, False), (False, True, True), *rest]
    return seen


@pytest.mark.parametrize("seed", range(len(SUBSETS)))
def test_the_seed_of_a_case_says_which_inputs_require_gradients(seed):
    """After a training step, no_grad and inference_mode, in which inputs are inference tensors; then training."""
    case = Case(problem=Problem(query_length=2), seed=seed)
    every = set("qkv")
    assert _asked(case, right.attend) == [every, set(), set(), *map(set, SUBSETS[seed]), every]


def test_without_gradients_only_inference_is_compared():
    """With a call that requires none, in ordinary mode."""
    attend = dataclasses.replace(
        right.attend, capabilities=dataclasses.replace(right.attend.capabilities, gradients=False)
    )
    assert _asked(Case(problem=Problem(query_length=2)), attend) == [set()] * 4


@pytest.mark.parametrize("cotangent", ["lse", "both"])
def test_an_lse_that_is_detached_from_v_is_no_violation(cotangent):
    """It does not depend on v: where only v requires gradients, autograd attaches out alone."""
    case = Case(problem=Problem(query_length=4), world_size=2, cotangent=cotangent, seed=SUBSETS.index(("v", "qk")))
    judged = MODES.judge(case, Runner(right.attend_with_lse, SimulatedWorld()))
    assert judged.violation is None
