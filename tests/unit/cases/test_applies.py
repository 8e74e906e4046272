"""Which cases a property applies to: what it draws, what it shrinks to, what it remembers and what it replays."""

from __future__ import annotations

import dataclasses

import pytest
from hunts import hunted

from ringref.pattern import multiplicity
from ringverify.cases.case import POISONED, Case, why_unsupported
from ringverify.cases.running import Runner
from ringverify.cases.shrinking import shrink
from ringverify.check.casefile import save
from ringverify.check.drawing import drawn
from ringverify.check.explaining import judged
from ringverify.check.searching import Counterexample
from ringverify.cli.replay import replay
from ringverify.faults.ring import EVERYTHING
from ringverify.implementation import Capabilities, Implementation
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.property import Violation
from ringverify.worlds.simulated import SimulatedWorld

CLAIMS = dataclasses.replace(EVERYTHING, memory="streaming", traffic="neighbours", deterministic=True)
PLAIN = Capabilities(dtypes=("float32", "bfloat16"))
NARROW = Capabilities(dtypes=("bfloat16",), window=True, documents=True)
NEEDS = {
    "lse_gradient": lambda case: case.cotangent != "out",
    "masked_rows": lambda case: (multiplicity(case.problem).sum(axis=3) == 0).any(),
    "overflow": lambda case: case.values not in ("normal", "integers", "zero_queries", "unit_values"),
    "precision": lambda case: case.problem.dtype in ("bfloat16", "float16") and case.problem.nq >= 48,
    "chunk_boundaries": lambda case: case.problem.nq <= 13,
    "exact_selection": lambda case: case.values == "selectors",
    "invariants": lambda case: case.values in ("normal", "integers", "dominating_key"),
    "isolation": lambda case: case.values in POISONED or case.problem.causal,
    "strided_inputs": lambda case: case.memory != "contiguous",
    "subgroups": lambda case: case.group != "world" and case.ranks > case.world_size,
    "traffic": lambda case: case.world_size > 1,
    "memory": lambda case: case.world_size >= 3 and case.problem.nq >= 64 * case.world_size,
}
"""What a case has to have for a property, where not any will do, said once more and otherwise."""


@pytest.mark.parametrize("capabilities", [CLAIMS, PLAIN, NARROW], ids=["everything", "plain", "narrow"])
@pytest.mark.parametrize("property", PROPERTIES.values(), ids=PROPERTIES)
def test_what_a_property_shrinks_to_it_could_have_drawn(property, capabilities):
    """However far a failure can be shrunk: it is no other property's in the end."""
    if property.unsupported(capabilities) is not None:
        pytest.skip("the property does not apply to the implementation")
    cases = drawn(property, capabilities, 12)
    assert cases, "the property draws nothing that applies to it"
    for case in cases[:4]:
        shrunk = shrink(
            case, lambda one: True, capabilities, budget=2000, applies=lambda one: property.applies(one, capabilities)
        )
        assert property.applies(shrunk.case, capabilities)
        assert why_unsupported(shrunk.case, capabilities) is None
        assert NEEDS.get(property.id, lambda one: True)(shrunk.case)


def doubled(q, k, v, call):
    """Wrong everywhere, in every dtype."""
    return 2 * (q + v.mean(dim=1, keepdim=True))


WRONG = Implementation(
    doubled,
    "doubled",
    Capabilities(
        dtypes=("float32", "bfloat16"), causal="never", documents=True, key_lengths=True, uneven=True, subgroups=True
    ),
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("property", ["precision", "overflow", "masked_rows", "strided_inputs", "subgroups"])
@pytest.mark.by_day(2)
def test_the_counterexample_of_a_property_is_one_of_it(property):
    """What is wrong everywhere fails in full precision, on plain memory and on the whole world too: not in its name."""
    shown = hunted(WRONG, property).counterexample
    assert PROPERTIES[property].applies(shown.case, WRONG.capabilities)
    assert NEEDS[property](shown.case)


def in_full_precision():
    """A case of `precision` as an earlier version shrank it."""
    (case, *_) = drawn(PROPERTIES["precision"], WRONG.capabilities, 1)
    return case.replace(dtype="float32")


def test_a_case_that_does_not_apply_accuses_nobody():
    """Whoever remembers it: it is not even run."""
    runner = Runner(WRONG, SimulatedWorld())
    judgement = judged(PROPERTIES["precision"], in_full_precision(), runner)
    assert (judgement.applies, judgement.violation, runner.log.runs) == (False, None, 0)


def test_replay_of_a_case_that_does_not_apply_judges_its_values_alone(tmp_path, monkeypatch):
    """Such as earlier versions recorded: they are evidence still, though not of their property."""
    monkeypatch.chdir(tmp_path)
    case = in_full_precision()
    recorded = Counterexample(
        case, Violation(("precision", "dv"), None, ""), "", first=case, tried=0, smallest=True, repeats=True
    )
    path = save(tmp_path, target="ring", property="precision", world="simulated", device="cpu", counterexample=recorded)
    said: list[str] = []
    assert replay(path, say=said.append, show=said.append) == 0
    assert said[1].startswith("property precision does not apply to this case")
    assert said[-1].startswith("the property holds")


def test_masked_rows_draws_cases_with_empty_rows_nearly_always():
    """For an implementation that can leave a row empty in one way only, too."""
    one = Capabilities(key_lengths=True)
    assert len(drawn(PROPERTIES["masked_rows"], one, 40)) >= 38


def test_masked_rows_does_not_apply_where_every_query_has_a_key():
    """Cross lengths without a causal mask, even, no shard empty."""
    never = Capabilities(cross_lengths=True, causal="never")
    assert PROPERTIES["masked_rows"].unsupported(never) is not None
    assert isinstance(drawn(PROPERTIES["forward"], never, 1)[0], Case)
