"""Learned sinks under the suite: right rings pass, faults do not, and what is declared decides what is asked."""

import dataclasses
import itertools

import pytest

from ringref.problem import DTYPES, Problem
from ringref.sharding import SHARDINGS
from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.choices import SeededChoices
from ringverify.cases.inputs import make_inputs
from ringverify.cases.running import Runner
from ringverify.cases.shrinking import shrink
from ringverify.cases.strategies import SINKS, Scope, case_of
from ringverify.faults import sinks
from ringverify.faults.ring import EVERYTHING, PLAIN
from ringverify.implementation import Capabilities, implementation
from ringverify.properties.invariants import INVARIANTS
from ringverify.properties.property import judge_everything
from ringverify.ring.declared import allgather, ring
from ringverify.worlds.simulated import SimulatedWorld

WORLD = SimulatedWorld()
WHOLE = dataclasses.replace(PLAIN, capabilities=sinks.SINKS)
VALUES = ("normal", "large_scores", "falling_blocks", "integers", "float16_limits")
CONSTRAINTS = ({}, {"causal": True}, {"key_lengths": (3, 0)}, {"window": (2, 0)}, {"softcap": 2.0, "scale": -0.3})


def case(number, **fields):
    """Cases of all dtypes, shardings, values and constraints, by turns."""
    problem = {"batch": 2, "query_length": 9, "heads": 4, "key_heads": 2, "head_dim": 4, "sinks": True}
    problem |= {"dtype": DTYPES[number % 4]} | CONSTRAINTS[number % 5] | fields
    return Case(
        problem=Problem(**problem),
        sharding=SHARDINGS[number // 4 % 4],
        world_size=1 + number % 4,
        values=VALUES[number // 3 % 5],
        cotangent=("out", "both", "lse")[number % 3],
        seed=number,
    )


@pytest.mark.parametrize("implementation", [WHOLE, ring, allgather], ids=["plain", "ring", "allgather"])
def test_right_rings_are_right_about_sinks(implementation):
    """In every dtype, with rows that have no key, with huge sinks, and with those of heads that have none."""
    runner = Runner(implementation, WORLD)
    for number in range(20):
        judgement = judge_everything(case(number), runner)
        assert judgement.violation is None, (case(number).describe(), judgement.violation)


def test_a_sink_that_leaves_almost_no_weight_to_keys_is_no_violation():
    """Beside a sink of 100, out is subnormal: half of it would not be rounded alike."""
    fields = {"query_length": 5, "key_heads": None, "dtype": "float32", "scale": None, "batch": 1}
    plain = [case(1, **fields).replace(seed=seed, values="normal", sharding="contiguous") for seed in (0, 3, 4, 5, 7)]
    assert all(make_inputs(one).sinks.max() > 50 for one in plain)
    runner = Runner(WHOLE, WORLD)
    assert [INVARIANTS.judge(one, runner).violation for one in plain] == [None] * 5


@pytest.mark.parametrize("id", sinks.FAULTS.mutants)
def test_every_fault_of_sinks_is_caught_within_a_few_cases(id):
    """And the sentence says which it is."""
    runner = Runner(sinks.FAULTS.mutants[id].implementation, WORLD)
    assert any(judge_everything(case(number, dtype="float32"), runner).violation for number in (5, 6, 7, 8, 10, 14))


@pytest.mark.parametrize(("right", "other"), [(ring, True), (WHOLE, "partial")])
def test_the_other_gradient_than_the_declared_one_is_wrong(right, other):
    """A part is not the whole, on two ranks and more; with replicated queries both are the same."""
    claims = dataclasses.replace(right.capabilities, sinks=other)
    runner = Runner(dataclasses.replace(right, capabilities=claims), WORLD)
    assert judge_everything(case(9), runner).violation.reason == ("value", "dsinks")
    alike = case(9).replace(sharding="replicated_query")
    assert judge_everything(alike, runner).violation is None


def test_only_who_declares_sinks_is_asked_for_them():
    """And all else is drawn as for who does not."""
    plain, declared = (
        [case_of(choices, c, Scope()) for _ in range(60)]
        for choices, c in ((SeededChoices("0"), EVERYTHING), (SeededChoices("0"), sinks.SINKS))
    )
    assert not any(one.problem.sinks for one in plain)
    assert [one.replace(sinks=False) for one in declared] == plain
    assert 60 // SINKS // 2 < sum(one.problem.sinks for one in declared) < 60 // SINKS * 2
    assert str(why_unsupported(case(0), EVERYTHING)) == "sinks is not declared"


def test_sinks_are_large_small_and_none():
    """Where scores are large, most sinks are of their size."""
    drawn = [make_inputs(case(number, heads=8)).sinks for number in range(20)]
    every = set(itertools.chain.from_iterable(one.tolist() for one in drawn))
    assert float("-inf") in every
    assert min(every - {float("-inf")}) <= -2000
    assert max(every) > 90
    assert any(-3 < one < 3 for one in every)


def test_a_case_is_shrunk_to_one_without_sinks_unless_it_takes_them():
    """Whatever fails without them is told without them."""
    plain = shrink(case(5), lambda one: True, sinks.SINKS, budget=200)
    assert not plain.case.problem.sinks
    needed = shrink(case(5), lambda one: one.problem.sinks, sinks.SINKS, budget=200)
    assert needed.case.problem.sinks
    assert Case.from_json(needed.case.to_json()) == needed.case


@pytest.mark.parametrize("value", ["whole", 1, None])
def test_what_sinks_cannot_be_declared_as_is_said(value):
    """1 is True in Python, and no declaration."""
    with pytest.raises(ValueError, match=f'^sinks={value!r}: expected True, False or "partial"$'):
        Capabilities(sinks=value)


def test_an_implementation_that_writes_to_its_sinks_is_told():
    """They are inputs like q, k and v."""

    @implementation(sinks=True, gradients=False)
    def attend(q, k, v, call):
        if call.sinks is not None:
            call.sinks.add_(1.0)
        return q.clone()

    contiguous = case(5).replace(sharding="contiguous")
    changed = Runner(attend, WORLD).run(contiguous, gradients=False).ranks[0].changed
    assert changed == ("call.sinks",)
