"""The library of faults: mutants are named and told of, every row of the reports is covered, nothing right rejected."""

import re

import pytest

from ringverify.cases.running import Runner
from ringverify.check.budget import Budget
from ringverify.check.hunting import hunt
from ringverify.faults import catalogue, fault
from ringverify.faults.catalogue import MUTANTS, OUT_OF_SCOPE, TOLD_AS
from ringverify.faults.ring import PLAIN
from ringverify.lab.variants import VARIANTS
from ringverify.properties.catalogue import PROPERTIES
from ringverify.targets import load
from ringverify.worlds.simulated import SimulatedWorld

ROWS = [
    *["A1", "A2", "A3", "A4", "A6", "A8", "A9", "A10", "A11", "A12"],
    *["B1", "B2", "B3", "B4", "B6", "B7", "B8", "B9", "B10", "B11", "B12", "B13", "B14"],
    *["C1", "C4", "C5", "D1", "D2", "D3", "D4", "D5", "D6", "D9", "D10", "D11", "E2", "E3"],
    *["F1", "F2", "F3", "F4", "F6", "F7", "F9", "F11", "F12", "G1", "G2", "G3", "G5", "G6"],
    *["H1", "H2", "H3", "H5", "I1", "I2", "I3", "J1", "J2", "K1", "K2"],
]
"""The rows of bugs in public code, as the field's reports number them."""

REPORTS = [f"R{number}" for number in range(1, 17)]
"""The reports that the project started from."""

RIGHT = {"plain": PLAIN} | {name: variant.implementation for name, variant in VARIANTS.items()}


def row(id):
    """A1 of A1b."""
    return re.match(r"[A-Z]\d+", id)[0]


def hunted(implementation, property, examples, seed=0):
    """What became of looking for a violation, without shrinking past what a test has time for."""
    runner = Runner(implementation, SimulatedWorld(), deadline=5.0)
    return hunt(
        PROPERTIES[property],
        runner,
        examples=examples,
        seed=seed,
        share=Budget(60, 1).share(),
        progress=lambda done: None,
    )


def test_every_mutant_says_what_is_wrong_and_where_that_was_seen():
    """Ids and titles are unique, stories and sources are there."""
    for id, one in MUTANTS.items():
        assert one.id == id
        assert one.implementation.name == f"mutant:{id}"
        assert re.fullmatch(r"[A-Z]\d+[a-e]?", id)
        assert one.title
        assert one.story
        assert one.source
        assert one.kind in fault.FaultKind.__args__
    titles = [one.title for one in MUTANTS.values()]
    assert sorted(titles) == sorted(set(titles))


def test_a_mutant_is_an_attribute_of_its_file_by_its_id():
    """So that `module:attribute` names it where a process has to be told."""
    for module in catalogue.GROUPS:
        for id, one in module.FAULTS.mutants.items():
            assert getattr(module, id) is one.implementation
    assert load("ringverify.faults.accumulation:A1") is MUTANTS["A1"].implementation


def test_every_row_of_the_reports_has_a_mutant_or_a_reason_for_none():
    """Rows of bugs, and the first reports; nothing is in both lists, nothing invented."""
    told = {row(id) for id in MUTANTS if not id.startswith("O")} | set(TOLD_AS)
    assert told | set(OUT_OF_SCOPE) == {*ROWS, *REPORTS}
    assert not told & set(OUT_OF_SCOPE)
    assert all(OUT_OF_SCOPE.values())
    assert set(TOLD_AS.values()) <= set(MUTANTS)
    assert not set(TOLD_AS) & set(MUTANTS)


def test_two_mutants_of_one_id_are_refused():
    """In one group; the catalogue refuses them across groups."""
    faults = fault.Faults()
    faults.add("X1", "one", story="One.", ring=PLAIN.function)
    with pytest.raises(ValueError, match="two mutants are called 'X1'"):
        faults.add("X1", "other", story="Other.", ring=PLAIN.function)


@pytest.mark.parametrize("property", ["lse_gradient", "masked_rows", "overflow", "strided_inputs"])
@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.nightly) for name in VARIANTS)])
def test_what_is_right_is_not_rejected(name, property):
    """The plain ring, of which every mutant is made, and every variant that looks wrong."""
    found = hunted(RIGHT[name], property, examples=4, seed=sum(map(ord, name)))
    assert found.counterexample is None, found.counterexample.case.describe()
    assert found.examples


@pytest.mark.parametrize(
    ("id", "property"),
    [
        ("A3", "forward"),
        ("A6", "forward"),
        ("A8b", "lse"),
        ("B2", "forward"),
        ("B9b", "forward"),
        ("C5", "forward"),
        ("D5b", "gradients"),
        ("D10", "forward"),
        ("F2", "gradients"),
        ("F4a", "gradients"),
        ("H3", "chunk_boundaries"),
        ("I1a", "strided_inputs"),
        ("O25", "lse_gradient"),
        ("O90", "inputs_untouched"),
    ],
)
@pytest.mark.by_day(4)
def test_a_mutant_is_killed_by_the_property_that_is_for_it(id, property):
    """Within the quick suite; the shrunk case is small."""
    found = hunted(MUTANTS[id].implementation, property, PROPERTIES[property].examples)
    assert found.counterexample is not None
    shown = found.counterexample.case
    assert shown.world_size <= 3
    assert max(shown.problem.nq, shown.problem.nk) <= 6
